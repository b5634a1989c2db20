"""Reads JSON (RFC 8259) written by a model, which may be truncated: the complete part of the value is returned.

Line breaks within strings are accepted, as models write them.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

# A string up to its end or the truncation (possessive, for linear time), or a structural character.
_TOKEN = re.compile(r'"(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*+("?)|[{}\[\],]')
_CLOSING = {"{": "}", "[": "]"}


def read_cut_json(text: str) -> Any:
    """Return the JSON value in `text`. If the text is truncated, return the value without a last piece that is
    meaningless on its own, such as a key without a value.

    Raises ValueError for invalid JSON, numbers that are not finite and unpaired surrogates; RecursionError for values
    nested too deeply.
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
    """Return two completions of truncated JSON: the whole text with all open strings and brackets closed, and the text
    before its last comma or after its last opening bracket with the brackets closed that are open there. The first is
    valid if nothing is cut but a string or brackets; the second is for a last element that is cut elsewhere. Returns ()
    if no bracket is open, or if brackets do not match.
    """
    closing: list[str] = []
    end, quote = len(text), ""
    whole, num_open = 0, 0
    for token in _TOKEN.finditer(text):
        first = token.group()[0]
        if first == '"' and not token.group(1):  # an unfinished string; at most half an escape follows the match
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
    """Raise ValueError for the names NaN, Infinity and -Infinity, which json.loads passes to this function."""
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    """Return the number in `digits` as a float. Raises ValueError if it is too large for a float."""
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large for a number")
    return number
