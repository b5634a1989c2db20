"""What a process of tests keeps of its compiled programs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
