"""Command-line options generated from a dataclass, so that a new field of EngineConfig is an option without code here.

Field names become flags (`max_model_len` -> `--max-model-len`), types determine how a value is parsed, and the help
text is the field's entry in the class docstring. Values are checked by the dataclass, as always.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxengine.config.base.values import read_size


def add_options(
    parser: argparse.ArgumentParser,
    title: str,
    cls: type,
    names: Sequence[str] | None = None,
    short: Mapping[str, str] = types.MappingProxyType({}),
) -> None:
    """Add to `parser`, in a group `title`, a flag for each init field of the dataclass `cls`, with help from its
    docstring.

    names: the fields to add, in this order; None for all. short: alternative flags, by field. A field's metadata:
    "nargs" is the number of values of a flag for a list of strings, "words" maps words to the integers that they stand
    for. `given_options` returns the parsed values; a flag that is not given adds no attribute to the parsed arguments.
    """
    hints, texts = typing.get_type_hints(cls), class_texts(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    group = parser.add_argument_group(title)
    for name in names if names is not None else fields:
        group.add_argument(
            *([short[name]] if name in short else []),
            flag_of(name),
            dest=destination(cls, name),
            default=argparse.SUPPRESS,
            help=_help(texts.get(name, ""), fields[name].default),
            **_reader(hints[name], fields[name].metadata.get("nargs"), fields[name].metadata.get("words")),
        )


def given_options(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Return the values of the fields of `cls` that were given on the command line, by field; other fields are absent.

    args: parsed by a parser with the flags of `add_options`.
    """
    prefix = destination(cls, "")
    return {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}


def positive_int(text: str) -> int:
    """Return the integer that a text of ASCII digits denotes. Raises argparse.ArgumentTypeError for other texts and for
    0.
    """
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def output_file(text: str) -> str:
    """Return `text`, a file's name, if the file can be written or, if it does not exist, its folder exists and can be.

    Raises argparse.ArgumentTypeError otherwise, and for a folder. The check precedes the minutes or hours that
    computing the file's content may take.
    """
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written; name a file in a folder that is there")
    return text


def flag_of(name: str) -> str:
    """Return the flag of a field by its name: `max_model_len` -> `--max-model-len`."""
    return "--" + name.replace("_", "-")


def destination(cls: type, name: str) -> str:
    """Return the attribute of the parsed arguments that holds the value of the field `name` of `cls`: "CLASS.NAME".

    Two dataclasses on one parser may share a field name (`seed`) if only one of them adds its flag.
    """
    return f"{cls.__name__}.{name}"


def class_texts(cls: type) -> dict[str, str]:
    """Return the text of each field of a class and its base classes, by field, from the `Attributes:` of their
    docstrings; a subclass's text overrides a base's.
    """
    return {name: text for each in cls.__mro__[::-1] for name, text in field_texts(each.__doc__ or "").items()}


def field_texts(docstring: str) -> dict[str, str]:
    """Map each field to its text, on one line, in the docstring's `Attributes:` section; {} without one."""
    # From Python 3.13 on the compiler removes the indentation.
    section = inspect.cleandoc(docstring).partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^ {2}(\w+): ", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in zip(entries[1::2], entries[2::2], strict=True)}


def _help(text: str, default: Any) -> str:
    """Return the help of a flag: its text, and its default unless that is None, (), missing or a dataclass.

    Percent signs are doubled, since argparse expands them.
    """
    shown = default is not None and not dataclasses.is_dataclass(default) and default not in ((), dataclasses.MISSING)
    # argparse expands percent signs.
    return (text + (f" (default: {default})" if shown else "")).strip().replace("%", "%%")


def _reader(hint: Any, nargs: str | None = None, words: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the keyword arguments of add_argument for values of type `hint`; None in a union is ignored, as omitting
    the flag means None.

    nargs: how many texts a flag for a list of texts takes; None for one each time it is given. words: words that stand
    for integers.
    """
    kinds = [kind for kind in _members(hint) if kind is not type(None)]
    kind = kinds[0] if len(kinds) == 1 else Any
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind is int:
        return {"type": partial(_whole, words=words or {}), "metavar": "|".join(["INT", *(words or {})])}
    if kind in (float, str):
        return {"type": kind, "metavar": kind.__name__.upper()}
    if set(kinds) == {str, bool}:
        return {"nargs": "?", "const": True, "metavar": "STR"}
    if len(kinds) > 1 and str in kinds:
        return {"type": str, "metavar": "JSON"}  # or text in another form, which its dataclass reads
    if origin is typing.Literal:
        return {"type": type(arguments[0]), "choices": arguments}
    if origin in (Sequence, list, tuple) and arguments[0] is str:
        several = {"action": "append"} if nargs is None else {"action": "extend", "nargs": nargs}
        return {**several, "metavar": "STR"}
    if origin in (Sequence, list, tuple) and arguments[0] is int:
        return {"type": _int_list, "metavar": "INT,INT,..."}
    if origin in (Mapping, dict) and arguments[0] is int:
        return {"type": _json(lambda found: {int(key): value for key, value in found.items()}), "metavar": "JSON"}
    return {"type": _json(lambda found: found), "metavar": "JSON"}


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union of types, or the type itself alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _whole(text: str, words: Mapping[str, int]) -> int:
    """Return the integer that a text denotes: an integer, a size such as "4k", or the number of one of `words`.

    Raises argparse.ArgumentTypeError for other texts.
    """
    if text in words:
        return words[text]
    try:
        return int(text) if text.startswith("-") else read_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _int_list(text: str) -> tuple[int, ...]:
    """Return the integers of a text such as 1,2,3. Raises argparse.ArgumentTypeError for others."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers, such as 1,2,3") from None


def _json(shape: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Return a parser of JSON texts, which returns `shape` of the decoded value.

    The parser raises argparse.ArgumentTypeError if the text is not JSON or `shape` raises ValueError or AttributeError.
    """

    def read(text: str) -> Any:
        """Return `shape` of the JSON value of the text. Raises argparse.ArgumentTypeError if either fails."""
        try:
            return shape(json.loads(text))
        except (ValueError, AttributeError, RecursionError):
            raise argparse.ArgumentTypeError(f"{text!r} is not the JSON expected here") from None

    return read
