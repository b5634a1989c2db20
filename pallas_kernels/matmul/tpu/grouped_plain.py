"""Grouped product on TPUs with plain matrices: in bfloat16 the kernel of `grouped`.

Other cases use jax.lax.ragged_dot, which XLA:TPU compiles to a kernel whose work follows the rows, too.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxengine.pallas_kernels.matmul.gated import Gating, activated, biased
from jaxengine.pallas_kernels.matmul.tpu.grouped import (
    Matrix,
    gated_product_of_groups,
    log_not_fused,
    product_of_groups,
)
from jaxengine.pallas_kernels.matmul.tpu.widened import why_not_aligned
from jaxengine.pallas_kernels.matmul.xla import ragged
from jaxengine.pallas_kernels.tuning import TpuProducts


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    out_dtype: Any,
    sizes: TpuProducts | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Return rows x [M, in] times their group's matrix of w [G, in, out], plus the group's bias [G, out] or None: [M,
    out] in out_dtype, 0 for rows of no group. The public operation has checked the arguments. jax.lax.ragged_dot
    computes what the kernel does not support.

    sizes: tile sizes, None for those of the chip that the trace is for. interpret: argument of `pl.pallas_call`.
    """
    if why_not_aligned(x.shape[1], 1, x.dtype):
        return biased(ragged.grouped_matmul(x, w, group_sizes, out_dtype=out_dtype), group_sizes, bias)
    return product_of_groups(x, None, Matrix(w, bias=bias), group_sizes, None, x.dtype, out_dtype, sizes, interpret)


def gated_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Gating,
    out_dtype: Any,
    sizes: TpuProducts | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Return activation(gate, up) of rows x [M, in] times their group's matrix of w [G, in, 2 F], gates and then ups,
    plus the group's bias [G, 2 F] or None: [M, F] in out_dtype, 0 for rows of no group.

    The public operation has checked the arguments. If one kernel cannot compute all of it, the product is written to
    memory and activated from there, which is logged once. sizes, interpret: see `grouped_matmul`.
    """
    size = x.shape[1]
    if why := why_not_aligned(size, 1, x.dtype):
        log_not_fused(size, w.shape[2] // 2, why)
        y = grouped_matmul(x, w, group_sizes, out_dtype=out_dtype, sizes=sizes, interpret=interpret)
        return activated(y, group_sizes, bias, activation, out_dtype)
    matrix = Matrix(w, bias=bias)
    return gated_product_of_groups(x, None, matrix, group_sizes, activation, x.dtype, out_dtype, sizes, interpret)
