"""Parsers of tool calls of gpt-oss: messages to functions.NAME with JSON arguments, in OpenAI's harmony format; and of
Inkling: messages of the kind invoke_tool_json with {"name": NAME, "args": {...}}.

gpt-oss may omit the prefix of a function that the request has.

Bodies of messages to the user are content. Other messages (reasoning, calls of built-in tools) are content as written;
a preceding reasoning parser removes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from jaxengine.parsers.scan.call_grammar import CallGrammar, literal
from jaxengine.parsers.scan.events import Collector, Event
from jaxengine.parsers.scan.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    END_MESSAGE,
    END_SAMPLING,
    INVOKE,
    MESSAGE,
    MODEL,
    START,
    THINKING,
    Body,
    HarmonyReader,
    Header,
    InklingReader,
    Outside,
    Part,
    invoked_function,
    json_function,
)
from jaxengine.parsers.scan.json_call import JsonCall, Progress


def forced_grammar(calls: CallGrammar) -> Iterator[str]:
    """Yield Lark rules of outputs that call one function, with the top rule `start`; reasoning may precede the call.

    A call is <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>, its arguments and <|call|>.
    Raises ValueError for a vocabulary without harmony's tokens, and the errors of calls.json.
    """
    yield from forced_rules(calls)
    said = f'{calls.word(CONSTRAIN)} "json" {calls.word(MESSAGE)}'
    named = (f"{literal(f'{name} ')} {said} arguments_{at}" for at, name in enumerate(calls.functions))
    yield f'call: {calls.word(CHANNEL)} "commentary to=functions." ({" | ".join(named)}) {calls.word(CALL)}'
    yield from calls.arguments()


def forced_rules(calls: CallGrammar) -> Iterator[str]:
    """Yield the Lark rules of outputs with one `call`, a rule that the caller must add. The top rule is `start`: an
    optional thought (<|channel|>analysis<|message|>, any text, <|end|><|start|>assistant), then the call.

    Raises ValueError for a vocabulary without harmony's tokens.
    """
    channel, end, message, start, _, _ = tokens(calls, CHANNEL, END, MESSAGE, START, CALL, CONSTRAIN)
    yield f'start: (thought {start} "assistant")? call'
    yield f'thought: {channel} "analysis" {message} /(?s:.*)/ {end}'


def inkling_forced_grammar(calls: CallGrammar) -> Iterator[str]:
    """Yield Lark rules of outputs of Inkling that call functions, with the top rule `start`; reasoning may precede the
    calls. Their objects have no white space, as in the chat template.

    Raises ValueError for a vocabulary without the format's tokens, and the errors of calls.json.
    """
    model, thinking, invoke, end, last = tokens(calls, MODEL, THINKING, INVOKE, END_MESSAGE, END_SAMPLING)
    yield f"start: (thought {model})? call {f'({model} call)*' if calls.many else ''} {last}"
    yield f"thought: {thinking} /(?s:.*)/ {end}"
    names = [literal(name) for name in calls.functions]  # also as JSON writes them
    heads = [literal(f'{{"name":{name},"args":') for name in names]
    named = (f"{name} {invoke} {heads[at]} arguments_{at}" for at, name in enumerate(names))
    yield f'call: ({" | ".join(named)}) "}}" {end}'
    yield from calls.arguments()


def tokens(calls: CallGrammar, *words: str) -> list[str]:
    """Return the grammar terms of words that must be tokens. Raises ValueError for the first one that is none."""
    missing = next((word for word in words if calls.token_id(word) is None), None)
    if missing is not None:
        raise ValueError(f"the model's vocabulary has no token {missing}, which its calls need")
    return [calls.word(word) for word in words]


class HarmonyToolParser:
    """Parser of the calls of one output. functions: names of the request's functions."""

    def __init__(self, new_id: Iterable[str], functions: Collection[str]):
        self._out = Collector(new_id)
        self._functions = functions
        self._reader = HarmonyReader()
        self._header = Header("")
        self._function: str | None = None
        self._is_blank = True

    def feed(self, text: str) -> list[Event]:
        """Read a piece of the output; return the events that are certain by now."""
        self._read(self._reader.feed(text))
        return self._out.take()

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back."""
        self._read(self._reader.finish())
        return self._out.finish()

    def _read(self, parts: list[Part]) -> None:
        """Pass the parts of the output to `_begin`, `_add` and `_end`; text outside of messages is content."""
        for part in parts:
            if isinstance(part, Header):
                self._begin(part)
            elif isinstance(part, Outside):
                self._out.content(part.text)
            elif isinstance(part, Body):
                self._add(part.text)
            else:
                self._end(part.word)

    def _begin(self, header: Header) -> None:
        """Begin a message: start a call if it addresses a function. Otherwise write its header as content, unless it is
        addressed to the user.
        """
        self._header, self._function, self._is_blank = header, json_function(header, self._functions), True
        if self._function is not None:
            self._out.start(self._function)
        elif not header.is_said:
            self._out.content(header.text)

    def _add(self, text: str) -> None:
        """Add a piece of a body, to the call's arguments or to the content."""
        if self._function is None:
            self._out.content(text)
        else:
            self._is_blank &= text.isspace()
            self._out.arguments(text)

    def _end(self, word: str) -> None:
        """End a message. A call with blank arguments gets {} after them. For a message that neither calls nor addresses
        the user, the end word is content.
        """
        if self._function is not None:
            self._out.arguments("{}" if self._is_blank else "")
        elif not self._header.is_said:
            self._out.content(word)


class InklingToolParser(HarmonyToolParser):
    """Parser of the calls of one output of Inkling. Where a call should be and none is, content is as written."""

    def __init__(self, new_id: Iterable[str]):
        super().__init__(new_id, ())
        self._reader = InklingReader()
        self._begin(Header(""))

    def _begin(self, header: Header) -> None:
        """Begin a message. Of one that calls no function, and is not to the user, the header is content."""
        is_call = invoked_function(header, ()) is not None
        self._header, self._call = header, JsonCall(self._out, ("args", "arguments"), bare=True)
        self._progress = Progress.MORE if is_call else Progress.DONE
        self._is_kept = not is_call and not header.is_said
        self._out.content(header.text if self._is_kept else "")

    def _add(self, text: str) -> None:
        """Add a piece of a body. Where a call may be, it goes to the reader of the call; what follows the object is
        content, or part of arguments that are not valid JSON.
        """
        at = 0
        if self._progress is Progress.MORE:
            at, self._progress = self._call.read(text, 0)
            if self._progress is Progress.REJECTED:
                self._reject()
        (self._out.arguments if self._progress is Progress.BROKEN else self._out.content)(text[at:])

    def _end(self, word: str) -> None:
        """End a message. A call in which it ends stays open."""
        if self._progress is Progress.MORE and not self._call.is_call:
            self._reject()
        self._out.content(word if self._is_kept else "")

    def _reject(self) -> None:
        """Write a header and the beginning of a body that is no call as content."""
        self._out.content(self._header.text + self._call.held)
        self._is_kept = True
