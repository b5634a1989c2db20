"""Candidate tiles and forms of a quantised product on a TPU, estimated from the instruction bundles of one tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxengine.pallas_kernels.matmul.candidates import Candidate, Problem, operands, product_by
from jaxengine.pallas_kernels.matmul.nibbles import per_byte
from jaxengine.pallas_kernels.matmul.tpu.quantized import quantized_matmul, tiles
from jaxengine.pallas_kernels.matmul.tpu.widened import SPAN, chunk_of
from jaxengine.pallas_kernels.tuning import TpuProducts

_COLUMNS = (512, 256, 1024)  # the default first: of candidates with equal tiles the first is kept


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Yield a candidate for the problem for each width of tiles in _COLUMNS: first all with scaled sums, if the
    problem's rows are at most half of a group's inputs, then all with scaled codes. Of candidates with equal tiles and
    the same form only the first is yielded.
    """
    default, found = TpuProducts(), set()
    dtypes = jnp.bfloat16, jnp.dtype(problem.codes)
    for by_sums in (True, False) if problem.rows <= problem.group // 2 else (False,):
        for columns in _COLUMNS:
            sum_rows = max(default.sum_rows, problem.rows) if by_sums else min(default.sum_rows, problem.rows - 1) or 1
            chosen = {"columns": columns, "sum_rows": sum_rows}
            sizes = replace(default, **chosen)
            tile = tiles(problem.rows, problem.size, problem.out, problem.size // problem.group, *dtypes, sizes)
            if (by_sums, tile) in found:
                continue
            found.add((by_sums, tile))
            yield _candidate(problem, chosen, sizes, by_sums, *tile)


def _candidate(
    problem: Problem, chosen: dict[str, int], sizes: TpuProducts, by_sums: bool, rows: int, columns: int
) -> Candidate:
    """Return the candidate with fields `chosen` of `sizes`, whose tiles have these rows and columns. What is compiled
    for its estimate is one tile over the inputs of one pass of the kernel's loop; its cost is None without "bundles".

    by_sums: whether sums are scaled instead of codes, see `widened`.
    """
    # One tile of as many inputs as the kernel handles without a loop: its bundles are those of one pass.
    span = (SPAN if by_sums else chunk_of(problem.group)) // problem.group * problem.group
    inputs = min(problem.size, span)
    part = problem._replace(rows=rows, size=inputs, out=columns)
    alone = replace(sizes, columns=-(-columns // per_byte(jnp.dtype(problem.codes))), tile_bytes=1 << 30)
    tiles_of_out = -(-problem.rows // rows) * -(-problem.out // columns)

    def cost(report: dict[str, Any]) -> float | None:
        if not report.get("bundles"):
            return None
        computed = report["bundles"] * problem.size / inputs / report["clock"]
        copied = columns * problem.size / report["bandwidth"]
        copied *= 1 / per_byte(jnp.dtype(problem.codes)) + 4 * (1 + problem.zeros) / problem.group
        # The first tile's copy is not hidden, nor is the last one's product.
        return 1e6 * (copied + (tiles_of_out - 1) * max(computed, copied) + computed)

    return Candidate(
        {name: value for name, value in chosen.items() if value != getattr(TpuProducts(), name)},
        partial(product_by, quantized_matmul, sizes=alone),
        operands(part),
        cost,
        partial(product_by, quantized_matmul, sizes=sizes),
    )
