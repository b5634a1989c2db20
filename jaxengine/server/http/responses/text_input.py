"""Streaming reader of a custom tool call's text from its JSON arguments, {"input": text}, which arrive in pieces."""

from __future__ import annotations

import json
import re

from jaxengine.parsers.tools.forced import TEXT
from jaxengine.tokens.cut_json import read_cut_json

_HEAD = re.compile(rf'\s*\{{\s*"{TEXT}"\s*:\s*"')
_COMPACT_HEAD = f'{{"{TEXT}":"'
_MAX_HEAD = 1000
# Longest part of a string that ends between two characters: neither within an escape, nor between two surrogates. An
# escape without its four digits is text.
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_WHOLE = re.compile(
    rf'(?:[^"\\]|{_HIGH}{_LOW}|{_HIGH}(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])[0-9a-fA-F]{{4}})'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F])|\\[^u])*+"
)
_ESCAPE = re.compile(rf"{_HIGH}{_LOW}|\\u[0-9a-fA-F]{{4}}|\\[^u]", re.DOTALL)


class TextInput:
    """Reader of one call's text. Arguments of another form count as text as a whole."""

    def __init__(self) -> None:
        self._held = ""
        self._in_text = self._has_ended = False
        self._is_other = False

    def feed(self, arguments: str) -> str:
        """Read a piece of the arguments; return the part of the text that is certain now and was not before, "" for
        none. Anything after the end of the text is dropped.
        """
        if self._has_ended:
            return ""
        self._held += arguments
        if not self._in_text and not self._open():
            return ""
        whole = _WHOLE.match(self._held)
        assert whole is not None
        self._held = self._held[whole.end() :]
        self._has_ended = self._held.startswith('"')
        return _ESCAPE.sub(_unescaped, whole.group())

    def finish(self) -> str:
        """Return the rest of the text: "" if the text has begun, else the whole text, taken from arguments of another
        form (`_other`). A partial escape at the end of a truncated output is dropped.
        """
        return "" if self._in_text else _other(self._held)

    def _open(self) -> bool:
        """Remove the JSON before the text from the buffer, and return True, if the text begins in it. Return False if
        the text has not begun yet, and always once the arguments are known to be of another form.
        """
        if self._is_other:
            return False
        head = _HEAD.match(self._held)
        if head is not None:
            self._held, self._in_text = self._held[head.end() :], True
            return True
        is_long = len(self._held) > _MAX_HEAD
        self._is_other = is_long or not _COMPACT_HEAD.startswith("".join(self._held.split()))
        return False


def _unescaped(escape: re.Match[str]) -> str:
    """Return the character of a JSON escape. An invalid escape is returned unchanged; an unpaired surrogate becomes
    U+FFFD, as it has no UTF-8 encoding.
    """
    try:
        text = json.loads(f'"{escape.group()}"', strict=False)
    except ValueError:
        return escape.group()
    return "\ufffd" if "\ud800" <= text <= "\udfff" else text


def _other(arguments: str) -> str:
    """Return the text in arguments of another form: the value of the parameter TEXT, or of the only parameter; the
    content of a JSON string; "" for {}; otherwise the arguments unchanged. Arguments may be truncated.
    """
    try:
        value = read_cut_json(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, dict):
        named = value.get(TEXT, next(iter(value.values())) if len(value) == 1 else None)
        if isinstance(named, str):
            return named
        return arguments if value else ""
    return value if isinstance(value, str) else arguments
