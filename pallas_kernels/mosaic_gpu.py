"""Mosaic GPU helpers: kernel launch, shared-memory tiles, Hopper's limits, and the differences between jax releases:

- 0.10 lowers by lane by default; 0.11 and 0.12 infer layouts per warpgroup, which the kernels rely on;
- 0.10 and 0.11.0 keep the interpreter's parameters in a private module;
- 0.11 replaced `out_shape`/`scratch_shapes` by `out_type`/`scratch_types` (0.10.2 takes both), and `transpose_ref` is
  deprecated: kernels write `ref.transpose((1, 0))`, which works everywhere.

A kernel body that both the interpreter and the compiler accept uses plain jnp and lax on full shared-memory refs or
`pl.ds` slices of them, no literal int index in `.at[...]` under `pl.when`, no masked store, no scalar argument, no
dynamic grid. Counts and work items are scalars read from global memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = 1.4426950408889634
WARPGROUP_ROWS = 64  # rows of one wgmma
BOX_ROWS = 8  # a tiled TMA box starts at a row that must be provably a multiple of this
SHARED_MEMORY_BYTES = 227 * 1024  # per CTA on sm_90 and sm_100


def launch(
    body: Callable[..., None],
    *operands: jax.Array,
    name: str,
    outputs: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    num_ctas: int,
    num_warpgroups: int,
    interpret: Any = False,
    reduction_scratch_bytes: int = 2048,
) -> tuple[jax.Array, ...]:
    """Run body(*operand refs, *output refs, *scratch refs) in each warpgroup of `num_ctas` CTAs and return the outputs,
    a tuple.

    The body takes its CTA and warpgroup from the axes "cta" and "wg" (`lax.axis_index`). name: the kernel's name in
    compiled programs. outputs: shapes and dtypes of the results. scratch: specs of shared memory and barriers.
    num_warpgroups: warpgroups of each CTA. reduction_scratch_bytes: shared memory for the compiler's own reductions.
    interpret: False to compile, True or the interpreter's parameters to run on the CPU (see `interpreter`).
    """
    options = {} if interpret is False else {"interpret": interpreter() if interpret is True else interpret}
    kernel = plgpu.kernel(
        body,
        out_type=tuple(outputs),
        scratch_types=list(scratch),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=num_warpgroups,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=reduction_scratch_bytes,
        ),
        **options,
    )
    return tuple(kernel(*operands))


def interpreter(**options: Any) -> Any:
    """Return parameters that make `launch` interpret the kernel on the CPU. options: fields of jax's
    InterpretGPUParams, such as `detect_races=True`.

    Every warpgroup blocks a thread of XLA's pool while it waits. On a host with few cores, a process must be started
    with NPROC=8 in its environment, or it hangs.
    """
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams(**options)  # pyright: ignore[reportAttributeAccessIssue]
    from jax._src.pallas.mosaic_gpu.interpret import params

    return params.InterpretGPUParams(**options)


def swizzle_of(num_columns: int, dtype: jnp.dtype) -> int:
    """Return the largest swizzle, 128, 64 or 32 bytes, that divides the bytes of a row of `num_columns` elements.

    Raises ValueError if none does.
    """
    row_bytes = num_columns * jnp.dtype(dtype).itemsize
    for swizzle in (128, 64, 32):
        if row_bytes % swizzle == 0:
            return swizzle
    raise ValueError(f"Mosaic GPU: a row of {num_columns} x {jnp.dtype(dtype).name} must be a multiple of 32 bytes")


def tiles(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Return the spec of shared memory of `shape` and `dtype`, tiled as by `swizzled` with the largest swizzle that
    divides its rows. Raises ValueError if a row is not a multiple of 32 bytes.
    """
    return swizzled(shape, dtype, swizzle_of(shape[-1], dtype))


def swizzled(shape: tuple[int, ...], dtype: jnp.dtype, swizzle: int) -> Any:
    """Return the spec of shared memory of `shape` and `dtype`, whose last two dimensions are tiled and swizzled as
    wgmma and TMA boxes need them.

    A tile is BOX_ROWS rows of `swizzle` bytes.
    """
    columns = swizzle // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((BOX_ROWS, columns)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
