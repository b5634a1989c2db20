"""Interpreted kernels: runs the Pallas kernels of another platform on a CPU, in jax's interpreters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxengine.pallas_kernels.registry import PLATFORMS, has_kernels, rows_of

# Platforms whose kernels jax interprets: all that have some.
INTERPRETED = tuple(sorted(filter(has_kernels, PLATFORMS)))


@contextmanager
def interpreted(platform: str) -> Iterator[None]:
    """Return a context manager in which programs are traced with the kernels of `platform`, one of INTERPRETED, which
    jax interprets on the CPU. This is slow.

    Programs that jax cannot interpret raise NotImplementedError while they are compiled: Mosaic GPU kernels with wgmma,
    and before jax 0.11.1 those with tcgen05 too. Arrays must have the layout of the platform.
    """
    from jax.experimental.pallas import tpu as pltpu

    params: Any
    if platform == "tpu":
        params = pltpu.InterpretParams()
    elif platform == "gpu_triton":
        params = True  # as plain XLA: a kernel's blocks one after the other
    else:
        from jaxengine.pallas_kernels.mosaic_gpu import interpreter

        params = interpreter()
    # One setting of jax forces all of its interpreters.
    with rows_of(platform), pltpu.force_tpu_interpret_mode(params):
        yield
