"""Rows with NaN or infinity, rounded and multiplied: what comes out must say so."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.matmul.rounding import dynamic_scales, largest_values, rounded_rows, static_scales
from tests.pallas_kernels.matmul.test_quantized import DENSE, compiled, matrix_of


@pytest.mark.parametrize("rounding", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("num_scales", [1, 3])
def test_a_row_that_is_not_finite_is_known_by_its_product(num_scales, rounding):
    """Also of int8, which has no code for it; other rows know nothing of it."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((70, 96)), jnp.float32).at[5, 50].set(jnp.nan).at[8, 50].set(-jnp.inf)
    matrix, scales, _ = matrix_of(rng, 96, 40, num_scales, rounding, False)
    rounded = rounded_rows(x, dynamic_scales(largest_values(x, 96 // num_scales), rounding), rounding)
    for function, name in DENSE.items():
        finite = np.isfinite(compiled(function, "bfloat16")(*rounded, jnp.asarray(matrix), scales, None))
        assert finite.any(axis=1).tolist() == finite.all(axis=1).tolist(), name
        assert np.flatnonzero(~finite.any(axis=1)).tolist() == [5, 8], name


@pytest.mark.parametrize("rounding", ["int8", "float8_e4m3fn"])
def test_a_row_with_nan_is_known_by_its_product_where_scales_are_static(rounding):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((7, 96)), jnp.float32).at[5, 50].set(jnp.nan)
    matrix, scales, _ = matrix_of(rng, 96, 40, 1, rounding, False)
    rows = rounded_rows(x, static_scales(x, jnp.full((1, 1), 0.03), rounding), rounding)
    for function, name in DENSE.items():
        finite = np.isfinite(compiled(function, "bfloat16")(*rows, jnp.asarray(matrix), scales, None))
        assert finite.any(axis=1).tolist() == finite.all(axis=1).tolist() == [row != 5 for row in range(7)], name
