"""Parser of tool calls of Beam: messages to a function in OpenAI's harmony format, with arguments as elements.

  <|start|>assistant to=get_weather<|channel|>analysis <|constrain|>xml<|message|><rfl:parameter name="city">
  Paris
  </rfl:parameter><|call|>

The format is the response_template of its checkpoints, see tests/parser/test_beam_parser.py of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from jaxengine.parsers.scan.call_grammar import CallGrammar, Schema
from jaxengine.parsers.scan.events import Event
from jaxengine.parsers.scan.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    START,
    Body,
    End,
    HarmonyReader,
    Header,
    Part,
    xml_function,
)
from jaxengine.parsers.tools import parameters
from jaxengine.parsers.tools.harmony import forced_rules
from jaxengine.parsers.tools.parameter_words import ParameterWords

_HEAD = f"{CHANNEL}analysis {CONSTRAIN}xml{MESSAGE}"
# The reader of messages finds where a call begins and ends; the first word is in no body.
WORDS = ParameterWords((f"{START}assistant to=", _HEAD, CALL), ('<rfl:parameter name="', '">', "</rfl:parameter>"))
_WRITTEN = replace(WORDS, call=(" to=", _HEAD, ""), parameter=('<rfl:parameter name="', '">\n', "\n</rfl:parameter>"))


def forced_grammar(calls: CallGrammar) -> Iterator[str]:
    """Yield Lark rules of outputs that call functions, with the top rule `start`; reasoning may precede the calls.
    Arguments have the order of their schema, and no string is constrained unless its schema lists values.

    Raises ValueError for a vocabulary without harmony's tokens and for a schema with too many alternatives or levels,
    UnresolvedError for a reference that leads nowhere, and the errors of calls.json.
    """
    yield from forced_rules(calls)
    _, *rules = parameters.grammar(calls, _WRITTEN)
    one = " | ".join(rule.partition(":")[0] for rule in rules if rule.startswith("call_"))
    more = f'({calls.word(END)} {calls.word(START)} "assistant" one)*' if calls.many else ""
    yield f"call: one {more} {calls.word(CALL)}"
    yield f"one: {one}"
    yield from rules


class BeamToolParser(parameters.ParameterToolParser):
    """Parser of the calls of one output. functions: schemas of arguments, by function name.

    Bodies of messages to the user are content. Other messages that call nothing are content as written; a preceding
    reasoning parser removes them.
    """

    def __init__(self, new_id: Iterable[str], functions: Mapping[str, Schema]):
        super().__init__(new_id, functions, WORDS)
        self._reader = HarmonyReader()
        self._header = Header("")

    def feed(self, text: str) -> list[Event]:
        """Read a piece of the output; return the events that are certain by now."""
        self._read_parts(self._reader.feed(text))
        return self._out.take()

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back. The arguments of a call in which the output
        ends stay open, unless a value has just ended.
        """
        parts = self._reader.finish()
        self._read_parts(parts[:-1] if parts and isinstance(parts[-1], End) else parts)
        return super().finish()

    def _read_parts(self, parts: list[Part]) -> None:
        """Pass bodies of calls to the states of a call, and write other parts as content."""
        for part in parts:
            if isinstance(part, Header):
                self._header = part
                if name := xml_function(part, self._functions):
                    self._out.start(name)
                    self._open_call(name, "")
                elif not part.is_said:
                    self._say(part.text)
            elif isinstance(part, End):
                if self._arguments is not None:
                    self._close_call()
                elif not self._header.is_said and not xml_function(self._header, self._functions):
                    self._say(part.word)
            elif isinstance(part, Body) and self._arguments is not None:
                self._read(part.text)
            else:
                self._say(part.text)

    def _say(self, text: str) -> None:
        """Write text as content, after text that was held back as the beginning of a word."""
        self._out.content(self._outside.take() + text)

    def _close_call(self) -> None:
        """End the call at the end of its message: a value that is open ends too, and a name that is open leaves the
        arguments open.
        """
        if self._state not in (self._in_name, self._to_value):
            self._read(CALL)
        if self._state == self._after_value:
            self._turn_from_value()
        if self._arguments is not None:
            self._cut_call(self._arguments)
            self._arguments, self._state = None, self._content
