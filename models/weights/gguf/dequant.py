"""GGML block formats as codes with scales and zeros, and as float32; vectorised over blocks.

A quantised tensor is a row-major sequence of blocks; a block is a fixed number of bytes that yields a fixed number
of consecutive values, codes * scales - zeros, in groups of neighbours that share a scale. The layouts are those of ggml
(`block_q4_0` and others in ggml-common.h); all fields are little-endian and every product is taken in float32, in
ggml's order, so the values are bit-equal to ggml's. Below, B is the number of blocks of one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxengine.models.weights.gguf import grid_blocks
from jaxengine.models.weights.gguf.parts import Parts, fields, half, nibbles, one_group, words


class BlockFormat(NamedTuple):
    """One GGML tensor type.

    Attributes:
      name: ggml's name.
      values, nbytes: number of values, and of bytes, of a block.
      dtype: dtype of the array that a reader returns.
      parts: function from blocks u8[B, nbytes] to Parts; None for plain types, whose bytes are the array.
      group: number of values that share a scale.
      four_bits: whether codes are four bits wide, from 0 on if there are zeros, otherwise from -8 on.
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


def _fifth_bits(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return the 32 bits of the little-endian word at byte `start` of each block, each moved to bit 4 of its own
    element: u8[B, n] -> i8[B, 32].
    """
    return (np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << 4).view(np.int8)


def _q8_0(blocks: np.ndarray) -> Parts:
    """Return the Parts of Q8_0 blocks: a float16 scale and 32 signed bytes."""
    return one_group(blocks[:, 2:].view(np.int8), half(blocks, 0))


def _q4_0(blocks: np.ndarray) -> Parts:
    """Return the Parts of Q4_0 blocks: a float16 scale and 32 nibbles, from which 8 is subtracted."""
    return one_group(nibbles(blocks[:, 2:]) - np.int8(8), half(blocks, 0))


def _q4_1(blocks: np.ndarray) -> Parts:
    """Return the Parts of Q4_1 blocks: a float16 scale, a float16 minimum and 32 nibbles."""
    return one_group(nibbles(blocks[:, 4:]), half(blocks, 0), half(blocks, 2))


def _q5_0(blocks: np.ndarray) -> Parts:
    """Return the Parts of Q5_0 blocks: a float16 scale, 32 fifth bits and 32 nibbles; 16 is subtracted from the
    codes.
    """
    return one_group((nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)) - np.int8(16), half(blocks, 0))


def _q5_1(blocks: np.ndarray) -> Parts:
    """Return the Parts of Q5_1 blocks: a float16 scale, a float16 minimum, 32 fifth bits and 32 nibbles."""
    return one_group(nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), half(blocks, 0), half(blocks, 2))


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scale and minimum of the eight groups of a Q4_K/Q5_K block, each f32[B, 8, 1].

    Bytes 4..15 hold eight 6-bit scales and eight 6-bit minima: groups 0-3 in the low six bits of bytes 0-3 and 4-7,
    groups 4-7 as nibbles of bytes 8-11, their two top bits in the top bits of bytes 0-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minima = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], axis=1)
    return (half(blocks, 0) * scales)[:, :, None], (half(blocks, 2) * minima)[:, :, None]


def _k_nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the nibbles of u8[B, 128] as i8[B, 8, 32]: each run of 32 bytes has one group in its low nibbles and the
    next group in its high ones.
    """
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 0x0F, runs >> 4], axis=2).reshape(-1, 8, 32).view(np.int8)


def _q2_k(blocks: np.ndarray) -> Parts:
    """Return the Parts of Q2_K blocks: codes of two bits in 16 groups with a scale and a minimum each."""
    # Sixteen bytes with a scale and a minimum; in a half of 128 values, two bits of 32 bytes are 32 values.
    scales, minima = blocks[:, :16] & 0x0F, blocks[:, :16] >> 4
    codes = fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).swapaxes(2, 3).reshape(-1, 16, 16)
    return Parts(codes.view(np.int8), (half(blocks, 80) * scales)[:, :, None], (half(blocks, 82) * minima)[:, :, None])


def _q3_k(blocks: np.ndarray) -> Parts:
    """Return the Parts of Q3_K blocks: signed codes of three bits in 16 groups with a scale each."""
    # Codes as in Q2_K, less four unless the bit of their own in the first 32 bytes is set. Scales of six bits: nibbles
    # of bytes 96 to 103, the low ones first, and two bits of bytes 104 to 107 in the same way.
    low = fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).swapaxes(2, 3).reshape(-1, 16, 16)
    high = fields(blocks[:, :32], 1).swapaxes(1, 2).reshape(-1, 16, 16)
    scales = fields(blocks[:, 96:104], 4).swapaxes(1, 2).reshape(-1, 16)
    scales = scales | (fields(blocks[:, 104:108], 2).swapaxes(1, 2).reshape(-1, 16) << 4)
    scales = half(blocks, 108) * (scales.view(np.int8) - np.int8(32))
    return Parts(low.view(np.int8) - ((high ^ 1) << 2).view(np.int8), scales[:, :, None])


def _q4_k(blocks: np.ndarray) -> Parts:
    """Return the Parts of Q4_K blocks: codes of four bits in eight groups with a scale and a minimum each."""
    return Parts(_k_nibbles(blocks[:, 16:]), *_k_scales(blocks))


def _q5_k(blocks: np.ndarray) -> Parts:
    """Return the Parts of Q5_K blocks: codes of five bits in eight groups with a scale and a minimum each."""
    # Bit g of byte i is the fifth bit of value i of group g.
    group = np.arange(8, dtype=np.uint8)[:, None]
    fifth = ((blocks[:, None, 16:48] >> group) & 1) << 4
    return Parts(_k_nibbles(blocks[:, 48:]) | fifth.view(np.int8), *_k_scales(blocks))


def _q6_k(blocks: np.ndarray) -> Parts:
    """Return the Parts of Q6_K blocks: signed codes of six bits in 16 groups with a scale each."""
    # Two halves of 128 values; in a half, groups of 32: low nibbles of bytes 0-31 and 32-63, then their high nibbles.
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 0x0F, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shift = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift) & 3) << 4
    codes = (low | high).view(np.int8) - np.int8(32)
    scales = half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return Parts(codes.reshape(-1, 16, 16), scales[:, :, None])


# mxfp4.DOUBLED, but of a module without jax: API processes, which have none, read files' headers.
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def _mxfp4(blocks: np.ndarray) -> Parts:
    """Return the Parts of MXFP4 blocks: an exponent and 32 nibbles, whose doubled e2m1 values are the codes."""
    # The first byte is the block's exponent, for values that are not doubled.
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return one_group(_FP4[nibbles(blocks[:, 1:])], scale)


# Values of four-bit codes that lie closer together near zero.
_NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_nl(blocks: np.ndarray) -> Parts:
    """Return the Parts of IQ4_NL blocks: a float16 scale and 32 nibbles, indices into _NONLINEAR."""
    return one_group(_NONLINEAR[nibbles(blocks[:, 2:])], half(blocks, 0))


def _iq4_xs(blocks: np.ndarray) -> Parts:
    """Return the Parts of IQ4_XS blocks: nibbles, indices into _NONLINEAR, in eight groups with a scale of six bits
    each.
    """
    # Eight groups of 32, each sixteen bytes; their scales have two bits in a word and four in nibbles.
    high = (words(blocks, 2, 4, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & 3
    scales = (fields(blocks[:, 4:8], 4).reshape(-1, 8) | (high << 4)).view(np.int8) - np.int8(32)
    codes = fields(blocks[:, 8:].reshape(-1, 8, 16), 4).swapaxes(2, 3).reshape(-1, 8, 32)
    return Parts(_NONLINEAR[codes], (half(blocks, 0) * scales)[:, :, None])


def _nvfp4_scales() -> np.ndarray:
    """Return, for each of the 256 bytes, its value as a scale of doubled codes, f32[256]: four bits of exponent and
    three of mantissa without a sign, halved; 0 for the code of NaN.
    """
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    return np.where(byte == 0x7F, 0, values / 2).astype(np.float32)  # the code of NaN counts as 0


_NVFP4_SCALES = _nvfp4_scales()


def _nvfp4(blocks: np.ndarray) -> Parts:
    """Return the Parts of NVFP4 blocks: nibbles, whose doubled e2m1 values are the codes, in four groups with an e4m3
    scale each.
    """
    # Four scales, then four groups of eight bytes.
    codes = fields(blocks[:, 4:].reshape(-1, 4, 8), 4).swapaxes(2, 3).reshape(-1, 4, 16)
    return Parts(_FP4[codes], _NVFP4_SCALES[blocks[:, :4]][:, :, None])


def _ternary(codes: np.ndarray, scale: np.ndarray) -> Parts:
    """Return the Parts of codes 0 to 2, u8[B, 256], which stand for -1 to 1, with one scale for each block, f32[B,
    1].
    """
    return Parts(codes.reshape(-1, 8, 32).view(np.int8) - np.int8(1), np.repeat(scale, 8, axis=1)[:, :, None])


def _tq1_0(blocks: np.ndarray) -> Parts:
    """Return the Parts of TQ1_0 blocks: 256 ternary digits, five in most bytes, and a float16 scale."""
    # A byte is a fraction of 256 with five digits to the base of three; the last four bytes have four of them.
    digits = [
        (packed[:, None] * np.array([1, 3, 9, 27, 81][:count], np.uint8)[:, None]).reshape(-1, count * packed.shape[1])
        for packed, count in ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    ]
    codes = (np.concatenate(digits, axis=1).astype(np.uint16) * 3) >> 8
    return _ternary(codes.astype(np.uint8), half(blocks, 52))


def _tq2_0(blocks: np.ndarray) -> Parts:
    """Return the Parts of TQ2_0 blocks: 256 codes of two bits, from 0 to 2, and a float16 scale."""
    return _ternary(fields(blocks[:, :64].reshape(-1, 2, 32), 2).swapaxes(2, 3).reshape(-1, 256), half(blocks, 64))


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
    10: BlockFormat("Q2_K", 256, 84, _F32, _q2_k, group=16, four_bits=True, has_zeros=True),
    11: BlockFormat("Q3_K", 256, 110, _F32, _q3_k, group=16, four_bits=True),
    12: BlockFormat("Q4_K", 256, 144, _F32, _q4_k, four_bits=True, has_zeros=True),
    13: BlockFormat("Q5_K", 256, 176, _F32, _q5_k, has_zeros=True),
    14: BlockFormat("Q6_K", 256, 210, _F32, _q6_k, group=16),
    16: BlockFormat("IQ2_XXS", 256, 66, _F32, grid_blocks.iq2_xxs),
    17: BlockFormat("IQ2_XS", 256, 74, _F32, grid_blocks.iq2_xs, group=16),
    18: BlockFormat("IQ3_XXS", 256, 98, _F32, grid_blocks.iq3_xxs),
    19: BlockFormat("IQ1_S", 256, 50, _F32, grid_blocks.iq1_s),
    20: BlockFormat("IQ4_NL", 32, 18, _F32, _iq4_nl),
    21: BlockFormat("IQ3_S", 256, 110, _F32, grid_blocks.iq3_s),
    22: BlockFormat("IQ2_S", 256, 82, _F32, grid_blocks.iq2_s, group=16),
    23: BlockFormat("IQ4_XS", 256, 136, _F32, _iq4_xs),
    26: BlockFormat("I32", 1, 4, np.dtype("<i4"), None),
    29: BlockFormat("IQ1_M", 256, 56, _F32, grid_blocks.iq1_m, group=16),
    30: BlockFormat("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16), None),
    34: BlockFormat("TQ1_0", 256, 54, _F32, _tq1_0, four_bits=True),
    35: BlockFormat("TQ2_0", 256, 66, _F32, _tq2_0, four_bits=True),
    39: BlockFormat("MXFP4", 32, 17, _F32, _mxfp4),
    40: BlockFormat("NVFP4", 64, 36, _F32, _nvfp4, group=16),
}


def split_blocks(block_format: BlockFormat, data: bytes) -> Parts:
    """Return the codes, scales and zeros of complete blocks of a quantised type.

    Raises ValueError if the data ends within a block.
    """
    assert block_format.parts is not None
    with np.errstate(all="ignore"):
        return block_format.parts(np.frombuffer(data, np.uint8).reshape(-1, block_format.nbytes))


def dequantize(block_format: BlockFormat, data: bytes) -> np.ndarray:
    """Return the values of complete blocks, flat, in `block_format.dtype`; those of plain types are copied unchanged.

    Infinite or NaN scales give infinite or NaN values, as in ggml, without a warning. Raises ValueError if the data
    ends within a block.
    """
    if block_format.parts is None:
        return np.frombuffer(data, block_format.dtype).copy()
    codes, scales, zeros = split_blocks(block_format, data)
    with np.errstate(all="ignore"):
        values = codes * scales
        if zeros is not None:
            values -= zeros
    return values.reshape(-1)
