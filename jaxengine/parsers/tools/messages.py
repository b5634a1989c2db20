"""Parsers of tool calls of Beam and Muse: messages to a tool, as in the harmony format, with arguments as elements.

Beam's message is the call, and Muse's has calls in it:

  <|start|>assistant to=get_weather<|channel|>analysis <|constrain|>xml<|message|><rfl:parameter name="city">
  Paris
  </rfl:parameter><|call|>

  <|start|>assistant to=get_weather<|message|><atem:function_calls>
  <atem:invoke name="get_weather">
  <atem:parameter name="city">Paris</atem:parameter>
  </atem:invoke>
  </atem:function_calls><|eot|>

The first is the response_template of Beam's checkpoints, see tests/parser/test_beam_parser.py of vLLM; the second is in
vllm/tool_parsers/muse_glimmer_tool_parser.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from jaxengine.parsers.scan.call_grammar import CallGrammar, Schema
from jaxengine.parsers.scan.events import Collector, Event
from jaxengine.parsers.scan.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    EOM,
    EOT,
    HARMONY,
    MESSAGE,
    SELF,
    START,
    Body,
    CalledFunction,
    End,
    GlimmerHeader,
    HarmonyReader,
    HarmonyWords,
    Header,
    Part,
    SparkHeader,
    recipient_function,
    xml_function,
)
from jaxengine.parsers.tools import parameters
from jaxengine.parsers.tools.harmony import forced_rules, tokens
from jaxengine.parsers.tools.parameter_words import ParameterWords

_HEAD = f"{CHANNEL}analysis {CONSTRAIN}xml{MESSAGE}"
# The reader of messages finds where a call begins and ends; the first word is in no body.
BEAM_WORDS = ParameterWords((f"{START}assistant to=", _HEAD, CALL), ('<rfl:parameter name="', '">', "</rfl:parameter>"))
_BEAM_WRITTEN = replace(
    BEAM_WORDS, call=(" to=", _HEAD, ""), parameter=('<rfl:parameter name="', '">\n', "\n</rfl:parameter>")
)
MUSE_STOP_WORDS = (EOT,)
MUSE_WORDS = ParameterWords(
    ('<atem:invoke name="', '">', "</atem:invoke>"),
    ('<atem:parameter name="', '">', "</atem:parameter>"),
    ("<atem:function_calls>", "</atem:function_calls>"),
    verbatim=True,
)
_MUSE_WRITTEN = replace(
    MUSE_WORDS,
    call=(MUSE_WORDS.call[0], '">\n', MUSE_WORDS.call[2]),
    parameter=(*MUSE_WORDS.parameter[:2], f"{MUSE_WORDS.parameter[2]}\n"),
)

# Recipients of messages that call nothing, of either Muse.
_NO_TOOLS = sorted(
    {name for header in (GlimmerHeader, SparkHeader) for name in (*header.readers, *header.thoughts)} - {""}
)


def beam_forced_grammar(calls: CallGrammar) -> Iterator[str]:
    """Yield Lark rules of outputs of Beam that call functions, each in a message, with the top rule `start`; reasoning
    may precede the calls. <|end|><|start|>assistant separates them, and <|call|> ends the last. Arguments have the
    order of their schema, and no string is constrained unless its schema lists values.

    Raises ValueError for a vocabulary without harmony's tokens and for a schema with too many alternatives or levels,
    UnresolvedError for a reference that leads nowhere, and the errors of calls.json.
    """
    yield from forced_rules(calls)
    rules = [*parameters.grammar(calls, _BEAM_WRITTEN)][1:]
    more = f'({calls.word(END)} {calls.word(START)} "assistant" one)*' if calls.many else ""
    yield f"call: one {more} {calls.word(CALL)}"
    yield f"one: {_alternatives(rules)}"
    yield from rules


def muse_forced_grammar(calls: CallGrammar) -> Iterator[str]:
    """Yield Lark rules of outputs of Muse that call functions, each in a message, with the top rule `start`; otherwise
    as beam_forced_grammar, with Muse's tokens: EOM ends a message, EOT the last.
    """
    start, message, eom, eot = tokens(calls, START, MESSAGE, EOM, EOT)
    opening, closing = map(calls.word, MUSE_WORDS.section or ())
    rules = [*parameters.grammar(calls, _MUSE_WRITTEN)][1:]
    more = f'({eom} {start} "assistant" call)*' if calls.many else ""
    yield f'start: (thought {start} "assistant")? call {more} {eot}'
    yield f'thought: " to={SELF}" {message} /(?s:.*)/ {eom}'
    yield f"RECIPIENT: /[A-Za-z0-9_.-]+/ & ~/{'|'.join(_NO_TOOLS)}/"
    yield f'call: " to=" RECIPIENT {message} {opening} "\\n" ({_alternatives(rules)}) "\\n" {closing}'
    yield from rules


def _alternatives(rules: Iterable[str]) -> str:
    """Return the alternatives of the rules of one call among `rules`."""
    return " | ".join(rule.partition(":")[0] for rule in rules if rule.startswith("call_"))


class _MessageToolParser(parameters.ParameterToolParser):
    """Common part of the parsers: messages are read, and bodies of calls are passed to the states of a call.

    Bodies of messages to the user are content. Other messages that call nothing are content as written; a preceding
    reasoning parser removes them.
    """

    def __init__(
        self,
        new_id: Iterable[str],
        functions: Mapping[str, Schema],
        words: ParameterWords,
        function: CalledFunction,
        messages: HarmonyWords = HARMONY,
    ):
        super().__init__(new_id, functions, words)
        self._reader, self._function = HarmonyReader(messages), function
        self._header = Header("")

    def feed(self, text: str) -> list[Event]:
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
        """Pass bodies of messages to tools to `_read`, and call `_begin_message` and `_end_message` around them. Write
        other parts as content, but no words around messages to the user.
        """
        for part in parts:
            if isinstance(part, Header):
                self._header = part
                if name := self._function(part, self._functions):
                    self._begin_message(name)
                elif not part.is_said:
                    self._say(part.text)
            elif isinstance(part, End):
                if self._function(self._header, self._functions):
                    self._end_message()
                elif not self._header.is_said:
                    self._say(part.word)
            elif isinstance(part, Body) and self._takes_body():
                self._read(part.text)
            else:
                self._say(part.text)

    def _say(self, text: str) -> None:
        """Write text as content, after text that was held back as the beginning of a word."""
        self._out.content(self._outside.take() + text)

    def _begin_message(self, name: str) -> None:
        """Begin a message to the tool `name`; do nothing unless a subclass does."""

    def _takes_body(self) -> bool:
        """Return whether the current message's body belongs to a call; defined by subclasses."""
        raise NotImplementedError

    def _end_message(self) -> None:
        """End a message to a tool; defined by subclasses."""
        raise NotImplementedError


class BeamToolParser(_MessageToolParser):
    """Parser of the calls of one output of Beam. functions: schemas of arguments, by function name."""

    def __init__(self, new_id: Iterable[str], functions: Mapping[str, Schema]):
        super().__init__(new_id, functions, BEAM_WORDS, xml_function)

    def _begin_message(self, name: str) -> None:
        """Start a call of the function `name`."""
        self._out.start(name)
        self._open_call(name, "")

    def _takes_body(self) -> bool:
        return self._arguments is not None

    def _end_message(self) -> None:
        """End the call at the end of its message: a value that is open ends too, and a name that is open leaves the
        arguments open.
        """
        if self._arguments is None:
            return
        if self._state not in (self._in_name, self._to_value):
            self._read(CALL)
        if self._state == self._after_value:
            self._turn_from_value()
        if self._arguments is not None:
            self._flush()
            self._arguments, self._state = None, self._content


class MuseToolParser(_MessageToolParser):
    """Parser of the calls of one output of Muse. functions: schemas of arguments, by function name. messages: words of
    messages, which differ in the recipients.

    The elements of calls in messages to others, who may quote them, are no calls. Text beside the calls of a message to
    a tool is content. "f.f" calls the request's function f, as the model may write its tool before its name.
    """

    def __init__(self, new_id: Iterable[str], functions: Mapping[str, Schema], messages: HarmonyWords):
        doubled = {f"{name}.{name}": name for name in functions if f"{name}.{name}" not in functions}
        schemas = {**functions, **{double: functions[name] for double, name in doubled.items()}}
        super().__init__(new_id, schemas, MUSE_WORDS, recipient_function, messages)
        self._out = _RenamingCollector(new_id, doubled)

    def _takes_body(self) -> bool:
        return recipient_function(self._header, ()) is not None

    def _end_message(self) -> None:
        """End a message to a tool: text that was held back is content, and a call without an end keeps its arguments as
        far as they came.
        """
        self._flush()
        self._arguments, self._in_section, self._state = None, False, self._content


class _RenamingCollector(Collector):
    """Collector that starts calls of some functions under other names. names: other name, by name."""

    def __init__(self, new_id: Iterable[str], names: Mapping[str, str]):
        super().__init__(new_id)
        self._names = names

    def start(self, name: str, own_id: str | None = None) -> None:
        """Start a call of the function `name`, under its other name if it has one. own_id: see Collector.start."""
        super().start(self._names.get(name, name), own_id)
