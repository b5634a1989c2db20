"""Parser of tool calls of Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or from v11
[TOOL_CALLS]name{...}.

In the newer form every call has its own marker, and its name may be followed by [CALL_ID] with the model's id, which is
dropped, and [ARGS]. Markers are special tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from jaxengine.parsers.scan.call_grammar import CallGrammar, literal
from jaxengine.parsers.scan.call_start import listed_starts
from jaxengine.parsers.scan.events import Event
from jaxengine.parsers.scan.json_call import JsonCall, Progress
from jaxengine.parsers.scan.json_call_list import JsonCallList
from jaxengine.parsers.scan.json_scan import JsonScanner
from jaxengine.parsers.scan.markers import Marker
from jaxengine.parsers.scan.states import StateParser

_BEGIN, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_CALL = partial(JsonCall, names=("arguments", "parameters"), bare=True)
_MAX_NAME = 256


def grammar(calls: CallGrammar) -> Iterator[str]:
    """Yield Lark rules for calls, with the top rule `calls`: the newer form if the vocabulary has a token [ARGS], else
    the list.

    Raises the errors of calls.json.
    """
    begin = calls.word(_BEGIN)
    yield from calls.arguments()
    if calls.token_id(_ARGS) is None:
        yield f'calls: {begin} "[" {calls.listed("call", ", ")} "]"'
        yield f"call: {calls.objects('arguments')}"
        return
    own_id = f"({calls.word(_CALL_ID)} /[A-Za-z0-9]{{9}}/)?"
    yield f"calls: {'call+' if calls.many else 'call'}"
    named = [f"{literal(name)} {own_id} {calls.word(_ARGS)} arguments_{at}" for at, name in enumerate(calls.functions)]
    yield f"call: {begin} ({' | '.join(named)})"


def starts(name: str) -> Iterator[tuple[str, ...]]:
    """Yield the beginnings of calls of the function `name` in both forms, as word sequences for CallStarts.words."""
    yield from ((_BEGIN, name, after) for after in ("{", _ARGS, _CALL_ID))
    yield from listed_starts((_BEGIN,), name)


class MistralToolParser(StateParser):
    """Parser of both forms of calls after [TOOL_CALLS]."""

    def __init__(self, new_id: Iterable[str]):
        super().__init__(new_id)
        self._begin = Marker(_BEGIN)
        self._word: list[str] = []
        self._calls = JsonCallList(self._out, _CALL)
        self._scanner = JsonScanner()
        self._state = self._content

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back: content, or the rest of a call's arguments."""
        if self._state == self._content:
            self._out.content(self._begin.take())
        elif self._state in (self._after_marker, self._name):
            self._out.content(_BEGIN + "".join(self._word))
        elif self._state == self._list:
            self._release_list()
        elif self._state == self._broken:
            self._out.arguments(self._begin.take())
        return self._out.finish()

    def _content(self, text: str, at: int) -> int:
        """Process content, up to the marker. Reads `text` from `at`; returns the index after what it read."""
        plain, at, found = self._begin.read(text, at)
        self._out.content(plain)
        if found:
            self._word, self._state = [], self._after_marker
        return at

    def _after_marker(self, text: str, at: int) -> int:
        """Process text after the marker, where a bracket begins the older form and other text a name; neither is read
        here. Reads `text` from `at`; returns the position after the white space read.
        """
        if text[at].isspace():
            self._word.append(text[at])
            return at + 1
        self._calls = JsonCallList(self._out, _CALL)
        self._state = self._list if text[at] == "[" else self._name
        return at

    def _name(self, text: str, at: int) -> int:
        """Process a character of the name of a call in the newer form, up to the brace that opens its arguments. An id
        of the call and [ARGS], which may follow the name, are dropped.

        Reads `text` at the position `at`; returns the new position, unchanged if the next state is to read the
        character. Text that turns out to be no name (a line break, more than _MAX_NAME characters) becomes content.
        """
        char = text[at]
        word = "".join(self._word) if char == "{" else ""
        name = word.strip().removesuffix(_ARGS).partition(_CALL_ID)[0].strip()
        if name and name.isprintable() and " " not in name:
            self._out.start(name)
            self._scanner, self._state = JsonScanner(), self._arguments
            return at
        if char in "{\n" or len(self._word) > _MAX_NAME:
            self._out.content(_BEGIN + "".join(self._word))
            self._state = self._content
            return at
        self._word.append(char)
        return at + 1

    def _arguments(self, text: str, at: int) -> int:
        """Emit the arguments of a call in the newer form as they arrive. At the first character that is not valid JSON
        the call goes on in `_broken`. Reads `text` from `at`; returns the index after what it read.
        """
        end, right = self._scanner.take(text, at)
        self._out.arguments(text[at:end])
        if not right:
            self._state = self._broken
        elif self._scanner.done:
            self._state = self._content
        return end

    def _list(self, text: str, at: int) -> int:
        """Process the list of calls of the older form. Where it turns out to be none, text that belongs to no call
        becomes content; arguments that are not valid JSON go on in `_broken`. Reads `text` from `at`; returns the index
        after what it read.
        """
        at, progress = self._calls.read(text, at)
        if progress is Progress.BROKEN:
            self._state = self._broken
        elif progress is not Progress.MORE:
            if progress is Progress.REJECTED:
                self._release_list()
            self._state = self._content
        return at

    def _broken(self, text: str, at: int) -> int:
        """Process arguments that are not valid JSON: they continue until the next marker. Reads `text` from `at`;
        returns the index after what it read.
        """
        plain, at, found = self._begin.read(text, at)
        self._out.arguments(plain)
        if found:
            self._word, self._state = [], self._after_marker
        return at

    def _release_list(self) -> None:
        """Write [TOOL_CALLS] and the text that the list holds and that belongs to no call as content; nothing if the
        list holds no such text.
        """
        if self._calls.held:
            self._out.content(_BEGIN + "".join(self._word) + self._calls.held)
