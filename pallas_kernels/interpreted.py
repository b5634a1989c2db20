"""Interpreted kernels: runs the Pallas kernels of another platform on a CPU, in jax's interpreters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jaxengine.pallas_kernels.registry import rows_of

# Platforms whose kernels jax interprets.
INTERPRETED = ("gpu", "tpu")


@contextmanager
def interpreted(platform: str) -> Iterator[None]:
    """Return a context manager in which programs are traced with the kernels of `platform`, one of INTERPRETED, which
    jax interprets on the CPU. This is slow.

    jax interprets the Mosaic GPU kernels without wgmma; others raise NotImplementedError while they are compiled.
    Arrays must have the layout of the platform.
    """
    from jax.experimental.pallas import tpu as pltpu

    if platform == "gpu":
        from jaxengine.pallas_kernels.mosaic_gpu import interpreter

        # One setting of jax forces both interpreters.
        params = interpreter()
    else:
        params = pltpu.InterpretParams()
    with rows_of(platform), pltpu.force_tpu_interpret_mode(params):
        yield
