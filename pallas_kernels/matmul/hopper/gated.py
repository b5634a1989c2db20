"""Epilogue of gated products on a Hopper GPU: one warpgroup has the sums of gates, the other those of ups.

A tile has 64 outputs of each half of a group's matrix: one warpgroup's wgmma computes the gates, the other's the ups of
the same outputs. The ups' sums go through shared memory in float32, so that only the result is rounded, and [M, 2 F] is
never stored. Contains the list of operations that Mosaic GPU supports in activations; the activation is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxengine.pallas_kernels.matmul.gated import Gating
from jaxengine.pallas_kernels.matmul.hopper import ring
from jaxengine.pallas_kernels.mosaic_gpu import WARPGROUP_ROWS

PIECE = 16  # rows of which gates and ups are in registers at a time, in addition to the sums
# Elementwise operations that Mosaic GPU and its interpreter support by warpgroup in every jax release supported here.
# Activations with others go to XLA: the trace of an unsupported one would succeed and its compilation fail.
_KNOWN = {"add", "sub", "mul", "div", "max", "min", "neg", "exp", "logistic", "tanh", "integer_pow", "square"}
_AROUND = {"jit", "pjit", "convert_element_type"}


def why_not_fused(width: int, activation: Gating) -> str:
    """Return the reason why the kernel cannot activate the gates and ups that it multiplies, `width` columns of each,
    or "" if it can.

    It can if width is a multiple of 8 and the activation, which is traced for this, uses only operations of _KNOWN and
    holds no arrays.
    """
    if width % 8:
        return f"{width} columns are no multiple of 8"
    tile = jax.ShapeDtypeStruct((WARPGROUP_ROWS, 8), jnp.float32)
    traced = jax.make_jaxpr(activation)(tile, tile)
    if traced.consts:
        return "the activation holds arrays"
    unknown = sorted(set(_operations(traced.jaxpr)) - _KNOWN - _AROUND)
    return f"the activation has {', '.join(unknown)}" if unknown else ""


def _operations(jaxpr: Any) -> Iterator[str]:
    """Yield the names of the operations of a jaxpr, including those of functions that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        if eqn.primitive.name in _AROUND and "jaxpr" in eqn.params:
            yield from _operations(eqn.params["jaxpr"].jaxpr)


def scratch(shape: Any, bias: jax.Array | None) -> list[Any]:
    """Return the four scratch declarations of a gated kernel of this shape: shared memory for the bias and the ups,
    then a barrier for each. Those for the bias are None if bias is, and all are None if shape.gating is.
    """
    if shape.gating is None:
        return [None] * 4
    has_bias = bias is not None
    return [
        plgpu.SMEM((2, WARPGROUP_ROWS), bias.dtype) if has_bias else None,
        plgpu.SMEM((WARPGROUP_ROWS, shape.handed_rows), jnp.float32),
        plgpu.Barrier() if has_bias else None,
        plgpu.Barrier(),
    ]


def store(gating: Gating, refs: Any, warpgroup: Any, sums: Any, send: Callable[[Any, int], None]) -> None:
    """Store gating(gate, up) of sums f32 [64, rows], which are gates in warpgroup 0 and ups in warpgroup 1.

    Warpgroup 1 passes its sums on in shared memory. Warpgroup 0 waits for them, computes and sends the results, and
    returns once they are stored. refs: those of `matmul.hopper.quantized`, whose bias, if any, is waited for and added
    to the sums. send: as for `ring.store_transposed`.
    """
    if refs.bias_smem is not None:
        plgpu.barrier_wait(refs.bias_full)
        sums = sums + lax.broadcast_in_dim(refs.bias_smem[warpgroup].astype(jnp.float32), sums.shape, [0])
    rows = sums.shape[1]

    @pl.when(warpgroup == 1)
    def _():
        refs.ups_smem[:, pl.ds(0, rows)] = sums
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.ups_full)

    @pl.when(warpgroup == 0)
    def _():
        plgpu.barrier_wait(refs.ups_full)
        for first in range(0, rows, PIECE):
            count = min(PIECE, rows - first)
            part = refs.y_smem.at[warpgroup, pl.ds(first, count)]
            ring.write_transposed(gating(sums[:, first : first + count], refs.ups_smem[:, pl.ds(first, count)]), part)
            send(part, first)
        plgpu.wait_smem_to_gmem(0)
