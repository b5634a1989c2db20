"""The causal convolution against float64."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.registry import KERNELS, kernel
from jaxengine.pallas_kernels.state.conv import causal_conv
from tests.pallas_kernels import reference
from tests.pallas_kernels.state.problems import BATCHES, NUM_ROWS

IMPLEMENTATIONS = {kernel(op, platform): platform for op, platform in KERNELS if op == "causal_conv"}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=IMPLEMENTATIONS.values())
@pytest.mark.parametrize(
    ("kernel_size", "dtype"),
    [
        (4, "float32"),
        (2, "bfloat16"),
        pytest.param(4, "bfloat16", marks=pytest.mark.thorough("each is tried with the other")),
        pytest.param(2, "float32", marks=pytest.mark.thorough("each is tried with the other")),
    ],
)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_against_float64(implementation, kernel_size, dtype, batch):
    rng, rows = np.random.default_rng(0), batch.rows()
    x = jnp.asarray(rng.standard_normal((batch.num_tokens, 10)), dtype)
    weight = jnp.asarray(rng.standard_normal((10, kernel_size)), dtype)
    windows = jnp.asarray(rng.standard_normal((NUM_ROWS, kernel_size - 1, 10)), dtype)
    read = np.asarray(rows.reads)[: len(batch.counts)]
    unread = np.setdiff1d(np.arange(NUM_ROWS), read[read >= 0])
    poisoned = windows.at[unread].set(jnp.nan)  # and what is written must be written whole
    ends = np.asarray(rows.cu_q_lens)
    where = ends, np.asarray(rows.reads), np.asarray(rows.writes), len(batch.counts)
    exact = reference.causal_conv(*map(np.float64, (x, weight, poisoned)), *where)
    y, after = jax.jit(implementation)(x.at[ends[-1] :].set(jnp.nan), weight, poisoned, rows)
    np.testing.assert_allclose(y, exact[0], rtol=0, atol=1e-5)
    saved = np.asarray(rows.saves)[len(batch.counts) - 1]
    if saved < NUM_ROWS:
        exact[1][saved] = exact[1][np.asarray(rows.writes)[len(batch.counts) - 1]]
    np.testing.assert_array_equal(np.float64(after), exact[1])


def test_a_window_of_one_token():
    """Products without a state, zeros for tokens of no sequence."""
    rows = BATCHES["decodes"].rows()
    live = np.arange(12) < np.asarray(rows.cu_q_lens)[int(rows.num_seqs)]
    assert not live.all()
    x = jnp.where(live[:, None], jnp.arange(36.0).reshape(12, 3), jnp.nan)
    y, windows = causal_conv(x, jnp.asarray([[2.0], [0.5], [-1.0]]), jnp.zeros((NUM_ROWS, 0, 3)), rows)
    np.testing.assert_array_equal(y, np.where(live[:, None], np.nan_to_num(x) * [2.0, 0.5, -1.0], 0.0))
    assert windows.shape == (NUM_ROWS, 0, 3)


@pytest.mark.parametrize(
    ("x", "weight", "windows", "said"),
    [
        ((4, 3), (3, 0), (2, 0, 3), "must agree"),
        ((4, 3), (2, 2), (2, 1, 3), "must agree"),
        ((4, 3), (3, 4), (2, 2, 3), "must agree"),
    ],
)
def test_shapes_that_do_not_fit(x, weight, windows, said):
    rows = BATCHES["decodes"].rows()
    with pytest.raises(ValueError, match=f"causal_conv: .*{said}"):
        causal_conv(jnp.zeros(x), jnp.zeros(weight), jnp.zeros(windows), rows)


def test_rows_that_do_not_fit():
    rows = BATCHES["decodes"].rows()
    with pytest.raises(ValueError, match=r"StateRows.writes must be int32\[8\], got int32\[2\]"):
        causal_conv(jnp.zeros((8, 3)), jnp.zeros((3, 2)), jnp.zeros((2, 1, 3)), replace(rows, writes=rows.writes[:2]))
