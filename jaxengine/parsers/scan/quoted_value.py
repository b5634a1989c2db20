"""Incremental converter of an object or array in Gemma's notation to JSON.

  {city:<|"|>Paris<|"|>,days:[1,2.5],rain:true}

Strings stand between two quotation words. Names of members, numbers, true, false and null stand without them; any other
text without them is a string. JSON's own strings are accepted, too.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from jaxengine.parsers.scan.markers import Marker
from jaxengine.parsers.scan.typed_text import as_json

_CLOSING = {"{": "}", "[": "]"}
_SCALARS = frozenset(("boolean", "integer", "number", "null"))


class _State(Enum):
    """Part of the innermost bracket that the next character belongs to."""

    KEY = auto()
    VALUE = auto()
    NEXT = auto()  # a comma or the end of the bracket; other text is ignored


class QuotedValue:
    """Converter of one object or array, from its opening bracket on. quote: the quotation word.

    Attributes:
      json: pieces of the JSON of what has been read; members whose value has not begun are missing.
    """

    def __init__(self, quote: str):
        self.json: list[str] = []
        self._quote, self._string_end = quote, Marker(quote)
        self._open: list[str] = []
        self._num_items = [0]  # of each open bracket, after one for the value itself
        self._state = _State.VALUE
        # The name of the member whose value is next, and a quoted text where a name is expected.
        self._key: str | None = None
        self._name: str | None = None
        # Text without quotation from its first character that is no white space; its length.
        self._plain: list[str] = []
        # Text of a string between quotation words; None outside of one.
        self._string: list[str] | None = None
        self._in_json_string = self._is_escaped = False

    def read(self, text: str, at: int) -> tuple[int, bool]:
        """Read `text` from the position `at` to the end of the value or of the text.

        Returns (index after the last character read, whether the value is complete).
        """
        while at < len(text):
            if self._string is not None:
                plain, at, word = self._string_end.read(text, at)
                self._string.append(plain)
                if word:
                    self._end_string("".join(self._string))
                    self._string = None
                continue
            at += 1
            if self._in_json_string:
                self._json_string(text[at - 1])
            else:
                self._structure(text[at - 1])
            if not self._open and self.json:
                return at, True
        return at, False

    def _structure(self, char: str) -> None:
        """Read the character `char` outside of strings: a bracket, a comma, the colon after a name, or part of a name
        or bare value. What it begins or ends is appended to `json`. Text after a complete value is ignored up to a
        comma or the closing bracket.
        """
        closes = bool(self._open) and char == _CLOSING[self._open[-1]]
        if closes or char == ",":
            if self._state is _State.VALUE:
                self._end_plain()
            self._plain, self._name, self._key = [], None, None
            if closes:
                self._close(char)
            else:
                self._state = _State.KEY if self._open[-1:] == ["{"] else _State.VALUE
        elif self._state is _State.NEXT:
            return
        elif char == ":" and self._state is _State.KEY:
            self._key = "".join(self._plain).rstrip() if self._name is None else self._name
            self._plain, self._name, self._state = [], None, _State.VALUE
        elif char in _CLOSING and self._state is _State.VALUE and not self._plain:
            self._begin_value(char)
            self._open.append(char)
            self._num_items.append(0)
            self._state = _State.KEY if char == "{" else _State.VALUE
        elif self._plain or not char.isspace():
            self._in_json_string = char == '"' and not self._plain
            self._plain.append(char)
            if len(self._plain) == len(self._quote) and "".join(self._plain) == self._quote:
                self._plain, self._string = [], []

    def _json_string(self, char: str) -> None:
        """Read a character of a string in JSON's notation, after its opening quotation mark. At its end, record the
        string; one that is not valid JSON is kept as written, with its quotes.
        """
        self._plain.append(char)
        if char == '"' and not self._is_escaped:
            written, self._plain, self._in_json_string = "".join(self._plain), [], False
            try:
                self._end_string(json.loads(written, strict=False))
            except ValueError:
                self._end_string(written)
        self._is_escaped = char == "\\" and not self._is_escaped

    def _end_string(self, text: str) -> None:
        """End a quoted string: record it as a member's name, or append it to `json` as a value."""
        if self._state is _State.KEY:
            self._name = text
        elif self._state is _State.VALUE:
            self._begin_value(json.dumps(text, ensure_ascii=False))
            self._state = _State.NEXT

    def _end_plain(self) -> None:
        """End a value without quotation words, and append it to `json` as a number, true, false, null or else a string.
        An empty text is a value only after a member's name.
        """
        text = "".join(self._plain).rstrip()
        if text or self._key is not None:
            self._begin_value(as_json(text, _SCALARS))

    def _begin_value(self, written: str) -> None:
        """Append `written`, a value or its beginning, to `json`, preceded by a comma unless it is the first item, and
        by its member's name if it has one.
        """
        name = "" if self._key is None else f"{json.dumps(self._key, ensure_ascii=False)}: "
        self.json.append(f"{', ' if self._num_items[-1] else ''}{name}{written}")
        self._num_items[-1] += 1
        self._key = None

    def _close(self, char: str) -> None:
        """Append the closing bracket `char` to `json`, and leave the innermost bracket."""
        self.json.append(char)
        self._open.pop()
        self._num_items.pop()
        self._state = _State.NEXT
