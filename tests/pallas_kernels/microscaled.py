"""Rows whose scales are each for a few inputs: every implementation bit for bit what plain XLA makes of them."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxengine.pallas_kernels.matmul.rounding import E4M3, E8M0, UE8M0
from jaxengine.pallas_kernels.registry import kernel
from tests.fixtures.recorders.blocks import GLOBAL_SCALE, MICROSCALED_ROWS, given
from tests.pallas_kernels.conformance import watched
from tests.pallas_kernels.implementations import Implementation

EIGHT, FOUR = "float8_e4m3fn", "float4_e2m1fn"


class Rows(NamedTuple):
    """Rows [rows, size] rounded to `dtype` in groups; own: a scale of all rows for each row."""

    rows: int
    size: int
    group: int
    dtype: str
    kind: str
    own: bool = False
    of: str = "bfloat16"


QUICK = {
    "nvfp4, tiles of columns and steps that overlap": Rows(249, 8320, 16, FOUR, E4M3),
    "nvfp4, tiles of rows": Rows(1032, 160, 16, FOUR, E4M3, True),
    "mxfp4": Rows(8, 480, 32, FOUR, E8M0),
    "mxfp8, one row": Rows(1, 160, 32, EIGHT, UE8M0),
    "nvfp4, recorded": Rows(20, 64, 16, FOUR, E4M3, of="float32"),
}
MORE = {
    "mxfp4, recorded": Rows(20, 64, 32, FOUR, E8M0, of="float32"),
    "mxfp8, recorded": Rows(20, 64, 32, EIGHT, E8M0, of="float32"),
    "mxfp8, tiles of columns": Rows(3, 4224, 32, EIGHT, UE8M0),
}
ROWS = QUICK | MORE


def microscaled(name: str, implementation: Implementation) -> None:
    case = ROWS[name]
    x, whole = operands(case)
    options = {"group": case.group, "dtype": case.dtype, "kind": case.kind}
    plain = jax.jit(partial(kernel("microscaled_rows", "cpu"), **options))(x, whole)
    run = partial(kernel("microscaled_rows", implementation.platform), **options, **implementation._options())
    with watched(implementation, name):
        got = jax.block_until_ready(jax.jit(run)(x, whole))
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(plain, np.float32))
    if case.of == "bfloat16" and case.kind != E4M3:  # of scale 1
        _, codes = codes_and_ties(case.size, case.group, case.dtype)
        np.testing.assert_array_equal(np.asarray(got[0], np.float64), codes)
    if name.endswith("recorded"):
        with np.load(MICROSCALED_ROWS, allow_pickle=False) as recorded:
            wanted = recorded[name.partition(",")[0]] * (1 if whole is None else GLOBAL_SCALE)
        np.testing.assert_allclose(got, wanted, rtol=3e-7)


def operands(case: Rows) -> tuple[jax.Array, jax.Array | None]:
    """Rows of many sizes, with zeros, what is not finite, and every code and tie; a scale for all of them."""
    rng = np.random.default_rng(case.size)
    x = (
        given()
        if case.of == "float32"
        else rng.standard_normal((case.rows, case.size)) * 2.0 ** rng.integers(-12, 12, (case.rows, case.size))
    )
    if case.of != "float32":
        x[0], _ = codes_and_ties(case.size, case.group, case.dtype)
        x[1:2] = -8 * x[:1]
        x[2:3, : case.group], x[2:3, case.group + 3], x[3:4, case.group - 1] = 0, np.inf, np.nan
    whole = None
    if case.kind == E4M3:
        # Scales as the recorded one, and some that saturate and some that vanish.
        sizes = GLOBAL_SCALE * 2.0 ** rng.integers(-9, 9, (case.rows, 1)) if case.own else GLOBAL_SCALE.reshape(1, 1)
        whole = jnp.asarray(sizes, jnp.float32)
    return jnp.asarray(x, case.of), whole


def codes_and_ties(size: int, group: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """A row of what codes stand for and of what is between two, the largest one in each group, so that its scale is 1,
    as far as there is room; and what they are rounded to."""
    bits = np.arange(1 << (3 if dtype == FOUR else 7), dtype=np.uint8)
    codes = bits.view(getattr(ml_dtypes, dtype)).astype(np.float64)
    codes = codes[np.isfinite(codes)]
    drawn = np.concatenate([codes, (codes[1:] + codes[:-1]) / 2])
    row = np.resize(drawn, (size // group, group))
    row[:, 0] = codes[-1]
    return row.ravel(), row.ravel().astype(getattr(ml_dtypes, dtype)).astype(np.float64)
