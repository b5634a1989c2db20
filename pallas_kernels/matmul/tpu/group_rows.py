"""Row counts of the TPU's grouped kernel: where groups should begin, and how many rows it multiplies."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.matmul.tpu.grouped import STEP, Shape, rows_for, shape_of, why_not_fused
from jaxengine.pallas_kernels.matmul.tpu.visits import visits_of
from jaxengine.pallas_kernels.matmul.tpu.widened import why_not_aligned
from jaxengine.pallas_kernels.tuning import TpuProducts

# Rows of an average group from which on padding each to a multiple of STEP pays: it adds a ninth of memory at most.
_ALIGNED_ROWS = 64


def group_step(num_rows: int, num_groups: int) -> int:
    """Return the number to a multiple of which group sizes should be padded, in rows: STEP if num_rows / num_groups,
    the size of an average group, is at least _ALIGNED_ROWS, else 1.
    """
    return STEP if num_rows >= _ALIGNED_ROWS * num_groups else 1


def multiplied_rows(group_sizes: np.ndarray, x: Any, x_scales: Any, codes: Any, scales: Any, *, gated: bool) -> int:
    """Return the number of rows, padding included, that the TPU kernel multiplies by a matrix for groups of these
    sizes, in bfloat16 and with the default tile sizes; 0 if XLA computes the product instead.

    x, x_scales, codes, scales: shapes and dtypes of the operation's operands; None for absent ones. gated: whether the
    outputs are gates and ups, to be activated.
    """
    (num_rows, size), (num_groups, _, out), count = x.shape, codes.shape, 0 if scales is None else scales.shape[1]
    if why_not_aligned(size, count or 1, jnp.bfloat16):
        return 0
    of_rows = partial(rows_for, codes=codes.dtype, count=count, num_groups=num_groups)
    rows = jax.eval_shape(partial(of_rows, dtype=jnp.bfloat16, sizes=TpuProducts()), x, x_scales)
    gated = gated and not why_not_fused(out // 2)
    dtypes, out = (rows.values.dtype, codes.dtype), out // 2 if gated else out
    shape = shape_of(num_rows, size, out, count, num_groups, *dtypes, TpuProducts(), gated=gated)
    return _rows_of_visits(group_sizes, num_rows, shape)


def _rows_of_visits(group_sizes: np.ndarray, num_rows: int, shape: Shape) -> int:
    """Return the number of rows that the kernel multiplies, from its own list of visits for consecutive groups of
    group_sizes among num_rows rows. A visit multiplies full blocks of `shape`, from the group's first row in the tile,
    rounded down to STEP, on. Runs visits_of on jax's default device.
    """
    listed = jax.jit(visits_of, static_argnums=(1, 2))(jnp.asarray(group_sizes, jnp.int32), num_rows, shape.rows)
    visits, total, most = jax.device_get(listed), 0, shape.blocks[-1]
    for visit in range(int(visits.products[0])):
        group, before = visits.group[visit], int(visits.tile[visit]) * shape.rows
        first, last = int(visits.starts[group]) - before, int(visits.ends[group]) - before
        whole, rest = divmod(min(last, shape.rows) - max(first, 0) // STEP * STEP, most)
        total += whole * most + min((block for block in shape.blocks if block >= rest), default=0) * (rest > 0)
    return total
