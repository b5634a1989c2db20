"""Command-line options generated from a dataclass, so that a new field of EngineConfig becomes an option by itself.

Field names become flags (`max_model_len` -> `--max-model-len`), types determine how a value is parsed, and the help
text is the field's entry in the class docstring. The dataclass checks the values.
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

from jaxengine.config.base.flexible_parser import Several
from jaxengine.config.base.values import read_size


def add_options(
    parser: argparse.ArgumentParser,
    title: str,
    cls: type,
    names: Sequence[str] | None = None,
    short: Mapping[str, str] = types.MappingProxyType({}),
) -> None:
    """Add a flag for each init field of the dataclass `cls` to `parser`, in a group `title`, with help from the class's
    docstring.

    names: the fields to add, in this order; None for all. short: alternative flags, by field. In a field's metadata,
    "nargs" is the number of words that a flag for a list takes, and "words" maps words to the integers for which they
    stand. `given_options` returns the parsed values. A flag that is not given adds no attribute to the parsed
    arguments.
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
    """Return the fields of `cls` that were given on the command line, with their values. args: result of a parser with
    the flags of `add_options`.
    """
    prefix = destination(cls, "")
    return {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}


def positive_int(text: str) -> int:
    """Return the integer >= 1 that a text of ASCII digits denotes. Raises argparse.ArgumentTypeError otherwise."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def output_file(text: str) -> str:
    """Return `text`, the name of a file that can be written, or that can be created in an existing folder.

    Raises argparse.ArgumentTypeError for other names. The check is made early because it may take minutes or hours to
    compute the file's content.
    """
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written; name a file in a folder that is there")
    return text


def flag_of(name: str) -> str:
    """Return the flag of a field by its name: `max_model_len` -> `--max-model-len`."""
    return "--" + name.replace("_", "-")


def destination(cls: type, name: str) -> str:
    """Return the attribute of parsed arguments that has the value of the field `name` of `cls`: "CLASS.NAME".

    So two dataclasses on one parser may have a field of the same name (`seed`) if only one of them adds its flag.
    """
    return f"{cls.__name__}.{name}"


def class_texts(cls: type) -> dict[str, str]:
    """Return the texts of the fields of a class and its base classes, by field, from the `Attributes:` of their
    docstrings. A subclass's text overrides that of a base class.
    """
    return {name: text for each in cls.__mro__[::-1] for name, text in field_texts(each.__doc__ or "").items()}


def field_texts(docstring: str) -> dict[str, str]:
    """Return the texts of a docstring's `Attributes:` section, each on one line, by field; {} without a section."""
    # From Python 3.13 on the compiler removes the indentation.
    section = inspect.cleandoc(docstring).partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^ {2}(\w+): ", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in zip(entries[1::2], entries[2::2], strict=True)}


def _help(text: str, default: Any) -> str:
    """Return the help of a flag: its text, and its default unless that is None, (), missing or a dataclass."""
    shown = default is not None and not dataclasses.is_dataclass(default) and default not in ((), dataclasses.MISSING)
    # argparse expands percent signs.
    return (text + (f" (default: {default})" if shown else "")).strip().replace("%", "%%")


def _reader(hint: Any, nargs: str | None = None, words: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the keyword arguments of add_argument for values of type `hint`. None in a union is ignored, since it is
    the value of an omitted flag.

    nargs: how many words a flag for a list takes; None: a flag for texts is repeated for each, one for integers takes
    them in one word. words: words that stand for integers.
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
        several = {} if nargs is None else {"action": Several, "nargs": nargs}
        return {**several, "type": _int_list, "metavar": "INT,INT,..."}
    if origin in (Mapping, dict) and arguments[0] is int:
        return {"type": _json(lambda found: {int(key): value for key, value in found.items()}), "metavar": "JSON"}
    return {"type": _json(lambda found: found), "metavar": "JSON"}


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union of types, or a tuple with the type itself."""
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


def _json(convert: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Return a parser of JSON texts, which applies `convert` to the decoded value.

    The parser raises argparse.ArgumentTypeError if the text is not JSON or `convert` raises ValueError or
    AttributeError.
    """

    def read(text: str) -> Any:
        """Return the converted JSON value of a text. Raises argparse.ArgumentTypeError for any other text."""
        try:
            return convert(json.loads(text))
        except (ValueError, AttributeError, RecursionError):
            raise argparse.ArgumentTypeError(f"{text!r} is not the JSON expected here") from None

    return read
