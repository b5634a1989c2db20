"""Compiled programs and traces that a process of tests keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.sharding import SingleDeviceSharding

from jaxengine.runner.executables.cache import ExecutableCache
from jaxengine.runner.executables.layer_chain import InParts
from tests import fast_compile
from tests.fast_compile import _Compiled


def module(text: str) -> Any:
    return SimpleNamespace(operation=SimpleNamespace(get_asm=lambda **_: text))


def options(text: bytes = b"") -> Any:
    return SimpleNamespace(SerializeAsString=lambda: text)


def test_a_module_is_compiled_once_for_its_devices_and_options(monkeypatch):
    monkeypatch.setattr(fast_compile, "_LEAST_KEPT", 3)
    compiled = _Compiled(lambda *_: object())
    first = compiled.get("cpu", module("long"), [0], options(), [])
    assert compiled.get("cpu", module("long"), [0], options(), []) is first
    for other in (
        ("cpu", module("longer"), [0], options(), []),
        ("cpu", module("long"), [1], options(), []),
        ("cpu", module("long"), [0], options(b"others"), []),
        ("cpu", module("long"), [0], options(), ["calls Python"]),
    ):
        assert compiled.get(*other) is not first
    assert compiled.get("cpu", module("s"), [0], options(), []) is not compiled.get(
        "cpu", module("s"), [0], options(), []
    )


def test_few_are_kept(monkeypatch):
    monkeypatch.setattr(fast_compile, "_LEAST_KEPT", 0)
    monkeypatch.setattr(fast_compile, "_MOST_KEPT", 2)
    compiled = _Compiled(lambda *_: object())

    def get(text: str) -> object:
        return compiled.get("cpu", module(text), [0], options(), [])

    first, second = get("a"), get("b")
    assert get("a") is first
    get("c")  # the one used least recently is forgotten
    assert get("a") is first and get("b") is not second


def num_traces(family: type | None = None, unused: frozenset[tuple[str, str]] = frozenset()) -> int:
    """How often a function within the programs of two engines is traced, the second of which may not use some
    kernels.
    """
    traced = []

    @jax.jit
    def within(x):
        traced.append(x)
        return x + 1

    for each in (frozenset(), unused):
        cache = ExecutableCache("", jax.devices()[:1], family=family)
        cache.unused = each
        cache.compile(lambda x: within(x), [jax.ShapeDtypeStruct((2,), np.float32)], donate=())
    return len(traced)


def test_engines_share_traces_but_for_those_of_a_users_family():
    assert (num_traces(), num_traces(SimpleNamespace)) == (1, 2)
    assert num_traces(type("Own", (), {})) == num_traces(unused=frozenset({("matmul", "cuda")})) == 2


def test_replaced_code_is_traced_anew_and_leaves_no_trace():
    traced, answers = [], [1, 2, 1]

    @jax.jit
    def within(x):
        traced.append(x)
        return x + answers[len(traced) - 1]

    def run() -> float:
        return float(jax.jit(lambda x: within(x))(1.0))

    first = run()
    with fast_compile.own_traces():
        second = run()
    assert (first, second, run()) == (2, 3, 2) and len(traced) == 2


@pytest.mark.parametrize(
    ("name", "shape", "level"), [("sample_rows", "8x49152", 1), ("sample_rows", "8x128", 0), ("forward", "8x49152", 0)]
)
def test_samplers_over_whole_vocabularies_are_optimised(name, shape, level):
    debug = SimpleNamespace(xla_backend_optimization_level=0)
    given = SimpleNamespace(SerializeAsString=bytes, executable_build_options=SimpleNamespace(debug_options=debug))
    text = f"module @jit_{name} attributes {{}} {{\n func @main(%x: tensor<{shape}xf32>) {{" + " " * 5000
    _Compiled(lambda *_: object()).get("cpu", module(text), [0], given, [])
    assert debug.xla_backend_optimization_level == level


def test_equal_layers_of_a_model_of_two_are_compiled_once():
    @jax.jit
    def run_layer(x):
        return x * x

    def step(x):
        return run_layer(run_layer(x + 1)) - 1

    shape = jax.ShapeDtypeStruct((4, 8), np.float32, sharding=SingleDeviceSharding(jax.devices()[0]))
    compiled = ExecutableCache("", jax.devices()[:1]).compile(step, [shape], donate=())
    assert isinstance(compiled, InParts) and [call.program for call in compiled.chain.calls] == [0, 1, 1, 2]


def num_loads(folder: str) -> int:
    """How often a stored program is loaded for two engines."""
    shape, found = jax.ShapeDtypeStruct((2,), np.float32, sharding=SingleDeviceSharding(jax.devices()[0])), []
    for _ in range(3):  # the first one stores it
        cache = ExecutableCache(folder, jax.devices()[:1])
        found.append(cache.get("add", lambda x: x + 1, [shape], shape, donate=()))
    assert (cache.num_compiled, cache.num_loaded) == (0, 1)
    return len(set(map(id, found[1:])))


def test_a_program_is_loaded_once(tmp_path):
    assert num_loads(str(tmp_path)) == 1


def test_engines_of_a_test_that_patches_share_nothing(monkeypatch, tmp_path):
    assert (num_traces(), num_loads(str(tmp_path))) == (2, 2)


def contexts_of(num_modules: int) -> list[int]:
    """Contexts of so many modules that are lowered one after another, numbered from 0."""
    modules: list[Any] = [jax.jit(lambda x: x + 1).lower(np.float32(0)).compiler_ir() for _ in range(num_modules)]
    contexts = [each.context for each in modules]
    return [contexts.index(each) for each in contexts]


def test_modules_share_contexts(monkeypatch):
    if hasattr(mlir, "_thread_local_context"):
        pytest.skip("this jax lets modules share contexts by itself")
    monkeypatch.setattr(fast_compile, "_MODULES_OF_CONTEXT", 3)
    monkeypatch.setattr(fast_compile, "_CONTEXTS", fast_compile._Contexts())
    assert contexts_of(7) == [0, 0, 0, 3, 3, 3, 6]
