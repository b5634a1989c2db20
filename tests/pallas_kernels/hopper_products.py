"""Products with quantised matrices, and with those of groups, as Hopper kernels against float64 on the codes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.matmul.hopper.gated import why_not_fused
from jaxengine.pallas_kernels.matmul.hopper.shape import why_xla
from jaxengine.pallas_kernels.tuning import HopperProducts
from tests.pallas_kernels import reference
from tests.pallas_kernels.implementations import Implementation
from tests.pallas_kernels.matmul.test_quantized import error, matrix_of, stored
from tests.pallas_kernels.products import E4M3, GroupedProduct, Product, exact_groups, rows_of, run

# Nothing is rounded but sums, in float32.
ERROR = 2e-6
ROUNDED = 2e-3  # of a result in bfloat16
# Rings that go round and tiles of few rows in small problems, inputs of a tile of the result on one CTA, and on many.
_SMALL, _SPLIT = HopperProducts(num_ctas=1, rows=16, stages=2), HopperProducts(num_ctas=8, stages=2, least_tiles=1)
_RING = HopperProducts(num_ctas=1, rows=16, stages=4)
_WIDE = HopperProducts(num_ctas=1, rows=128, stages=2)

QUICK = {
    "one row, inputs split": Product(1, 2112, 136, 64, "uint8", True, sizes=_SPLIT),
    "pairs in groups of 32, tiles of 64": Product(20, 320, 128, 32, "uint8", sizes=_SMALL),
    "int8 rows by coarser groups": Product(5, 1088, 136, 32, "int8", True, "int8", 64, sizes=_SMALL),
    "e4m3 widened": Product(9, 512, 128, 128, E4M3, sizes=_SMALL),
    "e4m3 as it is": Product(20, 640, 520, 128, E4M3, False, E4M3, 128, sizes=_SMALL),
    "int8 in groups of 32": Product(61, 1152, 128, 32, "int8", sizes=_RING),
}
MORE = {
    "a group of several tiles": Product(5, 1024, 136, 256, "uint8", True, "int8", sizes=_SMALL),
    "a whole tile of rows": Product(121, 512, 128, 128, "uint8", True, sizes=_WIDE),
    "a scale a channel": Product(8, 256, 136, 256, "uint8", sizes=_SMALL),
    "e4m3 as it is, groups of 64": Product(8, 256, 136, 64, E4M3, False, E4M3, 128, sizes=_SMALL),
    "e4m3 as it is, groups of 32": Product(8, 256, 136, 32, E4M3, False, E4M3, sizes=_SMALL),
    "e4m3 as it is, wide rows": Product(300, 384, 264, 128, E4M3, False, E4M3, 128, sizes=_WIDE),
    "int8 in groups of 16": Product(8, 128, 136, 16, "int8", sizes=_SMALL),
    "int8 rows, e4m3 codes": Product(5, 256, 128, 128, E4M3, False, "int8", sizes=_SMALL),
    "e4m3 rows, pairs": Product(5, 256, 128, 128, "uint8", True, E4M3, sizes=_SMALL),
    "one tile of inputs": Product(8, 64, 128, 64, "uint8", True, sizes=_SPLIT),
    "splits of unequal length": Product(8, 896, 128, 128, "uint8", sizes=HopperProducts(num_ctas=3, least_tiles=1)),
    "pairs in groups of 32, tiles of fewer rows": Product(200, 256, 136, 32, "uint8", True, sizes=_WIDE),
    "table's sizes": Product(33, 1024, 520, 128, "uint8", True, sizes=HopperProducts()),
}
THOROUGH = {
    f"{rows} rows, groups of {group}, {codes}{' with zeros' * zeros}": Product(
        rows, size, 392, group, codes, zeros, sizes=HopperProducts(num_ctas=8)
    )
    for rows in (1, 16, 64, 65, 513, 2048)
    for group, size in ((32, 320), (64, 576), (128, 640))
    for codes, zeros in (("uint8", True), ("uint8", False), ("int8", False), (E4M3, False))
}
# Of results that are stored as they leave the kernel, and of parts that are added up before.
IN_BFLOAT16 = ("pairs in groups of 32, tiles of 64", "splits of unequal length")
PRODUCTS = QUICK | MORE | THOROUGH
BFLOAT16 = "bfloat16"  # matrices as they are
_PLAIN = Product(50, 320, 136, 320, BFLOAT16, sizes=_RING)
_CODES = Product(50, 192, 136, 32, "uint8", True, sizes=_SMALL)
# More groups than a table of 32 has; no more rows than needed, for there is a CTA for each tile that there might be.
_MANY_PLAIN = GroupedProduct((*(0,) * 33, 1, 0), Product(1, 64, 128, 64, BFLOAT16, sizes=_SMALL))
_MANY_CODES = GroupedProduct((*(0,) * 33, 1, 0), Product(1, 64, 128, 32, "uint8", True, sizes=_SMALL))
QUICK_GROUPS = {
    "groups of several tiles": GroupedProduct((5, 0, 17, 11, 0, 3), _PLAIN),
    "no rows of any group": GroupedProduct((0,) * 6, _PLAIN._replace(size=64, group=64)),
    "one row of many groups": _MANY_PLAIN,
    "one row of many groups, codes": _MANY_CODES,
    # Behind the last row there is no room: what a tile has too much is seen there, and elsewhere a neighbour's.
    "tiles of every size": GroupedProduct(tuple(range(1, 66, 8)), Product(297, 64, 128, 64, BFLOAT16, sizes=_WIDE)),
    "pairs of groups": GroupedProduct((1, 0, 30, 0, 19, 0), _CODES),
    "e4m3 of groups, rounded rows": GroupedProduct(
        (0, 33, 0, 16), Product(50, 256, 128, 128, E4M3, False, E4M3, 128, sizes=_SMALL)
    ),
    "all rows of one group": GroupedProduct((0, 0, 61), _PLAIN._replace(rows=61, out=520)),
}
MORE_GROUPS = {
    "tiles by sixteen rows": GroupedProduct((664,), Product(665, 128, 128, 128, E4M3, False, E4M3, 128, sizes=_WIDE)),
    "int8 of groups, a scale a channel": GroupedProduct(
        (2, 0, 40), Product(42, 256, 128, 256, "int8", False, "int8", sizes=_SMALL)
    ),
}
THOROUGH_GROUPS = {
    f"{rows} rows of {num_groups} groups, {codes}, groups of {group}": GroupedProduct(
        tuple(np.random.default_rng(rows).multinomial(rows - 1, [1 / num_groups] * num_groups).tolist()),
        Product(rows, 384, 392, group, codes, codes == "uint8", sizes=HopperProducts()),
    )
    for rows, num_groups in ((8, 4), (100, 16), (1500, 2), (1500, 16))
    for codes, group in ((BFLOAT16, 384), ("uint8", 128), ("int8", 32), (E4M3, 384))
}
GROUPS = QUICK_GROUPS | MORE_GROUPS | THOROUGH_GROUPS
ROUNDED_GROUPS = ("groups of several tiles",)
# Gates and ups: a matrix's outputs are half of each, of which a tile has 64. One begins inside of the one before.
QUICK_GATED = {
    "e4m3 of groups, rounded rows": GroupedProduct(
        (57, 16), Product(74, 256, 128, 128, E4M3, False, E4M3, 128, sizes=_WIDE)
    ),
    "one row of many groups": _MANY_PLAIN,
    "one row of many groups, codes": _MANY_CODES,
    "pairs of groups": GroupedProduct((1, 0, 30, 0, 19, 0), _CODES._replace(out=144)),
    "groups of several tiles": GroupedProduct(
        (5, 0, 17, 11, 0, 3), _PLAIN._replace(size=192, group=192, out=528, sizes=_SMALL)
    ),
}
MORE_GATED = {
    "no rows of any group": GroupedProduct((0,) * 6, _PLAIN._replace(size=64, group=64, out=144)),
    "all rows of one group": GroupedProduct((0, 0, 50), _PLAIN._replace(out=128)),
    "int8 of groups, a scale a channel": GroupedProduct(
        (2, 0, 40), Product(42, 256, 256, 256, "int8", False, "int8", sizes=_SMALL)
    ),
    "tiles of every size": GroupedProduct(tuple(range(1, 66, 8)), Product(297, 64, 128, 64, BFLOAT16, sizes=_WIDE)),
    "tiles by sixteen rows": GroupedProduct((664,), Product(665, 128, 192, 64, "int8", True, sizes=_WIDE)),
}
GATED = (
    QUICK_GATED
    | MORE_GATED
    | {name: case._replace(each=case.each._replace(out=688)) for name, case in THOROUGH_GROUPS.items()}
)


def hopper_product(name: str, implementation: Implementation) -> None:
    case = PRODUCTS[name]
    num_scales = case.size // case.group
    assert not why_xla(case.size, case.out, num_scales, case.codes, np.dtype("bfloat16")), "the kernel does not take it"
    rng = np.random.default_rng(case.rows * case.size)
    matrix = matrix_of(rng, case.size, case.out, num_scales, case.codes, case.zeros)
    rows, x = rows_of(rng, case)
    given: Any = [None if m is None else np.asarray(m) for m in matrix]
    exact = reference.quantized_matmul(x, *given)
    operands = *rows, stored(matrix[0], case.codes), *matrix[1:]
    for out_dtype, allowed in ((jnp.float32, ERROR), (jnp.bfloat16, ROUNDED)):
        if out_dtype == jnp.float32 or name in IN_BFLOAT16:
            got = run("quantized_matmul", name, case, operands, implementation, out_dtype)
            assert error(got, exact) < allowed, f"{error(got, exact):.1e}, not {allowed}"


def hopper_grouped(name: str, implementation: Implementation) -> None:
    """Rows of groups; those of none hold NaN, and must give zeros and disturb no other."""
    op, operands, exact, end = _of_groups(GROUPS[name])
    for out_dtype, allowed in ((jnp.float32, ERROR), (jnp.bfloat16, ROUNDED)):
        if out_dtype == jnp.float32 or name in ROUNDED_GROUPS:
            got = run(op, name, GROUPS[name].each, operands, implementation, out_dtype)
            _compare(got, exact, end, allowed)


def hopper_gated(name: str, implementation: Implementation) -> None:
    """The same of gates and ups, with a bias unless rows are rounded; what is made of them rounds but once."""
    group_sizes, case = GATED[name]
    op, operands, exact, end = _of_groups(GATED[name])
    assert not why_not_fused(case.out // 2, silu_times), "the kernel does not take it"
    bias = None
    if case.rounded is None:
        numbers = np.random.default_rng(1).standard_normal((len(group_sizes), case.out))
        bias = jnp.asarray(numbers, jnp.bfloat16)
        exact[:end] += np.repeat(np.asarray(bias, np.float64), group_sizes, axis=0)
    gate, up = np.split(exact, 2, axis=1)
    half = case._replace(out=case.out // 2)
    for out_dtype, allowed in ((jnp.float32, ERROR), (jnp.bfloat16, ROUNDED)):
        if out_dtype == jnp.float32 or name in ROUNDED_GROUPS:
            of_both = op.replace("grouped", "gated"), name, half, (*operands, bias), implementation, out_dtype
            got = run(*of_both, activation=silu_times)
            _compare(got, gate * (1 + np.tanh(gate / 2)) / 2 * up, end, allowed)


def silu_times(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _of_groups(problem: GroupedProduct) -> tuple[str, tuple, np.ndarray, int]:
    """The product's operation and operands, what it is in float64, and the rows that groups have."""
    group_sizes, case = problem
    plain, num_scales = case.codes == BFLOAT16, case.size // case.group
    given = case.size, case.out, num_scales, case.codes, np.dtype("bfloat16")
    assert not why_xla(*given, grouped=True), "the kernel does not take it"
    rng = np.random.default_rng(case.rows * case.size)
    stack = (len(group_sizes),)
    if plain:
        values = rng.standard_normal((*stack, case.size, case.out)) * case.size**-0.5
        matrix: Any = (jnp.asarray(values, jnp.bfloat16), np.ones((*stack, 1, case.out), np.float32), None)
    else:
        matrix = matrix_of(rng, case.size, case.out, num_scales, case.codes, case.zeros, stack)
    (values, x_scales), x = rows_of(rng, case)
    exact, end = exact_groups(x, matrix, group_sizes)
    values = values.at[end:].set(jnp.nan) if x_scales is None else values
    sizes = jnp.asarray(group_sizes, jnp.int32)
    if plain:
        return "grouped_matmul", (values, matrix[0], sizes), exact, end
    operands = values, x_scales, stored(matrix[0], case.codes), *matrix[1:], sizes
    return "quantized_grouped_matmul", operands, exact, end


def _compare(got: np.ndarray, exact: np.ndarray, end: int, allowed: float) -> None:
    assert not got[end:].any(), "rows of no group are not 0"
    if end:
        assert error(got, exact) < allowed, f"{error(got, exact):.1e}, not {allowed}"
