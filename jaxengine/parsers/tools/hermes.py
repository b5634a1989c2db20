"""Parser of tool calls of Hermes 2 Pro, Qwen 2.5 and Qwen 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

Other models use other words. The arguments may be called parameters, the closing word may be missing, and text may
surround calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxengine.parsers.scan.call_grammar import CallGrammar, literal
from jaxengine.parsers.scan.call_start import object_start
from jaxengine.parsers.scan.events import Event
from jaxengine.parsers.scan.json_call import JsonCall, Progress
from jaxengine.parsers.scan.markers import Marker, Opening
from jaxengine.parsers.scan.states import StateParser

BEGIN, END = "<tool_call>", "</tool_call>"


def grammar(
    calls: CallGrammar,
    begin: str = BEGIN,
    end: str = END,
    space: str = "\n",
    key: str = "arguments",
    others: tuple[str, ...] = (),
) -> Iterator[str]:
    """Yield Lark rules for calls, with the top rule `calls`. begin, end: words around a call (end "": none); space:
    text between the words and the object; key: key of the arguments; others: alternatives of `begin`, of which the
    first is written if `begin` is not a token of the vocabulary.

    Raises the errors of calls.json.
    """
    begin = begin if not others or calls.token_id(begin) is not None else others[0]
    between = f"{literal(space)} " if space else ""
    yield "calls: " + calls.listed("call", "\n")
    yield f"call: {calls.word(begin)} {between}({calls.objects(key)}) {between}{calls.word(end) if end else ''}"
    yield from calls.arguments()


def starts(name: str, begin: str = BEGIN, others: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the beginnings of a call of the function `name`, `begin` or one of `others` and a JSON object, as word
    sequences for CallStarts.words.
    """
    yield from ((word, *object_start(name)) for word in (begin, *others))


class HermesToolParser(StateParser):
    """Parser of calls between two words. begin, end: the words; end "": none; others: alternatives of `begin`."""

    def __init__(self, new_id: Iterable[str], begin: str = BEGIN, end: str = END, others: tuple[str, ...] = ()):
        super().__init__(new_id)
        begins = begin, *others
        # The word with which the current call begins, and the one with which all end.
        self._words = begin, end
        # Without a closing word, arguments that are not valid JSON continue until the next call.
        self._begin, self._end = Marker(*begins), Marker(*([end] if end else begins))
        self._state = self._content
        self._opening = Opening("{")
        self._closing = Opening(end)
        self._call = self._new_call()

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back: content, or the rest of a call's arguments."""
        if self._state == self._content:
            self._out.content(self._begin.take())
        elif self._state == self._before_object:
            self._out.content(self._words[0] + self._opening.held)
        elif self._state == self._object:
            self._reject()
        elif self._state == self._after_call:
            self._out.content(self._closing.held)
        else:
            self._out.arguments(self._end.take())
        return self._out.finish()

    def _content(self, text: str, at: int) -> int:
        """Process content, up to the opening word. Reads `text` from `at`; returns the index after what it read."""
        plain, at, found = self._begin.read(text, at)
        self._out.content(plain)
        if found:
            self._open(found)
        return at

    def _open(self, word: str) -> None:
        """Reset the readers for a new call, and enter the state after its opening word, `word`."""
        self._words = word, self._words[1]
        self._opening, self._call = Opening("{"), self._new_call()
        self._state = self._before_object

    def _before_object(self, text: str, at: int) -> int:
        """Process text between the opening word and the brace of a call; other text is content, with the word. Reads
        `text` from `at`; returns the index after what it read.
        """
        at, found = self._opening.read(text, at)
        if found:
            self._call.read("{", 0)
            self._state = self._object
        elif found is False:
            self._out.content(self._words[0] + self._opening.held)
            self._state = self._content
        return at

    def _object(self, text: str, at: int) -> int:
        """Process the object of a call, after which its closing word may follow; an object that is not a call becomes
        content, and arguments that are not valid JSON go on in `_broken`. Reads `text` from `at`; returns the index
        after what it read.
        """
        at, progress = self._call.read(text, at)
        if progress is Progress.REJECTED:
            self._reject()
            self._state = self._content
        elif progress is Progress.BROKEN:
            self._state = self._broken
        elif progress is not Progress.MORE:
            self._closing = Opening(self._words[1])
            self._state = self._after_call if self._words[1] else self._content
        return at

    def _broken(self, text: str, at: int) -> int:
        """Process arguments that are not valid JSON: they continue until the closing word, or the next call's opening
        word if the format has no closing word.

        Reads `text` from `at`; returns the index after what it read.
        """
        plain, at, found = self._end.read(text, at)
        self._out.arguments(plain)
        if found and not self._words[1]:
            self._open(found)
        elif found:
            self._state = self._content
        return at

    def _reject(self) -> None:
        """Write an object that is not a call as content, with the opening word; nothing for one that has become
        a call.
        """
        if self._call.held:
            self._out.content(self._words[0] + self._opening.held[:-1] + self._call.held)

    def _new_call(self) -> JsonCall:
        """Return a reader of the next object."""
        return JsonCall(self._out, ("arguments", "parameters"), bare=True)
