"""Machine code of llvmlite in place of an interpreter: it has nothing to find, but has to be built first."""

from __future__ import annotations

from jaxengine.pallas_kernels.native import library
from jaxengine.pallas_kernels.registry import NATIVE_ROOMS


def install() -> None:
    library.made(NATIVE_ROOMS)


def reset() -> None: ...


def problems() -> list[str]:
    return []
