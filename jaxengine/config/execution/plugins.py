"""The option plugins: modules or files that register model families of a user's own. Nothing is imported here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.files import named_path

OPTION = "plugins"
_MODULE = re.compile(r"[^\W\d]\w*([.][^\W\d]\w*)*")


def read_plugins(value: Any) -> tuple[str, ...]:
    """Return the option's value as a tuple of distinct names in order, with files as absolute paths.

    value: one name or Path, or a sequence of them. Raises ConfigError for other values; whether a module or file exists
    is not checked.
    """
    values = [value] if isinstance(value, str | Path) else value
    if not isinstance(values, Sequence) or not all(isinstance(each, str | Path) for each in values):
        raise ConfigError(OPTION, value, "a list of modules' names and of .py files")
    return tuple(dict.fromkeys(_name_of(str(each)) for each in values))


def is_file_name(name: str) -> bool:
    """Return whether a plugin's name is that of a file rather than of a module."""
    return name.endswith(".py") or "/" in name


def _name_of(name: str) -> str:
    """Return a plugin's name: a file's absolute path, or a module's name unchanged. Raises ConfigError for a text that
    can be neither.
    """
    if is_file_name(name):
        return str(named_path(OPTION, name).absolute())
    if not _MODULE.fullmatch(name):
        raise ConfigError(OPTION, name, "the name of a module, such as my_models.own, or a .py file")
    return name
