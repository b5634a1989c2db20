"""Products with quantised matrices against float64 on the codes, for all in plain XLA, compiled for the CPU.

The kernels are tests.pallas_kernels.products' and hopper_products'.
"""

from __future__ import annotations

import itertools
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.matmul.cpu import quantized as quantized_cpu
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.matmul.quantized import (
    CODES,
    quantized_gated_matmul,
    quantized_grouped_matmul,
    quantized_matmul,
)
from jaxengine.pallas_kernels.matmul.rounding import RoundedRows, dynamic_scales, largest_values, rounded_rows
from jaxengine.pallas_kernels.matmul.tpu import quantized as tpu
from jaxengine.pallas_kernels.matmul.tpu.grouped import sums_are_scaled
from jaxengine.pallas_kernels.matmul.xla import quantized_groups as quantized_groups_xla
from jaxengine.pallas_kernels.registry import KERNELS, kernel
from jaxengine.pallas_kernels.tuning import TpuProducts
from tests.pallas_kernels import reference

# Kernels, which run in their interpreters.
ELSEWHERE = [(op, platform) for op in ("quantized_matmul", "quantized_grouped_matmul") for platform in ("gpu", "tpu")]
ELSEWHERE += [("quantized_matmul", "gpu_triton")]
IMPLEMENTATIONS = {
    kernel(*row): row[1]
    for row in KERNELS
    if row[0] in ("quantized_matmul", "quantized_grouped_matmul") and row not in ELSEWHERE
}
DENSE = {function: name for function, name in IMPLEMENTATIONS.items() if function.__name__ == "quantized_matmul"}
GROUPED = {function: name for function, name in IMPLEMENTATIONS.items() if function not in DENSE}
ERROR = 2e-3  # relative root of the mean square


def error(got, exact) -> float:
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    return float(np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)))


def codes_of(rng, shape, dtype):
    if dtype == "float8_e4m3fn":
        return jnp.asarray(np.clip(rng.standard_normal(shape) * 100, -448, 448), jnp.float32).astype(dtype)
    low, high = (-127, 128) if dtype == "int8" else (-8, 8)
    return rng.integers(low, high, shape, np.int8)


def stored(codes, dtype):
    """Codes as the operation takes them."""
    if dtype != "uint8":
        return jnp.asarray(codes)
    return jnp.asarray((codes[..., 0::2, :].view(np.uint8) & 15) | codes[..., 1::2, :].view(np.uint8) << 4)


def matrix_of(rng, size, out, num_scales, dtype, zeros, stack=()):
    codes = codes_of(rng, (*stack, size, out), dtype)
    scales = jnp.asarray(2.0 ** rng.uniform(-9, -3, (*stack, num_scales, out)), jnp.float32)
    return codes, scales, jnp.asarray(rng.standard_normal(scales.shape) * 4, jnp.float32) * scales if zeros else None


@cache
def compiled(function, dtype):
    options = {"dtype": jnp.dtype(dtype), "out_dtype": jnp.float32}
    return jax.jit(lambda *given: function(QuantizedOperands(*given[:5]), *given[5:], **options))


# rows, inputs, outputs, scales along the inputs, dtype of codes, whether there are zeros, dtype of rows
CASES = [
    (1, 96, 136, 1, "int8", False, "float32"),
    (3, 96, 136, 1, "float8_e4m3fn", False, "bfloat16"),
    (7, 258, 131, 1, "uint8", True, "bfloat16"),
    (1, 96, 136, 3, "uint8", False, "bfloat16"),  # groups of 32
    (64, 192, 136, 3, "uint8", True, "float32"),  # of 64
    (65, 384, 600, 3, "uint8", True, "bfloat16"),  # of 128; more than one block of columns, the last cut short
    (3, 96, 600, 3, "uint8", False, "bfloat16"),
    (65, 384, 140, 3, "float8_e4m3fn", False, "bfloat16"),
    (33, 160, 129, 10, "int8", True, "float32"),
    (1, 192, 136, 3, "uint8", True, "float32"),
    (1, 96, 136, 6, "int8", True, "bfloat16"),  # groups of 16
]


FURTHER = pytest.mark.thorough("another size, or other codes, of a path that the others take")
ALWAYS = (0, 2, 4, 5, 8, 10)  # of CASES


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=[] if index in ALWAYS else FURTHER) for index, case in enumerate(CASES)],
)
def test_against_float64(case):
    rows, size, out, num_scales, codes_dtype, zeros, dtype = case
    rng = np.random.default_rng(rows * size)
    x = jnp.asarray(rng.standard_normal((rows, size)) + 0.3, dtype)
    matrix = matrix_of(rng, size, out, num_scales, codes_dtype, zeros)
    exact = reference.quantized_matmul(
        np.asarray(x, np.float64), *(None if m is None else np.asarray(m) for m in matrix)
    )
    for function, name in DENSE.items():
        got = compiled(function, dtype)(x, None, stored(matrix[0], codes_dtype), *matrix[1:])
        assert (got.dtype, got.shape) == (jnp.float32, (rows, out))
        assert error(got, exact) < ERROR, name


# Rows, scales along their inputs, scales along the matrix's.
ROUNDED = [(1, 1, 1), (5, 1, 1), (5, 3, 3), (70, 3, 6), (5, 1, 3), (70, 1, 3), (5, 6, 3)]


ROUNDED_ALWAYS = [(ROUNDED[0], "int8"), (ROUNDED[3], "int8"), (ROUNDED[4], "int8"), (ROUNDED[6], "int8")]
ROUNDED_ALWAYS += [(ROUNDED[2], "float8_e4m3fn"), (ROUNDED[5], "float8_e4m3fn")]


@pytest.mark.parametrize(
    ("case", "rounding"),
    [
        pytest.param(*row, id="{}-{}".format(*row), marks=[] if row in ROUNDED_ALWAYS else FURTHER)
        for row in itertools.product(ROUNDED, ("int8", "float8_e4m3fn"))
    ],
)
def test_rounded_rows(case, rounding):
    rows, x_scales, num_scales = case
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, 192)), jnp.float32)
    matrix = matrix_of(rng, 192, 40, num_scales, rounding, False)
    rounded, wide = rounded_to(x, x_scales, rounding)
    exact = reference.quantized_matmul(wide, np.asarray(matrix[0]), np.asarray(matrix[1]), None)
    for function, name in DENSE.items():
        assert error(compiled(function, "float32")(*rounded, *matrix), exact) < 1e-6, name
        assert error(compiled(function, "bfloat16")(*rounded, *matrix), exact) < ERROR, name


def rounded_to(x, num_scales, rounding):
    """Rows as codes with so many scales each, and what they stand for in float64."""
    group = x.shape[1] // num_scales
    rounded = rounded_rows(x, dynamic_scales(largest_values(x, group), rounding), rounding)
    return rounded, np.float64(np.float32(rounded.codes)) * np.repeat(np.float64(rounded.scales), group, axis=1)


def test_rounded_rows_and_columns_of_any_size():
    """XLA's meet in float16, which has neither large numbers nor small ones."""
    rng = np.random.default_rng(0)
    of_rows, of_columns = 2.0 ** rng.integers(-60, 40, (70, 1)), 2.0 ** rng.integers(-30, 20, 40)
    x = jnp.asarray(rng.standard_normal((70, 96)) * of_rows, jnp.float32).at[5].set(0)
    (codes, x_scales), wide = rounded_to(x, 3, "int8")
    matrix, scales, zeros = matrix_of(rng, 96, 40, 3, "uint8", True)
    scales, zeros = (part * jnp.asarray(of_columns, jnp.float32) for part in (scales.at[1, 4].set(0), 1000 * zeros))
    exact = reference.quantized_matmul(wide, matrix, np.asarray(scales), np.asarray(zeros)) / of_rows / of_columns
    given = stored(matrix, "uint8"), scales, zeros
    for function, name in (DENSE | GROUPED).items():
        operands = given if function in DENSE else (*(part[None] for part in given), jnp.asarray([70], jnp.int32))
        got = compiled(function, "bfloat16")(codes, x_scales, *operands)
        assert error(got / of_rows / of_columns, exact) < ERROR, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numbers_at_the_ends_of_float32(dtype):
    """Rows and columns of nearly its least and its largest numbers are finite, and units of them are."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((70, 96)), jnp.float32).at[6, ::2].set(0)
    x = x * jnp.ones((70, 1)).at[5].set(1e-35).at[6].set(1e-37).at[7].set(1e35)
    for rounding in ("int8", "float8_e4m3fn"):
        matrix, scales, _ = matrix_of(rng, 96, 40, 3, rounding, False)
        scales = scales.at[:, 4].set(1.2e-38).at[:, 5].set(1e-37)
        (codes, x_scales), wide = rounded_to(x, 3, rounding)
        exact = reference.quantized_matmul(wide, np.asarray(matrix), np.asarray(scales), None)
        sizes = np.abs(wide).max(axis=1, keepdims=True) + 1e-30
        for function, name in (DENSE | GROUPED).items():
            operands = (jnp.asarray(matrix), scales, None)
            if function not in DENSE:
                operands = *(part[None] for part in operands[:2]), None, jnp.asarray([70], jnp.int32)
            got = np.asarray(compiled(function, dtype)(codes, x_scales, *operands))
            assert error(got / sizes, exact / sizes) < ERROR, (rounding, name)


@pytest.mark.parametrize("op", ["quantized_matmul", "quantized_grouped_matmul"])
def test_a_tpu_without_kernel_has_no_float16(op):
    """Groups of 32 inputs do not fill its registers: XLA's product, of rows and a matrix in float32."""
    rng = np.random.default_rng(0)
    matrix = matrix_of(rng, 96, 40, 3, "int8", False)
    rows, wide = rounded_to(jnp.asarray(rng.standard_normal((70, 96)), jnp.float32), 3, "int8")
    codes, scales = (jnp.asarray(part) for part in matrix[:2])
    operands: tuple[Any, ...] = (QuantizedOperands(*rows, codes, scales, None),)
    if op == "quantized_grouped_matmul":
        operands = QuantizedOperands(*rows, codes[None], scales[None], None), jnp.asarray([70], jnp.int32)
    call = partial(kernel(op, "tpu"), dtype=jnp.bfloat16, out_dtype=jnp.float32)
    text = jax.jit(call).trace(*operands).lower(lowering_platforms=("tpu",)).as_text()
    assert "xf16" not in text and "HIGHEST" in text
    assert error(call(*operands), reference.quantized_matmul(wide, matrix[0], np.asarray(matrix[1]), None)) < 1e-6


def test_rounding():
    x = jnp.asarray([[0.5, 1.5, -2.5, 127.0], [0, 0, 0, 0], [-1e9, 1e-9, 3, 4]], jnp.float32)
    rounded = rounded_rows(x, dynamic_scales(largest_values(x, 4), "int8"), "int8")
    np.testing.assert_array_equal(rounded.codes[0], [0, 2, -2, 127])
    np.testing.assert_array_equal(rounded.codes[1], 0)
    np.testing.assert_array_equal(rounded.codes[2], [-127, 0, 0, 0])
    np.testing.assert_allclose(rounded.scales[:, 0], [1, 1, 1e9 / 127], rtol=1e-6)
    # One scale for all rows: what does not fit saturates, and no code of fp8 is a NaN.
    static = rounded_rows(x, jnp.full((1, 1), 0.01, jnp.float32), "float8_e4m3fn")
    np.testing.assert_array_equal(np.float32(static.codes[2]), [-448, 0, 288, 384])
    assert static.scales.shape == (3, 1)


SIZES = [5, 0, 17, 11]


@pytest.mark.parametrize(
    ("num_scales", "codes", "zeros"), [(1, "int8", False), (1, "uint8", False), (3, "uint8", True)]
)
@pytest.mark.parametrize("x_scales", [0, pytest.param(1, marks=FURTHER), 3])
def test_groups(num_scales, codes, zeros, x_scales):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((37, 96)), jnp.bfloat16).astype(jnp.float32)
    matrix = matrix_of(rng, 96, 136, num_scales, codes, zeros, (len(SIZES),))
    rows = x, None
    if x_scales:
        rows, x = rounded_to(x, x_scales, "int8")
    exact, ends = np.zeros((37, 136)), np.cumsum(SIZES)
    for group in range(len(SIZES)):
        own = slice(ends[group] - SIZES[group], ends[group])
        parts = (None if m is None else np.asarray(m)[group] for m in matrix)
        exact[own] = reference.quantized_matmul(np.asarray(x)[own], *parts)
    given = stored(matrix[0], codes), *matrix[1:]
    for function, name in GROUPED.items():
        got = compiled(function, "float32")(*rows, *given, jnp.asarray(SIZES, jnp.int32))
        assert error(got, exact) < 1e-6, name
        assert not np.asarray(got)[exact.sum(axis=1) == 0].any(), name
        if zeros:
            got = compiled(function, "bfloat16")(*rows, *given, jnp.asarray(SIZES, jnp.int32))
            assert error(got, exact) < ERROR, name
    call = RoundedRows(*rows) if x_scales else rows[0]
    sizes = jnp.asarray(SIZES, jnp.int32)
    got = quantized_grouped_matmul(call, *given, sizes, dtype=jnp.float32)
    assert error(got, exact) < 1e-6
    bias = rng.standard_normal((len(SIZES), 136)).astype(np.float32)
    got = quantized_grouped_matmul(call, *given, sizes, jnp.asarray(bias), dtype=jnp.float32)
    exact[: sum(SIZES)] += np.repeat(bias, SIZES, axis=0)
    assert error(got, exact) < 1e-6 and not np.asarray(got[sum(SIZES) :]).any()


def test_codes_of_groups_that_are_stored_turned():
    rng = np.random.default_rng(0)
    codes, scales, _ = matrix_of(rng, 32, 24, 2, "uint8", False, (3,))
    x, sizes = jnp.asarray(rng.standard_normal((9, 32)), jnp.float32), jnp.asarray([4, 0, 5], jnp.int32)
    given = QuantizedOperands(x, None, stored(codes, "uint8"), scales, None), sizes
    options = {"dtype": jnp.float32, "out_dtype": jnp.float32}
    run = quantized_groups_xla.quantized_grouped_matmul
    np.testing.assert_array_equal(run(*given, **options, transposed=True), run(*given, **options))


WHOLE_ALWAYS = [(1, "int8", 64), (64, "int8", 1), (64, "uint8", 1), (64, "uint8", 64), (64, "float8_e4m3fn", 64)]


@pytest.mark.parametrize(
    ("num_scales", "codes", "rows"),
    [
        pytest.param(*row, marks=[] if row in WHOLE_ALWAYS else FURTHER)
        for row in itertools.product((1, 64), ("int8", "uint8", "float8_e4m3fn"), (1, 64))
    ],
)
def test_no_whole_matrix_is_widened_on_a_cpu(num_scales, codes, rows):
    size, out = 8192, 16384
    weight_bytes = size * out // (2 if codes == "uint8" else 1)
    matrix = jax.ShapeDtypeStruct((weight_bytes // out, out), jnp.dtype(codes))
    shapes = (jax.ShapeDtypeStruct((rows, size), jnp.float32), matrix)
    scales = jax.ShapeDtypeStruct((num_scales, out), jnp.float32)
    analysis = jax.jit(quantized_matmul).lower(*shapes, scales).compile().memory_analysis()
    assert analysis is not None
    # Beside the sums of a row, which a plain product has as well.
    assert analysis.temp_size_in_bytes < weight_bytes // 8 + 2 * rows * out * 4


@pytest.mark.parametrize("num_scales", [1, 6])
@pytest.mark.parametrize("codes_dtype", ["int8", "uint8"])
def test_one_row_of_a_large_matrix(codes_dtype, num_scales, monkeypatch):
    monkeypatch.setattr(quantized_cpu, "_MOST_SUMS_BYTES", 1)
    monkeypatch.setattr(quantized_cpu, "_TRIP_SUMS_BYTES", 8 << 10)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, 384)), jnp.float32)
    matrix = matrix_of(rng, 384, 264, num_scales, codes_dtype, True)
    run = jax.jit(partial(kernel("quantized_matmul", "cpu"), dtype=jnp.float32, out_dtype=jnp.float32))
    given = QuantizedOperands(x, None, stored(matrix[0], codes_dtype), *matrix[1:])
    assert "while" in run.lower(given).as_text()
    exact = reference.quantized_matmul(np.asarray(x), *(np.asarray(part) for part in matrix))
    assert error(run(given), exact) < 1e-6


@pytest.mark.parametrize(("codes_dtype", "sums"), [("int8", 72), ("uint8", 36)])
def test_one_row_meets_codes_in_registers(codes_dtype, sums):
    packed = 2 if codes_dtype == "uint8" else 1
    codes = jax.ShapeDtypeStruct((576 // packed, 960), jnp.dtype(codes_dtype))
    shapes = jax.ShapeDtypeStruct((1, 576), jnp.float32), codes, jax.ShapeDtypeStruct((18, 960), jnp.float32)
    text = jax.jit(quantized_matmul).lower(*shapes).compile().as_text()
    assert text is not None
    # One loop reads the codes as they are stored, and leaves sums of eight rows of them each.
    assert " while(" not in text and f" = f32[{sums},960]" in text.split("\nENTRY ")[1], text


@pytest.mark.parametrize(
    ("x", "codes", "scales", "zeros", "message"),
    [
        ((2, 8), (6, 4), (1, 4), None, "must agree"),
        ((2, 8), (8, 4), (3, 4), None, "where n divides 8"),
        ((2, 8), (8, 4), (2, 3), None, "scales must be"),
        ((2, 8), (8, 4), (2, 4), (1, 4), "zeros must have the shape"),
    ],
)
def test_shapes_that_do_not_fit(x, codes, scales, zeros, message):
    zeros = None if zeros is None else jnp.zeros(zeros)
    with pytest.raises(ValueError, match=f"quantized_matmul: .*{message}"):
        quantized_matmul(jnp.zeros(x), jnp.zeros(codes, jnp.int8), jnp.zeros(scales), zeros)


def test_operands_of_other_kinds():
    with pytest.raises(ValueError, match=f"codes must be one of {', '.join(CODES)}, got float32"):
        quantized_matmul(jnp.zeros((2, 8)), jnp.zeros((8, 4)), jnp.zeros((1, 4)))
    rounded = RoundedRows(jnp.zeros((2, 8), jnp.int8), jnp.zeros((1, 2)))
    with pytest.raises(ValueError, match="scales of rows must be"):
        quantized_matmul(rounded, jnp.zeros((8, 4), jnp.int8), jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match="group_sizes must be int32"):
        sizes = jnp.zeros(1, jnp.int32)
        quantized_grouped_matmul(jnp.zeros((2, 8)), jnp.zeros((2, 8, 4), jnp.int8), jnp.zeros((2, 1, 4)), None, sizes)
    with pytest.raises(ValueError, match=r"quantized_grouped_matmul: bias must be \(2, 4\) or None, got \(4,\)"):
        given = jnp.zeros((2, 8)), jnp.zeros((2, 8, 4), jnp.int8), jnp.zeros((2, 1, 4)), None, jnp.zeros(2, jnp.int32)
        quantized_grouped_matmul(*given, jnp.zeros(4))
    for out, bias in ((4, jnp.zeros((2, 2))), (3, None)):
        given = jnp.zeros((2, 8)), jnp.zeros((2, 8, out), jnp.int8), jnp.zeros((2, 1, out)), None
        with pytest.raises(ValueError, match="outputs must be even, and bias"):
            quantized_gated_matmul(*given, jnp.zeros(2, jnp.int32), bias, activation=jnp.multiply)


@pytest.mark.parametrize("has_bias", [False, True])
def test_gates_and_ups(has_bias):
    """Of the first and the second half of the outputs, bias added; rows of no group are 0."""
    rng = np.random.default_rng(0)
    rows, codes = rng.standard_normal((7, 64)), rng.integers(-127, 128, (3, 64, 80), np.int8)
    scales, sizes = rng.uniform(0.5, 2, (3, 1, 80)), [4, 0, 2]
    bias = 50 * rng.standard_normal((3, 80)) * has_bias
    exact = np.zeros((7, 80))
    for row, group in enumerate(np.repeat(range(3), sizes)):
        exact[row] = rows[row] @ (codes[group] * scales[group]) + bias[group]
    x, of_codes, added = (jnp.asarray(each, jnp.float32) for each in (rows, scales, bias))
    operands = x, jnp.asarray(codes), of_codes, None, jnp.asarray(sizes, jnp.int32), added if has_bias else None
    got = quantized_gated_matmul(*operands, activation=lambda gate, up: gate - 3 * up)
    assert error(got, exact[:, :40] - 3 * exact[:, 40:]) < 1e-6 and not got[6].any()


@pytest.mark.parametrize(("width", "name"), [(256, "quantized_gated_matmul"), (200, "quantized_grouped_matmul")])
def test_gates_and_ups_are_one_kernel_on_tpus(width, name):
    """Whose columns fill whole registers; others are activated apart."""
    shapes = ((8, 128), jnp.bfloat16), ((4, 128, 2 * width), jnp.int8), ((4, 1, 2 * width), jnp.float32)
    x, codes, scales = (jax.ShapeDtypeStruct(*each) for each in shapes)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def gated(x, codes, scales, sizes):
        return quantized_gated_matmul(x, codes, scales, None, sizes, None, activation=jnp.multiply)

    text = jax.jit(gated).trace(x, codes, scales, sizes).lower(lowering_platforms=("tpu",)).as_text()
    assert {each for each in ("quantized_gated_matmul", "quantized_grouped_matmul") if each in text} == {name}


@pytest.mark.parametrize("int8_products", [1, 2])
def test_a_tpu_without_products_of_eight_bits_makes_none(int8_products):
    """One scale a channel: XLA's product, of codes in bfloat16 there."""
    rng = np.random.default_rng(0)
    x, codes = (jnp.asarray(rng.integers(-127, 128, shape), jnp.int8) for shape in ((5, 96), (96, 40)))
    options = {"dtype": jnp.bfloat16, "out_dtype": jnp.float32, "sizes": TpuProducts(int8_products=int8_products)}
    call = partial(tpu.quantized_matmul, **options)
    operands = QuantizedOperands(x, jnp.full((5, 1), 0.5), codes, jnp.full((1, 40), 0.25), None)
    dots = [eqn for eqn in jax.make_jaxpr(call)(operands).eqns if eqn.primitive.name == "dot_general"]
    kinds = {str(invar.aval.dtype) for eqn in dots for invar in eqn.invars}
    assert kinds == ({"int8"} if int8_products == 2 else {"bfloat16"})
    expected = np.asarray(x, np.float32) @ np.asarray(codes, np.float32) / 8
    np.testing.assert_allclose(call(operands), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("rows", "group", "by_sums"), [(16, 32, True), (17, 32, False), (64, 128, True), (65, 128, False)]
)
def test_groups_are_summed_for_fewer_rows_than_half_of_one_on_tpus(rows, group, by_sums):
    assert tpu.sums_are_smaller(rows, group, TpuProducts()) == by_sums
    assert sums_are_scaled(rows, group, TpuProducts()) == by_sums


def test_sums_of_wide_groups_are_scaled_for_any_rows_of_experts():
    """Once for each chunk of inputs: scaling the matrix would take longer than 128 rows do."""
    assert sums_are_scaled(1024, 512, TpuProducts()) and not sums_are_scaled(1024, 256, TpuProducts())


def test_kernels_reserve_what_their_tiles_take_on_tpus():
    rows = tpu.prepared(
        jnp.zeros((8, 4096), jnp.bfloat16), None, jnp.int8, 32, jnp.bfloat16, TpuProducts(), by_sums=True
    )
    codes, scales = jnp.zeros((4096, 512), jnp.int8), jnp.zeros((32, 512), jnp.float32)
    held = 2 * (4096 * 512 + 8 * 32 * 512 + 8 * 4096 * 2)
    limit = tpu.vmem_limit((8, 512), rows, codes, scales, None, TpuProducts().vmem_limit_bytes)
    assert held + (4 << 20) < limit < held + (12 << 20)
    assert limit < tpu.vmem_limit((8, 512), rows, codes, scales, scales, TpuProducts().vmem_limit_bytes)
    assert tpu.vmem_limit((512, 4096), rows, codes, scales, None, 1 << 20) == 1 << 20


@pytest.mark.parametrize(("num_row_scales", "by_sums"), [(1, True), (4, True), (4, False), (16, False)])
def test_sums_of_groups_are_those_of_the_rows_on_tpus(num_row_scales, by_sums):
    """Whatever the rows' scales stand beside: a group of the matrix, a chunk of its inputs, or the result."""
    rng, num_groups, size = np.random.default_rng(num_row_scales), 8, 2048
    x = jnp.asarray(rng.integers(-127, 128, (6, size)), jnp.int8)
    scales = jnp.asarray(rng.uniform(0.5, 2, (6, num_row_scales)), jnp.float32)
    rows = tpu.prepared(x, scales, jnp.int8, num_groups, jnp.bfloat16, TpuProducts(), by_sums=by_sums)
    high, low, _ = np.split(np.asarray(tpu.group_sums(rows, num_groups), np.float32), 3, axis=1)
    found = (high + low) * (1 if rows.after is None else np.asarray(rows.after))
    values = np.asarray(x, np.float32) * np.repeat(scales, size // num_row_scales, axis=1)
    expected = values.reshape(6, num_groups, -1).sum(2)
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2 * np.abs(values).sum(1).max() / num_groups)


@pytest.mark.parametrize(("rows", "size", "group"), [(16, 512, 128), (5, 256, 128), (12, 384, 128), (3, 96, 32)])
def test_groups_of_rows_have_scales_of_their_own(rows, size, group):
    x = np.random.default_rng(rows).standard_normal((rows, size)).astype(np.float32)
    found = rounded_rows(jnp.asarray(x), dynamic_scales(largest_values(jnp.asarray(x), group), "int8"), "int8")
    np.testing.assert_allclose(found.scales, np.abs(x.reshape(rows, -1, group)).max(2) / 127, rtol=1e-6)
    scales = np.repeat(found.scales, group, axis=1)
    np.testing.assert_allclose(found.codes, np.round(x / scales))
    np.testing.assert_allclose(found.widened(jnp.float32), found.codes * scales)
