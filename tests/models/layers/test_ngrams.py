"""Parts of DeepSeek-V4.1 that are pure functions: rounding of keys, and hashes of n-grams."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.models.layers.attention.blocks.shared_keys import rounded_e2m1, rounded_e4m3, rounded_nvfp4
from jaxengine.models.layers.base.hashes import product_of_ids, remainders
from jaxengine.models.layers.streams.hyper_connections import with_shares, without_shares


def test_rounding():
    grid = np.array([6.0, 0.25, 0.26, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 5.1, 0, 0.2, 4, 3, 2, 1.5], np.float32)
    even = np.array([6.0, 0, 0.5, -1, 1, 2, 2, -4, 4, 6, 0, 0, 4, 3, 2, 1.5], np.float32)
    scales = np.array([[1.0], [2.0**-9], [104.0]], np.float32)  # numbers of e4m3
    np.testing.assert_array_equal(jax.jit(rounded_nvfp4)(grid * scales), even * scales)
    rows = np.concatenate([grid, grid]) * np.array([[1.0], [2.0**-20], [2.0**30]], np.float32)
    wanted = np.concatenate([even, even]) * rows[:, :1] / 6
    # The scale is the least power of two by which nothing overflows: above that it doubles.
    rows = np.concatenate([rows, [[6.1] + [0.3] * 31]]).astype(np.float32)
    wanted = np.concatenate([wanted, [[6.0] + [0.0] * 31]])
    np.testing.assert_array_equal(jax.jit(rounded_e2m1)(rows), wanted)
    eights = jax.jit(rounded_e4m3)(np.array([448.0, 33.0, 34.1, -0.001] + [0.0] * 28, np.float32))
    np.testing.assert_array_equal(eights[:4], [448, 32, 36, -(2.0**-9)])
    odd = np.linspace(0, 1, 20)
    assert all(each(odd) is odd for each in (rounded_e2m1, rounded_e4m3, rounded_nvfp4))


def test_hashes():
    rng = np.random.default_rng(0)
    for factor in (2**63 // 129280 - 1, 2**47 + 12345, 1):
        ids = rng.integers(0, 129280, 50)
        words = product_of_ids(jnp.asarray(ids, jnp.uint32), factor)
        whole = [int(high) << 32 | int(low) for high, low in zip(*words, strict=True)]
        assert whole == [int(each) * factor for each in ids]
        for primes in ((16000057, 16000061), (2**30 + 3, 41)):
            assert np.asarray(remainders(words, primes)).tolist() == [[each % p for p in primes] for each in whole]


def test_shares_are_exact_beside_bfloat16():
    shares = jnp.asarray(np.random.default_rng(0).uniform(1e-6, 1, (5, 4)), jnp.float32)
    streams = jnp.ones((5, 8), jnp.bfloat16)
    kept, found = without_shares(with_shares(streams, shares), 4)
    assert (found == shares).all() and (kept == streams).all() and kept.dtype == jnp.bfloat16
