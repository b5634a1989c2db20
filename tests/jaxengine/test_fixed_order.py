"""Row sums keep every bit when rows are added to the batch, and are sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.fixed_order import BLOCK, block_sums, row_sums


@pytest.mark.parametrize("width", [1, BLOCK + 1, 300, 1000])
def test_sums_do_not_depend_on_the_number_of_rows(width):
    rows = np.random.default_rng(width).normal(0, 2, (33, width)).astype(np.float32)
    both = jax.jit(lambda x: (row_sums(jnp.exp(x)), block_sums(jnp.exp(x))))
    whole, blocks = (np.asarray(part) for part in both(rows))
    np.testing.assert_allclose(whole[:, 0], np.exp(rows.astype(np.float64)).sum(axis=1), rtol=1e-6)
    padded = np.pad(np.exp(rows.astype(np.float64)), ((0, 0), (0, -width % BLOCK)))
    np.testing.assert_allclose(blocks, padded.reshape(33, -1, BLOCK).sum(axis=2), rtol=1e-6)
    for num_rows in (1, 2, 8):
        for got, expected in zip(both(rows[-num_rows:]), (whole, blocks), strict=True):
            np.testing.assert_array_equal(got, expected[-num_rows:])
