"""Products with quantised matrices as Triton kernels against float64 on the codes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.matmul.triton.quantized import why_xla
from jaxengine.pallas_kernels.tuning import TritonProducts
from tests.pallas_kernels import reference
from tests.pallas_kernels.implementations import Implementation
from tests.pallas_kernels.matmul.test_quantized import error, matrix_of, stored
from tests.pallas_kernels.products import E4M3, Product, rows_of, run

# Nothing is rounded but sums, in float32.
ERROR = 2e-6
ROUNDED = 2e-3  # of a result in bfloat16
# Several tiles of few rows in small problems, inputs of a tile of the result in one program, and in several.
_SMALL = TritonProducts(num_ctas=1, rows=16, inputs=32)
_SPLIT = TritonProducts(num_ctas=8, rows=16, inputs=32, least_steps=1)

QUICK = {
    "pairs, zeros, inputs split": Product(3, 448, 40, 64, "uint8", True, sizes=_SPLIT),
    "a group of several products": Product(19, 384, 72, 96, "uint8", sizes=_SMALL),
    "int8, a scale a channel": Product(1, 256, 33, 256, "int8", True, sizes=_SMALL),
    "e4m3 in groups of 48": Product(17, 192, 64, 48, E4M3, sizes=_SMALL),
}
MORE = {
    "wide tiles": Product(65, 512, 264, 128, "uint8", True, sizes=TritonProducts(num_ctas=1)),
    "tiles of as many outputs as rows": Product(64, 512, 264, 128, "uint8", sizes=TritonProducts()),
    "splits of unequal length": Product(8, 896, 128, 128, "uint8", sizes=TritonProducts(num_ctas=12, least_steps=1)),
    "one product": Product(8, 32, 40, 32, "uint8", True, sizes=_SPLIT),
    "int8 in groups of 16": Product(8, 128, 136, 16, "int8", sizes=_SMALL),
    "table's sizes": Product(33, 1024, 520, 128, "uint8", True, sizes=TritonProducts()),
}
THOROUGH = {
    f"{rows} rows, groups of {group}, {codes}{' with zeros' * zeros}": Product(
        rows, size, 392, group, codes, zeros, sizes=TritonProducts(num_ctas=8)
    )
    for rows in (1, 16, 64, 65, 513)
    for group, size in ((32, 320), (64, 576), (128, 640), (1152, 1152))
    for codes, zeros in (("uint8", True), ("uint8", False), ("int8", False), (E4M3, False))
}
PRODUCTS = QUICK | MORE | THOROUGH
# Of results that are stored as they leave the kernel, and of parts that are added up before.
IN_BFLOAT16 = ("int8, a scale a channel", "splits of unequal length")


def triton_product(name: str, implementation: Implementation) -> None:
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
