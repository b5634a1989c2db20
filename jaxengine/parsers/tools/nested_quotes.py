"""Repair of calls in Python's notation with a string that holds its own quotation mark unescaped.

  bash(command='sed -n '3,4p' a.py')

The first mark after the opening one cannot end the string, because what follows it is no Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_OPENING = re.compile("['\"]")
# What may follow a string: punctuation of Python, or another string that continues it.
_AFTER_STRING = re.compile(r"\s*[,)\]}:'\"]")
_MARK = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in "'\""}
# More readings than this, or more characters of all of them, are not tried: each is parsed as calls.
_MAX_READINGS, _MAX_CHARS = 32, 1 << 17


def requoted(text: str) -> Iterator[str]:
    """Yield the ways to read the first string of `text` that its next quotation mark cannot end: for each later mark
    that could end it, the text with the marks in between escaped. Nothing if the next mark could end each string,
    or if there are more than _MAX_READINGS ways or they have more than _MAX_CHARS characters together. Takes linear
    time.
    """
    at = 0
    while (opening := _OPENING.search(text, at)) is not None:
        begin, quote = opening.end(), opening.group()
        marks = (found.start() for found in _MARK[quote].finditer(text, begin) if found.group() == quote)
        if (first := next(marks, None)) is None:
            return
        at = first + 1
        if _AFTER_STRING.match(text, at) is None:
            yield from _readings(text, begin, [first, *marks])
            return


def _readings(text: str, begin: int, marks: list[int]) -> Iterator[str]:
    """Yield `text` with a string from `begin` to each of `marks` but the first that may end it, where the marks before
    are escaped; nothing beyond the limits of `requoted`. marks: the positions of its unescaped quotation marks.
    """
    ends = {mark for mark in marks[1:] if _AFTER_STRING.match(text, mark + 1)}
    if len(ends) > _MAX_READINGS or len(ends) * len(text) > _MAX_CHARS:
        return
    pieces = [text[begin : marks[0]]]
    for before, mark in zip(marks, marks[1:], strict=False):
        pieces.append(f"\\{text[before:mark]}")
        if mark in ends:
            yield text[:begin] + "".join(pieces) + text[mark:]
