"""GGML blocks whose codes are points of a grid: IQ1, IQ2 and IQ3.

A few bits name a point, which is four or eight values at once; signs, if the points have none, are stored separately.
The points were chosen by llama.cpp's author (ggml-common.h) and cannot be computed: grids.bin has them, as
tests/fixtures/recorders/blocks.py takes them from the `gguf` package. All blocks but IQ1_M's begin with a float16 that
multiplies their scales. Below, blocks are u8[B, bytes of a block], B of them in a call.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from jaxengine.models.weights.gguf.parts import Parts, fields, half, words

VALUES = 256  # of a block
GRIDS = Path(__file__).with_name("grids.bin")
# In the order of grids.bin, which has as many bytes for each.
NAMES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")
# Values of a point's digits. The file has a bit for each number with these digits, the lowest first, set if it is a
# point of the grid; points are in the order of their numbers.
DIGITS = {
    "IQ2": np.array([8, 25, 43], np.int8),
    "IQ3_XXS": np.array([4, 12, 20, 28, 36, 44, 52, 62], np.int8),
    "IQ3_S": np.arange(1, 16, 2, dtype=np.int8),
    "IQ1": np.array([-1, 0, 1], np.int8),
}


@cache
def _grid(name: str) -> np.ndarray:
    """Return the points of the grid of type `name`: i8[points, 4 or 8]. Results are cached."""
    digits = DIGITS[name if name in DIGITS else name[:3]]
    bits = np.fromfile(GRIDS, np.uint8).reshape(len(NAMES), -1)[NAMES.index(name)]
    numbers = np.flatnonzero(np.unpackbits(bits))
    return digits[numbers[:, None] // len(digits) ** np.arange(4 if name.startswith("IQ3") else 8) % len(digits)]


def _signs(bits: np.ndarray) -> np.ndarray:
    """Return the signs (1 or -1) of eight values in each byte, the lowest bit first: u8[B, n] -> i8[B, n, 8]."""
    return 1 - 2 * fields(bits, 1).view(np.int8)


def _even_signs(seven: np.ndarray) -> np.ndarray:
    """Return the signs (1 or -1) of eight values from the low seven bits of each element, [B, n] -> i8[B, n, 8]; the
    eighth sign makes the number of negative ones even.
    """
    low = seven.astype(np.uint8) & np.uint8(0x7F)
    return _signs(low | ((fields(low, 1).sum(axis=-1, dtype=np.uint8) & 1) << 7))


def _sevens(fours: np.ndarray) -> np.ndarray:
    """Return the four lowest fields of seven bits of each word: u32[B, n] -> u32[B, 4n]."""
    return (fours[..., None] >> np.arange(0, 28, 7, dtype=np.uint32)).reshape(len(fours), 4 * fours.shape[1])


def _signed(points: np.ndarray, signs: np.ndarray, scales: np.ndarray) -> Parts:
    """Return the Parts of points, i8[B, n, 4 or 8], multiplied by signs, i8 of as many elements. scales: f32[B,
    groups].
    """
    shape = (*scales.shape, VALUES // scales.shape[1])
    codes = points.reshape(shape) * signs.reshape(shape)
    return Parts(codes, scales[:, :, None])


def iq2_xxs(blocks: np.ndarray) -> Parts:
    """Return the parts of IQ2_XXS blocks.

    A block has eight groups of 32 values: bytes of four points, then a word with their signs and the scale.
    """
    pairs = words(blocks, 2, 66, "<u4").reshape(-1, 8, 2)
    points = _grid("IQ2_XXS")[blocks[:, 2:66].reshape(-1, 8, 8)[:, :, :4]]
    scales = half(blocks, 0) * (np.float32(0.5) + (pairs[..., 1] >> 28).astype(np.float32)) * np.float32(0.25)
    return _signed(points, _even_signs(_sevens(pairs[..., 1])), scales)


def iq2_xs(blocks: np.ndarray) -> Parts:
    """Return the parts of IQ2_XS blocks.

    A block has 32 words with a point and its signs each, then scales of 16 groups in nibbles.
    """
    named = words(blocks, 2, 66, "<u2")
    scales = fields(blocks[:, 66:74], 4).reshape(-1, 16).astype(np.float32)
    scales = half(blocks, 0) * (np.float32(0.5) + scales) * np.float32(0.25)
    return _signed(_grid("IQ2_XS")[named & 511], _even_signs(named >> 9), scales)


def iq2_s(blocks: np.ndarray) -> Parts:
    """Return the parts of IQ2_S blocks.

    A block has low bytes of 32 points, their signs, their two high bits, then scales of 16 groups in nibbles.
    """
    named = blocks[:, 2:34] | (fields(blocks[:, 66:74], 2).reshape(-1, 32).astype(np.uint16) << 8)
    scales = fields(blocks[:, 74:82], 4).reshape(-1, 16).astype(np.float32)
    scales = half(blocks, 0) * (np.float32(0.5) + scales) * np.float32(0.25)
    return _signed(_grid("IQ2_S")[named], _signs(blocks[:, 34:66]), scales)


def iq3_xxs(blocks: np.ndarray) -> Parts:
    """Return the parts of IQ3_XXS blocks.

    A block has bytes of 64 points of four values, then eight words with the signs and the scale of 32 values each.
    """
    held = words(blocks, 66, 98, "<u4")
    scales = half(blocks, 0) * (np.float32(0.5) + (held >> 28).astype(np.float32)) * np.float32(0.5)
    return _signed(_grid("IQ3_XXS")[blocks[:, 2:66]], _even_signs(_sevens(held)), scales)


def iq3_s(blocks: np.ndarray) -> Parts:
    """Return the parts of IQ3_S blocks.

    A block has low bytes of 64 points of four values, their high bits, signs, then scales of eight groups in nibbles.
    """
    named = blocks[:, 2:66] | (fields(blocks[:, 66:74], 1).reshape(-1, 64).astype(np.uint16) << 8)
    scales = half(blocks, 0) * (1 + 2 * fields(blocks[:, 106:110], 4).reshape(-1, 8)).astype(np.float32)
    return _signed(_grid("IQ3_S")[named], _signs(blocks[:, 74:106]), scales)


def _shifted(points: np.ndarray, is_lower: np.ndarray, scales: np.ndarray) -> Parts:
    """Return the Parts of points i8[B, n, 8] moved by an eighth: down where `is_lower` [B, n] is nonzero, otherwise up.
    scales: f32[B, groups].
    """
    codes = 8 * points + np.where(is_lower, -1, 1)[..., None].astype(np.int8)
    return Parts(codes.reshape(*scales.shape, VALUES // scales.shape[1]), (scales * np.float32(0.125))[:, :, None])


def iq1_s(blocks: np.ndarray) -> Parts:
    """Return the parts of IQ1_S blocks.

    A block has low bytes of 32 points, then eight words, each with three high bits of four points, their scale, and
    whether they are shifted down.
    """
    held = words(blocks, 34, 50, "<u2")
    high = (held[..., None] >> np.arange(0, 12, 3, dtype=np.uint16)) & 7
    named = blocks[:, 2:34] | (high.reshape(-1, 32) << 8)
    scales = half(blocks, 0) * (2 * ((held >> 12) & 7) + 1).astype(np.float32)
    return _shifted(_grid("IQ1_S")[named], np.repeat(held >> 15, 4, axis=1), scales)


def iq1_m(blocks: np.ndarray) -> Parts:
    """Return the parts of IQ1_M blocks.

    A block has low bytes of 32 points, nibbles with their high bits and whether they are shifted down, then four words,
    each with four scales of three bits and a nibble of the float16 that multiplies all scales.
    """
    high = fields(blocks[:, 32:48], 4).reshape(-1, 32)
    named = blocks[:, :32] | ((high & 7).astype(np.uint16) << 8)
    held = words(blocks, 48, 56, "<u2")
    whole = np.bitwise_or.reduce((held >> 12) << np.arange(0, 16, 4, dtype=np.uint16), axis=1)
    scales = (held[..., None] >> np.arange(0, 12, 3, dtype=np.uint16)) & 7
    scales = whole.view("<f2").astype(np.float32)[:, None] * (2 * scales.reshape(-1, 16) + 1).astype(np.float32)
    return _shifted(_grid("IQ1_S")[named], high >> 3, scales)
