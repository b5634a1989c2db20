"""Incremental reader of a JSON object {"name": ..., "arguments": {...}}, the usual form of a tool call.

Once the name is known and the arguments have begun it is a call, and all characters of the arguments are emitted as
they are; a string of arguments is emitted without its quotes when complete, and null means none. Before that it may
still turn out to be something else, and its text is held.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from jaxengine.parsers.scan.events import Collector
from jaxengine.parsers.scan.json_scan import JsonScanner


class Progress(Enum):
    """State of a reader of calls after a piece of text.

    MORE: the object goes on. DONE: a call, and its object is closed. CUT: a call with complete arguments, whose object
    is invalid after them. BROKEN: a call whose arguments are invalid. REJECTED: not a call; `held` is its text.
    """

    MORE = auto()
    DONE = auto()
    CUT = auto()
    BROKEN = auto()
    REJECTED = auto()


class JsonCall:
    """Reader of one object, from its opening brace on.

    Args:
      names: keys that may hold the arguments.
      bare: accept an object with a name and otherwise only scalars as a call without arguments.
      name_key: the key that holds the function's name.
    """

    def __init__(self, out: Collector, names: tuple[str, ...], bare: bool = False, name_key: str = "name"):
        self._out = out
        self._names = names
        self._name_key = name_key
        self._bare = bare
        self._scanner = JsonScanner()
        self._text: list[str] = []
        self._literal: list[str] = []
        self._key: str | None = None
        self._name: str | None = None
        self._arguments: list[str] = []
        self._in_arguments = False
        self._has_arguments = False
        self._in_null = False
        self._holds_more = False
        self._started = False

    @property
    def held(self) -> str:
        """Text read so far, while it is not known to be a call; "" afterwards."""
        return "" if self._started else "".join(self._text)

    def read(self, text: str, at: int) -> tuple[int, Progress]:
        """Read `text` from the position `at`; return the position where it stopped, and the progress.

        Sends the call, once it is one, and its arguments to `out`. A character with which it becomes CUT, BROKEN or
        REJECTED is not read, and the position is before it.
        """
        begin = at
        progress = Progress.MORE
        while at < len(text) and progress is Progress.MORE:
            if self._in_arguments and (end := self._scanner.skip(text, at)) > at:
                self._arguments.append(text[at:end])
                at = end
                continue
            progress = self._read(text[at])
            at += progress in (Progress.MORE, Progress.DONE)
        if not self._started:
            self._text.append(text[begin:at])
        self._send()
        return at, progress

    def _read(self, char: str) -> Progress:
        """Read one character of the object; return the progress after it. Name and arguments are collected for `_send`:
        an object of arguments as written, null as {}, a string as its text, and with `bare` {} at the end of an object
        without arguments.
        """
        scanner = self._scanner
        depth, in_string, in_key, begins_value = (
            scanner.depth,
            scanner.in_string,
            scanner.in_key,
            scanner.expects_value,
        )
        if not scanner.read(char):
            return self._wrong()
        if self._in_null and not scanner.in_scalar:
            self._arguments, self._has_arguments, self._in_null = ["{}"], True, False
        if self._in_arguments:
            self._arguments.append(char)
            if scanner.depth == 1:
                self._in_arguments, self._has_arguments = False, True
        elif depth == 1:
            if in_string or scanner.in_string:
                self._literal.append(char)
                if not scanner.in_string and not self._end_string(in_key):
                    return Progress.REJECTED
            elif begins_value and not char.isspace() and not self._begin_value(char):
                return Progress.REJECTED
        if not scanner.done:
            return Progress.MORE
        if self._bare and self._name is not None and not (self._has_arguments or self._holds_more):
            self._arguments, self._has_arguments = ["{}"], True
        return Progress.DONE if self.is_call else Progress.REJECTED

    @property
    def is_call(self) -> bool:
        """Whether the name is known and the arguments have begun."""
        return self._name is not None and (self._in_arguments or self._has_arguments)

    def _wrong(self) -> Progress:
        """Return the progress after an invalid character: REJECTED if the object is not known to be a call, BROKEN
        within its arguments, else CUT.
        """
        if not self.is_call:
            return Progress.REJECTED
        return Progress.BROKEN if self._in_arguments else Progress.CUT

    def _end_string(self, is_key: bool) -> bool:
        """Record a key (`is_key`) or string value at the top level of the object, which has just ended, as key, name or
        arguments; a blank string of arguments counts as {}.

        Returns False if the object cannot be a call: invalid JSON, an empty or unprintable name, unpaired surrogates in
        the arguments.
        """
        try:
            value = json.loads("".join(self._literal), strict=False)
        except ValueError:
            return False
        self._literal = []
        if is_key:
            self._key = value
        elif self._key == self._name_key and self._name is None:
            self._name = value
            return bool(value) and value.isprintable()  # half a surrogate pair is not printable
        elif self._key in self._names and not self._has_arguments:
            self._arguments, self._has_arguments = [value if value.strip() else "{}"], True
            return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
        return True

    def _begin_value(self, char: str) -> bool:
        """Record the beginning `char` of a value, other than a string, at the top level of the object: whether it is
        the first arguments (an object or null), or another array or object.

        Returns False if the object cannot be a call: the name is not a string, or the first arguments are neither an
        object nor null.
        """
        if self._key in self._names and not self._has_arguments:
            self._in_null = char == "n"
            self._in_arguments = char == "{"
            if self._in_arguments:
                self._arguments.append(char)
            return self._in_arguments or self._in_null
        self._holds_more |= char in "{["
        return self._key != self._name_key

    def _send(self) -> None:
        """Send the call's start (once) and the arguments since the last call of this method to `out`; nothing while it
        is not known to be a call.
        """
        if not self.is_call:
            return
        if not self._started:
            assert self._name is not None
            self._out.start(self._name)
            self._started, self._text = True, []
        self._out.arguments("".join(self._arguments))
        self._arguments = []


class KeyedCall(JsonCall):
    """Reader of one object {name: {...}}, whose first key is the function's name and its value the arguments."""

    def __init__(self, out: Collector):
        super().__init__(out, ())

    def _end_string(self, is_key: bool) -> bool:
        """Record the first key (`is_key`) of the object as the function's name. Strings after the arguments are
        ignored.

        Returns False if the object cannot be a call: an empty or unprintable name, or a string before the arguments.
        """
        text, self._literal = "".join(self._literal), []
        if self._has_arguments:
            return True
        try:
            self._name = json.loads(text, strict=False) if is_key else ""
        except ValueError:
            return False
        return bool(self._name) and self._name.isprintable()

    def _begin_value(self, char: str) -> bool:
        """Record the beginning `char` of a value, other than a string, at the top level of the object. The first value
        is the arguments; later ones are ignored.

        Returns False if the arguments are no object.
        """
        if self._has_arguments:
            return True
        self._in_arguments = char == "{"
        if self._in_arguments:
            self._arguments.append(char)
        return self._in_arguments
