"""The noise of draws, worked out with numpy and in float64 from where the random bits are."""

from __future__ import annotations

import numpy as np

MASK = 0xFFFFFFFF


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011)."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    a, b = ((word + own) & MASK for word, own in zip(counter, keys[:2], strict=True))
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            a = (a + b) & MASK
            b = a ^ ((b << distance | b >> (32 - distance)) & MASK)
        a = (a + keys[(group + 1) % 3]) & MASK
        b = (b + keys[(group + 2) % 3] + group + 1) & MASK
    return a, b


def gumbel(seed: int, position: int, num_tokens: int) -> np.ndarray:
    """f64[num_tokens], of the token at `position` of a request with this seed."""
    words = threefry((seed & MASK, seed >> 32 & MASK), (0, position))
    x = (np.arange(num_tokens, dtype=np.uint64) * 0x9E3779B9 + words[0]) & MASK
    bits = _lowbias32(_lowbias32(x) ^ words[1])
    below_one = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), 1 - 2.0**-24)
    return -np.log(-np.log1p(-below_one.astype(np.float64)))


def _lowbias32(x: np.ndarray) -> np.ndarray:
    """Of numbers below 2**32, u64."""
    x = (x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D) & np.uint64(MASK)
    x = (x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B) & np.uint64(MASK)
    return x ^ (x >> np.uint64(16))
