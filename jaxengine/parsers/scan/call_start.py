"""Beginnings of calls, by which a reasoning parser recognises a call in reasoning that the model did not end."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class CallStarts:
    """Texts with which tool calls begin, in the format of the tool parser that runs after a reasoning parser.

    Attributes:
      functions: names of the request's functions.
      words: beginnings of their calls, each a sequence of words between which white space may stand.
    """

    functions: Collection[str]
    words: tuple[tuple[str, ...], ...] = ()


def object_start(name: str) -> tuple[str, ...]:
    """Return the words with which {"name": name, ...} begins."""
    return ("{", '"name"', ":", json.dumps(name, ensure_ascii=False))


def listed_starts(begins: Collection[str], name: str) -> Iterator[tuple[str, ...]]:
    """Yield, for each text of `begins`, the word sequence (text, "[", words of `object_start(name)`): the beginning of
    a JSON list whose first object calls the function `name`.
    """
    for begin in begins:
        yield (begin, "[", *object_start(name))
