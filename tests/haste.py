"""Compiling in haste: a test runs its programs a few times, so that what optimising them takes is not earned again.

XLA:CPU does without optimisation, without its emitters of fusions, whose code LLVM is slow to get through, and without
cutting modules into parts for many cores. Nothing that JAX or this project decides is changed by it; `time python -m
pytest FILE`, and with `--unhurried`, tells what it saves.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

import pytest

_OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


@functools.cache
def _known_options() -> dict[str, bool | int]:
    """Those that this release of XLA knows, without a change of what it has read of XLA_FLAGS."""
    import jax

    lowered, known = jax.jit(lambda x: x + 1).lower(1.0), {}
    for name, value in _OPTIONS.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            lowered.compile(compiler_options={name: value})
            known[name] = value
    return known


def hasty() -> dict[str, str]:
    """What the environment of a process has that compiles in haste."""
    own = " ".join(f"--{name}={str(value).lower()}" for name, value in _known_options().items())
    flags = os.environ.get("XLA_FLAGS", "")
    flags = flags if own in flags else f"{flags} {own}".strip()
    return {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@contextlib.contextmanager
def in_haste() -> Iterator[None]:
    """Compiles in haste, here and in what is started; where there is an accelerator, nothing is changed."""
    import jax
    from jax._src import compiler

    if jax.default_backend() != "cpu":
        yield
        return
    options, options_of = _known_options(), compiler.get_compile_options

    def in_one_part(*args, env_options_overrides=None, **kwargs):
        return options_of(*args, env_options_overrides={**options, **(env_options_overrides or {})}, **kwargs)

    before = jax.config.read("jax_disable_most_optimizations")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in hasty().items():
            patch.setenv(name, value)
        patch.setattr(compiler, "get_compile_options", in_one_part)
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", before)
