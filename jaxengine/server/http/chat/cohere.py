"""POST /cohere/v2/chat: Cohere's endpoint over chat completions, without citations.

As from vLLM's reasoning models, reasoning before a call is a block of the content, never `tool_plan`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from jaxengine.api.engine_client import EngineClient
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import ABSENT, Answer, answers
from jaxengine.server.http.answer.sse import answer, event, json_response, stream_events
from jaxengine.server.http.chat.answers import ToolCall
from jaxengine.server.http.chat.cohere_protocol import CohereChatRequest
from jaxengine.server.http.chat.completion import ChatAnswer
from jaxengine.server.http.chat.run import ChatServer
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.request.errors import ApiError, cohere_error_body, renaming
from jaxengine.server.http.request.limits import JsonRoute, convert

CohereReason = Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL", "ERROR", "TIMEOUT"]
# Finish reason of a choice -> Cohere's. An output that repeats itself has ended by itself.
_REASONS = {"length": "MAX_TOKENS", "tool_calls": "TOOL_CALL", "error": "ERROR", "abort": "ERROR"}
# Field of a delta -> type of the content block, which is also the name of the block's text.
_BLOCKS = {"reasoning": "thinking", "content": "text"}


class CohereCounts(Answer):
    input_tokens: int
    output_tokens: int


class CohereUsage(Answer):
    billed_units: CohereCounts
    tokens: CohereCounts
    cached_tokens: int


class CohereLogprobs(Answer):
    """Text of one or more tokens, with their ids and log-probabilities."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


class CohereBlock(Answer):
    type: Literal["text", "thinking"]
    text: str = ABSENT
    thinking: str = ABSENT


class CohereMessage(Answer):
    role: Literal["assistant"]
    content: list[CohereBlock] = ABSENT
    tool_calls: list[ToolCall] = ABSENT


class CohereChat(Answer):
    id: str
    finish_reason: CohereReason
    message: CohereMessage
    usage: CohereUsage
    logprobs: list[CohereLogprobs] = ABSENT
    kv_transfer_params: dict[str, Any] = ABSENT


class CohereEvent(Answer):
    """Event of a stream. delta: "message" with what is new of it, or the end's finish_reason and usage, or error."""

    type: Literal[
        "message-start",
        "content-start",
        "content-delta",
        "content-end",
        "tool-call-start",
        "tool-call-delta",
        "tool-call-end",
        "message-end",
    ]
    id: str = ABSENT
    index: int = ABSENT
    delta: dict[str, Any] = ABSENT
    logprobs: CohereLogprobs = ABSENT


class CohereWriter:
    """Writer of a stream of Cohere's events, from the chunks of a chat completion. One block or call is open at most.

    name: id of the answer.
    """

    def __init__(self, name: str):
        self._name = name
        self._open: tuple[str, int] | None = None  # "content" or "tool-call", and its index
        self._kind: str | None = None  # type of the open block
        self._num_blocks = 0
        self._scores: list[dict[str, Any]] = []
        self._end: dict[str, Any] = {}

    def start(self) -> dict[str, Any]:
        """Return the first event, message-start, with the answer's id and the role "assistant"."""
        return {"type": "message-start", "id": self._name, "delta": {"message": {"role": "assistant"}}}

    def events(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a chunk. The finish reason and the usage are stored for `end`, and log-probabilities
        until the next event with a text.
        """
        if usage := chunk.get("usage"):
            self._end["usage"] = _usage(usage)
        for choice in chunk["choices"]:
            self._scores += _scores(choice)
            if choice["finish_reason"] is not None:
                self._end["finish_reason"] = _reason(choice)
            delta = choice["delta"]
            for name, kind in _BLOCKS.items():
                if delta.get(name):
                    yield from self._text(kind, delta[name])
            for call in delta.get("tool_calls", ()):
                yield from self._call(call)

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the end of the open block or call, if there is one, and message-end with finish reason and usage."""
        yield from self._close()
        yield {"type": "message-end", "id": self._name, "delta": self._end}

    def fail(self, message: str) -> Iterator[dict[str, Any]]:
        """Yield the events of `end`, with an error in place of usage, and the finish reason "ERROR"."""
        yield from self._close()
        yield {"type": "message-end", "id": self._name, "delta": {"error": message, "finish_reason": "ERROR"}}

    def _text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Yield the events for more text of a block of type `kind`, with the stored log-probabilities. If that is not
        open, another block or call is ended and it is begun.
        """
        if self._kind != kind:
            yield from self._close()
            self._kind, self._open = kind, ("content", self._num_blocks)
            self._num_blocks += 1
            yield self._say("start", {"content": {"type": kind, kind: ""}})
        scores, self._scores = self._scores, []
        yield {**self._say("delta", {"content": {kind: text}}), **({"logprobs": _joined(scores)} if scores else {})}

    def _call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events for the beginning of a call, after the end of what is open, or for more of its arguments.
        call: a chat completion's delta.
        """
        index, function = call["index"], call["function"]
        if self._open != ("tool-call", index):
            yield from self._close()
            self._open = "tool-call", index
            made = {"name": function.get("name", ""), "arguments": function["arguments"]}
            yield self._say("start", {"tool_calls": {"id": call.get("id", ""), "type": "function", "function": made}})
        elif function["arguments"]:
            yield self._say("delta", {"tool_calls": {"function": {"arguments": function["arguments"]}}})

    def _close(self) -> Iterator[dict[str, Any]]:
        """Yield the event that ends the open block or call, if there is one."""
        if self._open is not None:
            yield self._say("end")
        self._open = self._kind = None

    def _say(self, kind: str, message: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return an event about the open block or call. kind: "start", "delta" or "end". message: what is new."""
        assert self._open is not None
        name, index = self._open
        return {"type": f"{name}-{kind}", "index": index, **({"delta": {"message": message}} if message else {})}


def _reason(choice: dict[str, Any]) -> str:
    """Return Cohere's finish reason of a choice that has ended: by _REASONS, but "STOP_SEQUENCE" after a stop string,
    "TIMEOUT" for an abort by the timeout, and "COMPLETE" for others.
    """
    reason, stop = choice["finish_reason"], choice.get("stop_reason")
    if isinstance(stop, str) and reason == "stop":
        return "STOP_SEQUENCE"
    return "TIMEOUT" if (reason, stop) == ("abort", "timeout") else _REASONS.get(reason, "COMPLETE")


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the usage of a chat completion in Cohere's form: input and output tokens twice, and cached tokens."""
    counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"billed_units": counts, "tokens": counts, "cached_tokens": cached}


def _scores(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Return text, id and log-probability of each token of a choice, in Cohere's form; [] if not requested."""
    listed, ids = (choice.get("logprobs") or {}).get("content") or (), choice.get("token_ids") or ()
    return [
        {"text": each["token"], "token_ids": [token], "logprobs": [each["logprob"]]}
        for each, token in zip(listed, ids, strict=False)
    ]


def _joined(scores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return entries of `_scores` as one: their texts joined, and all their ids and log-probabilities."""
    whole: dict[str, Any] = {"text": "".join(each["text"] for each in scores)}
    return whole | {name: [one for each in scores for one in each[name]] for name in ("token_ids", "logprobs")}


def cohere_body(chat: dict[str, Any]) -> dict[str, Any]:
    """Return a complete chat completion, which has one choice, in Cohere's form. The message has content, blocks of
    reasoning and text, and tool_calls only if there are any, as has the body logprobs and kv_transfer_params.
    """
    (choice,) = chat["choices"]
    said, message = choice["message"], {"role": "assistant"}
    blocks = [{"type": kind, kind: said[name]} for name, kind in _BLOCKS.items() if said[name]]
    message |= {"content": blocks} if blocks else {}
    message |= {"tool_calls": said["tool_calls"]} if said.get("tool_calls") else {}
    body = {"id": chat["id"], "finish_reason": _reason(choice), "message": message, "usage": _usage(chat["usage"])}
    body |= {"logprobs": scores} if (scores := _scores(choice)) else {}
    moved = chat["kv_transfer_params"]
    return body | ({} if moved is None else {"kv_transfer_params": moved})


async def _events(chat: ChatAnswer, writer: CohereWriter, body: CohereChatRequest) -> AsyncGenerator[bytes, None]:
    """Run a request and yield the answer as server-sent events, without [DONE]; an item may be b"". Call it after
    `chat.prepare`. Raises the errors of ChatRun.pieces.
    """
    begun = False
    async with contextlib.aclosing(chat.chunks()) as found:
        with renaming(body.as_asked):
            async for chunks in found:
                said = [each for chunk in chunks for each in writer.events(chunk)]
                if not begun:
                    begun, said = True, [writer.start(), *said]
                yield b"".join(map(event, said))
    yield b"".join(map(event, writer.end()))


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the route /cohere/v2/chat. Raises ConfigError for an unknown parser."""
    routes = APIRouter(tags=["chat"], route_class=JsonRoute)
    server, names = ChatServer.open(engine, config), served_names(engine, config)

    @routes.post("/cohere/v2/chat", response_class=Response)
    @answers(CohereChat, CohereEvent)
    async def create_cohere_chat(body: CohereChatRequest, request: Request) -> Response:
        """Answer a conversation in Cohere's form, complete or as a stream of events. Raises RequestError, ApiError
        (404) for an unknown model, OverloadedError, EngineDeadError.
        """
        model, lora = await choose_model(engine, body.model, names)
        name, limits = body.register("chat", request), server.reasoning_format is not None
        asked, ignored = await convert(request, body.chat_request, limits_thinking=limits), request.state.ignored_fields
        template = server.renderer.template(asked)
        ignored += await convert(request, lambda: [*body.ignored_parts(template, limits_thinking=limits)])
        with renaming(body.as_asked):
            chat = ChatAnswer(server, asked, name, model, body.options(request, config, lora))
            await chat.prepare(ignored)

        async def whole() -> Response:
            with renaming(body.as_asked):
                return json_response(cohere_body(await chat.body()))

        writer = CohereWriter(name)

        def failed(error: ApiError) -> bytes:
            return b"".join(map(event, writer.fail(cohere_error_body(error)["message"])))

        if body.stream:
            return await stream_events(request, _events(chat, writer, body), config, failed=failed)
        return await answer(request, whole())

    return routes
