"""Incremental converter of a Python literal to JSON: strings, numbers, True, False, None, lists and dicts; tuples and
sets become lists.

Adjacent strings are concatenated, line breaks within strings are accepted, and so are JSON's true, false and null.
Nothing is evaluated.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import Enum, auto

_CLOSING = {"{": "}", "[": "]", "(": ")"}
_NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "a": "\\u0007", "v": "\\u000b"}
_ESCAPES |= {"\\": "\\\\", '"': '\\"', "'": "'", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class Reading(Enum):
    """Result of PythonScanner.read for one character of a value.

    MORE: the value goes on. DONE: it is complete with this character. BEFORE: it was complete before this character,
    which belongs to what follows. WRONG: it is no literal, or one without a JSON counterpart.
    """

    MORE = auto()
    DONE = auto()
    BEFORE = auto()
    WRONG = auto()


class _State(Enum):
    """State of the scan: the kind of token that the next character may begin, or that it is part of."""

    VALUE = auto()
    FIRST = auto()  # an item, a key, or the end of what was opened
    LATER = auto()  # the same after a comma
    COLON = auto()
    NEXT = auto()
    STRING = auto()
    ESCAPE = auto()
    NUMBER = auto()  # digits of an escape
    SCALAR = auto()
    AFTER_STRING = auto()  # another string may continue it


@dataclass(slots=True)
class _Open:
    """An open bracket.

    Attributes:
      bracket: its character.
      place: index in PythonScanner.json of the piece written for it.
      has_comma: whether a comma has come in it.
      has_keys: whether a brace holds keys; None until that is known.
    """

    bracket: str
    place: int
    has_comma: bool = False
    has_keys: bool | None = None


class PythonScanner:
    """Converter of one value.

    Attributes:
      json: pieces of the value as JSON.
    """

    def __init__(self) -> None:
        self.json: list[str] = []
        self._state = _State.VALUE
        self._open: list[_Open] = []
        self._is_key = False
        self._was_string = False
        self._quote = ""
        self._escape = ""
        self._scalar: list[str] = []

    def read(self, char: str) -> Reading:
        """Read the next character `char`, and append to `json`. Return whether the value continues, is complete, or is
        invalid.

        The end of a name, a number or a string shows only with the character after it (BEFORE), which is not consumed.
        Adjacent strings are joined.
        After a result other than MORE the scanner must not be used again.
        """
        match self._state:
            case _State.STRING:
                return self._string(char)
            case _State.ESCAPE:
                return self._begin_escape(char)
            case _State.NUMBER:
                return self._number(char)
            case _State.AFTER_STRING:
                if char.isspace():
                    return Reading.MORE
                if char in "\"'":
                    self.json.pop()
                    self._state, self._quote = _State.STRING, char
                    return Reading.MORE
                if self._end_value(was_string=True) is Reading.DONE:
                    return Reading.BEFORE
            case _State.SCALAR:
                if char.isalnum() or char in "_.+-":
                    self._scalar.append(char)
                    return Reading.MORE
                value = _scalar_json("".join(self._scalar))
                if value is None:
                    return Reading.WRONG
                self.json.append(value)
                if self._end_value() is Reading.DONE:
                    return Reading.BEFORE
        return Reading.MORE if char.isspace() else self._structure(char)

    def _structure(self, char: str) -> Reading:
        """Read a character that is neither white space nor within a string or scalar: a bracket, comma, colon, or the
        beginning of a value. Returns WRONG if it is not allowed there, DONE for the outermost closing bracket, else
        MORE.
        """
        state = self._state
        inner = self._open[-1] if self._open else None
        if inner is None or state is _State.VALUE:
            return self._begin_value(char)
        if char == _CLOSING[inner.bracket] and state in (_State.FIRST, _State.LATER, _State.NEXT):
            return self._close(inner, is_empty=state is _State.FIRST)
        if state is _State.NEXT and char == ",":
            inner.has_comma, self._state = True, _State.LATER
            inner.has_keys = bool(inner.has_keys)
        elif char == ":" and (state is _State.COLON or self._ends_first_key(inner)):
            inner.has_keys = True
            self.json.append(": ")
            self._state = _State.VALUE
        elif state in (_State.FIRST, _State.LATER):
            if state is _State.LATER:
                self.json.append(", ")
            self._is_key = bool(inner.has_keys)
            return self._begin_value(char)
        else:
            return Reading.WRONG
        return Reading.MORE

    def _ends_first_key(self, inner: _Open) -> bool:
        """Return whether a colon at this point would end the first item in the brace `inner`, which makes that item a
        key.
        """
        return inner.bracket == "{" and inner.has_keys is None and self._state is _State.NEXT and self._was_string

    def _begin_value(self, char: str) -> Reading:
        """Read the first character of a value: a quote, a bracket, or part of a scalar. Return WRONG for a key that is
        no string, else MORE.
        """
        if char in "\"'":
            self._state, self._quote = _State.STRING, char
            self.json.append('"')
        elif self._is_key:
            return Reading.WRONG
        elif char in _CLOSING:
            self._open.append(_Open(char, len(self.json)))
            self._state = _State.FIRST
            self.json.append("{" if char == "{" else "[")
        else:
            self._state, self._scalar = _State.SCALAR, [char]
        return Reading.MORE

    def _close(self, inner: _Open, is_empty: bool) -> Reading:
        """Close the innermost bracket `inner`, and correct its opening piece in `json`: a list, also for a tuple or a
        set, a dict, or parentheses around a value, which are dropped. is_empty: the bracket contains nothing. Returns
        DONE for the outermost bracket, else MORE.
        """
        self._open.pop()
        if inner.bracket == "(" and not inner.has_comma and not is_empty:
            self.json[inner.place] = ""  # parentheses around a value
        elif inner.bracket == "{" and (inner.has_keys or is_empty):
            self.json.append("}")
        else:
            self.json[inner.place] = "["
            self.json.append("]")
        return self._end_value()

    def _end_value(self, was_string: bool = False) -> Reading:
        """End a value (was_string: a string). Return DONE outside of brackets, else MORE."""
        self._state = _State.COLON if self._is_key else _State.NEXT
        self._is_key, self._was_string = False, was_string
        return Reading.MORE if self._open else Reading.DONE

    def _string(self, char: str) -> Reading:
        """Read a character within a string: its end, a backslash, or a character that is appended to `json`, escaped if
        necessary. Returns MORE.
        """
        if char == self._quote:
            self.json.append('"')
            self._state = _State.AFTER_STRING
        elif char == "\\":
            self._state = _State.ESCAPE
        else:
            self.json.append(json.dumps(char, ensure_ascii=False)[1:-1] if char < " " or char == '"' else char)
        return Reading.MORE

    def _begin_escape(self, char: str) -> Reading:
        """Read the character after a backslash: a letter, whose JSON escape is appended, or the first character of a
        numeric escape. An escape that Python lacks keeps its backslash. Returns MORE.
        """
        self._state = _State.STRING
        if char in _HEX_DIGITS or char in "01234567":
            self._state, self._escape = _State.NUMBER, char
        else:
            self.json.append(
                _ESCAPES[char] if char in _ESCAPES else "\\\\" + json.dumps(char, ensure_ascii=False)[1:-1]
            )
        return Reading.MORE

    def _number(self, char: str) -> Reading:
        """Read a character of a numeric escape, and append the escaped character when it is complete. An octal escape
        ends after three digits or before another character, which is then read as part of the string. Return WRONG for
        an invalid hexadecimal digit or a code beyond Unicode, else MORE.
        """
        kind, digits = self._escape[0], self._escape[1:]
        if kind not in _HEX_DIGITS:
            if char in "01234567" and len(self._escape) < 3:
                self._escape += char
                return Reading.MORE
            self.json.append(_character(int(self._escape, 8)))
            self._state = _State.STRING
            return self._string(char)
        if char not in "0123456789abcdefABCDEF":
            return Reading.WRONG
        self._escape += char
        if len(digits) + 1 == _HEX_DIGITS[kind]:
            code = int(self._escape[1:], 16)
            if code > 0x10FFFF:
                return Reading.WRONG
            self.json.append(_character(code))
            self._state = _State.STRING
        return Reading.MORE


def _character(code: int) -> str:
    """Return the character of this code point for use within a JSON string; an unpaired surrogate is escaped."""
    return json.dumps(chr(code), ensure_ascii=0xD800 <= code <= 0xDFFF)[1:-1]


def _scalar_json(text: str) -> str | None:
    """Return True, False, None (or true, false, null) or a number in Python's notation as JSON; None for other texts,
    infinities and NaN.
    """
    if text in _NAMES:
        return _NAMES[text]
    for base in (0, 10):  # in base 10 digits may follow a zero: 07
        try:
            return str(int(text, base))
        except ValueError:
            pass
    try:
        number = float(text)
    except ValueError:
        return None
    return json.dumps(number) if math.isfinite(number) else None
