"""Rows of heads times their matrices against float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.matmul.batched import batched_matmul


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("contract", "rows"), [(0, 1), (1, 1), (0, 3), (1, 3)])
def test_against_float64(dtype, contract, rows):
    rng = np.random.default_rng(0)
    matrices = jnp.asarray(rng.standard_normal((5, 12, 8)), dtype)
    x = jnp.asarray(rng.standard_normal((rows, 5, 8 if contract else 12)), dtype)
    exact = np.einsum("rni,noi->rno" if contract else "rni,nio->rno", np.float64(x), np.float64(matrices))
    got = batched_matmul(x, matrices.reshape(60, 8), contract=contract)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("x", "weight", "contract"),
    [
        ((2, 3), (6, 4), 0),
        ((2, 5, 4), (6, 4), 1),
        ((2, 3, 4), (6, 4), 0),
        ((2, 3, 2), (6, 4), 1),
        ((2, 3, 2), (6, 4), 2),
    ],
)
def test_shapes_that_do_not_fit(x, weight, contract):
    with pytest.raises(ValueError, match="batched_matmul: "):
        batched_matmul(jnp.zeros(x), jnp.zeros(weight), contract=contract)
