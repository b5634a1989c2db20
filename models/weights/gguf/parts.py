"""Parts of GGUF blocks, and functions that unpack their bytes. Below, B is the number of blocks of one call."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Parts(NamedTuple):
    """Content of blocks: codes i8[B, n, group], and scales and zeros, f32[B, n, 1] each; zeros are None if codes are
    signed. Values are codes * scales - zeros.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None


def half(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return the float16 at byte `start` of each block: u8[B, n] -> f32[B, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def words(blocks: np.ndarray, start: int, stop: int, dtype: str) -> np.ndarray:
    """Return the little-endian integers of `dtype` in bytes `start` to stop - 1 of each block: u8[B, n] -> [B, m]."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def fields(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the fields of `bits` bits of each byte, the lowest first: u8[B, n] -> u8[B, n, 8 / bits]."""
    return (packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8((1 << bits) - 1)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the nibbles of u8[B, n] as i8[B, 2n]: all low nibbles of a row, then all its high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).view(np.int8)


def one_group(codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray | None = None) -> Parts:
    """Return the Parts of blocks with one scale: codes i8[B, values], scale f32[B, 1]. minimum: f32[B, 1], added to the
    products; None for signed codes.
    """
    return Parts(codes[:, None], scale[:, None], None if minimum is None else -minimum[:, None])
