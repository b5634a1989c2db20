"""Choices of a chat completion: messages, deltas, and log-probabilities in the form of OpenAI's chat."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxengine.parsers.scan.events import ArgumentsDelta, ContentDelta, Event, ReasoningDelta, ToolCallStart, message_of
from jaxengine.requests.output.outputs import CompletionOutput, Logprob, PositionLogprobs
from jaxengine.server.base.captured import captured_fields
from jaxengine.server.http.answer.routed_experts import encoded_experts
from jaxengine.server.http.answer.sampling_mass import NO_SAMPLING, sampling_fields
from jaxengine.server.http.answer.weight_spans import SpanWriter
from jaxengine.server.http.request.json_logprobs import json_logprob, json_position
from jaxengine.server.http.request.protocol import NULL_CHOICE
from jaxengine.tokens.tokenizer import Tokenizer

_NULL_MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content"))


class ChatChoiceWriter:
    """Writer of the choices of one request.

    Args:
      role: role of the answer.
      before: text with which the answer begins, for `echo`.
      logprobs: number of likeliest tokens with log-probabilities, -1 for all that the engine returns; None for no
        log-probabilities.
      as_token_ids: whether tokens are written as token_id:N.
      with_token_ids: whether choices have token_ids.
      with_versions: whether choices have weight_versions.
      is_named: whether the request names the function to call; the finish reason is then "stop", as in OpenAI's API and
        vLLM.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        role: str,
        before: str,
        logprobs: int | None,
        *,
        as_token_ids: bool,
        with_token_ids: bool,
        with_versions: bool,
        is_named: bool = False,
    ):
        self._tokenizer = tokenizer
        self._role = role
        self._before = before
        self._logprobs = logprobs
        self._as_token_ids = as_token_ids
        self._with_token_ids = with_token_ids
        self._spans = SpanWriter() if with_versions else None
        self._is_named = is_named
        self._calling: set[int] = set()

    def whole(self, output: CompletionOutput, events: Sequence[Event]) -> dict[str, Any]:
        """Return a choice with its complete message; the text for `echo` precedes its content. Without text the content
        is None next to reasoning or tool calls, else "". events: the parser's events for the whole output.
        """
        parsed = message_of(events)
        content = parsed.content
        if content is None and not (parsed.tool_calls or parsed.reasoning):
            content = ""
        if self._before:
            content = self._before + (content or "")
        message: dict[str, Any] = {"role": self._role, "content": content, **_NULL_MESSAGE}
        if parsed.reasoning is not None:
            message |= _reasoning(parsed.reasoning)
        if parsed.tool_calls:
            self._calling.add(output.index)
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.tool_calls
            ]
        choice = {**NULL_CHOICE, **self._choice(output, "message", message)}
        found = {"routed_experts": encoded_experts(output), **captured_fields(output)}
        return {**choice, **found, **self._versions(output)}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Return the first choices of a stream for output `index`, one for each chunk: its role, then the text for
        `echo` if there is one.
        """
        deltas = [{"role": self._role, "content": ""}, *([{"content": self._before}] if self._before else ())]
        return [{"index": index, "delta": each, "logprobs": None, "finish_reason": None} for each in deltas]

    def chunks(self, output: CompletionOutput, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Return choices with an output's new parts, one for each chunk; [] if there is nothing new that was requested.
        events: the parser's new events.

        Text and reasoning share the first chunk, and each call has its own. Tokens, their log-probabilities and other
        captured fields are in the first chunk; the finish reason, "tool_calls" rather than "stop" once the output has
        begun a call, and weight_versions are in the last. A chunk never contains two calls, nor a call and the finish
        reason, because OpenAI's client would not notice that the call is complete.
        """
        if any(isinstance(event, ToolCallStart) for event in events):
            self._calling.add(output.index)
        deltas, versions = _deltas(events), self._versions(output)
        ends = output.finish_reason is not None
        if not deltas or (ends and "tool_calls" in deltas[-1]):
            deltas.append({})
        sampled = any(getattr(output, name) is not None for name in NO_SAMPLING)
        shown = self._with_token_ids or self._logprobs is not None or sampled
        rows = captured_fields(output)
        tokens = bool(rows) or (bool(output.token_ids) and shown)
        if deltas == [{}] and not tokens and not ends:
            return []
        choices = [self._choice(output, "delta", deltas[0])]
        choices[0] |= rows
        # Tokens and their logprobs are in the first chunk, the finish reason is in the last one.
        rest = dataclasses.replace(output, token_ids=[], logprobs=None, **NO_SAMPLING)
        choices += [self._choice(rest, "delta", delta) for delta in deltas[1:]]
        for choice in choices[:-1]:
            choice |= {"finish_reason": None, "stop_reason": None}
        choices[-1] |= versions
        return choices

    def prompt_logprobs(self, positions: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
        """Return the prompt's log-probabilities in vLLM's format: for each token a dict by token id, or None if the
        token has none.
        """
        return [json_position(position) for position in positions]

    def _versions(self, output: CompletionOutput) -> dict[str, Any]:
        """Return the field weight_versions if it is requested and the output has ended; {} otherwise. Counts tokens, so
        call it once for each piece.
        """
        return {} if self._spans is None else self._spans.of(output.index, output)

    def _choice(self, output: CompletionOutput, kind: str, said: dict[str, Any]) -> dict[str, Any]:
        """Return a choice whose field `kind`, "message" or "delta", is `said`. The finish reason "stop" becomes
        "tool_calls" if the output has tool calls and the request did not name the function.
        """
        reason, calls = output.finish_reason, output.index in self._calling and not self._is_named
        logprobs = token_logprobs(self._tokenizer, output, self._logprobs, self._as_token_ids)
        choice = {
            "index": output.index,
            kind: said,
            "logprobs": None if logprobs is None else {"content": logprobs},
            "finish_reason": "tool_calls" if reason == "stop" and calls else reason,
            "stop_reason": output.stop_reason,
        }
        return {**choice, "token_ids": output.token_ids if self._with_token_ids else None, **sampling_fields(output)}


def token_logprobs(
    tokenizer: Tokenizer,
    output: CompletionOutput,
    count: int | None,
    as_token_ids: bool = False,
) -> list[dict[str, Any]] | None:
    """Return the log-probability of each token of `output` in OpenAI's chat format. Each entry lists the `count`
    likeliest tokens, likeliest first; -1: all whose log-probabilities the engine returned.

    None if `count` is None or the output has no log-probabilities. as_token_ids: whether tokens are written as
    token_id:N in place of their text.
    """
    if count is None or output.logprobs is None:
        return None

    def one(token_id: int, entry: Logprob) -> dict[str, Any]:
        """Return a token's entry in OpenAI's format: "token", its text or, with as_token_ids, "token_id:ID"; "logprob"
        (`json_logprob`); and "bytes", those of the token in a byte-level vocabulary, else of its text.
        """
        text = entry.decoded_token or ""
        # Half a character has bytes, but no text.
        written = tokenizer.token_bytes(token_id) if tokenizer.is_byte_level else text.encode()
        token = f"token_id:{token_id}" if as_token_ids else text
        return {"token": token, "logprob": json_logprob(entry.logprob), "bytes": list(written)}

    found = []
    for token_id, position in zip(output.token_ids, output.logprobs, strict=True):
        best = sorted(position.items(), key=lambda item: -item[1].logprob)
        most = len(best) if count == -1 else count
        tops = [one(other, entry) for other, entry in best[:most]]
        found.append({**one(token_id, position[token_id]), "top_logprobs": tops})
    return found


def _deltas(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the deltas of the parser's events, dicts without a role: first one with content and reasoning, if there is
    any, then one for each tool call; [] for no events.
    """
    delta: dict[str, Any] = {}
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    if content:
        delta["content"] = content
    if reasoning:
        delta |= _reasoning(reasoning)
    calls = [{"tool_calls": [call]} for call in _calls(events)]
    return [delta, *calls] if delta else calls


def _calls(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return entries of a delta's tool_calls, one for each call. The events of a call are merged, because clients take
    a second entry for another call. Only an entry with the start of a call has its id and name.
    """
    entries: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            entries[event.index] = {"index": event.index, "id": event.id, "type": "function", "function": function}
        elif isinstance(event, ArgumentsDelta):
            entry = entries.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            entry["function"]["arguments"] += event.text
    return list(entries.values())


def _reasoning(text: str) -> dict[str, str]:
    """Return the reasoning text under vLLM's current and earlier field names."""
    return {"reasoning": text, "reasoning_content": text}
