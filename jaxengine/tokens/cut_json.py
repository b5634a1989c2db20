"""Reads JSON (RFC 8259) that a model wrote and that may end too early: as much of the value as came.

Line breaks inside strings are let pass: models write them. Knows nothing of messages.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

# A string up to its end, or up to where it is cut (possessive: linear whatever it holds); or what structures a value.
_TOKEN = re.compile(r'"(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*+("?)|[{}\[\],]')
_CLOSING = {"{": "}", "[": "]"}


def read_cut_json(text: str) -> Any:
    """The value; of one that is cut short, what is there without its last piece where that means nothing alone.

    Raises ValueError for what is neither, for numbers that are not finite and for halves of surrogate pairs;
    RecursionError for what is nested too deep to be read.
    """
    problem = None
    for candidate in (text, *_closed(text)):
        try:
            value = json.loads(candidate, strict=False, parse_constant=_refuse, parse_float=_finite)
        except ValueError as error:
            problem = problem or error
            continue
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    raise problem or ValueError


def _closed(text: str) -> tuple[str, ...]:
    """The text with all closed that is open at its end, and with all closed behind its last whole piece."""
    closing: list[str] = []
    end, quote = len(text), ""
    whole, num_open = 0, 0
    for token in _TOKEN.finditer(text):
        first = token.group()[0]
        if first == '"' and not token.group(1):  # nothing but half an escape comes behind it
            end, quote = token.end(), '"'
        elif first in _CLOSING:
            closing.append(_CLOSING[first])
            whole, num_open = token.end(), len(closing)
        elif first == ",":
            whole, num_open = token.start(), len(closing)
        elif first in "]}":
            if not closing or closing.pop() != first:
                return ()
    if not closing:
        return ()
    ends = "".join(reversed(closing))
    return text[:end] + quote + ends, text[:whole] + "".join(reversed(closing[:num_open]))


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large for a number")
    return number
