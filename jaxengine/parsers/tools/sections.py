"""Parser of tool calls in a section, each a name followed by JSON arguments: DeepSeek V3 and V3.1, Kimi K2, PLaMo 3.

  <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>...
  <|tool_calls_section_end|>

The words of the section may be missing, and text may surround it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from jaxengine.parsers.scan.call_grammar import CallGrammar, literal
from jaxengine.parsers.scan.events import Event
from jaxengine.parsers.scan.json_scan import JsonScanner
from jaxengine.parsers.scan.markers import Marker, Opening
from jaxengine.parsers.scan.states import StateParser

_MAX_HEAD = 512
# The end of a call's own id.
_NUMBERED = re.compile(r":\d+$")


@dataclass(frozen=True)
class SectionWords:
    """Marker words and patterns of a format.

    Attributes:
      section: words around all calls. others: alternative words that begin the section.
      begin, middle, end: words before a call's head, between head and arguments, and after the arguments.
      head: pattern of the head, with the group `name` of the function.
      around: patterns of what the head may have before and after the name of one of the request's functions; None:
        only `head` applies.
      fence: text that may precede `end`.
      numbered: the head is the call's id: the name is followed by a number, which may be missing, as may `kind`.
      kind, rest: for grammars, what the head has before the name, as words, and after it, in Lark's notation.
    """

    section: tuple[str, str]
    begin: str
    middle: str
    end: str
    head: re.Pattern[str]
    around: tuple[str, str] | None = None
    others: tuple[str, ...] = ()
    fence: str = ""
    numbered: bool = False
    kind: tuple[str, ...] = ()
    rest: str = ""

    def call(self, head: str, functions: Collection[str]) -> tuple[str, str | None] | None:
        """Return (function, the model's id of the call or None) that the text `head` names; None if it is not a head of
        a call. The id is all of the head if that is numbered.

        functions: names of the request's functions; another name in the usual form is returned too. The name in the
        head's usual form counts first, then any other part of it that is one of the functions.
        """
        found, whole = self.head.fullmatch(head), head.strip()
        name = None if found is None else found["name"]
        own_id = whole if self.numbered and _NUMBERED.search(whole) else None
        if self.around is not None and name not in functions:
            before, after = self.around
            fitting = [each for each in functions if re.fullmatch(before + re.escape(each) + after, whole)]
            name = max(fitting, key=len, default=name)
        return None if name is None else (name, own_id)


DEEPSEEK_V3 = SectionWords(
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    begin="<｜tool▁call▁begin｜>",
    middle="```json",
    end="<｜tool▁call▁end｜>",
    head=re.compile(r"\s*function<｜tool▁sep｜>\s*(?P<name>\S+)\s*"),
    fence="```",
    kind=("function", "<｜tool▁sep｜>"),
    rest='"\\n"',
)
DEEPSEEK_V31 = SectionWords(
    section=DEEPSEEK_V3.section,
    begin=DEEPSEEK_V3.begin,
    middle="<｜tool▁sep｜>",
    end=DEEPSEEK_V3.end,
    head=re.compile(r"\s*(?P<name>\S+)\s*"),
)
KIMI_K2 = SectionWords(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    others=("<|tool_call_section_begin|>",),
    begin="<|tool_call_begin|>",
    middle="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    head=re.compile(r"\s*(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?\s*"),
    around=(r"(?:functions?[.:])?", r"(?:[:_.-]\w*)?"),
    numbered=True,
    kind=("functions.",),
    rest='":" /[0-9]{1,3}/',
)
PLAMO3 = SectionWords(
    section=("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
    begin="<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",
    middle="<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
    end="<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
    head=DEEPSEEK_V31.head,
)


def grammar(calls: CallGrammar, words: SectionWords) -> Iterator[str]:
    """Yield Lark rules for one section of calls, with the top rule `calls`. words: the format's.

    Raises the errors of calls.json.
    """
    opening, closing = map(calls.word, words.section)
    yield f"calls: {opening} {'call+' if calls.many else 'call'} {closing}"
    kind = [calls.word(word) for word in words.kind]
    inside = ('"\\n"', literal("\n" + words.fence)) if words.fence else ()
    named = []
    for at, name in enumerate(calls.functions):
        arguments = f"arguments_{at}".join(f" {each} " for each in inside) if inside else f"arguments_{at}"
        named.append(" ".join([*kind, literal(name), words.rest, calls.word(words.middle), arguments]))
    yield f"call: {calls.word(words.begin)} ({' | '.join(named)}) {calls.word(words.end)}"
    yield from calls.arguments()


def starts(name: str, words: SectionWords) -> Iterator[tuple[str, ...]]:
    """Yield the beginnings of calls of the function `name`, with and without a section's word before them.

    Each is a sequence of words between which white space may stand, for CallStarts.words.
    """
    heads = [(*words.kind, name, words.middle)]
    if words.numbered:
        heads = [(prefix + name + after,) for prefix in ("", *words.kind) for after in (":", words.middle)]
    for head in heads:
        yield (words.begin, *head)
        yield from ((section, words.begin, *head) for section in (words.section[0], *words.others))


class SectionToolParser(StateParser):
    """Parser of calls in a section. functions: names of the request's functions; words: the format's."""

    def __init__(self, new_id: Iterable[str], functions: Collection[str], words: SectionWords):
        super().__init__(new_id)
        self._functions = functions
        self._words = words
        self._outside = Marker(words.begin, *words.section, *words.others)
        self._next = Opening(words.begin)
        self._middle = Marker(words.middle, words.end)
        self._opening = Opening("{", words.end)
        self._scanner = JsonScanner()
        self._end = Marker(words.end, words.begin, words.section[1])
        # The text as written, from the section's or the call's word on, while it is not known to be a call.
        self._held: list[str] = []
        self._head: list[str] = []
        self._room = 0
        self._in_section = False
        self._state = self._content

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back: content, or the rest of a call's arguments."""
        if self._state == self._content:
            self._out.content(self._outside.take())
        elif self._state == self._section:
            self._reject(self._next.held)
        elif self._state == self._in_head:
            self._reject("".join(self._head) + self._middle.take())
        elif self._state == self._before_object:
            self._reject("".join(self._head) + self._opening.held)
        elif self._state == self._broken:
            self._out.arguments(self._end.take())
        elif self._state == self._after_arguments:
            self._end_call(self._end.take())
        return self._out.finish()

    def _content(self, text: str, at: int) -> int:
        """Process text outside of calls and sections: content, until an opening word. A section's closing word is
        dropped if a section is open, and content otherwise. Reads `text` from `at`; returns the index after what it
        read.
        """
        plain, at, word = self._outside.read(text, at)
        self._out.content(plain)
        if word == self._words.begin:
            self._begin_call([word])
        elif word == self._words.section[1] and self._in_section:
            self._in_section = False
        elif word == self._words.section[1]:
            self._out.content(word)
        elif word:
            self._held, self._next, self._state = [word], Opening(self._words.begin), self._section
        return at

    def _section(self, text: str, at: int) -> int:
        """Process text after the word that begins a section. Unless a call follows, that word is content.

        Reads `text` from `at`; returns the index after what it read.
        """
        at, found = self._next.read(text, at)
        if found:
            self._begin_call([*self._held, self._next.held])
        elif found is False:
            held = self._next.held
            self._reject("")
            self._content(held, 0)
        return at

    def _begin_call(self, held: list[str]) -> None:
        """Enter the head of a call. held: the words before it, which are content if no call follows."""
        self._held, self._head, self._room, self._state = held, [], _MAX_HEAD, self._in_head

    def _in_head(self, text: str, at: int) -> int:
        """Process the head of a call; text that is not a head, or is longer than _MAX_HEAD characters, is content.
        Reads `text` from `at`; returns the index after what it read.
        """
        plain, read, word = self._middle.read(text[at : at + self._room], 0)
        self._head.append(plain)
        self._room -= read
        if word == self._words.middle and self._words.call("".join(self._head), self._functions):
            self._head.append(word)
            self._opening, self._state = Opening("{", self._words.end), self._before_object
        elif word or not self._room:
            self._reject("".join(self._head) + (word or self._middle.take()))
        return at + read

    def _before_object(self, text: str, at: int) -> int:
        """Process text before the arguments: "{" starts the call, the end word makes a call with the arguments {},
        other text makes everything since the opening word content. Reads `text` from `at`; returns the index after what
        it read.
        """
        at, found = self._opening.read(text, at)
        if found is False:
            self._reject("".join(self._head) + self._opening.held)
        if not found:
            return at
        call = self._words.call("".join(self._head[:-1]), self._functions)
        assert call is not None
        self._out.start(*call)
        self._in_section = True
        if self._opening.held.endswith("{"):
            self._scanner, self._state = JsonScanner(), self._arguments
            self._arguments("{", 0)
        else:  # nothing between the words
            self._out.arguments("{}")
            self._state = self._content
        return at

    def _arguments(self, text: str, at: int) -> int:
        """Emit the arguments, JSON, as they arrive. At the first character that is not valid JSON the call goes on in
        `_broken`. Reads `text` from `at`; returns the index after what it read.
        """
        end, right = self._scanner.take(text, at)
        self._out.arguments(text[at:end])
        if not right:
            self._state = self._broken
        elif self._scanner.done:
            self._held, self._state = [], self._after_arguments
        return end

    def _broken(self, text: str, at: int) -> int:
        """Process arguments that are not valid JSON: they continue until a word that ends or begins a call, or ends the
        section. Reads `text` from `at`; returns the index after what it read.
        """
        plain, at, word = self._end.read(text, at)
        self._out.arguments(plain)
        self._turn_to(word)
        return at

    def _after_arguments(self, text: str, at: int) -> int:
        """Collect text between the arguments and the word that ends the call or begins the next one, then end the call
        (`_end_call`). Reads `text` from `at`; returns the index after what it read.
        """
        plain, at, word = self._end.read(text, at)
        self._held.append(plain)
        if word:
            self._end_call("")
        self._turn_to(word)
        return at

    def _turn_to(self, word: str) -> None:
        """Enter the state that follows `word`, which ended a call; "" (no such word yet) changes nothing."""
        if word == self._words.begin:
            self._begin_call([word])
        elif word:
            self._in_section &= word == self._words.end
            self._state = self._content

    def _end_call(self, rest: str) -> None:
        """Write the text between the arguments and the end of the call, the held text and `rest`, as content, unless it
        is blank or the fence.
        """
        between = "".join(self._held) + rest
        if between.strip() not in ("", self._words.fence):
            self._out.content(between)

    def _reject(self, text: str) -> None:
        """Write the held words and `text`, which are no call, as content, and return to the state outside of calls."""
        self._out.content("".join(self._held) + text)
        self._state = self._content
