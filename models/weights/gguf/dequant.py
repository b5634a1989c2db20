"""GGML block formats as codes with scales and zeros, and as float32; vectorised over blocks.

A quantised tensor is a row-major sequence of blocks; a block is a fixed number of bytes that yields a fixed number
of consecutive values, codes * scales - zeros, in groups of neighbours that share a scale. The layouts are those of ggml
(`block_q4_0` ... `block_q6_K` in ggml-common.h); all fields are little-endian and every product is taken in float32, in
ggml's order, so the values are bit-equal to ggml's. Below, B is the number of blocks of one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np


class Parts(NamedTuple):
    """Content of blocks: codes i8[B, n, group], scales and zeros f32[B, n, 1]; zeros None where codes are signed."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None


class BlockFormat(NamedTuple):
    """One GGML tensor type.

    name: ggml's name. values, nbytes: per block. dtype: dtype of the array that a reader returns.
    parts: u8[B, nbytes] -> Parts; None for plain types, whose bytes are the array.
    group: values that share a scale. four_bits: codes are four bits wide, from 0 where there are zeros, else from -8.
    has_zeros: whether Parts has zeros.
    """

    name: str
    values: int
    nbytes: int
    dtype: np.dtype
    parts: Callable[[np.ndarray], Parts] | None
    group: int = 32
    four_bits: bool = False
    has_zeros: bool = False


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """Read the float16 at byte `start` of each block: u8[B, n] -> f32[B, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack u8[B, n] -> i8[B, 2n]: all low nibbles of a row, then all its high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).view(np.int8)


def _fifth_bits(blocks: np.ndarray, start: int) -> np.ndarray:
    """Move the 32 bits of the little-endian word at byte `start` to bit 4: u8[B, n] -> i8[B, 32]."""
    return (np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << 4).view(np.int8)


def _one_group(codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray | None = None) -> Parts:
    """Make Parts of blocks with one scale: i8[B, values], f32[B, 1]. minimum: added to the products."""
    return Parts(codes[:, None], scale[:, None], None if minimum is None else -minimum[:, None])


def _q8_0(blocks: np.ndarray) -> Parts:
    return _one_group(blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _q4_0(blocks: np.ndarray) -> Parts:
    return _one_group(_nibbles(blocks[:, 2:]) - np.int8(8), _half(blocks, 0))


def _q4_1(blocks: np.ndarray) -> Parts:
    return _one_group(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: np.ndarray) -> Parts:
    return _one_group((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)) - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: np.ndarray) -> Parts:
    return _one_group(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decode scale and minimum of the eight groups of a Q4_K/Q5_K block, each f32[B, 8, 1].

    Bytes 4..15 hold eight 6-bit scales and eight 6-bit minima: groups 0-3 in the low six bits of bytes 0-3 and 4-7,
    groups 4-7 as nibbles of bytes 8-11, their two top bits in the top bits of bytes 0-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minima = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], axis=1)
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * minima)[:, :, None]


def _k_nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack u8[B, 128] -> i8[B, 8, 32]: a run of 32 bytes holds one group in low nibbles, the next in high ones."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 0x0F, runs >> 4], axis=2).reshape(-1, 8, 32).view(np.int8)


def _q4_k(blocks: np.ndarray) -> Parts:
    return Parts(_k_nibbles(blocks[:, 16:]), *_k_scales(blocks))


def _q5_k(blocks: np.ndarray) -> Parts:
    # Bit g of byte i is the fifth bit of value i of group g.
    group = np.arange(8, dtype=np.uint8)[:, None]
    fifth = ((blocks[:, None, 16:48] >> group) & 1) << 4
    return Parts(_k_nibbles(blocks[:, 48:]) | fifth.view(np.int8), *_k_scales(blocks))


def _q6_k(blocks: np.ndarray) -> Parts:
    # Two halves of 128 values; in a half, groups of 32: low nibbles of bytes 0-31 and 32-63, then their high nibbles.
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 0x0F, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shift = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift) & 3) << 4
    codes = (low | high).view(np.int8) - np.int8(32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return Parts(codes.reshape(-1, 16, 16), scales[:, :, None])


# Doubled values of MXFP4 codes: a sign, two bits of exponent, one of mantissa.
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def _mxfp4(blocks: np.ndarray) -> Parts:
    # The first byte is the block's exponent, for values that are not doubled.
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return _one_group(_FP4[_nibbles(blocks[:, 1:])], scale)


_F32 = np.dtype("<f4")

# Formats by ggml's type number.
FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, _F32, None),
    1: BlockFormat("F16", 1, 2, np.dtype("<f2"), None),
    2: BlockFormat("Q4_0", 32, 18, _F32, _q4_0, four_bits=True),
    3: BlockFormat("Q4_1", 32, 20, _F32, _q4_1, four_bits=True, has_zeros=True),
    6: BlockFormat("Q5_0", 32, 22, _F32, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _F32, _q5_1, has_zeros=True),
    8: BlockFormat("Q8_0", 32, 34, _F32, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _F32, _q4_k, four_bits=True, has_zeros=True),
    13: BlockFormat("Q5_K", 256, 176, _F32, _q5_k, has_zeros=True),
    14: BlockFormat("Q6_K", 256, 210, _F32, _q6_k, group=16),
    30: BlockFormat("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16), None),
    39: BlockFormat("MXFP4", 32, 17, _F32, _mxfp4),
}


def split_blocks(block_format: BlockFormat, data: bytes) -> Parts:
    """Split complete blocks of a quantised type into codes, scales and zeros."""
    assert block_format.parts is not None
    with np.errstate(all="ignore"):
        return block_format.parts(np.frombuffer(data, np.uint8).reshape(-1, block_format.nbytes))


def dequantize(block_format: BlockFormat, data: bytes) -> np.ndarray:
    """Dequantise complete blocks to flat values of dtype `block_format.dtype`; plain types are copied unchanged.

    Infinite or NaN scales give infinite or NaN values, as in ggml, without a warning.
    """
    if block_format.parts is None:
        return np.frombuffer(data, block_format.dtype).copy()
    codes, scales, zeros = split_blocks(block_format, data)
    with np.errstate(all="ignore"):
        values = codes * scales
        if zeros is not None:
            values -= zeros
    return values.reshape(-1)
