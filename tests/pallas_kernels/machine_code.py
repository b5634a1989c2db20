"""Machine code of llvmlite in place of an interpreter: it has nothing to find, but has to be built first."""

from __future__ import annotations

import functools
from typing import Any

from jaxengine.pallas_kernels.native import library
from jaxengine.pallas_kernels.registry import NATIVE_ROOMS


def install() -> None:
    library.made(NATIVE_ROOMS)


def reset() -> None: ...


def problems() -> list[str]:
    return []


@functools.cache
def narrow() -> Any:
    """Return llvmlite's engine with the code for a processor without AVX-512."""
    import llvmlite.binding as llvm  # pyright: ignore[reportMissingImports]

    features = llvm.get_host_cpu_features()
    for name in features:
        features[name] = features[name] and not name.startswith(("avx512", "amx"))
    return library.compiled(NATIVE_ROOMS, "haswell", features)[1]


@functools.cache
def without_dots() -> Any:
    """Return llvmlite's engine with this processor's code but for products of bfloat16, whose bits are others."""
    import llvmlite.binding as llvm  # pyright: ignore[reportMissingImports]

    features = llvm.get_host_cpu_features()
    features["avx512bf16"] = False
    return library.compiled(NATIVE_ROOMS, llvm.get_host_cpu_name(), features)[1]
