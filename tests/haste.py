"""Compiling in haste: a test runs its programs a few times, so that what optimising them takes is not earned again.

Without optimisation, without the emitters of fusions (LLVM gets through the older ones' code in half the time) and in
one part a module (many parts are for many cores) XLA:CPU takes a third of the processor time. Nothing that JAX or this
project decides is changed by it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import pytest

_OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in _OPTIONS.items())


def hasty(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a process that compiles in haste."""
    flags = environment.get("XLA_FLAGS", "")
    flags = flags if _FLAGS in flags else f"{flags} {_FLAGS}".strip()
    return {**environment, "XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@contextlib.contextmanager
def in_haste() -> Iterator[None]:
    """Compiles in haste, here and in what is started."""
    import jax
    from jax._src import compiler

    jax.devices()  # reads XLA_FLAGS, which is for what is started: this process is not always in haste
    options_of = compiler.get_compile_options

    def in_one_part(*args, env_options_overrides=None, **kwargs):
        overrides = {**_OPTIONS, **(env_options_overrides or {})}
        return options_of(*args, env_options_overrides=overrides, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in hasty().items():
            patch.setenv(name, value)
        patch.setattr(compiler, "get_compile_options", in_one_part)
        jax.config.update("jax_disable_most_optimizations", True)
        yield
    jax.config.update("jax_disable_most_optimizations", False)
