"""The digest of a user's code: equal for equal code and values, another for whatever a trace of it could differ in."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.config.base.user_code import UnknownCodeError, changed_code, code_digest
from jaxengine.models import registry as registry
from jaxengine.models.layers.base.norm import RMSNorm
from tests.tables import each_row

SOURCE = '''
import functools, logging, math
import numpy as np
from dataclasses import dataclass, field
import jax
import jax.numpy as jnp

SCALE, TABLE, OPTIONS, logger = 1.0, np.arange(3.0), {"caps": [1, 2]}, logging.getLogger(__name__)

@dataclass(frozen=True)
class Settings:
    rate: float = 0.5
    names: tuple = field(default=("a", "b"))

SETTINGS = Settings()

def make(factor):
    def scaled(x):
        return x * factor
    return scaled

closed = make(2.0)

@jax.jit
def jitted(x):
    return x + OPTIONS["caps"][0]

def by_default(x, bias=1.0, *, gain=2.0):
    return x * gain + bias

def chosen(x):
    return x if {"a", "b", "c"} else -x

partly = functools.partial(by_default, bias=3.0)

class Base:
    rank = 4
    def apply(self, x):
        """What it says."""
        logger.info("applied")
        return helper(x) * SETTINGS.rate + TABLE.sum() + jnp.tanh(x) * math.pi

class Own(Base):
    def apply(self, x):
        return chosen(jitted(partly(closed(super().apply(x * SCALE)))))

def helper(x):
    return x + other.OFFSET

unread = 5
'''


def made(source: str = SOURCE) -> Any:
    """A module of a user's own that no file holds, with another one that it reads."""
    module, other = types.ModuleType("own_module"), types.ModuleType("own_other")
    other.__dict__.update(OFFSET=1.5, unread=1)
    module.__dict__["other"] = other
    exec(compile(source, "own_module.py", "exec"), module.__dict__)  # noqa: S102
    return module


def digest(module: Any) -> str:
    return code_digest([module.Own])


@pytest.fixture(autouse=True)
def _modules(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_module", types.ModuleType("own_module"))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a global": lambda m: vars(m).update(SCALE=2.0),
    "an array": lambda m: m.TABLE.__setitem__(1, 7.0),
    "a device's array": lambda m: vars(m).update(TABLE=jnp.arange(3.0)),
    "an item of a list in a dict, read by a jitted function": lambda m: m.OPTIONS["caps"].__setitem__(0, 9),
    "a closure": lambda m: vars(m).update(closed=m.make(3.0)),
    "a default": lambda m: setattr(m.by_default, "__defaults__", (4.0,)),
    "a keyword's default": lambda m: setattr(m.by_default, "__kwdefaults__", {"gain": 5.0}),
    "a partial's argument": lambda m: vars(m).update(partly=m.functools.partial(m.by_default, bias=8.0)),
    "an attribute of a base class": lambda m: setattr(m.Base, "rank", 8),
    "a field of an instance": lambda m: vars(m).update(SETTINGS=m.Settings(rate=0.75)),
    "a value of another module": lambda m: vars(m.other).update(OFFSET=2.5),
    "a method put in": lambda m: setattr(m.Own, "apply", lambda self, x: x),
    "a function put in": lambda m: vars(m).update(helper=lambda x: x),
    "a bool for an equal number": lambda m: vars(m).update(SCALE=True),
}


@each_row("change", CHANGES.values(), ids=list(CHANGES))
def test_whatever_a_trace_reads_changes_the_digest(change):
    module = made()
    before = digest(module)
    change(module)
    assert digest(module) != before


@each_row(
    "change",
    [
        lambda m: None,
        lambda m: vars(m).update(unread=6),
        lambda m: vars(m.other).update(unread=6),
        lambda m: vars(m).update(SETTINGS=m.Settings(), TABLE=np.arange(3.0)),
    ],
    ids=["nothing", "a global", "an attribute of another module", "equal values made anew"],
)
def test_what_a_trace_does_not_read_changes_nothing(change):
    module = made()
    change(module)
    assert digest(module) == digest(made())


def test_comments_and_docstrings_change_nothing():
    source = SOURCE.replace("What it says", "Other words").replace("\nclass", "\n\n# Why.\nclass")
    assert digest(made(source)) == digest(made())


@each_row(
    "value, said",
    [(iter([1]), "own_module.SCALE, of type list_iterator"), (np.random.default_rng(0), "Generator")],
)
def test_a_value_that_cannot_be_told_is_named(value, said):
    module = made()
    module.SCALE = value
    with pytest.raises(UnknownCodeError, match=said):
        digest(module)


def test_what_a_function_reads_from_outside_cannot_be_told():
    source = SOURCE.replace("x + other.OFFSET", 'x + float(os.environ["OFFSET"])').replace("import f", "import os, f")
    with pytest.raises(UnknownCodeError, match="helper calls or reads environ"):
        digest(made(source))


def test_functions_put_into_our_modules_are_found(monkeypatch):
    assert changed_code() == []

    def own(self: Any, x: jax.Array) -> jax.Array:
        return x

    monkeypatch.setattr(RMSNorm, "__call__", own)
    assert changed_code() == [own]
