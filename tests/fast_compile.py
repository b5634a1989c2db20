"""XLA:CPU without optimisation: a test runs its programs a few times, which does not pay for optimising them.

Left out are XLA's optimisation passes, its fusion emitters, whose code LLVM is slow to compile, and the split of
modules into parts for many cores. Besides, an engine on one device compiles equal layers once in models of two layers
already, as it does in production from six on. Nothing else that JAX or this project decides changes. `time python -m
pytest FILE`, with and without `--optimised`, shows the difference.

Besides, a process that compiles one module twice gets the same executable again: engines of many tests have the same
sampler and state changes, whose keys in the engine's own cache name their models. And its engines share traces of
functions within their programs, and what they load. Lowered modules share MLIR contexts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Programs that a process keeps, each some dozen mappings of memory (see tests/conftest.py), and the shortest text of
# one: what is shorter compiles in a few milliseconds.
_MOST_KEPT, _LEAST_KEPT = 200, 4096
_SHARED_TRACES = "engines of the tests"
# Modules that are lowered in one context, which keeps their constants as long as one of them lives.
_MODULES_OF_CONTEXT = 100
# Samplers over the vocabulary of a real tokenizer draw a number for each of its tokens: unoptimised, a step of eight
# rows takes 20 ms longer, so that some fifty steps pay for optimising the machine code.
_LARGE_SAMPLER = re.compile(r"\Amodule @jit_sample\w* .*?tensor<\d+x\d{5,}xf32>", re.DOTALL)
_OF_LAYERS: dict[str, Any] = {}  # how layer_chain divides models in production
_OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


@functools.cache
def _known_options() -> dict[str, bool | int]:
    """Those of _OPTIONS that this release of XLA knows; XLA_FLAGS, which it has read already, stays as it is."""
    import jax

    lowered, known = jax.jit(lambda x: x + 1).lower(1.0), {}
    for name, value in _OPTIONS.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            lowered.compile(compiler_options={name: value})
            known[name] = value
    return known


def fast_compile_environment() -> dict[str, str]:
    """Variables for a process that compiles fast."""
    own = " ".join(f"--{name}={str(value).lower()}" for name, value in _known_options().items())
    flags = os.environ.get("XLA_FLAGS", "")
    flags = flags if own in flags else f"{flags} {own}".strip()
    return {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def _is_an_engines() -> bool:
    """Whether an engine's cache of executables, which may store what it gets, compiles now; True if jax hides it."""
    cache = sys.modules.get("jaxengine.runner.executables.cache")
    return cache is not None and getattr(cache._ENGINE, "value", True) is not None


def _serialized(backend: Any, executable: Any) -> bytes | None:
    """The serialised form of an executable, None if it has none."""
    try:
        return backend.serialize_executable(executable)
    except Exception:  # XLA may raise anything for what cannot be serialised
        return None


class _Compiled:
    """Executables of this process, by module, devices and options; those used least recently are forgotten."""

    def __init__(self, compile_and_load: Callable[..., Any]):
        self._compile_and_load = compile_and_load
        self._found: OrderedDict[tuple[str, ...], Any] = OrderedDict()
        self._payloads: dict[int, bytes | None] = {}  # None for what cannot be serialised

    def get(self, backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
        """Return what jax._src.compiler.backend_compile_and_load does, the same again for the same module."""
        text = "" if host_callbacks else module.operation.get_asm(enable_debug_info=False)
        if len(text) < _LEAST_KEPT:
            return self._compile_and_load(backend, module, devices, options, host_callbacks)
        if _LARGE_SAMPLER.match(text):
            options.executable_build_options.debug_options.xla_backend_optimization_level = 1
        key = hashlib.sha256(text.encode()).hexdigest(), str(devices), str(options.SerializeAsString())
        made, may_be_stored = self._found.get(key), _is_an_engines()
        if made is None or (may_be_stored and id(made) not in self._payloads):
            made = self._found[key] = self._compile_and_load(backend, module, devices, options, host_callbacks)
            if may_be_stored:
                self._payloads[id(made)] = _serialized(backend, made)
        self._found.move_to_end(key)
        if len(self._found) > _MOST_KEPT:
            self._payloads.pop(id(self._found.popitem(last=False)[1]), None)
        return made

    def payload(self, executable: Any) -> bytes | None:
        """The serialised form of one that is kept: XLA writes it only before an executable has run."""
        return self._payloads.get(id(executable))


@functools.cache
def _compiled() -> _Compiled:
    from jax._src import compiler

    return _Compiled(compiler.backend_compile_and_load)


def _groups_of_small(kinds: Any, num_tokens: int) -> tuple[int, int]:
    """Return what layer_chain._groups does; short steps of small models compile no layer twice to save a call."""
    few = sys.modules["jaxengine.runner.executables.layer_chain"].FEW_TOKENS
    is_small = len(kinds) < _OF_LAYERS["_LEAST_LAYERS"]
    return _OF_LAYERS["_groups"](kinds, max(num_tokens, few) if is_small else num_tokens)


@contextlib.contextmanager
def fast_compile() -> Iterator[None]:
    """Compile fast, here and in processes that are started; with an accelerator, nothing changes."""
    import jax
    from jax._src import compiler
    from jax.experimental import serialize_executable

    if jax.default_backend() != "cpu":
        yield
        return
    options, options_of = _known_options(), compiler.get_compile_options

    def in_one_part(*args, env_options_overrides=None, **kwargs):
        own = options if jax.config.read("jax_disable_most_optimizations") else {}
        return options_of(*args, env_options_overrides={**own, **(env_options_overrides or {})}, **kwargs)

    write = serialize_executable._JaxPjrtPickler.persistent_id

    def persistent_id(pickler, value):
        payload = _compiled().payload(value)
        return write(pickler, value) if payload is None else ("exec", payload)

    before = jax.config.read("jax_disable_most_optimizations")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fast_compile_environment().items():
            patch.setenv(name, value)
        if layer_chain := sys.modules.get("jaxengine.runner.executables.layer_chain"):
            for name in ("_LEAST_LAYERS", "_groups"):
                _OF_LAYERS.setdefault(name, getattr(layer_chain, name))
            patch.setattr(layer_chain, "_LEAST_LAYERS", 2)
            patch.setattr(layer_chain, "_groups", _groups_of_small)
        patch.setattr(compiler, "get_compile_options", in_one_part)
        patch.setattr(compiler, "backend_compile_and_load", _compiled().get)
        patch.setattr(serialize_executable._JaxPjrtPickler, "persistent_id", persistent_id)
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", before)


@contextlib.contextmanager
def as_in_production() -> Iterator[None]:
    """Compile as in production, here alone, where fast_compile is in force."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _OF_LAYERS.items():
            patch.setattr(sys.modules["jaxengine.runner.executables.layer_chain"], name, value)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", before)


class _Contexts(threading.local):
    """MLIR contexts of the modules that a thread lowers, each for some of them."""

    def __init__(self) -> None:
        self._current, self._num_modules = None, 0

    def next(self, make: Callable[[], Any]) -> Any:
        """Return the context of the next module."""
        if self._num_modules % _MODULES_OF_CONTEXT == 0:
            self._current = make()
        self._num_modules += 1
        return self._current


_CONTEXTS = _Contexts()


def share_contexts(patch: pytest.MonkeyPatch) -> None:
    """Let modules that are lowered one after another share a context.

    jax makes one for each and loads all dialects into it: a fifth of the time that an operation of a new shape takes
    outside jit, and most of the memory of a process of tests, for jax remembers modules.
    """
    mlir = sys.modules.get("jax._src.interpreters.mlir")
    if mlir is None or hasattr(mlir, "_thread_local_context"):  # from jax 0.11 on it shares contexts by itself
        return
    start = mlir.ModuleContext.__init__

    def start_sharing(self, /, *, context=None, **kwargs):  # of which `module` may be one
        start(self, context=context or _CONTEXTS.next(mlir.make_ir_context), **kwargs)

    patch.setattr(mlir.ModuleContext, "__init__", start_sharing)


def own_traces() -> contextlib.AbstractContextManager[Any]:
    """Trace anew, as an engine does, for what is traced here alone: a test has replaced code that functions within
    programs read.

    `jax.clear_caches` would do that as well, and every later test of the process would trace and compile all it needs.
    """
    from jaxengine.runner.executables.cache import _ENGINE

    return _ENGINE(object())


def share_programs(patch: pytest.MonkeyPatch, may_share: Callable[[], bool]) -> None:
    """Let engines share what jax remembers of functions within programs, most of them its own, and loaded programs.

    An engine traces such functions anew, a third of the time of a start that compiles little, since a user's function
    may read what another engine found otherwise. Here this is left to the engines of a family that is not ours, or
    while code of ours is replaced. To load is most of a start that compiles nothing; here a process loads a file once.
    Neither happens while `may_share()` is False.
    """
    if (module := sys.modules.get("jaxengine.runner.executables.cache")) is None:
        return
    ours, unchanged = Path(sys.modules["jaxengine"].__file__ or "").parent, module.code_digest(())
    compile_alone, load_alone = module.ExecutableCache.compile, module.load

    def compile_sharing(cache, *args, **kwargs):
        own, is_ours = cache._traces, cache._family is None or ours in cache._family.parents
        if is_ours and cache._changed == unchanged and may_share():
            cache._traces = _SHARED_TRACES, cache.unused  # kernels that a program is made without decide traces, too
        try:
            return compile_alone(cache, *args, **kwargs)
        finally:
            cache._traces = own

    def load_once(payload, *args):
        return (_load_once if may_share() else load_alone)(payload, *args)

    patch.setattr(module.ExecutableCache, "compile", compile_sharing)
    patch.setattr(module, "load", load_once)


@functools.lru_cache(_MOST_KEPT)
def _load_once(*args):
    from jaxengine.runner.executables.layer_chain import load

    return load(*args)
