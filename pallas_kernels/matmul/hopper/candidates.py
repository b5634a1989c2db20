"""Choices of tiles of a product with a quantised matrix on a Hopper GPU, by a model of the card.

ptxas tells registers and spills, from which follows how many CTAs share a multiprocessor. A tile of inputs takes the
longest of its copies, its wgmma and the widening of its codes; parts of sums are written and read once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.candidates import Candidate, Problem, operands
from pallas_kernels.matmul.hopper.quantized import quantized_matmul
from pallas_kernels.matmul.hopper.shape import MOST_SHARED_ROWS, OUTPUTS, RESERVED_BYTES, Shape
from pallas_kernels.mosaic_gpu import SHARED_MEMORY_BYTES
from pallas_kernels.tuning import HopperProducts

# The usual ones first: of those that come to the same the first is kept.
_ROWS, _SHARED, _LEAST_TILES = (128, 64, 32), (1, 2, 3), (4, 2)
# Of a multiprocessor: multiplications a cycle, registers, and cycles that a CTA waits for its first tile and its last
# store.
_PRODUCTS, _REGISTERS, _LATENCY = 2048, 65536, 1800
_CACHE = 1.6  # bandwidth of the second-level cache, that of the memory being 1
# Instructions of a thread for a code that is widened, by bits, as ptxas makes them, of 128 lanes a cycle.
_WIDENING = {"uint8": 2.9 / 128, "int8": 2.5 / 128, "float8_e4m3fn": 4 / 128}


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Rows of tiles and lengths of the parts of sums, those that come to the same left out."""
    found, usual, num_scales = set(), HopperProducts(), problem.size // problem.group
    names = "rows", "shared", "least_tiles"
    for values in product(_ROWS, _SHARED, _LEAST_TILES):
        sizes = replace(usual, **dict(zip(names, values, strict=True)))
        of_matrix = problem.size, problem.out, num_scales, jnp.dtype(problem.codes)
        shape = Shape(problem.rows, *of_matrix, False, problem.zeros, False, jnp.bfloat16, sizes)
        if (shape.tile_rows, shape.splits) in found:
            continue
        found.add((shape.tile_rows, shape.splits))
        function = partial(_product, sizes=sizes)
        kept = {name: getattr(sizes, name) for name in names if getattr(sizes, name) != getattr(usual, name)}
        yield Candidate(kept, function, operands(problem), partial(_microseconds, shape), function)


def _microseconds(shape: Shape, told: dict[str, Any]) -> float | None:
    if told.get("spill_bytes") or not told.get("registers"):
        return None
    vectors = 4 * shape.sums * OUTPUTS * (1 + shape.has_zeros)
    rows = shape.tile_rows * shape.inputs * shape.row_dtype.itemsize
    tile = OUTPUTS * shape.columns + rows + vectors
    stored = OUTPUTS * shape.stored_rows * shape.stored_dtype.itemsize
    fit = SHARED_MEMORY_BYTES // (shape.stages * tile + stored + RESERVED_BYTES)
    by_registers = 1 if shape.tile_rows > MOST_SHARED_ROWS else _REGISTERS // (384 * (-(-told["registers"] // 8) * 8))
    shared = max(min(fit, by_registers), 1)
    ctas = shape.row_tiles * shape.out_tiles * shape.splits
    waves = -(-ctas // (shape.sizes.num_ctas * shared))
    # What a multiprocessor does for the CTAs that share it; rows come from its cache, mostly.
    here = min(shared, -(-ctas // shape.sizes.num_ctas))
    products = max(shape.tile_rows, 32) * OUTPUTS * shape.inputs / _PRODUCTS
    widening = OUTPUTS * shape.inputs * _WIDENING[jnp.dtype(shape.codes).name]
    num_bytes = told["bandwidth"] / told["clock"] / shape.sizes.num_ctas  # of a multiprocessor, in a cycle
    each = here * max((OUTPUTS * shape.columns + vectors) / num_bytes, products, widening)
    parts = 0.0
    if shape.splits > 1:
        result = shape.row_tiles * shape.tile_rows * shape.out_tiles * OUTPUTS
        parts = 2 * 4 * shape.splits * result / (_CACHE * num_bytes * shape.sizes.num_ctas) + _LATENCY
    return 1e6 * (waves * (shape.per_split * each + _LATENCY) + parts) / told["clock"]


def _product(
    x: jax.Array, codes: jax.Array, scales: jax.Array, zeros: Any = None, *, sizes: HopperProducts
) -> jax.Array:
    options = {"dtype": jnp.bfloat16, "out_dtype": jnp.bfloat16, "sizes": sizes}
    return quantized_matmul(x, None, codes, scales, zeros, **options)
