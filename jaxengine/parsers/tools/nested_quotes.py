"""Repair of calls in Python's notation with a string that holds its own quotation mark unescaped.

  bash(command='sed -n '3,4p' a.py')

Models write shell commands like this. The first mark after the opening one cannot end the string, because what follows
it is no Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_OPENING = re.compile("['\"]")
# What may follow a string: punctuation of Python, or another string that continues it.
_AFTER_STRING = re.compile(r"\s*[,)\]}:'\"]")
_MARK = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in "'\""}
# More marks than this after the opening one are not tried.
_MAX_MARKS = 64


def requoted(text: str) -> Iterator[str]:
    """Yield the ways to read the first string of `text` that its next quotation mark cannot end: for each later mark
    that could end it, the text with the marks in between escaped. Nothing if the next mark could end each string,
    or if more than _MAX_MARKS marks follow.
    """
    at = 0
    while (opening := _OPENING.search(text, at)) is not None:
        begin, quote = opening.end(), opening.group()
        marks = [found.start() for found in _MARK[quote].finditer(text, begin) if found.group() == quote]
        if not marks:
            return
        at = marks[0] + 1
        if _AFTER_STRING.match(text, at) is None:
            if len(marks) <= _MAX_MARKS:
                yield from _readings(text, begin, marks)
            return


def _readings(text: str, begin: int, marks: list[int]) -> Iterator[str]:
    """Yield `text` with a string from `begin` to each of `marks` but the first that may end it, where the marks before
    are escaped. marks: the positions of its unescaped quotation marks.
    """
    pieces = [text[begin : marks[0]]]
    for before, mark in zip(marks, marks[1:], strict=False):
        pieces.append(f"\\{text[before:mark]}")
        if _AFTER_STRING.match(text, mark + 1):
            yield text[:begin] + "".join(pieces) + text[mark:]
