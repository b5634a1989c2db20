"""Parser of tool calls in a JSON list after a word: <tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>.

The words are in the rows of the registry. Text may surround the list. Cohere's and Apertus's objects have other keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from jaxengine.parsers.scan.call_grammar import CallGrammar, literal
from jaxengine.parsers.scan.events import Collector, Event
from jaxengine.parsers.scan.json_call import JsonCall, KeyedCall, Progress
from jaxengine.parsers.scan.json_call_list import JsonCallList
from jaxengine.parsers.scan.markers import Marker, Opening
from jaxengine.parsers.scan.states import StateParser


@dataclass(frozen=True)
class ListedCall:
    """Form of the objects in a list.

    Attributes:
      reader: function that returns a reader of one object.
      objects: function that returns the grammar alternatives of one object, with the rules of CallGrammar.arguments.
    """

    reader: Callable[[Collector], JsonCall]
    objects: Callable[[CallGrammar], str]


def _numbered_objects(calls: CallGrammar) -> str:
    """Return the grammar alternatives {"tool_call_id": "N", "tool_name": ..., "parameters": ...}, one for each
    function, which refer to the rules of CallGrammar.arguments. N: 1 to 3 digits.
    """
    heads = (f'", "tool_name": {json.dumps(name, ensure_ascii=False)}, "parameters": ' for name in calls.functions)
    begin = literal('{"tool_call_id": "')
    return " | ".join(f'{begin} /[0-9]{{1,3}}/ {literal(head)} arguments_{at} "}}"' for at, head in enumerate(heads))


def _keyed_objects(calls: CallGrammar) -> str:
    """Return the grammar alternatives {NAME: ARGUMENTS}, one for each function, which refer to the rules of
    CallGrammar.arguments.
    """
    heads = (f"{{{json.dumps(name, ensure_ascii=False)}: " for name in calls.functions)
    return " | ".join(f'{literal(head)} arguments_{at} "}}"' for at, head in enumerate(heads))


def keyed_starts(begins: tuple[str, ...], name: str) -> Iterator[tuple[str, ...]]:
    """Yield, for each text of `begins`, the beginning of a list whose first object is {name: {...}}, as a word sequence
    for CallStarts.words.
    """
    for begin in begins:
        yield (begin, "[", "{", json.dumps(name, ensure_ascii=False), ":", "{")


NAMED = ListedCall(
    partial(JsonCall, names=("arguments", "parameters"), bare=True), lambda calls: calls.objects("arguments")
)
COHERE = ListedCall(partial(JsonCall, names=("parameters",), bare=True, name_key="tool_name"), _numbered_objects)
APERTUS = ListedCall(KeyedCall, _keyed_objects)


def grammar(calls: CallGrammar, begins: tuple[str, ...], end: str = "", call: ListedCall = NAMED) -> Iterator[str]:
    """Yield Lark rules for a list of calls, with the top rule `calls`. begins: words before a list, of which the first
    is used; end: the word after it, "" for none; call: form of its objects.

    Raises the errors of calls.json.
    """
    closing = calls.word(end) if end else ""
    yield f'calls: {calls.word(begins[0])} "[" {calls.listed("call", ", ")} "]" {closing}'
    yield f"call: {call.objects(calls)}"
    yield from calls.arguments()


class JsonListToolParser(StateParser):
    """Parser of a list of calls. begins: words before the list; end: the word after it, "" for none.

    bare: an output may begin with the list itself. call: form of the objects.
    """

    def __init__(
        self,
        new_id: Iterable[str],
        begins: tuple[str, ...],
        end: str = "",
        bare: bool = False,
        call: ListedCall = NAMED,
    ):
        super().__init__(new_id)
        self._call = call
        self._begin = Marker(*begins)
        self._end = end
        self._before = ""
        self._opening = Opening("[")
        self._calls = JsonCallList(self._out, call.reader)
        self._closing = Opening(end)
        self._broken_end = Marker(*((end,) if end else begins))
        self._state = self._before_list if bare else self._content

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back: content, or the rest of a call's arguments."""
        if self._state == self._content:
            self._out.content(self._begin.take())
        elif self._state == self._before_list:
            self._out.content(self._before + self._opening.held)
        elif self._state == self._list:
            self._release()
        elif self._state == self._after_call:
            self._out.content(self._closing.held)
        else:
            self._out.arguments(self._broken_end.take())
        return self._out.finish()

    def _content(self, text: str, at: int) -> int:
        """Process content, up to a word before a list. Reads `text` from `at`; returns the index after what it read."""
        plain, at, word = self._begin.read(text, at)
        self._out.content(plain)
        if word:
            self._open(word)
        return at

    def _open(self, word: str) -> None:
        """Enter the state after `word`, which may precede a list."""
        self._before, self._opening, self._state = word, Opening("["), self._before_list

    def _before_list(self, text: str, at: int) -> int:
        """Process text between a word and the opening bracket, after which the list is read. If other text comes, the
        word and this text are content, and so is what follows. Reads `text` from `at`; returns the index after what it
        read.
        """
        at, found = self._opening.read(text, at)
        if found:
            self._before += self._opening.held[:-1]
            self._calls = JsonCallList(self._out, self._call.reader)
            self._calls.read("[", 0)
            self._state = self._list
        elif found is False:
            self._out.content(self._before + self._opening.held)
            self._state = self._content
        return at

    def _list(self, text: str, at: int) -> int:
        """Process the list of calls, after which its closing word may follow. Where it turns out to be none, text that
        belongs to no call becomes content; arguments that are not valid JSON go on in `_broken`. Reads `text` from
        `at`; returns the index after what it read.
        """
        at, progress = self._calls.read(text, at)
        if progress is Progress.BROKEN:
            self._state = self._broken
        elif progress is Progress.REJECTED:
            self._state = self._content
            self._release()
        elif progress is Progress.DONE:
            self._closing = Opening(self._end)
            self._state = self._after_call if self._end else self._content
        return at

    def _broken(self, text: str, at: int) -> int:
        """Process arguments that are not valid JSON: they continue until the word after the list, or, if the format has
        none, the next of the words before one.

        Reads `text` from `at`; returns the index after what it read.
        """
        plain, at, word = self._broken_end.read(text, at)
        self._out.arguments(plain)
        if word == self._end and word:
            self._state = self._content
        elif word:
            self._open(word)
        return at

    def _release(self) -> None:
        """Write the text that the list holds and that belongs to no call as content, with the word before the list;
        nothing if there is none.
        """
        if self._calls.held:
            self._out.content(self._before + self._calls.held)
