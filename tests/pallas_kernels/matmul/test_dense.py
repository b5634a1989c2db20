"""Rows times a matrix against float64, for every implementation, all compiled for the CPU."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul.dense import matmul
from pallas_kernels.registry import KERNELS, kernel

IMPLEMENTATIONS = {kernel(op, platform): platform for op, platform in KERNELS if op == "matmul"}


@pytest.mark.parametrize("function", IMPLEMENTATIONS, ids=IMPLEMENTATIONS.values())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("contract", [0, 1])
@pytest.mark.parametrize(("rows", "size"), [(1, 40), (1, 41), (3, 40)])
def test_against_float64(function, dtype, contract, rows, size):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, size)), dtype)
    weight = jnp.asarray(rng.standard_normal((size, 24) if contract == 0 else (24, size)), dtype)
    matrix = np.asarray(weight, np.float64)
    exact = np.asarray(x, np.float64) @ (matrix if contract == 0 else matrix.T)
    for got in (function(x, weight, contract=contract), matmul(x, weight, contract=contract)):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


MISFITS = [((2, 3), (4, 3), 0), ((2, 3), (3, 4), 1), ((3,), (3, 4), 0), ((2, 3), (3, 3), 2)]


@pytest.mark.parametrize(("x", "weight", "contract"), MISFITS)
def test_shapes_that_do_not_fit(x, weight, contract):
    with pytest.raises(ValueError, match="matmul: x .* must agree, got"):
        matmul(jnp.zeros(x), jnp.zeros(weight), contract=contract)
