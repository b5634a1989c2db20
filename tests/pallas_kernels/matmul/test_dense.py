"""Rows times a matrix against float64, for every implementation, all compiled for the CPU."""

from __future__ import annotations

import math
import platform
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.matmul.dense import matmul
from jaxengine.pallas_kernels.registry import KERNELS, kernel

IMPLEMENTATIONS = {kernel(op, platform): platform for op, platform in KERNELS if op == "matmul"}


@pytest.mark.parametrize("function", IMPLEMENTATIONS, ids=IMPLEMENTATIONS.values())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("contract", [0, 1])
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 41), (3, 40), (1, 288), pytest.param(1, 40, marks=pytest.mark.thorough("as the first"))]
)
def test_against_float64(function, dtype, contract, rows, size):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, size)), dtype)
    weight = jnp.asarray(rng.standard_normal((size, 24) if contract == 0 else (24, size)), dtype)
    matrix = np.asarray(weight, np.float64)
    exact = np.asarray(x, np.float64) @ (matrix if contract == 0 else matrix.T)
    for got in (function(x, weight, contract=contract), matmul(x, weight, contract=contract)):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize(("contract", "sums"), [(0, "f32[48,1536]"), (1, "f32[1536,24]")])
def test_one_row_of_bfloat16_makes_no_wide_matrix(contract, sums):
    shape = (576, 1536) if contract == 0 else (1536, 576)
    x, weight = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((1, 576), shape))
    program = jax.jit(partial(kernel("matmul", "cpu"), contract=contract)).lower(x, weight).compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None and memory is not None
    entry = text.split("\nENTRY ")[1]
    from_matrix = re.search(r"(%\S+) = bf16\[\d+,\d+\]\S* parameter\(1\)", entry)
    assert from_matrix is not None
    # One loop reads the matrix as it is stored, and leaves sums of a few terms each.
    readers = [line for line in entry.splitlines() if re.search(rf"\(.*{from_matrix[1]}[,)]", line)]
    assert len(readers) == 1 and f" = {sums}" in readers[0] and "kind=kLoop" in readers[0], readers
    assert memory.temp_size_in_bytes < math.prod(shape)  # a quarter of float32's


def test_sums_of_a_wide_matrix_take_no_memory():
    x, weight = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((1, 4096), (4096, 32768)))
    text = jax.jit(partial(kernel("matmul", "cpu"), contract=0)).lower(x, weight).as_text()
    assert "512x32768xf32" not in text


@pytest.mark.skipif(platform.machine() != "x86_64", reason="in which order XLA adds is known of these processors only")
@pytest.mark.parametrize(("dtype", "few"), [("float32", 1), ("bfloat16", 2)])
@pytest.mark.parametrize(
    "inputs", [1536] + [pytest.param(size, marks=pytest.mark.thorough("more or fewer blocks")) for size in (1024, 4096)]
)
@pytest.mark.parametrize("rows", [8, 33, 64])
def test_few_rows_have_the_bits_of_many(dtype, few, inputs, rows):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((rows, inputs)), dtype)
    weight = jnp.asarray(rng.standard_normal((inputs, 192)), dtype)
    product = jax.jit(partial(kernel("matmul", "cpu"), contract=0))
    if rows > 56 and not np.array_equal(product(x[:8], weight), product(x, weight)[:8]):
        pytest.skip("of so many rows XLA adds in another order than of eight, on processors without AVX-512")
    alone = np.concatenate([product(x[first : first + few], weight) for first in (0, few)])
    np.testing.assert_array_equal(alone, product(x, weight)[: len(alone)])


MISFITS = [((2, 3), (4, 3), 0), ((2, 3), (3, 4), 1), ((3,), (3, 4), 0), ((2, 3), (3, 3), 2)]


@pytest.mark.parametrize(("x", "weight", "contract"), MISFITS)
def test_shapes_that_do_not_fit(x, weight, contract):
    with pytest.raises(ValueError, match="matmul: x .* must agree, got"):
        matmul(jnp.zeros(x), jnp.zeros(weight), contract=contract)
