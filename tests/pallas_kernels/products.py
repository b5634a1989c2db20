"""Products with matrices of groups, and with quantised ones whose scales vary along the inputs, as TPU kernels, against
float64 on the codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.matmul.rounding import dynamic_scales, largest_values, rounded_rows
from jaxengine.pallas_kernels.matmul.tpu.widened import CHUNK, PIECE
from jaxengine.pallas_kernels.matmul.xla.grouped import tile_rows_of
from jaxengine.pallas_kernels.registry import kernel
from jaxengine.pallas_kernels.tuning import HopperProducts, TpuProducts, TritonProducts
from tests.pallas_kernels import reference
from tests.pallas_kernels.conformance import watched
from tests.pallas_kernels.implementations import Implementation
from tests.pallas_kernels.matmul.test_quantized import ERROR, error, matrix_of, stored

# Several tiles of rows and of columns in small problems.
SMALL = TpuProducts(rows=32, columns=128)
SUMMED = 3e-5  # nothing is rounded but sums, and those of zeros to 16 bits
PAIRED = 1.5e-3  # of two groups that are multiplied together one is rounded


class Product(NamedTuple):
    """Rows [rows, size] times a matrix [size, out] with a scale for each `group` inputs.

    rounded: dtype of the rows' codes, None for bfloat16; row_group: inputs that share a scale of a row, 0 for all.
    """

    rows: int
    size: int
    out: int
    group: int
    codes: str
    zeros: bool = False
    rounded: str | None = None
    row_group: int = 0
    sizes: TpuProducts | HopperProducts | TritonProducts = SMALL


E4M3, BFLOAT16 = "float8_e4m3fn", "bfloat16"  # the latter for matrices that have no scales
QUICK = {
    "one row": Product(1, 2112, 136, 64, "uint8", True),
    "sums of 32": Product(16, 1088, 520, 32, "int8"),
    "weights of 128": Product(125, 512, 130, 128, "uint8", True),
    "weights of 32": Product(70, 2112, 130, 32, E4M3),
    "e4m3 rows by groups": Product(8, 4224, 130, 128, E4M3, False, E4M3, 128),
    "e4m3 rows by finer groups": Product(8, 768, 40, 192, E4M3, False, E4M3, 96),
    "int8 rows": Product(5, 512, 130, 128, "int8", False, "int8"),
    "int8 rows by groups": Product(5, 512, 40, 64, "uint8", True, "int8", 128),
}
MORE = {
    "sums in a loop": Product(3, 8320, 40, 128, "uint8", True),
    "weights in a loop": Product(70, 1152, 40, 128, "int8"),
    "e4m3 rows in a loop": Product(8, 8448, 40, 128, E4M3, False, E4M3, 128),
    "e4m3 rows by coarser groups": Product(8, 512, 40, 64, E4M3, False, E4M3, 128),
    "sums of 16, ends cut": Product(8, 448, 130, 16, "uint8", True),
    "sums of a wide group": Product(5, 2048, 40, 1024, E4M3),
    "weights of a wide group": Product(70, 2048, 40, 1024, "uint8"),
    "many e4m3 rows by groups": Product(70, 1152, 130, 128, E4M3, False, E4M3, 128),
    "many e4m3 rows by finer groups": Product(70, 1152, 40, 192, E4M3, False, E4M3, 96),
    "int8 rows, no such products": Product(5, 256, 40, 64, "int8", False, "int8", 64, replace(SMALL, int8_products=1)),
    "int8 rows, e4m3 codes": Product(5, 256, 40, 64, E4M3, False, "int8"),
    "many int8 rows": Product(70, 256, 40, 64, "uint8", True, "int8"),
}
THOROUGH = {
    f"{rows} rows, groups of {group}, {codes}{' with zeros' * zeros}": Product(
        rows, 1152, 1000, group, codes, zeros, sizes=TpuProducts()
    )
    for rows in (1, 16, 64, 65, 513, 2048)
    for group in (32, 64, 128)
    for codes, zeros in (("uint8", True), ("uint8", False), ("int8", False), (E4M3, False))
}
PRODUCTS = QUICK | MORE | THOROUGH


class GroupedProduct(NamedTuple):
    """Rows of groups of `group_sizes`, and some behind them, as of a Product whose matrix each group has its own of."""

    group_sizes: tuple[int, ...]
    each: Product


MANY = replace(SMALL, sum_rows=8)
_ROWS = Product(50, 128, 136, 32, "uint8", True)
_AS_IT_IS = Product(50, 128, 136, 128, BFLOAT16)
QUICK_GROUPED = {
    "groups that share tiles": GroupedProduct((5, 0, 17, 11, 0, 3), _ROWS),
    "no rows of any group": GroupedProduct((0,) * 6, _ROWS),
    "a scale a channel": GroupedProduct(
        (0, 0, 50, 0, 0, 0), _ROWS._replace(size=512, group=512, codes="int8", zeros=False, sizes=MANY)
    ),
    "whole tiles, weights": GroupedProduct(
        (16, 16, 0, 0, 0, 18),
        _ROWS._replace(out=520, codes=E4M3, zeros=False, sizes=replace(MANY, group_bytes=1 << 15)),
    ),
    "rounded rows": GroupedProduct(
        (1, 61, 0, 0, 0, 1),
        _ROWS._replace(rows=66, codes="int8", zeros=False, rounded="int8", row_group=0, sizes=replace(SMALL, rows=96)),
    ),
    # In blocks that begin inside of a register's 32 rows, and end in the next two or at the tile's end.
    "rows rounded by groups": GroupedProduct(
        (21, 0, 70, 8), Product(100, 256, 136, 128, E4M3, False, E4M3, 128, replace(SMALL, rows=96))
    ),
    # A block would end behind its tile, and a whole tile is one group's.
    "pieces of columns, a group of several blocks": GroupedProduct(
        (53, 237, 0, 5, 0, 0, 0, 0), Product(297, 128, 570, 128, "int8", sizes=replace(SMALL, rows=96))
    ),
    "one row of a group": GroupedProduct((0, 0, 1), Product(1, 64, 40, 32, "uint8", True)),
    "matrices as they are": GroupedProduct((5, 0, 57, 41, 0, 18), _AS_IT_IS._replace(rows=125)),
}
THOROUGH_GROUPED = {
    f"{rows} rows of {num_groups} groups, {codes}, groups of {group}": GroupedProduct(
        tuple(np.random.default_rng(rows).multinomial(rows - 1, [1 / num_groups] * num_groups).tolist()),
        Product(rows, 384, 600, group, codes, codes == "uint8", sizes=TpuProducts()),
    )
    for rows in (8, 100, 1500)
    for num_groups in (4, 16)
    for codes, group in (("uint8", 128), ("int8", 32), ("int8", 384), (E4M3, 128), (BFLOAT16, 384))
}
THOROUGH_GROUPED["matrices as they are, in a loop"] = GroupedProduct((3, 8, 1), Product(13, 8256, 40, 8256, BFLOAT16))
GROUPED = QUICK_GROUPED | THOROUGH_GROUPED
# Gates and ups: a matrix's outputs are half of each.
_BOTH = _ROWS._replace(out=512)
QUICK_GATED = {
    "groups that share tiles": QUICK_GROUPED["groups that share tiles"]._replace(each=_BOTH),
    "pieces of columns, a group of several blocks": GroupedProduct(
        (53, 237, 0, 5, 0, 0, 0, 0), Product(297, 128, 1024, 128, "int8", sizes=replace(SMALL, rows=96))
    ),
    "strips of columns": GroupedProduct(
        (0, 50, 0), _BOTH._replace(out=1280, codes=E4M3, zeros=False, sizes=replace(MANY, group_bytes=1 << 17))
    ),
    "rounded rows": GroupedProduct(
        (1, 40, 0, 1), _BOTH._replace(out=256, codes="int8", zeros=False, rounded="int8", row_group=0)
    ),
    "one row": GroupedProduct((0, 0, 1), Product(1, 64, 256, 64, "uint8", True)),
    "more groups than biases at once": GroupedProduct(
        (0,) * 15 + (3, 2) + (0,) * 16 + (1,) + (0,) * 30 + (2, 1), Product(10, 64, 256, 64, "int8")
    ),
    "columns that fill no registers": GroupedProduct((5, 0, 17, 11, 0, 3), _ROWS),
    "matrices as they are": GroupedProduct((5, 0, 17, 11, 0, 3), _AS_IT_IS._replace(out=512)),
}
THOROUGH_GATED = {name: case._replace(each=case.each._replace(out=768)) for name, case in THOROUGH_GROUPED.items()} | {
    "an odd number of strips": GroupedProduct(
        (7, 40, 3), _BOTH._replace(out=768, sizes=replace(SMALL, group_bytes=1 << 15, cores=2))
    ),
    "no rows of any group": GroupedProduct((0,) * 6, _BOTH),
    "matrices as they are, columns that fill no registers": GroupedProduct((5, 0, 17, 11, 0, 3), _AS_IT_IS),
    "rows rounded by groups": GroupedProduct(
        (1, 0, 30, 0, 19, 0), _BOTH._replace(codes=E4M3, zeros=False, rounded=E4M3, row_group=64)
    ),
}
GATED = QUICK_GATED | THOROUGH_GATED


def product(name: str, implementation: Implementation) -> None:
    case = PRODUCTS[name]
    rng = np.random.default_rng(case.rows * case.size)
    codes, scales, zeros = matrix_of(rng, case.size, case.out, case.size // case.group, case.codes, case.zeros)
    matrix = codes, scales.at[0, :2].set(0), zeros  # no unit for what follows
    rows, x = rows_of(rng, case)
    given: Any = [None if m is None else np.asarray(m) for m in matrix]
    exact = reference.quantized_matmul(x, *given)
    operands = *rows, stored(matrix[0], case.codes), *matrix[1:]
    got = run("quantized_matmul", name, case, operands, implementation)
    assert error(got, exact) < (allowed := _allowed(case, case.rows)), f"{error(got, exact):.1e}, not {allowed}"


def grouped_product(name: str, implementation: Implementation) -> None:
    """With the bias of each group."""
    group_sizes, case = GROUPED[name]
    operands, exact = _of_groups(group_sizes, case)
    bias = _bias_of_groups(group_sizes, case, exact)
    got = run(_op("grouped_matmul", case), name, case, (*operands, bias), implementation)
    _compare_groups(got, exact, group_sizes, case)


def gated_product(name: str, implementation: Implementation) -> None:
    """The sums as an activation gets them, bias included: this one is linear, and tells gates from ups."""
    group_sizes, case = GATED[name]
    operands, exact = _of_groups(group_sizes, case)
    bias = _bias_of_groups(group_sizes, case, exact)
    expected = _both(*np.split(exact, 2, axis=1))
    half = case._replace(out=case.out // 2)
    got = run(_op("gated_matmul", case), name, half, (*operands, bias), implementation, activation=_both)
    _compare_groups(got, expected, group_sizes, case)


def _op(op: str, case: Product) -> str:
    return op if case.codes == BFLOAT16 else f"quantized_{op}"


def _both(gate: Any, up: Any) -> Any:
    return gate - 3 * up


def _of_groups(group_sizes: tuple[int, ...], case: Product) -> tuple[tuple, np.ndarray]:
    """Operands of a grouped product, and what it is in float64."""
    rng, stack = np.random.default_rng(case.rows), (len(group_sizes),)
    if case.codes == BFLOAT16:
        numbers = rng.standard_normal((*stack, case.size, case.out)).astype(BFLOAT16)
        matrix: Any = (numbers, np.ones((*stack, 1, case.out), np.float32), None)
    else:
        matrix = matrix_of(rng, case.size, case.out, case.size // case.group, case.codes, case.zeros, stack)
    rows, x = rows_of(rng, case)
    exact, end = exact_groups(x, matrix, group_sizes)
    values, x_scales = rows
    if x_scales is None:
        values = values.at[end:].set(jnp.nan)  # of no group, and must not matter
    sizes = jnp.asarray(group_sizes, jnp.int32)
    if case.codes == BFLOAT16:
        return (values, jnp.asarray(matrix[0]), sizes), exact
    return (values, x_scales, stored(matrix[0], case.codes), *matrix[1:], sizes), exact


def _bias_of_groups(group_sizes: tuple[int, ...], case: Product, exact: np.ndarray) -> jax.Array | None:
    """One of random numbers, which `exact` has then, too; none where rows are rounded."""
    if case.rounded is not None:
        return None
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((len(group_sizes), case.out)), jnp.float32)
    exact[: sum(group_sizes)] += np.repeat(bias, group_sizes, axis=0)
    return bias


def _compare_groups(got: np.ndarray, exact: np.ndarray, group_sizes: tuple[int, ...], case: Product) -> None:
    end = sum(group_sizes)
    assert not got[end:].any(), "rows of no group are not 0"
    if end:
        tile = tile_rows_of(case.rows, len(group_sizes))
        at_once = 1 if case.group >= CHUNK or case.codes == BFLOAT16 else tile
        assert error(got, exact) < (allowed := _allowed(case, at_once)), f"{error(got, exact):.1e}, not {allowed}"


def exact_groups(x: np.ndarray, matrix: tuple, group_sizes: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """The products of groups of rows in float64, zeros behind them, and where those begin."""
    exact, end = np.zeros((len(x), matrix[1].shape[-1])), 0
    for index, count in enumerate(group_sizes):
        own = slice(end, end + count)
        given: Any = [None if m is None else np.asarray(m)[index] for m in matrix]
        exact[own] = reference.quantized_matmul(x[own], *given)
        end += count
    return exact, end


def rows_of(rng: np.random.Generator, case: Product) -> tuple[tuple[jax.Array, jax.Array | None], np.ndarray]:
    """Rows and their scales as operands, and what they stand for in float64."""
    x = jnp.asarray(rng.standard_normal((case.rows, case.size)) + 0.3, jnp.bfloat16)
    if case.rounded is None:
        return (x, None), np.asarray(x, np.float64)
    rounded = rounded_rows(
        x, dynamic_scales(largest_values(x, case.row_group or case.size), case.rounded), case.rounded
    )
    return rounded, np.asarray(rounded.widened(jnp.float32), np.float64)


def _allowed(case: Product, at_once: int) -> float:
    assert isinstance(case.sizes, TpuProducts)
    by_sums = at_once <= min(case.sizes.sum_rows, case.group // 2)
    if case.row_group and case.row_group < case.group:
        return ERROR
    if by_sums:
        return SUMMED
    return PAIRED if case.group >= PIECE // 2 and not case.row_group else ERROR


def run(
    op: str,
    name: str,
    case: Product,
    operands: tuple,
    implementation: Implementation,
    out_dtype: Any = jnp.float32,
    **more: Any,
) -> np.ndarray:
    options = {"out_dtype": out_dtype, "sizes": case.sizes, **implementation._options(), **more}
    if op.startswith("quantized"):
        options["dtype"], operands = jnp.bfloat16, (QuantizedOperands(*operands[:5]), *operands[5:])
    with watched(implementation, name):
        got = jax.block_until_ready(kernel(op, implementation.platform)(*operands, **options))
    assert (got.dtype, got.shape) == (out_dtype, (case.rows, case.out))
    return np.asarray(got)
