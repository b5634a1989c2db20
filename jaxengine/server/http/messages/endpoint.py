"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's endpoint over chat completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.output.outputs import CompletionOutput
from jaxengine.requests.params.options import RequestOptions
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import answers
from jaxengine.server.http.answer.sse import answer, json_response, stream_events, typed_event
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.server.http.chat.run import ChatRun, ChatServer
from jaxengine.server.http.messages.answers import Message, MessageEvent, MessageTokens
from jaxengine.server.http.messages.output import MessageWriter, Said
from jaxengine.server.http.messages.protocol import Conversation, MessagesRequest
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.request.errors import ApiError, messages_error_body, renaming
from jaxengine.server.http.request.limits import JsonRoute, convert


class _Message:
    """Message request in progress: call `prepare`, then `whole` for one response or `stream` for a stream."""

    def __init__(
        self,
        server: ChatServer,
        body: MessagesRequest,
        chat: ChatRequest,
        name: str,
        model: str,
        options: RequestOptions,
    ):
        """Create the run of the message; nothing runs yet. A budget that the body asks for limits its reasoning if the
        server can do that.

        chat: `body` as a chat request; changed. name: id of the message and of its engine request. model: model name in
        the response. options: scheduling options. Raises RequestError with Anthropic's field names.
        """
        self._body = body
        self._writer = MessageWriter()
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._moved: dict[str, Any] | None = None  # kv_transfer_params of the answer
        self._head = {"id": name, "type": "message", "role": "assistant", "model": model}
        if chat.thinking_token_budget is None and _limits(server, body):
            chat.thinking_token_budget = body.asked_budget
        with renaming(body.as_asked):
            self._run = ChatRun(server, chat, name, options, is_stream=bool(body.stream))

    async def prepare(self, ignored: list[str]) -> None:
        """Prepare the prompt, and append to `ignored` the fields, by Anthropic's names, that have no effect for this
        model.

        Raises RequestError with Anthropic's field names, OverloadedError.
        """
        with renaming(self._body.as_asked):
            await self._run.prepare()
        names = {"reasoning_effort": "thinking" if self._body.disables_thinking else "output_config.effort"}
        ignored += [names.get(name, name) for name in self._run.ignored]

    async def whole(self) -> Response:
        """Run the message and return the complete response. Call it after `prepare`. Raises the errors of `stream`."""
        async with contextlib.aclosing(self._events()) as events:
            async for _ in events:
                continue
        body = {**self._head, "content": self._writer.content, **self._stop, "usage": self._usage()}
        return json_response(body | ({} if self._moved is None else {"kv_transfer_params": self._moved}))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Run the message and yield the response as server-sent events, any number of them in an item: message_start,
        the events of `_events`, then message_delta and message_stop. Call it after `prepare`.

        Raises the errors of ChatRun.pieces, and ApiError (500) for an output that ended with an error.
        """
        begun = False
        async with contextlib.aclosing(self._events()) as events:
            async for said in events:
                if not begun:
                    begun, usage = True, {**self._usage(), "output_tokens": 0}
                    message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
                    said = [{"type": "message_start", "message": message}, *said]
                yield b"".join(map(typed_event, said))
        yield typed_event({"type": "message_delta", "delta": self._stop, "usage": self._usage()})
        yield typed_event({"type": "message_stop"})

    async def _events(self) -> AsyncGenerator[list[Said], None]:
        """Run the message and yield, for each output, Anthropic's events of its content blocks. Sets the stop reason at
        the end. Raises the errors of `stream`.
        """
        async with contextlib.aclosing(self._run.pieces()) as pieces:
            with renaming(self._body.as_asked):
                async for whole, outputs in pieces:
                    said: list[Said] = []
                    self._moved = whole.kv_transfer_params
                    for output, events in outputs:
                        said += self._writer.add(events)
                        if output.finish_reason is not None:
                            self._end(output)
                            said += self._writer.close()
                            if self._calls(output):
                                self._stop = {"stop_reason": "tool_use", "stop_sequence": None}
                    yield said

    def _end(self, output: CompletionOutput) -> None:
        """Set the stop reason for an output that has ended: "max_tokens" for "length", "pause_turn" for "abort",
        "end_turn" for "repetition". "stop" becomes "stop_sequence", together with the sequence, if a stop string has
        ended the output, else "end_turn".

        Raises ApiError (500) for an output that ended with an error.
        """
        reason, stop = output.finish_reason, output.stop_reason
        if reason == "length":
            self._stop["stop_reason"] = "max_tokens"
        elif reason in ("stop", "repetition"):
            # A stop token is not one of the requested sequences.
            sequence = stop if isinstance(stop, str) else None
            self._stop = {"stop_reason": "stop_sequence" if sequence else "end_turn", "stop_sequence": sequence}
        elif reason == "abort":
            # Aborted by the timeout or an operator: the client may send the text back for the model to continue.
            self._stop["stop_reason"] = "pause_turn"
        else:
            raise ApiError(500, str(stop or "the output cannot be used"))

    def _calls(self, output: CompletionOutput) -> bool:
        """Whether an output ended with a tool call. A call that a stop sequence has cut short does not count, as it
        must not be executed.
        """
        is_cut = isinstance(output.stop_reason, str) and self._writer.is_cut
        return output.finish_reason == "stop" and self._writer.calls and not is_cut

    def _usage(self) -> dict[str, Any]:
        """Return the usage object with the token counts so far. Tokens that were found in the prefix cache, or written
        to it, are not counted as input tokens.
        """
        cached, created = self._run.num_cached_tokens, self._run.num_created_cache_tokens
        return {
            "input_tokens": len(self._run.prompt["prompt_token_ids"]) - cached - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
            "output_tokens": self._run.num_completion_tokens,
        }


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes /v1/messages and /v1/messages/count_tokens. Raises ConfigError for an unknown parser."""
    routes = APIRouter(tags=["messages"], route_class=JsonRoute)
    server = ChatServer.open(engine, config)
    names = served_names(engine, config)

    @routes.post("/v1/messages", response_class=Response)
    @answers(Message, MessageEvent)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation in Anthropic's form, complete or as a stream of events. Raises RequestError, ApiError
        (404) for an unknown model, OverloadedError, EngineDeadError.
        """
        model, lora = await choose_model(engine, body.model, names)
        name = body.register("msg", request)
        chat = await _read(server, body, request)
        message = _Message(server, body, chat, name, model, body.options(request, config, lora))
        await message.prepare(request.state.ignored_fields)
        if body.stream:
            return await stream_events(request, message.stream(), config, done=b"", failed=_failed)
        return await answer(request, message.whole())

    @routes.post("/v1/messages/count_tokens", response_class=Response)
    @answers(MessageTokens)
    async def count_message_tokens(body: Conversation, request: Request) -> Response:
        """Return, as `input_tokens`, the number of tokens of a conversation, which may exceed the context. Raises
        RequestError, ApiError (404) for an unknown model, OverloadedError, EngineDeadError.
        """
        await choose_model(engine, body.model, names)
        chat = await _read(server, body, request)
        with renaming(body.as_asked):
            ids = await server.renderer.token_ids(chat)
        return json_response({"input_tokens": len(ids)})

    return routes


def _limits(server: ChatServer, body: Conversation) -> bool:
    """Whether the token budget in a request's `thinking` has an effect: thinking is enabled, and the server has a
    reasoning parser.
    """
    return server.reasoning_format is not None and body.thinking is not None and body.thinking.type == "enabled"


async def _read(server: ChatServer, body: Conversation, request: Request) -> ChatRequest:
    """Return the equivalent chat request, and add the names of the request's parts that are accepted without effect,
    its beta header included, to its state. Raises RequestError with this API's field names, OverloadedError.
    """
    chat, ignored = await convert(request, lambda: (body.chat_request(), [*body.ignored_parts]))
    budget = () if body.asked_budget is None or _limits(server, body) else ("thinking.budget_tokens",)
    header = (name for name in ("anthropic-beta",) if name in request.headers)
    request.state.ignored_fields += [*ignored, *budget, *header]
    return chat


def _failed(error: ApiError) -> bytes:
    """Return the error that ends a stream, encoded as one of Anthropic's events."""
    return typed_event(messages_error_body(error))
