"""Products with quantised token tables against float64 on the codes, compiled for the CPU."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.matmul.quantized_table import quantized_table_matmul
from jaxengine.pallas_kernels.registry import KERNELS, kernel
from tests.pallas_kernels import reference
from tests.pallas_kernels.matmul.test_quantized import codes_of, error, stored

IMPLEMENTATIONS = {kernel(*row): row[1] for row in KERNELS if row[0] == "quantized_table_matmul"}
CROSSED = pytest.mark.thorough("codes and zeros, each of which the others have")
# (tokens, inputs, group): one block of tokens, several of which the last one begins in the one before, groups of 16,
# more groups than a row takes at once.
SIZES = ((48, 64, 32), (600, 96, 32), (300, 64, 16), (70, 32, 32), (48, 1600, 16))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=IMPLEMENTATIONS.get)
@pytest.mark.parametrize(
    ("dtype", "has_zeros"),
    [
        *(("int8", False), ("uint8", True)),
        *(pytest.param(*row, marks=CROSSED) for row in (("int8", True), ("uint8", False))),
    ],
)
def test_a_table(implementation, dtype, has_zeros):
    rng = np.random.default_rng(0)
    for tokens, size, group in SIZES:
        codes = codes_of(rng, (size, tokens), dtype)
        scales = rng.random((size // group, tokens), np.float32) + np.float32(0.5)
        zeros = rng.standard_normal(scales.shape).astype(np.float32) * 3 if has_zeros else None
        held = jnp.asarray(stored(codes, dtype)).T
        for rows in (1, 5):
            x = rng.standard_normal((rows, size)).astype(np.float32)
            product = jax.jit(partial(implementation, dtype=jnp.float32, out_dtype=jnp.float32))
            got = product(jnp.asarray(x), held, scales, zeros)
            assert got.shape == (rows, tokens) and got.dtype == jnp.float32
            assert error(got, reference.quantized_matmul(x, np.asarray(codes), scales, zeros)) < 1e-5


@pytest.mark.parametrize(
    ("x", "codes", "scales", "zeros", "message"),
    [
        ((2, 64), (8, 32), (2, 8), None, "must agree"),
        ((2, 32), (8, 32), (2, 7), None, r"scales must be \(n, 8\)"),
        ((2, 32), (8, 32), (3, 8), None, "n divides 32"),
        ((2, 32), (8, 32), (2, 8), (1, 8), r"zeros must be \(2, 8\)"),
    ],
)
def test_shapes_that_do_not_fit(x, codes, scales, zeros, message):
    zeros = None if zeros is None else jnp.zeros(zeros)
    with pytest.raises(ValueError, match=message):
        quantized_table_matmul(jnp.zeros(x), jnp.zeros(codes, jnp.int8), jnp.zeros(scales), zeros)
