"""Sums keep every bit when rows are added to the batch or zeros to the row, and are sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.sampling.fixed_order import BLOCK, block_sums, row_counts, row_sums, running_sums


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


@pytest.mark.parametrize("width", [7, 8 * BLOCK, 8 * BLOCK + 1, 20 * BLOCK])
def test_sums_do_not_depend_on_zeros_after_the_row(width):
    row = np.exp(np.random.default_rng(width).normal(0, 2, (3, width))).astype(np.float32)

    @jax.jit
    def sums(x):
        return row_sums(x), block_sums(x), running_sums(x)

    whole, blocks, running = sums(row)
    np.testing.assert_allclose(running, np.cumsum(row.astype(np.float64), axis=1), rtol=1e-6)
    for zeros in (1, 70 * BLOCK):
        padded = sums(np.pad(row, ((0, 0), (0, zeros))))
        np.testing.assert_array_equal(padded[0], whole)
        np.testing.assert_array_equal(padded[1][:, : blocks.shape[1]], blocks)
        np.testing.assert_array_equal(padded[2][:, :width], running)


def test_counts():
    mask = np.random.default_rng(0).random((4, 1000)) < 0.3
    assert row_counts(jnp.asarray(mask)).tolist() == mask.sum(axis=1, keepdims=True).tolist()
