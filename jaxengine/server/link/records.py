"""Records in messages: dataclasses and named tuples, such as a model's configuration, in the types of MessagePack.

A message names the class of each record, and only a class of such records is ever called.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

_PACKAGE = "jaxengine."
_SCALARS = (bool, int, float, str, bytes, type(None))
_COLLECTIONS = {kind.__name__: kind for kind in (tuple, list, frozenset)}


def packed(value: Any) -> Any:
    """Return what `unpacked` turns into an equal value: scalars as they are, and [kind, ...] for all else.

    value: a scalar, bytes, a path, a tuple, list, frozenset or mapping of values, or a record: a dataclass or named
    tuple of a module's top level whose fields are values. Mappings become dicts. Raises TypeError for another value,
    and for a record of a class that its module does not have under its name, which `unpacked` could not find.
    """
    if isinstance(value, _SCALARS):
        return value
    kind = type(value)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        if _record(kind.__module__, kind.__qualname__) is not kind:
            raise TypeError(f"{kind.__module__}.{kind.__qualname__} is another class than that of {value!r}")
        names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else kind._fields
        return ["record", kind.__module__, kind.__qualname__, {name: packed(getattr(value, name)) for name in names}]
    if isinstance(value, Path):
        return ["path", str(value)]
    if kind in _COLLECTIONS.values():
        return [kind.__name__, [packed(each) for each in value]]
    if isinstance(value, Mapping):
        return ["dict", [[packed(key), packed(each)] for key, each in value.items()]]
    raise TypeError(f"{value!r} cannot be part of a record in a message")


def unpacked(value: Any) -> Any:
    """Return the value of which `packed` made this one. Records of this package are imported as needed; others must be
    of modules that this process has imported, such as plugins.

    Raises TypeError for a name of anything but a record, ImportError for one of a module that this package lacks, and
    what a record's own checks raise.
    """
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "record":
        module, name, fields = rest
        record = _record(module, name)
        return record(**{field: unpacked(each) for field, each in fields.items()})
    if kind == "path":
        return Path(rest[0])
    if kind == "dict":
        return {unpacked(key): unpacked(each) for key, each in rest[0]}
    return _COLLECTIONS[kind](unpacked(each) for each in rest[0])


def _record(module: str, name: str) -> Any:
    """Return the class of a record, a dataclass or a named tuple, of a module by its name. A module of this package is
    imported; any other must be imported already.

    Raises TypeError if there is no such class, or no such module among the imported ones, and ImportError for a name in
    this package that is no module.
    """
    found = import_module(module) if module.startswith(_PACKAGE) else sys.modules.get(module)
    kind = getattr(found, name, None)
    if not (isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))):
        raise TypeError(f"{module}.{name} is no record")
    return kind
