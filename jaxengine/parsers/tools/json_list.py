"""Parser of tool calls in a JSON list after a word: <tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>.

The words are in the rows of the registry. Text may surround the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxengine.parsers.scan.call_grammar import CallGrammar
from jaxengine.parsers.scan.events import Event
from jaxengine.parsers.scan.json_call import Progress
from jaxengine.parsers.scan.json_call_list import JsonCallList
from jaxengine.parsers.scan.markers import Marker, Opening
from jaxengine.parsers.scan.states import StateParser

_KEYS = ("arguments", "parameters")


def grammar(calls: CallGrammar, begins: tuple[str, ...], end: str = "") -> Iterator[str]:
    """Yield Lark rules for a list of calls, with the top rule `calls`. begins: words before the list; end: the word
    after it, "" for none.

    Raises as calls.json does.
    """
    closing = calls.word(end) if end else ""
    yield f'calls: {calls.word(begins[0])} "[" {calls.listed("call", ", ")} "]" {closing}'
    yield f"call: {calls.objects('arguments')}"
    yield from calls.arguments()


class JsonListToolParser(StateParser):
    """Parser of a list of calls. begins: words before the list; end: the word after it, "" for none.

    bare: an output may begin with the list itself.
    """

    def __init__(self, new_id: Iterable[str], begins: tuple[str, ...], end: str = "", bare: bool = False):
        super().__init__(new_id)
        self._begin = Marker(*begins)
        self._end = end
        self._before = ""
        self._opening = Opening("[")
        self._calls = JsonCallList(self._out, _KEYS)
        self._closing = Opening(end)
        self._broken_end = Marker(end or begins[0])
        self._state = self._before_list if bare else self._content

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back: content, or the rest of a call's arguments."""
        if self._state == self._content:
            self._out.content(self._begin.take())
        elif self._state == self._before_list:
            self._out.content(self._before + self._opening.held)
        elif self._state == self._list:
            self._release()
        elif self._state == self._after_list:
            self._out.content(self._closing.held)
        else:
            self._out.arguments(self._broken_end.take())
        return self._out.finish()

    def _content(self, text: str, at: int) -> int:
        """State in content, up to a word before a list. Reads `text` from `at`; returns the position after what it
        read.
        """
        plain, at, word = self._begin.read(text, at)
        self._out.content(plain)
        if word:
            self._open(word)
        return at

    def _open(self, word: str) -> None:
        """Enter the state after a word before a list."""
        self._before, self._opening, self._state = word, Opening("["), self._before_list

    def _before_list(self, text: str, at: int) -> int:
        """State before the opening bracket; other text is content, with the word before it. Reads `text` from `at`;
        returns the position after what it read.
        """
        at, found = self._opening.read(text, at)
        if found:
            self._before += self._opening.held[:-1]
            self._calls = JsonCallList(self._out, _KEYS)
            self._calls.read("[", 0)
            self._state = self._list
        elif found is False:
            self._out.content(self._before + self._opening.held)
            self._state = self._content
        return at

    def _list(self, text: str, at: int) -> int:
        """State in the list of calls; a list without any becomes content. Reads `text` from `at`; returns the position
        after what it read.
        """
        at, progress = self._calls.read(text, at)
        if progress is Progress.BROKEN:
            self._state = self._broken
        elif progress is Progress.REJECTED:
            self._state = self._content
            self._release()
        elif progress is Progress.DONE:
            self._closing = Opening(self._end)
            self._state = self._after_list if self._end else self._content
        return at

    def _after_list(self, text: str, at: int) -> int:
        """State after the list, where the closing word may follow. Reads `text` from `at`; returns the position after
        what it read.
        """
        at, found = self._closing.read(text, at)
        if found is not None:
            self._state = self._content
        if found is False:
            self._content(self._closing.held, 0)
        return at

    def _broken(self, text: str, at: int) -> int:
        """State in arguments that are not valid JSON: they continue until the word after the list, or the next word
        before one if the format has none.

        Reads `text` from the position `at`; returns the position after what it read.
        """
        plain, at, word = self._broken_end.read(text, at)
        self._out.arguments(plain)
        if word == self._end and word:
            self._state = self._content
        elif word:
            self._open(word)
        return at

    def _release(self) -> None:
        """Write what the list has held, which is no call, as content, with the word before it."""
        if self._calls.held:
            self._out.content(self._before + self._calls.held)
