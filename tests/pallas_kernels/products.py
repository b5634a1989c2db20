"""Products with quantised matrices whose scales vary along the inputs, as TPU kernels, against float64 on the codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference
from pallas_kernels.matmul.rounding import dynamic_scales, largest_values, rounded_rows
from pallas_kernels.registry import kernel
from pallas_kernels.tuning import TpuProducts
from tests.pallas_kernels.conformance import watched
from tests.pallas_kernels.implementations import Implementation
from tests.pallas_kernels.matmul.test_quantized import ERROR, error, matrix_of, stored

# Several tiles of rows and of columns in small problems.
SMALL = TpuProducts(rows=32, columns=128)
ROUNDED_TWICE = 3e-3  # rows with scales of groups, widened to bfloat16 as the matrix is


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
    sizes: TpuProducts = SMALL


E4M3 = "float8_e4m3fn"
QUICK = {
    "one row": Product(1, 256, 136, 64, "uint8", True),
    "sums of 32": Product(16, 320, 300, 32, "int8"),
    "sums of 16, ends cut": Product(40, 448, 130, 16, "uint8", True),
    "sums in a loop": Product(3, 4224, 40, 128, "uint8", True),
    "sums of a wide group": Product(5, 2048, 40, 1024, E4M3),
    "weights of 128": Product(70, 256, 130, 128, "uint8", True),
    "weights of 32": Product(70, 320, 130, 32, E4M3),
    "weights in a loop": Product(70, 1152, 40, 128, "int8"),
    "weights of a wide group": Product(70, 2048, 40, 1024, "uint8"),
    "e4m3 rows by groups": Product(8, 384, 130, 128, E4M3, False, E4M3, 128),
    "e4m3 rows by coarser groups": Product(8, 512, 40, 64, E4M3, False, E4M3, 128),
    "e4m3 rows in a loop": Product(8, 4352, 40, 128, E4M3, False, E4M3, 128),
    "many e4m3 rows by groups": Product(70, 384, 130, 128, E4M3, False, E4M3, 128),
    "e4m3 rows by finer groups": Product(8, 384, 40, 192, E4M3, False, E4M3, 96),
    "int8 rows": Product(5, 256, 130, 128, "int8", False, "int8"),
    "int8 rows by groups": Product(5, 256, 40, 64, "uint8", True, "int8", 128),
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
PRODUCTS = QUICK | THOROUGH


def product(name: str, implementation: Implementation) -> None:
    case = PRODUCTS[name]
    rng = np.random.default_rng(case.rows * case.size)
    x: Any = jnp.asarray(rng.standard_normal((case.rows, case.size)) + 0.3, jnp.bfloat16)
    matrix = matrix_of(rng, case.size, case.out, case.size // case.group, case.codes, case.zeros)
    rows, allowed = (x, None), ERROR
    if case.rounded is not None:
        group = case.row_group or case.size
        rows = rounded_rows(x, dynamic_scales(largest_values(x, group), case.rounded), case.rounded)
        x = rows.widened(jnp.float32)
        widened = case.row_group and (case.rows > case.sizes.sum_rows or case.row_group < case.group)
        allowed = ROUNDED_TWICE if widened else ERROR
    given = (None if m is None else np.asarray(m) for m in matrix)
    exact = reference.quantized_matmul(np.asarray(x, np.float64), *given)
    multiply = kernel("quantized_matmul", implementation.platform)
    with watched(implementation, name):
        options = {"dtype": jnp.bfloat16, "out_dtype": jnp.float32, "sizes": case.sizes, **implementation._options()}
        got = jax.block_until_ready(multiply(*rows, stored(matrix[0], case.codes), *matrix[1:], **options))
    assert (got.dtype, got.shape) == (jnp.float32, exact.shape)
    assert error(got, exact) < allowed, f"{name}: relative error {error(got, exact):.1e}"
