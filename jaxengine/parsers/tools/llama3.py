"""Parser of tool calls of Llama 3: one or several {"name": ..., "parameters": {...}} anywhere in a text, or a list of
them.

A tag may precede them, and white space with a semicolon or comma may separate them; neither is content then. xLAM's
tags also have a word after the calls. An object that is not a call is content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from jaxengine.parsers.scan.call_grammar import CallGrammar, call_schema
from jaxengine.parsers.scan.events import Event
from jaxengine.parsers.scan.json_call import JsonCall, Progress
from jaxengine.parsers.scan.json_call_list import JsonCallList
from jaxengine.parsers.scan.markers import Opening
from jaxengine.parsers.scan.states import StateParser
from jaxengine.schema_references import SchemaDocument, moved, with_definitions

_TAG = "<|python_tag|>"
_CALL = partial(JsonCall, names=("parameters", "arguments"))
# Words before calls, each with the word after them, "" for none.
LLAMA_TAGS = ((_TAG, ""),)
XLAM_TAGS = (*LLAMA_TAGS, ("[TOOL_CALLS]", ""), ("<tool_call>", "</tool_call>"), ("```json", "```"))


def grammar(calls: CallGrammar) -> Iterator[str]:
    """Yield Lark rules for one or several calls, separated by "; ", with the top rule `calls`; <|python_tag|> may
    precede them.

    Raises UnresolvedError for a schema's reference that leads nowhere, and the errors of calls.json.
    """
    yield f"calls: {calls.word(_TAG)}? {calls.listed('call', '; ')}"
    # One rule up to the last brace: the lexer cannot backtrack before the brace, which may begin an answer too.
    for at, (name, schema) in enumerate(calls.functions.items()):
        definitions: dict[str, Any] = {}
        document = SchemaDocument(schema)
        call = call_schema(name, "parameters", moved(document.root, document, definitions))
        yield f"call_{at}: {calls.json(with_definitions(call, definitions))}"
    yield f"call: {' | '.join(f'call_{at}' for at in range(len(calls.functions)))}"


class Llama3ToolParser(StateParser):
    """Parser of JSON objects and lists that are calls, anywhere in a text. tags: words before calls, each with the word
    after them, "" for none.
    """

    def __init__(self, new_id: Iterable[str], tags: tuple[tuple[str, str], ...] = LLAMA_TAGS):
        super().__init__(new_id)
        self._tags = dict(tags)
        self._start = re.compile(f"[{re.escape(''.join({'{', '[', *(tag[0] for tag, _ in tags)}))}]")
        # A tag or a separator, which is content unless a call follows.
        self._before: list[str] = []
        self._may_separate = False
        self._opening = Opening(*self._tags)
        # The word after the calls of the last tag, and the same once there has been a call.
        self._end = self._closing_word = ""
        self._calls: JsonCall | JsonCallList = _CALL(self._out)
        self._state = self._content

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back, as content."""
        if self._state == self._tag:
            self._no_tag()
        if self._state == self._gap:
            self._out.content("".join(self._before))
        elif self._state == self._after_calls:
            self._out.content("".join(self._before) + self._opening.held)
        elif self._state == self._reading:
            self._release()
        return self._out.finish()

    def _content(self, text: str, at: int) -> int:
        """Process content, up to a character that may begin a tag or a call. Reads `text` from `at`; returns the index
        after what it read.
        """
        start = self._start.search(text, at)
        end = len(text) if start is None else start.start()
        self._out.content(text[at:end])
        if start is None:
            return end
        self._before, self._end, self._closing_word = [], "", ""
        if any(tag[0] == start.group() for tag in self._tags):
            self._opening, self._state = Opening(*self._tags), self._tag
            return end
        return self._open(text, end)

    def _tag(self, text: str, at: int) -> int:
        """Process what may be a tag; text that is none is content, or the beginning of a list. Reads `text` from `at`;
        returns the new position.
        """
        at, found = self._opening.read(text, at)
        if found:
            self._end = self._tags[self._opening.held]
            self._before, self._may_separate, self._state = [self._opening.held], False, self._gap
        elif found is False:
            self._no_tag()
        return at

    def _no_tag(self) -> None:
        """Read the beginning of a tag that is none: as an object or list if a bracket begins it, else as content."""
        held = self._opening.held
        if held[0] in "{[":
            self._open(held, 0)
            self._read(held[1:])
        else:
            self._out.content(held)
            self._state = self._content

    def _gap(self, text: str, at: int) -> int:
        """Process one character between a tag or call and the next call or content. White space is held and, after a
        call, one semicolon or comma; the beginning of the word after calls is left to `_after_calls`.

        Reads `text` at the position `at`; returns the new position, unchanged if the character is content.
        """
        char = text[at]
        if char in "{[":
            return self._open(text, at)
        if char.isspace() or (self._may_separate and char in ";,"):
            self._before.append(char)
            self._may_separate &= char.isspace()
            return at + 1
        if self._closing_word and char == self._closing_word[0]:
            self._opening, self._state = Opening(self._closing_word), self._after_calls
            return at
        self._out.content("".join(self._before))
        self._state = self._content
        return at

    def _after_calls(self, text: str, at: int) -> int:
        """Process what may be the word after calls, which is dropped with the space before it; other text is content.
        Reads `text` from `at`; returns the new position.
        """
        at, found = self._opening.read(text, at)
        if found is not None:
            self._state = self._content
        if found is False:
            self._out.content("".join(self._before) + self._opening.held)
        return at

    def _open(self, text: str, at: int) -> int:
        """Begin to read the object or list whose bracket is at the index `at`; return the index after the bracket."""
        self._calls = _CALL(self._out) if text[at] == "{" else JsonCallList(self._out, _CALL)
        self._calls.read(text[at], 0)
        self._state = self._reading
        return at + 1

    def _reading(self, text: str, at: int) -> int:
        """Process an object or list that may be a call: one that is not becomes content, and arguments that are not
        valid JSON go on in `_broken`. Reads `text` from `at`; returns the index after what it read.
        """
        at, progress = self._calls.read(text, at)
        if progress is Progress.BROKEN:
            self._state = self._broken
        elif progress is Progress.REJECTED:
            self._release()
            self._state = self._content
        elif progress is not Progress.MORE:
            self._before, self._may_separate, self._state, self._closing_word = [], True, self._gap, self._end
        return at

    def _broken(self, text: str, at: int) -> int:
        """Add all of `text` from `at` on to arguments that are not valid JSON, as nothing marks their end. Returns
        len(text).
        """
        self._out.arguments(text[at:])
        return len(text)

    def _release(self) -> None:
        """Write the held text that is not a call as content, with the tag or separator before it; nothing if there is
        none.
        """
        if self._calls.held:
            self._out.content("".join(self._before) + self._calls.held)
