"""Incremental scanner of the structure of a JSON value (RFC 8259), which does not build the value.

Control characters within strings are accepted, as models write line breaks there.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_SPACE = " \t\r\n"
_CLOSING = {"{": "}", "[": "]"}
_ESCAPED = '"\\/bfnrtu'
_PLAIN = re.compile(r'[^"\\]+')
_HEX = "0123456789abcdefABCDEF"


class _State(Enum):
    """State of the scan: the kind of token that the next character may begin, or that it is part of."""

    VALUE = auto()
    FIRST_ITEM = auto()  # a value or the end of the array
    FIRST_KEY = auto()  # a key or the end of the object
    KEY = auto()
    COLON = auto()
    NEXT = auto()  # a comma or the end of what is open
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()
    END = auto()


class JsonScanner:
    """Scanner of one value.

    Attributes:
      depth: number of open arrays and objects.
      in_string, in_key: inside a string, from its opening to before its closing quote; whether that is a key.
      expects_value: the next character other than white space begins a value.
      done: the value is complete. Never true for a top-level number or literal, whose end is not visible.
    """

    def __init__(self) -> None:
        self._state = _State.VALUE
        self._open: list[str] = []
        self._hex_left = 0
        self._scalar: list[str] = []
        self.in_key = False

    @property
    def depth(self) -> int:
        """Number of open arrays and objects."""
        return len(self._open)

    @property
    def in_string(self) -> bool:
        """Whether the position is inside a string."""
        return self._state in (_State.STRING, _State.ESCAPE, _State.HEX)

    @property
    def in_scalar(self) -> bool:
        """Whether the position is inside a number or literal, whose end only shows with the next character."""
        return self._state is _State.SCALAR

    @property
    def expects_value(self) -> bool:
        """Whether the next character other than white space must begin a value; False where a bracket may close
        instead.
        """
        return self._state is _State.VALUE

    @property
    def done(self) -> bool:
        """Whether the value is complete."""
        return self._state is _State.END

    def skip(self, text: str, at: int) -> int:
        """Return the position of the next quote or backslash of `text` from `at` on, or its end, if the scanner is
        inside a string (between escapes); else `at`. The state does not change.
        """
        if self._state is not _State.STRING:
            return at
        plain = _PLAIN.match(text, at)
        return at if plain is None else plain.end()

    def take(self, text: str, at: int) -> tuple[int, bool]:
        """Read `text` from the index `at` until the value is complete or the text ends.

        Returns (index after the last character read, whether all characters are allowed there). False: the character at
        the index is wrong, and the scanner must not be used again.
        """
        while at < len(text) and not self.done:
            if (end := self.skip(text, at)) > at:
                at = end
            elif self.read(text[at]):
                at += 1
            else:
                return at, False
        return at, True

    def read(self, char: str) -> bool:
        """Read the next character `char`, and update the state; return False if it is not allowed there, after which
        the scanner must not be used again. A number or literal is checked when it ends.
        """
        state = self._state
        if state is _State.STRING:
            if char == '"':
                self._state = _State.COLON if self.in_key else self._after_value()
                self.in_key = False
            elif char == "\\":
                self._state = _State.ESCAPE
            return True
        if state is _State.ESCAPE:
            self._state, self._hex_left = (_State.HEX, 4) if char == "u" else (_State.STRING, 0)
            return char in _ESCAPED
        if state is _State.HEX:
            self._hex_left -= 1
            if not self._hex_left:
                self._state = _State.STRING
            return char in _HEX
        if state is _State.SCALAR:
            if char not in ",]}" and char not in _SPACE:
                self._scalar.append(char)
                return True
            if not _is_scalar("".join(self._scalar)):
                return False
            state = self._state = self._after_value()
        return char in _SPACE or self._structure(state, char)

    def _structure(self, state: _State, char: str) -> bool:
        """Read the character `char`, which is neither white space nor within a string or scalar, in the state `state`;
        return False if it is not allowed there.
        """
        closes = bool(self._open) and char == _CLOSING[self._open[-1]]
        if state in (_State.KEY, _State.FIRST_KEY) and char == '"':
            self._state, self.in_key = _State.STRING, True
        elif state is _State.COLON and char == ":":
            self._state = _State.VALUE
        elif state is _State.NEXT and char == ",":
            self._state = _State.KEY if self._open[-1] == "{" else _State.VALUE
        elif closes and state in (_State.NEXT, _State.FIRST_KEY, _State.FIRST_ITEM):
            self._open.pop()
            self._state = self._after_value()
        elif state in (_State.VALUE, _State.FIRST_ITEM):
            return self._begin_value(char)
        else:
            return False
        return True

    def _begin_value(self, char: str) -> bool:
        """Read the first character of a value, and enter its state; return False if no value begins with it."""
        if char in _CLOSING:
            self._open.append(char)
            self._state = _State.FIRST_KEY if char == "{" else _State.FIRST_ITEM
        elif char == '"':
            self._state = _State.STRING
        elif char in "-0123456789tfn":
            self._state, self._scalar = _State.SCALAR, [char]
        else:
            return False
        return True

    def _after_value(self) -> _State:
        """Return the state after a value: NEXT within brackets, END outside."""
        return _State.NEXT if self._open else _State.END


def _is_scalar(text: str) -> bool:
    """Return whether a text is a JSON number, true, false or null."""
    try:
        json.loads(text, parse_int=len, parse_float=len, parse_constant=int)  # int("Infinity") raises ValueError
    except ValueError:
        return False
    return True
