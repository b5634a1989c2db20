"""Reads of single slots of all heads, in each layout of pages."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.kv.pages import pages_of
from jaxengine.pallas_kernels.kv.slots import read_heads

NUM_PAGES, SIZE, HEADS, KEY, VALUE = 3, 4, 2, 6, 10


def test_heads_of_slots():
    """Keys and the ends of values, of all heads or of the first, as they were written; no codes are read."""
    rows = np.random.default_rng(0).standard_normal((NUM_PAGES * SIZE, HEADS, KEY + VALUE)).astype(np.float32)
    pages, offsets = np.asarray([[2, 0, 7], [1, 1, 2]]), np.asarray([[3, 0, 1], [2, 1, 0]])
    wanted = rows[np.minimum(pages, NUM_PAGES - 1) * SIZE + offsets]
    for platform in ("cpu", "gpu_xla", "tpu"):
        kv = pages_of(jnp.asarray(rows), KEY, SIZE, platform)
        slots = jnp.asarray(pages, jnp.int32), jnp.asarray(offsets, jnp.int32)
        np.testing.assert_array_equal(read_heads(kv, *slots, HEADS), wanted[..., :KEY], platform)
        ends = read_heads(kv, *slots, 1, of_values=True, first=7)
        np.testing.assert_array_equal(ends, wanted[..., :1, KEY + 7 :], platform)
    with pytest.raises(ValueError, match="read_heads: the pool must hold no codes"):
        read_heads(replace(kv, k_scale=jnp.ones(HEADS)), *slots, HEADS)
