"""Digest of the current state of code that a user wrote: functions with the values of the globals, closures and
defaults that they read.

A source file does not contain these values: a notebook sets `module.SCALE = 2.0` and starts another engine. Programs
that were traced from such code are stored under this digest, or not at all if it cannot be computed. Knows nothing of
jax.
"""

from __future__ import annotations

import builtins
import enum
import functools
import hashlib
import logging
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np

# Values of these types are their repr.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, type(...), np.generic, np.dtype)
# What a function reads through these names cannot be found by its globals, closure and attributes.
_OUTSIDE = ("environ", "getenv", "open", "read_text", "read_bytes", "globals", "eval", "exec")
# Modules of jaxengine from whose functions programs are traced.
_TRACED = (
    "jaxengine.models.",
    "jaxengine.pallas_kernels.",
    "jaxengine.sampling.",
    "jaxengine.sharding.",
    "jaxengine.runner.programs.",
    "jaxengine.runner.extensions.",
)
_MAX_VALUES = 100_000
_METHODS = (types.MethodType, staticmethod, classmethod)
_FUNCTION_LIKE = (types.FunctionType, *_METHODS, property, functools.cached_property)


class UnknownCodeError(Exception):
    """Error for code that reads a value for which no digest can be computed. The message names the value."""


def code_digest(roots: Iterable[Any]) -> str:
    """Return the SHA-256, in hexadecimal, of the classes and functions `roots` and of all values that they read.

    Raises UnknownCodeError for a value that cannot be hashed, for code that reads the environment or files, and for
    more than 100,000 values.
    """
    walk = _Walk()
    for root in roots:
        walk.add(root, f"{getattr(root, '__qualname__', root)}")
    return walk.digest()


def is_library(module: str | None) -> bool:
    """Return whether a module belongs to jaxengine, Python or an installed package, so that its file determines its
    content.

    module: its name. True for None, False for "__main__".
    """
    if module is None or module == "__main__":
        return module is None
    top = module.partition(".")[0]
    if top in ("", "jaxengine") or top.startswith("namedtuple_") or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    paths = [file, *map(str, getattr(sys.modules.get(top), "__path__", ()))]
    return any("site-packages" in path or "dist-packages" in path for path in paths)


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the Python functions of which a function, method, property or cached property consists; none for other
    values.
    """
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, _METHODS):
        yield from functions_in(value.__func__)
    elif isinstance(value, property):
        yield from (each for each in (value.fget, value.fset, value.fdel) if isinstance(each, types.FunctionType))
    elif isinstance(value, functools.cached_property):
        yield from functions_in(value.func)


def changed_code() -> list[Any]:
    """Return the functions and classes of a user's code that replace or add to the content of the jaxengine modules
    from which programs are traced, and to the classes in them.
    """
    is_ours = functools.cache(is_library)

    def users(value: Any) -> list[Any]:
        """Return the functions of which `value` consists that were defined outside of jaxengine and libraries; [] for a
        value that is not like a function.
        """
        if not isinstance(value, _FUNCTION_LIKE):
            return []
        return [each for each in functions_in(value) if not is_ours(each.__globals__.get("__name__"))]

    names = sorted(name for name in sys.modules if name.startswith(_TRACED))
    found: list[Any] = []
    for module in filter(None, map(sys.modules.get, names)):
        for value in list(vars(module).values()):
            if not isinstance(value, type):
                found += users(value)
            elif not is_ours(value.__module__):
                found.append(value)
            elif value.__module__ == module.__name__:
                found += [each for member in vars(value).values() for each in users(member)]
    return found


class _Walk:
    """Hash of values in breadth-first order; a value that was visited before is hashed as its number. The order of
    calls: `add` for each root, then `digest` once.
    """

    def __init__(self):
        self._hash, self._waiting = hashlib.sha256(), deque[tuple[Any, str, frozenset[str]]]()
        self._met: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no id is used twice

    def add(self, value: Any, name: str, read: frozenset[str] = frozenset()) -> None:
        """Append a value to the queue of values to visit.

        name: the value's name, for errors. read: names that the code reads, of which those that are the value's
        attributes are visited too if the value is a module.
        """
        self._waiting.append((value, name, read))

    def digest(self) -> str:
        """Visit all queued values and those that they refer to, which empties the queue; return the digest in
        hexadecimal.

        Raises UnknownCodeError for a value that cannot be hashed, and for more than 100,000 values.
        """
        while self._waiting:
            value, name, read = self._waiting.popleft()
            if len(self._alive) > _MAX_VALUES:
                raise UnknownCodeError(f"{name} is part of more than {_MAX_VALUES:,} values")
            self._write(f"\n{name.rpartition('.')[2]}: ")
            if isinstance(value, types.ModuleType):
                self._module(value, name, read)
            elif isinstance(value, _PLAIN):
                self._write(repr(value))
            elif (number := self._met.get(id(value))) is not None:
                self._write(f"#{number}")
            else:
                # Equal constants may or may not be one object, so their identity is not hashed.
                if not isinstance(value, tuple | frozenset):
                    self._met[id(value)] = len(self._met)
                self._alive.append(value)
                self._visit(value, name)
        return self._hash.hexdigest()

    def _write(self, text: str) -> None:
        """Add text to the hash."""
        self._hash.update(text.encode("utf-8", "surrogatepass"))

    def _visit(self, value: Any, name: str) -> None:
        """Hash the kind of a value that was not visited before, and queue what it refers to.

        name: the value's name, for errors. Raises UnknownCodeError for a value that cannot be hashed.
        """
        if isinstance(value, _FUNCTION_LIKE):
            self._write(str(type(value).__name__))
            if isinstance(value, types.MethodType):
                self.add(value.__self__, f"{name}.__self__")
            for function in functions_in(value):
                self._function(function, name)
        elif isinstance(value, type):
            self._class(value, name)
        elif isinstance(value, functools.partial):
            self.add((value.func, value.args, value.keywords), name)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.add(key, f"{name}[]")
                self.add(item, f"{name}[{key!r}]")
        elif isinstance(value, list | tuple | deque):
            self._write(f"{type(value).__name__} {len(value)}")
            for item in value:
                self.add(item, f"{name}[]")
        elif isinstance(value, Set):
            self._write(repr(sorted(code_digest([item]) for item in value)))
        elif isinstance(value, enum.Enum):
            self._write(str(value))
        else:
            self._object(value, name)

    def _function(self, function: types.FunctionType, name: str) -> None:
        """Hash a function's code, and queue its defaults, its closure and the globals that it reads.

        Of a library's function only its name is hashed, and the function that it wraps queued. Raises UnknownCodeError
        for a function that reads the environment, files or names at run time.
        """
        module = function.__globals__.get("__name__")
        wrapped = getattr(function, "__wrapped__", None)
        if is_library(module):
            self._write(f"{module}.{function.__qualname__}")
            # The function of a library's decorator wraps the user's function.
            if wrapped is not None:
                self.add(wrapped, f"{name}.__wrapped__")
            return
        names = frozenset(self._code(function.__code__, name, function.__doc__))
        self.add((function.__defaults__, function.__kwdefaults__), f"{name}'s defaults")
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.add(cell.cell_contents, f"{name}.{variable}", names)
            except ValueError:
                self._write(f"{variable} is not set")
        for each in sorted(names):
            if each in function.__globals__:
                self.add(function.__globals__[each], f"{module}.{each}", names)
            elif each in _OUTSIDE and (each in ("environ", "getenv") or hasattr(builtins, each) or "_" in each):
                raise UnknownCodeError(f"{name} calls or reads {each}")

    def _code(self, code: types.CodeType, name: str, doc: str | None = None) -> set[str]:
        """Hash a code object and, recursively, those in it, and queue its constants; return the names of globals and
        attributes that they read.

        name: name of the function, for errors. doc: its docstring, which is not hashed; None if it has no docstring.
        """
        names = set(code.co_names)
        constants = [each for each in code.co_consts if not isinstance(each, types.CodeType) and each != doc]
        kept = (code.co_names, code.co_varnames, code.co_freevars, code.co_flags)
        self._write(repr((code.co_code, kept, code.co_exceptiontable)))
        self.add(constants, f"{name}'s constants")
        for each in code.co_consts:
            if isinstance(each, types.CodeType):
                names |= self._code(each, name)
        return names

    def _class(self, cls: type, name: str) -> None:
        """Hash a class's name; of a library's class also its module, of a user's class queue its bases and members."""
        self._write(f"class {cls.__qualname__}")
        if is_library(cls.__module__):
            self._write(cls.__module__)
            return
        for base in cls.__bases__:
            self.add(base, f"{name}.{base.__name__}")
        for key, value in vars(cls).items():
            # Python itself adds the other members with such names.
            if isinstance(value, _FUNCTION_LIKE) or not key.startswith(("__", "_abc_")):
                self.add(value, f"{name}.{key}")

    def _module(self, module: types.ModuleType, name: str, read: frozenset[str]) -> None:
        """Hash a module's name; of a user's module queue the values of its attributes that are among `read`."""
        self._write(module.__name__)
        if not is_library(module.__name__):
            for each in sorted(read & vars(module).keys()):
                self.add(vars(module)[each], f"{module.__name__}.{each}", read)

    def _object(self, value: Any, name: str) -> None:
        """Hash a value that is neither code nor plain data. name: name of the value, for errors.

        Of an array the content is hashed, of a wrapper what it wraps, of a logger its name, of a builtin its qualified
        name, of objects of typing and types their text; the attributes of any other object are queued. Raises
        UnknownCodeError for an object without readable attributes.
        """
        kind = type(value)
        self._write(f"{kind.__module__}.{kind.__qualname__}")
        array = np.asarray(value) if hasattr(value, "__array__") else None
        if array is not None and array.dtype != object:
            digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            self._write(f"{array.dtype} {array.shape} {digest}")
        elif (wrapped := getattr(value, "__wrapped__", None)) is not None:
            self.add(wrapped, f"{name}.__wrapped__")
        elif isinstance(value, logging.Logger):
            self._write(value.name)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType):
            self._write(value.__qualname__)
        elif kind.__module__ in ("typing", "types") and not isinstance(value, types.SimpleNamespace):
            self._write(repr(value))
        else:
            self._attributes(value, name)

    def _attributes(self, value: Any, name: str) -> None:
        """Queue an object's class and the values of its slots and attributes. name: name of the object, for errors.

        Raises UnknownCodeError for an object with neither __dict__ nor slots that are set.
        """
        slots = [slot for base in type(value).__mro__ for slot in _slots_of(base) if hasattr(value, slot)]
        if not hasattr(value, "__dict__") and not slots:
            raise UnknownCodeError(f"the value of {name}, of type {type(value).__qualname__}, cannot be read")
        self.add(type(value), f"{name}'s class")
        for slot in slots:
            self.add(getattr(value, slot), f"{name}.{slot}")
        for key, item in getattr(value, "__dict__", {}).items():
            self.add(item, f"{name}.{key}")


def _slots_of(cls: type) -> list[str]:
    """Return the names in a class's own __slots__, without __dict__ and __weakref__."""
    slots = vars(cls).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]
