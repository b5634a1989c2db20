"""Mamba's selective scan against float64, token by token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.registry import KERNELS, kernel
from jaxengine.pallas_kernels.state.scan import selective_scan
from tests.pallas_kernels import reference
from tests.pallas_kernels.state.problems import BATCHES, NUM_ROWS, Batch
from tests.tables import each_row

IMPLEMENTATIONS = {kernel(op, platform): platform for op, platform in KERNELS if op == "selective_scan"}
NAMES = "x", "b", "c", "dt", "a", "state"


def inputs(batch: Batch, channels: int = 5, size: int = 3) -> Any:
    """One channel never fades, another is as good as everything at every third token."""
    rng, count = np.random.default_rng(1), batch.num_tokens
    x, (b, c) = rng.standard_normal((count, channels)), rng.standard_normal((2, count, size))
    dt, a = np.abs(rng.standard_normal((count, channels))), -np.abs(rng.standard_normal((channels, size)))
    a[1], dt[::3, 2] = 0.0, 90.0
    state = rng.standard_normal((NUM_ROWS, channels, size))
    return [jnp.asarray(array, jnp.float32) for array in (x, b, c, dt, a, state)]


@pytest.mark.parametrize(
    "name", ["decodes and prompts", pytest.param("chunks of all sizes", marks=pytest.mark.thorough("further lengths"))]
)
def test_against_float64(name):
    batch = BATCHES[name]
    rows, live = batch.rows(), len(batch.counts)
    reads, writes, ends = (np.asarray(array) for array in (rows.reads, rows.writes, rows.cu_q_lens))
    *tokens, a, state = inputs(batch)
    state = state.at[np.setdiff1d(np.arange(NUM_ROWS), reads[:live][reads[:live] >= 0])].set(jnp.nan)
    given = [np.asarray(array) for array in (*tokens, a, state)]
    exact = reference.selective_scan(*given, cu_q_lens=ends, reads=reads, writes=writes, num_seqs=live)
    tokens = [array.at[ends[-1] :].set(jnp.nan) for array in tokens]
    if (saved := np.asarray(rows.saves)[live - 1]) < NUM_ROWS:
        exact[1][saved] = exact[1][writes[live - 1]]
    for implementation in IMPLEMENTATIONS:
        y, after = jax.jit(implementation)(*tokens, a, state, rows)
        np.testing.assert_allclose(y, exact[0], rtol=2e-5, atol=2e-4)
        np.testing.assert_allclose(after, exact[1], rtol=2e-5, atol=2e-4)


@each_row(
    ("name", "changed", "said"),
    [
        ("c", (8, 4), "must agree"),
        ("dt", (8, 4), "must agree"),
        ("a", (3, 5), "must agree"),
        ("state", (9, 5, 4), "must agree"),
        ("state", "bfloat16", "must be float32"),
    ],
)
def test_shapes_that_do_not_fit(name, changed, said):
    batch = BATCHES["decodes"]
    arrays: dict[str, Any] = dict(zip(NAMES, inputs(batch), strict=True))
    arrays[name] = arrays[name].astype(changed) if isinstance(changed, str) else jnp.zeros(changed)
    with pytest.raises(ValueError, match=f"selective_scan: .*{said}"):
        selective_scan(**arrays, rows=batch.rows())
