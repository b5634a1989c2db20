"""Candidate tiles of a quantised product on a Hopper GPU, estimated by a model of the card.

ptxas reports registers and spills, which determine how many CTAs share a multiprocessor. A tile of inputs takes as long
as the slowest of three: its copies, its wgmma and the widening of its codes. Partial sums are written and read once
more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax.numpy as jnp

from jaxengine.pallas_kernels.matmul.candidates import Candidate, Problem, operands, product_by
from jaxengine.pallas_kernels.matmul.hopper.quantized import quantized_matmul
from jaxengine.pallas_kernels.matmul.hopper.shape import MOST_SHARED_ROWS, OUTPUTS, RESERVED_BYTES, Shape
from jaxengine.pallas_kernels.mosaic_gpu import SHARED_MEMORY_BYTES
from jaxengine.pallas_kernels.tuning import HopperProducts

# The defaults are first, because of candidates with equal tiles the first is kept.
_ROWS, _SHARED, _LEAST_TILES = (128, 64, 32), (1, 2, 3), (4, 2)
# Multiplications per cycle and registers of a multiprocessor, and the cycles for which a CTA waits for its first tile
# and its last store.
_PRODUCTS, _REGISTERS, _LATENCY = 2048, 65536, 1800
_CACHE = 1.6  # bandwidth of the second-level cache relative to that of memory
# Cycles per widened code, by dtype: instructions that ptxas generates, at 128 lanes a cycle.
_WIDENING = {"uint8": 2.9 / 128, "int8": 2.5 / 128, "float8_e4m3fn": 4 / 128}


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Yield candidates for the problem: every combination of rows of a tile, CTAs per multiprocessor and fewest tiles
    of a CTA, the defaults first. Of combinations with equal tiles and splits only the first is yielded.
    """
    seen, defaults, num_scales = set(), HopperProducts(), problem.size // problem.group
    names = "rows", "shared", "least_tiles"
    for values in product(_ROWS, _SHARED, _LEAST_TILES):
        sizes = replace(defaults, **dict(zip(names, values, strict=True)))
        of_matrix = problem.size, problem.out, num_scales, jnp.dtype(problem.codes)
        shape = Shape(problem.rows, *of_matrix, False, problem.zeros, False, jnp.bfloat16, sizes)
        if (shape.tile_rows, shape.splits) in seen:
            continue
        seen.add((shape.tile_rows, shape.splits))
        function = partial(product_by, quantized_matmul, sizes=sizes)
        changed = {name: getattr(sizes, name) for name in names if getattr(sizes, name) != getattr(defaults, name)}
        yield Candidate(changed, function, operands(problem), partial(_microseconds, shape), function)


def _microseconds(shape: Shape, report: dict[str, Any]) -> float | None:
    """Return the estimated time of a product of `shape`, in microseconds, from the compiler's report
    (`Candidate.cost`); None if the report has register spills or no number of registers.
    """
    if report.get("spill_bytes") or not report.get("registers"):
        return None
    vectors = 4 * shape.sums * OUTPUTS * (1 + shape.has_zeros)
    rows = shape.tile_rows * shape.inputs * shape.row_dtype.itemsize
    tile = OUTPUTS * shape.columns + rows + vectors
    stored = OUTPUTS * shape.stored_rows * shape.stored_dtype.itemsize
    fit = SHARED_MEMORY_BYTES // (shape.stages * tile + stored + RESERVED_BYTES)
    by_registers = 1 if shape.tile_rows > MOST_SHARED_ROWS else _REGISTERS // (384 * (-(-report["registers"] // 8) * 8))
    shared = max(min(fit, by_registers), 1)
    ctas = shape.row_tiles * shape.out_tiles * shape.splits
    waves = -(-ctas // (shape.sizes.num_ctas * shared))
    # Cycles of a multiprocessor for the CTAs that share it; rows mostly come from its cache.
    here = min(shared, -(-ctas // shape.sizes.num_ctas))
    products = max(shape.tile_rows, 32) * OUTPUTS * shape.inputs / _PRODUCTS
    widening = OUTPUTS * shape.inputs * _WIDENING[jnp.dtype(shape.codes).name]
    num_bytes = report["bandwidth"] / report["clock"] / shape.sizes.num_ctas  # per multiprocessor and cycle
    each = here * max((OUTPUTS * shape.columns + vectors) / num_bytes, products, widening)
    parts = 0.0
    if shape.splits > 1:
        result = shape.row_tiles * shape.tile_rows * shape.out_tiles * OUTPUTS
        parts = 2 * 4 * shape.splits * result / (_CACHE * num_bytes * shape.sizes.num_ctas) + _LATENCY
    return 1e6 * (waves * (shape.per_split * each + _LATENCY) + parts) / report["clock"]
