"""Mosaic TPU helper: how a kernel is compiled.

Contains the compiler's parameters, so that what is checked while a kernel runs is decided in one place.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import tpu as pltpu


def compiler_params(interpret: Any, *semantics: Any, vmem_limit_bytes: int | None = None) -> pltpu.CompilerParams:
    """Return compiler parameters for `pl.pallas_call(..., interpret=interpret)`. Only if `interpret` is true, a read or
    write out of bounds raises an error.

    semantics: "parallel" or "arbitrary" for each dimension of the grid; without any, all are "arbitrary".
    vmem_limit_bytes: VMEM that the kernel may use, None for the compiler's default.
    """
    return pltpu.CompilerParams(
        dimension_semantics=semantics or None,
        vmem_limit_bytes=vmem_limit_bytes,
        disable_bounds_checks=not interpret,
    )
