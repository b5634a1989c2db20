"""Reasoning of gpt-oss, which is the messages of the channel analysis, of Muse, which is those to the model itself, and
of Inkling, which is those of the kind thinking.

Bodies of messages to the user are content.

A message that calls a function stays content as written, for the tool parser. Messages of one kind are separated by a
line break.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from jaxengine.parsers.scan.call_start import CallStarts
from jaxengine.parsers.scan.events import ContentDelta, Event, ReasoningDelta, ReasoningParser
from jaxengine.parsers.scan.harmony import (
    CHANNEL,
    END,
    MESSAGE,
    START,
    STOP_WORDS,
    Body,
    CalledFunction,
    End,
    HarmonyReader,
    Header,
    MessageReader,
    Part,
    json_function,
)


@dataclass(frozen=True)
class HarmonyFormat:
    """Implementation of reasoning_rows.ReasoningFormat for gpt-oss, or a model with other words or other calls.

    Attributes:
      function: which function a message calls.
      reader: returns a new reader of an output.
      stop_words: see registry.ToolFormat.
      answer: words that begin the answer, in this order; the model may write a constraint between them.
      thoughts: text that begins a first message with reasoning.
      after_thoughts: words, or sequences of words, that end reasoning.
      closing: text that ends reasoning and begins the answer.
      declares: word with which prompts declare tools, of a model that may leave out the words before the answer, for
        which a grammar would wait in vain; "" for others. Without tools, an output without `thoughts` is an answer.
    """

    function: CalledFunction = json_function
    reader: Callable[[], MessageReader] = HarmonyReader
    stop_words: tuple[str, ...] = STOP_WORDS
    answer: tuple[str, ...] = (f"{CHANNEL}final", MESSAGE)
    thoughts: str = f"{CHANNEL}analysis{MESSAGE}"
    after_thoughts: tuple[tuple[str, ...], ...] = ((f"{CHANNEL}final", MESSAGE), (f"{CHANNEL}commentary",))
    closing: str = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"
    declares: str = ""

    special_tokens = True
    # Calls are separate messages before the one that may be constrained.
    holds_calls = True

    def open(self, prompt: str, continued: str = "", *, calls: CallStarts | None = None) -> ReasoningParser:
        """Return a parser for one output. calls: calls that the tool parser will find, of which only the function names
        matter; None if no tool parser follows.

        prompt, continued: not used.
        """
        return HarmonyReasoningParser(() if calls is None else calls.functions, self.function, self.reader())

    def waits_for(self, prompt: str, continued: str = "") -> dict[str, Any]:
        """Return {"reasoning_end": ...} for structured_outputs: the words that begin the answer; with reasoning_begin,
        `thoughts`, if `prompt` lacks `declares`. {} if `continued`, the beginning of the answer, is not empty.
        """
        begin = {} if self.declares in prompt else {"reasoning_begin": self.thoughts}
        return {} if continued else {"reasoning_end": (self.answer,), **begin}

    def answers_after(self, prompt: str, continued: str = "", *, calls: bool = True) -> dict[str, Any] | None:
        """Return the fields of `waits_for` for stop_after; None if `continued`, the beginning of the answer, is not
        empty. Calls and remarks before the words that begin the answer are not the answer. calls: not used.
        """
        return self.waits_for(prompt, continued) or None

    def limited_by(self, prompt: str, continued: str = "") -> dict[str, Any] | None:
        """Return the fields of thinking_words: reasoning_end and reasoning_begin, the words that end and begin
        reasoning, and closing, the text that closes it. Only a first message with reasoning is limited.

        None if `continued`, the beginning of the answer, is not empty; the prompt is not used.
        """
        if continued:
            return None
        return {
            "reasoning_end": self.after_thoughts,
            "reasoning_begin": self.thoughts,
            "closing": self.closing,
        }


class HarmonyReasoningParser:
    """Splitter of one output of a model that writes such messages into reasoning and content. functions: names of the
    request's functions. function: which of them a message calls. reader: a new one, of the format.
    """

    late_ends = ()

    def __init__(self, functions: Collection[str], function: CalledFunction, reader: MessageReader) -> None:
        self._functions, self._function, self._reader = functions, function, reader
        self._header: Header | None = None
        self._is_call = False
        self._said: set[type] = set()

    def feed(self, text: str) -> list[Event]:
        """Read a piece of the output; return the events that are certain by now."""
        return self._events(self._reader.feed(text))

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back."""
        return self._events(self._reader.finish())

    def _events(self, parts: list[Part]) -> list[Event]:
        """Return the events of these parts, with adjacent events of one kind merged and empty ones left out."""
        events = [event for part in parts if (event := self._event(part)).text]
        joined: list[Event] = []
        for event in events:
            if joined and type(joined[-1]) is type(event):
                joined[-1] = type(event)(joined[-1].text + event.text)  # pyright: ignore[reportAttributeAccessIssue]
            else:
                joined.append(event)
        return joined

    def _event(self, part: Part) -> ContentDelta | ReasoningDelta:
        """Return the event of one part, and record the message that it belongs to.

        A message that calls a function is content as written. Of others the bodies are shown: as content if they are
        addressed to the user, else as reasoning. Text outside of messages is content. The event's text is "" for a part
        that is not shown, and the format's joint for the header of a further message of its kind.
        """
        if isinstance(part, Header):
            self._header, self._is_call = part, self._function(part, self._functions) is not None
            if self._is_call:
                return ContentDelta(part.text)
            kind = ContentDelta if part.is_said else ReasoningDelta
            again = kind in self._said
            self._said.add(kind)
            return kind(self._reader.joint if again else "")
        header = self._header
        if isinstance(part, End):
            self._header = None
            return ContentDelta(part.word if header is not None and self._is_call else "")
        if isinstance(part, Body) and header is not None and not self._is_call and not header.is_said:
            return ReasoningDelta(part.text)
        return ContentDelta(part.text)
