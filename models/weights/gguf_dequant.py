"""GGML block formats to float32, vectorised over blocks. Knows nothing of files, tensor names or shapes.

A quantised tensor is a row-major sequence of blocks; a block is a fixed number of bytes that yields a fixed number
of consecutive values. The layouts are those of ggml (`block_q4_0` ... `block_q6_K` in ggml-common.h); all fields are
little-endian and every product is taken in float32, in ggml's order, so the values are bit-equal to ggml's.
Below, B is the number of blocks of one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np


class BlockFormat(NamedTuple):
    """One GGML tensor type.

    name: ggml's name. values, nbytes: per block. dtype: of the array a reader hands out.
    dequantize: u8[B, nbytes] -> f32[B, values]; None for plain types, whose bytes are the array.
    """

    name: str
    values: int
    nbytes: int
    dtype: np.dtype
    dequantize: Callable[[np.ndarray], np.ndarray] | None


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of each block: u8[B, n] -> f32[B, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """u8[B, n] -> u8[B, 2n]: all low nibbles of a row, then all its high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fifth_bits(blocks: np.ndarray, start: int) -> np.ndarray:
    """The 32 bits of the little-endian word at byte `start`, moved to bit 4: u8[B, n] -> u8[B, 32]."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << 4


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, 2:].view(np.int8) * _half(blocks, 0)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return (_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8)) * _half(blocks, 0)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    values = _nibbles(blocks[:, 4:]) * _half(blocks, 0)
    values += _half(blocks, 2)
    return values


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return (quants.view(np.int8) - np.int8(16)) * _half(blocks, 0)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    values = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)) * _half(blocks, 0)
    values += _half(blocks, 2)
    return values


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of the eight groups of a Q4_K/Q5_K block, each f32[B, 8, 1].

    Bytes 4..15 hold eight 6-bit scales and eight 6-bit minima: groups 0-3 in the low six bits of bytes 0-3 and 4-7,
    groups 4-7 as nibbles of bytes 8-11, their two top bits in the top bits of bytes 0-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minima = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], axis=1)
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * minima)[:, :, None]


def _k_nibbles(packed: np.ndarray) -> np.ndarray:
    """u8[B, 128] -> u8[B, 8, 32]: a run of 32 bytes holds one group in low nibbles, the next in high ones."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 0x0F, runs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    scales, minima = _k_scales(blocks)
    values = _k_nibbles(blocks[:, 16:]) * scales
    values -= minima
    return values.reshape(-1, 256)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    scales, minima = _k_scales(blocks)
    # Bit g of byte i is the fifth bit of value i of group g.
    group = np.arange(8, dtype=np.uint8)[:, None]
    fifth = ((blocks[:, None, 16:48] >> group) & 1) << 4
    values = (_k_nibbles(blocks[:, 48:]) | fifth) * scales
    values -= minima
    return values.reshape(-1, 256)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    # Two halves of 128 values; in a half, groups of 32: low nibbles of bytes 0-31 and 32-63, then their high nibbles.
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 0x0F, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shift = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift) & 3) << 4
    quants = (low | high).view(np.int8) - np.int8(32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return (quants.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1, 256)


# Of MXFP4, doubled: a sign, two bits of exponent, one of mantissa.
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    # The first byte is the block's exponent, of values that are not doubled.
    return np.ldexp(_FP4[_nibbles(blocks[:, 1:])], blocks[:, :1].astype(np.int32) - 128)


_F32 = np.dtype("<f4")

# By ggml's type number.
FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, _F32, None),
    1: BlockFormat("F16", 1, 2, np.dtype("<f2"), None),
    2: BlockFormat("Q4_0", 32, 18, _F32, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _F32, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _F32, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _F32, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _F32, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _F32, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _F32, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _F32, _q6_k),
    30: BlockFormat("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16), None),
    39: BlockFormat("MXFP4", 32, 17, _F32, _mxfp4),
}


def dequantize(block_format: BlockFormat, data: bytes | np.ndarray) -> np.ndarray:
    """Whole blocks to values, flat, of dtype `block_format.dtype`; plain types are copied unchanged.

    Infinite or NaN scales give infinite or NaN values, as in ggml, without a warning.
    """
    raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.view(np.uint8).reshape(-1)
    if block_format.dequantize is None:
        return raw.view(block_format.dtype).copy()
    with np.errstate(all="ignore"):
        return block_format.dequantize(raw.reshape(-1, block_format.nbytes)).reshape(-1)
