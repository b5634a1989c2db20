"""Gates and ups on a Hopper GPU: the end of a tile of which one warpgroup has summed up gates and the other ups.

A tile has 64 outputs of each half of a group's matrix, a warpgroup's wgmma the gates, the other's the ups of the same
outputs. The ups' sums go through shared memory in float32, so that nothing is rounded but the result, and [M, 2 F] is
in no memory. Knows which activations Mosaic GPU makes; what they are is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.gated import Gating
from pallas_kernels.matmul.hopper import ring
from pallas_kernels.mosaic_gpu import WARPGROUP_ROWS

PIECE = 16  # rows of which gates and ups are in registers at a time, beside the sums
# Operations on numbers that Mosaic GPU has by warpgroup and its interpreter too, in every jax release here. Others are
# left to XLA rather than tried out: a trace does not fail where they are missing, but the compilation.
_KNOWN = {"add", "sub", "mul", "div", "max", "min", "neg", "exp", "logistic", "tanh", "integer_pow", "square"}
_AROUND = {"jit", "pjit", "convert_element_type"}


def why_apart(width: int, activation: Gating) -> str:
    """Why gates and ups, `width` of each, go through memory though the kernel multiplies, "" if it activates them."""
    if width % 8:
        return f"{width} columns are no multiple of 8"
    tile = jax.ShapeDtypeStruct((WARPGROUP_ROWS, 8), jnp.float32)
    traced = jax.make_jaxpr(activation)(tile, tile)
    if traced.consts:
        return "the activation holds arrays"
    unknown = sorted(set(_operations(traced.jaxpr)) - _KNOWN - _AROUND)
    return f"the activation has {', '.join(unknown)}" if unknown else ""


def _operations(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        if eqn.primitive.name in _AROUND and "jaxpr" in eqn.params:
            yield from _operations(eqn.params["jaxpr"].jaxpr)


def scratch(shape: Any, bias: jax.Array | None) -> list[Any]:
    """Of a kernel: bias and ups in shared memory, and what tells that they are there; None for what it has not."""
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
    """Make the result of sums f32 [64, rows], gates in warpgroup 0 and ups in the other, and send it from the first.

    refs: of `matmul.hopper.quantized`. send: as `ring.store_turned`.
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
            ring.turn(gating(sums[:, first : first + count], refs.ups_smem[:, pl.ds(first, count)]), part)
            send(part, first)
        plgpu.wait_smem_to_gmem(0)
