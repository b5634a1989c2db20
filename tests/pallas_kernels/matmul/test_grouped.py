"""Grouped products against a float64 loop over groups, for every implementation, all compiled for the CPU."""

from __future__ import annotations

from functools import cache, partial
from platform import machine

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.matmul.cpu.grouped import block_rows_of
from jaxengine.pallas_kernels.matmul.grouped import gated_matmul, grouped_matmul
from jaxengine.pallas_kernels.matmul.hopper import group_rows as hopper_rows
from jaxengine.pallas_kernels.matmul.quantized import quantized_grouped_matmul
from jaxengine.pallas_kernels.matmul.xla import grouped as grouped_tiles
from jaxengine.pallas_kernels.registry import KERNELS, kernel
from tests.tables import each_row

IN, OUT = 40, 24
# What rows of the registry run, each once; the kernel, which runs in its interpreter, is hopper_products'.
ROWS = [row for row in KERNELS if row[0] == "grouped_matmul" and row[1] != "gpu"]
IMPLEMENTATIONS = {kernel(op, platform): platform for op, platform in ROWS}
# name: rows, rows of each group. Few shapes: compiling is what takes time.
CASES = {
    "one row": (1, [0, 0, 1, 0]),
    "fewer rows than groups": (4, [0, 1, 0, 0, 2, 0, 1, 0]),
    "no rows in any group": (61, [0, 0, 0, 0, 0, 0]),
    "all rows in one group": (61, [0, 61, 0, 0, 0, 0]),
    "all rows in the last group": (61, [0, 0, 0, 0, 0, 61]),
    "empty groups at both ends": (61, [0, 7, 0, 1, 53, 0]),
    "whole blocks": (61, [16, 0, 16, 0, 29, 0]),
    "rows after the last group": (61, [3, 0, 17, 9, 1, 1]),
}


def oracle(x: np.ndarray, w: np.ndarray, sizes: list[int]) -> np.ndarray:
    """float64 [M, out], one group after the other."""
    out = np.zeros((x.shape[0], w.shape[2]))
    ends = np.cumsum(sizes)
    for group, matrix in enumerate(w.astype(np.float64)):
        rows = slice(ends[group] - sizes[group], ends[group])
        out[rows] = x[rows].astype(np.float64) @ matrix
    return out


def operands(num_rows: int, num_groups: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(num_rows)
    x, w = rng.standard_normal((num_rows, IN)), rng.standard_normal((num_groups, IN, OUT)) * IN**-0.5
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


@cache
def compiled(function):
    return jax.jit(partial(function, out_dtype=jnp.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name, dtype):
    num_rows, sizes = CASES[name]
    x, w = operands(num_rows, len(sizes), dtype)
    expected = oracle(np.asarray(x, np.float64), np.asarray(w, np.float64), sizes)
    outside = np.arange(num_rows) >= sum(sizes)
    # What belongs to no group must not matter.
    x = jnp.where(outside[:, None], jnp.nan, x)
    for function, platform in IMPLEMENTATIONS.items():
        got = np.asarray(compiled(function)(x, w, jnp.asarray(sizes, jnp.int32)))
        assert got.shape == expected.shape and got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5, err_msg=platform)
        assert not got[outside].any(), platform


@pytest.mark.thorough("in which order XLA adds depends on the processor")
@pytest.mark.skipif(machine() != "x86_64", reason="in which order XLA adds is known of these processors only")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_row(("inputs", "outputs"), [(IN, OUT), (64, 128), (768, 192), (1408, 64)])
def test_a_row_has_the_same_bits_in_blocks_of_every_size(dtype, inputs, outputs):
    """A decode has few rows for each expert, a prompt many: get_logprobs computes in the latter what the former did."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((64, inputs), (4, inputs, outputs)))
    product, found = compiled(kernel("grouped_matmul", "cpu")), []
    for count, block in ((1, 2), (2, 2), (4, 4), (8, 8), (16, 16)):
        assert block_rows_of(4 * count, 4) == block
        rows = jnp.concatenate([x[16 * group : 16 * group + count] for group in range(4)])
        found.append(np.asarray(product(rows, w, jnp.full(4, count, jnp.int32)))[::count])
    for each in found:
        np.testing.assert_array_equal(each, found[0])


def test_the_operation_passes_everything_on():
    _, sizes = CASES["rows after the last group"]
    x, w = operands(61, len(sizes), "bfloat16")
    expected = oracle(np.asarray(x, np.float64), np.asarray(w, np.float64), sizes)
    run = jax.jit(partial(grouped_matmul, out_dtype=jnp.float32))
    got = run(x, w, jnp.asarray(sizes, jnp.int32))
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_have_biases(dtype):
    """Added to the product as it is rounded, as every platform but TPUs does."""
    _, sizes = CASES["rows after the last group"]
    x, w = operands(61, len(sizes), dtype)
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((len(sizes), OUT)), dtype)
    added = np.zeros((61, OUT), np.float32)
    added[: sum(sizes)] = np.repeat(np.asarray(bias, np.float32), sizes, axis=0)
    given = x, w, jnp.asarray(sizes, jnp.int32)
    plain, got = grouped_matmul(*given), grouped_matmul(*given, bias)
    assert got.dtype == dtype and not np.asarray(got[sum(sizes) :]).any()
    np.testing.assert_array_equal(got, (plain.astype(jnp.float32) + added).astype(dtype))
    exact = oracle(*(np.asarray(part, np.float64) for part in given[:2]), sizes) + added
    np.testing.assert_allclose(got.astype(jnp.float32), exact, rtol=0, atol=2e-5 if dtype == "float32" else 0.05)


@pytest.mark.parametrize(("size", "by_kernel"), [(128, True), (40, False)])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_kernels_of_tpus_add_biases_themselves(is_quantized, size, by_kernel):
    """Where they multiply; XLA looks up the bias of each row's group."""

    def product(x, sizes, bias):
        if not is_quantized:
            return grouped_matmul(x, jnp.zeros((4, size, 136), jnp.bfloat16), sizes, bias)
        return quantized_grouped_matmul(
            x, jnp.zeros((4, size, 136), jnp.int8), jnp.zeros((4, 1, 136)), None, sizes, bias
        )

    def look_ups(bias):
        shapes = ((8, size), "bfloat16"), ((4,), "int32")
        traced = jax.jit(product).trace(*(jax.ShapeDtypeStruct(*each) for each in shapes), bias)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert ("tpu_custom_call" in text) == by_kernel
        return text.count("stablehlo.gather")

    assert (look_ups(jax.ShapeDtypeStruct((4, 136), "bfloat16")) == look_ups(None)) == by_kernel


def test_gates_and_ups_are_activated_with_their_biases():
    """As one after the other, with nothing to round between them."""
    _, sizes = CASES["rows after the last group"]
    x, w = operands(61, len(sizes), "float32")
    bias, sizes = (
        jnp.asarray(np.random.default_rng(1).standard_normal((len(sizes), OUT)), "float32"),
        jnp.asarray(sizes),
    )
    own = jnp.repeat(jnp.pad(bias, ((0, 1), (0, 0))), jnp.append(sizes, 61 - jnp.sum(sizes)), axis=0)
    for given, added in ((None, 0), (bias, own)):
        gate, up = jnp.split(grouped_matmul(x, w, sizes) + added, 2, axis=1)
        got = gated_matmul(x, w, sizes, given, activation=lambda gate, up: gate - 3 * up)
        np.testing.assert_allclose(got, gate - 3 * up, rtol=0, atol=1e-6)


@pytest.mark.parametrize("out", [5, 6])
def test_halves_and_biases_that_do_not_fit(out):
    given = jnp.zeros((4, 8)), jnp.zeros((2, 8, out)), jnp.zeros(2, jnp.int32), jnp.zeros((2, 5))
    with pytest.raises(ValueError, match=rf"gated_matmul: outputs must be even, and bias \(2, {out}\) or None, got"):
        gated_matmul(*given, activation=jnp.multiply)


@pytest.mark.parametrize(("platform", "expected"), [("cpu", "while"), ("cuda", "scatter"), ("tpu", "ragged_dot")])
def test_the_platform_compiled_for_decides(platform, expected):
    x, w = operands(61, 6, "float32")
    traced = jax.jit(grouped_matmul).trace(x, w, jnp.zeros(6, jnp.int32))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert {name for name in ("while", "scatter", "ragged_dot") if name in text} == {expected}


@pytest.mark.parametrize(
    ("dtype", "width", "expected"),
    [
        ("bfloat16", 128, {"gated_matmul"}),
        ("bfloat16", 100, {"grouped_matmul"}),
        ("float32", 128, {"ragged_dot"}),
    ],
)
def test_gates_and_ups_are_one_kernel_on_tpus(dtype, width, expected):
    """Whose columns fill whole registers, in bfloat16; others are activated apart."""
    shapes = ((8, 128), dtype), ((4, 128, 2 * width), dtype), ((4,), "int32")

    def gated(x, w, sizes):
        return gated_matmul(x, w, sizes, None, activation=jnp.multiply)

    lowered = jax.jit(gated).trace(*(jax.ShapeDtypeStruct(*each) for each in shapes)).lower(lowering_platforms=("tpu",))
    text = lowered.as_text()
    assert {name for name in ("gated_matmul", "grouped_matmul", "ragged_dot") if name in text} == expected


def test_tiles_of_several_trips(monkeypatch):
    """As where matrices are large: no trip holds all tiles, and the last one holds tiles of no group."""
    monkeypatch.setattr(grouped_tiles, "_TRIP_BYTES", 3 * IN * OUT * 4)
    run = jax.jit(partial(grouped_tiles.grouped_matmul, out_dtype=jnp.float32))
    for name in ("all rows in one group", "whole blocks", "rows after the last group"):
        num_rows, sizes = CASES[name]
        x, w = operands(num_rows, len(sizes), "float32")
        assert grouped_tiles.most_tiles_of(num_rows, len(sizes)) > 3
        got = run(x, w, jnp.asarray(sizes, jnp.int32))
        np.testing.assert_allclose(got, oracle(np.asarray(x), np.asarray(w), sizes), rtol=0, atol=2e-5)


def test_matrices_that_are_stored_turned():
    num_rows, sizes = CASES["rows after the last group"]
    x, w = operands(num_rows, len(sizes), "bfloat16")
    run, given = partial(grouped_tiles.grouped_matmul, out_dtype=jnp.float32), (x, w, jnp.asarray(sizes, jnp.int32))
    np.testing.assert_allclose(run(*given, transposed=True), run(*given), rtol=0, atol=2e-5)


@pytest.mark.parametrize("num_rows", [8, 512, 65536])
@pytest.mark.parametrize("num_groups", [128, 16])
def test_tiles_cost_what_the_rows_cost(num_rows, num_groups):
    """Of Qwen3-30B-A3B, by the program alone: operations of all trips there may be, matrices of one trip."""
    rows, size, out = num_rows, 2048, 1536
    x, w = jax.ShapeDtypeStruct((rows, size), "bfloat16"), jax.ShapeDtypeStruct((num_groups, size, out), "bfloat16")
    sizes = jax.ShapeDtypeStruct((num_groups,), "int32")
    run = partial(grouped_tiles.grouped_matmul, out_dtype=jnp.bfloat16)
    (product,) = (e for e in equations(jax.make_jaxpr(run)(x, w, sizes).jaxpr) if e.primitive.name == "dot_general")
    trip, tile, _ = product.outvars[0].aval.shape
    most = grouped_tiles.most_tiles_of(rows, num_groups)
    assert tile == grouped_tiles.tile_rows_of(rows, num_groups)
    # Rounded to whole trips. Where a group has fewer rows than the smallest tile, a tile for each row at most.
    assert -(-most // trip) * trip * tile <= (2 * rows if rows >= 16 * num_groups else 16 * rows) + trip * tile
    assert trip * size * out * 2 <= 64 << 20


def equations(jaxpr):
    """Of a program and all programs in it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            if (inner := getattr(value, "jaxpr", value)) is not value or hasattr(inner, "eqns"):
                yield from equations(inner)


def test_results_have_the_dtype_of_the_rows():
    x, w = operands(9, 2, "bfloat16")
    sizes = jnp.array([4, 5], jnp.int32)
    rounded, exact = grouped_matmul(x, w, sizes), grouped_matmul(x, w, sizes, out_dtype=jnp.float32)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))


def test_a_row_does_not_depend_on_the_others():
    """Bit for bit: the same rows and groups, with other rows of the same and of other groups between them."""
    x, w = operands(48, 4, "float32")
    run = compiled(kernel("grouped_matmul", "cpu"))
    few = run(x, w, jnp.array([0, 5, 0, 0], jnp.int32))[:5]
    moved = jnp.concatenate([x[5:30], x[:5], x[30:]])
    many = run(moved, w, jnp.array([7, 41, 0, 0], jnp.int32))[25:30]
    np.testing.assert_array_equal(few, many)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_program_holds_no_copy_of_the_matrices(dtype):
    """Neither all rows times all matrices nor a conversion of all matrices: memory for a few of them at most."""
    w = jax.ShapeDtypeStruct((64, 128, 128), dtype)
    x, sizes = jax.ShapeDtypeStruct((32, 128), dtype), jax.ShapeDtypeStruct((64,), "int32")
    memory = jax.jit(grouped_matmul).lower(x, w, sizes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 128 * 128 * 4


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_layers_take_turns_with_their_workspace(platform):
    """The zeros that all of them begin with were copied for each at the start of the step."""
    product = kernel("grouped_matmul", platform)

    def temporary(num_layers):
        def step(x, w, sizes):
            for _ in range(num_layers):
                sizes = sizes + jnp.bincount(jnp.argmax(x[:, :8], axis=1), length=8)
                x = x + product(x, w, sizes, out_dtype=jnp.float32)
            return x

        x, w = jax.ShapeDtypeStruct((4096, 128), jnp.float32), jax.ShapeDtypeStruct((8, 128, 128), jnp.float32)
        compiled = jax.jit(step).lower(x, w, jax.ShapeDtypeStruct((8,), jnp.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(8) < 1.1 * temporary(2)


@pytest.mark.parametrize(("rows", "groups", "block"), [(1, 8, 2), (8, 128, 2), (24, 8, 4), (64, 8, 8), (9999, 8, 16)])
def test_blocks_are_as_long_as_an_average_group(rows, groups, block):
    assert block_rows_of(rows, groups) == block


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": jnp.zeros((4, 7))}, r"x \[M, in\] and w \[G, in, out\] must agree, got \(4, 7\) and \(2, 8, 3\)"),
        ({"w": jnp.zeros((8, 3))}, "must agree"),
        ({"x": jnp.zeros((4, 8), jnp.bfloat16)}, "must both be bfloat16 or float32, got bfloat16 and float32"),
        ({"group_sizes": jnp.zeros(2)}, r"must be int32 \(2,\), got float32 \(2,\)"),
        ({"group_sizes": jnp.zeros(1, jnp.int32)}, r"got int32 \(1,\)"),
        ({"bias": jnp.zeros((2, 2))}, r"grouped_matmul: bias must be \(2, 3\) or None, got \(2, 2\)"),
    ],
)
def test_unfit_operands(changes, message):
    fit = {"x": jnp.zeros((4, 8)), "w": jnp.zeros((2, 8, 3)), "group_sizes": jnp.zeros(2, jnp.int32)}
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**(fit | changes))


def test_rows_that_xla_multiplies_are_not_counted_on_hopper():
    """Rows with more scales than the matrix go to XLA, as the operation says."""

    def struct(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    sizes, x = np.array([20, 0, 12, 0]), struct(jnp.int8, 32, 512)
    codes, scales = struct(jnp.int8, 4, 512, 256), struct(jnp.float32, 4, 4, 256)
    counted = [
        hopper_rows.multiplied_rows(sizes, x, struct(jnp.float32, 32, count), codes, scales, gated=False) > 0
        for count in (1, 4, 8)
    ]
    assert counted == [True, True, False]
