"""/v1/responses, OpenAI's newer endpoint: a response is a chat completion in another format, and may be stored.

Implements the life of a response: created complete, as a stream or in the background, retrieved, continued, cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response

from jaxengine.api.engine_client import EngineClient, EngineDeadError
from jaxengine.parsers.events import message_of
from jaxengine.requests.options import RequestOptions
from jaxengine.requests.sampling_params import SamplingParams
from jaxengine.scheduler.errors import OverloadedError, RequestError, show_value
from jaxengine.server.http.answers import answers
from jaxengine.server.http.chat.output import token_logprobs
from jaxengine.server.http.chat.run import ChatRun, ChatServer
from jaxengine.server.http.errors import ApiError, as_api_error, error_body
from jaxengine.server.http.limits import JsonRoute
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.responses.answers import (
    DeletedResponse,
    InputItems,
    ResponseAnswer,
    ResponseStreamEvent,
    ResponseTokens,
)
from jaxengine.server.http.responses.input import left_out_items, named_items, read_input
from jaxengine.server.http.responses.output import ResponseWriter, Said, called
from jaxengine.server.http.responses.protocol import ENCRYPTED, ResponsesRequest, as_response_error
from jaxengine.server.http.sse import answer, encode_json, event, json_response, stream_events
from jaxengine.server.names import served_names
from jaxengine.server.options import ServerConfig
from jaxengine.server.stored.store import Responses, StoredResponse

logger = logging.getLogger(__name__)


class _Making:
    """A response that is being generated.

    Attributes:
      id: of the response and of its engine request.
      messages: the conversation without instructions.
      input: the items that the client sent.
      writer: builds the response.
    """

    def __init__(
        self,
        server: ChatServer,
        body: ResponsesRequest,
        response_id: str,
        model: str,
        messages: Sequence[dict[str, Any]],
        store: bool,
        options: RequestOptions,
    ):
        """options: for the engine request. Raises RequestError."""
        self.id = response_id
        self.messages = messages
        self.input = named_items(body.input)
        self._tokenizer = server.engine.inputs.require_tokenizer()
        self._num_logprobs = (body.top_logprobs or 0) if body.wants_logprobs else None
        try:
            self._run = ChatRun(server, body.chat_request(messages), response_id, options)
        except RequestError as error:
            raise as_response_error(error) from None
        head = _head(body, response_id, model, store, self._run.params)
        self._origins = body.callables.origins
        self.writer = ResponseWriter(head, self._origins, encrypted=ENCRYPTED in (body.include or ()))

    async def prepare(self, ignored: list[str]) -> None:
        """Prepares the prompt and appends to `ignored` the fields without effect for this model. Raises
        RequestError.
        """
        try:
            await self._run.prepare()
        except RequestError as error:
            raise as_response_error(error) from None
        ignored += ["reasoning"] if self._run.ignored else []

    async def events(self) -> AsyncGenerator[list[Said], None]:
        """Generates the response to its end; yields the events of each step."""
        said = self.writer.open()
        async with contextlib.aclosing(self._run.pieces()) as pieces:
            try:
                async for _, outputs in pieces:
                    for output, events in outputs:
                        logprobs = token_logprobs(self._tokenizer, output, self._num_logprobs)
                        said += self.writer.add(events, logprobs)
                        if output.finish_reason is not None:
                            said += self._end(output.finish_reason, output.stop_reason)
                    yield said
                    said = []
            except RequestError as error:
                raise as_response_error(error) from None

    def conversation(self) -> list[dict[str, Any]]:
        """Returns the messages, followed by the answer."""
        parsed = message_of(self.writer.parts)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content or ""}
        if parsed.reasoning:
            message["reasoning"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": called(call, self._origins)}
                for call in parsed.tool_calls
            ]
        return [*self.messages, message]

    def stored(self, owner: str) -> StoredResponse:
        """Returns the response and its conversation in their current state."""
        shown, messages = encode_json(self.writer.response), encode_json(self.conversation())
        return StoredResponse(self.id, owner, shown, messages, encode_json(self.input))

    def usage(self) -> dict[str, Any]:
        run, given = self._run, len(self._run.prompt["prompt_token_ids"])
        return {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": run.num_cached_tokens},
            "output_tokens": run.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": run.num_reasoning_tokens},
            "total_tokens": given + run.num_completion_tokens,
        }

    def fail(self, error: Exception) -> None:
        """Ends the response as failed, with the client's form of `error`."""
        shown = error_body(as_api_error(error))["error"]
        self.writer.close("failed", self.usage(), {"code": "server_error", "message": shown["message"]})

    def _end(self, reason: str, stop_reason: int | str | None) -> list[Said]:
        if reason == "stop":
            return self.writer.close("completed", self.usage())
        if reason == "length":
            return self.writer.close("incomplete", self.usage(), reason="max_output_tokens")
        if reason == "abort" and stop_reason != "timeout":
            return self.writer.close("cancelled", self.usage())
        why = "the request's time was up" if reason == "abort" else str(stop_reason or "the output cannot be used")
        return self.writer.close("failed", self.usage(), {"code": "server_error", "message": why})


def _head(body: ResponsesRequest, response_id: str, model: str, store: bool, params: SamplingParams) -> dict[str, Any]:
    """Returns the constant fields of a response."""
    plain = {"format": {"type": "text"}}
    text = plain if body.text is None else body.text.model_dump(exclude_none=True, by_alias=True)
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        # Null as in vLLM: none of these is taken.
        **dict.fromkeys(("max_tool_calls", "prompt", "input_messages", "output_messages")),
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": store,
        "temperature": params.temperature,
        "text": {**plain, **text},
        "tool_choice": _shown_choice(body),
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _shown_choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump()


def _owner(request: Request) -> str:
    """Returns a hash of the API key in the request's headers, which identifies the client."""
    shown = [request.headers.get(name, "") for name in ("authorization", "x-api-key")]
    return hashlib.sha256("\n".join(shown).encode()).hexdigest()


class _Responses:
    """State that all responses of this process share, other than stored ones, which are in `app.state.store`."""

    def __init__(self, engine: EngineClient, config: ServerConfig):
        self.server = ChatServer.open(engine, config)
        self._engine, self._config = engine, config
        self._names = served_names(engine, config)
        # Background tasks, by response id.
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        """Creates a response. Raises RequestError, ApiError."""
        model, lora = await choose_model(self._engine, body.model, self._names)
        owner, earlier, store = _owner(request), [], _store(request)
        if body.previous_response_id is not None:
            earlier = await _finished(store, body.previous_response_id, owner)
        response_id = body.request_id or f"resp_{secrets.token_hex(16)}"
        if body.request_id is not None and await store.knows(response_id):
            raise RequestError(f"request_id {show_value(response_id)} is in use", param="request_id")
        request.state.user = body.user
        keeps = body.store is not False
        messages, options = [*earlier, *read_input(body.input)], body.options(request, self._config, lora)
        making = _Making(self.server, body, response_id, model, messages, keeps, options)
        request.state.ignored_fields += [*body.ignored_parts, *left_out_items(body.input)]
        await making.prepare(request.state.ignored_fields)
        if body.background:
            return await self._begin(making, owner, request.app.state)
        keep = _Keeper(store, owner, self) if keeps else None
        if body.stream:
            events = self._stream(making, keep)
            return await stream_events(request, events, self._config.stream_write_timeout, done=b"")
        return await answer(request, self._whole(making, keep))

    async def _whole(self, making: _Making, keep: _Keeper | None) -> Response:
        async with contextlib.aclosing(making.events()) as events:
            async for _ in events:
                continue
        if keep is not None:
            await keep(making)
        return json_response(making.writer.response)

    async def _stream(self, making: _Making, keep: _Keeper | None) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(making.events()) as events:
            async for said in events:
                if keep is not None and making.writer.response["status"] != "in_progress":
                    await keep(making)
                yield b"".join(b"event: %b\n%b" % (each["type"].encode(), event(each)) for each in said)

    async def _begin(self, making: _Making, owner: str, state: Any) -> Response:
        """Starts a background response; returns its queued state at once."""
        queued = {**making.writer.response, "status": "queued"}
        stored = making.stored(owner)
        stored.response, stored.background, stored.is_running = encode_json(queued), True, True
        await state.store.put(stored, self)
        keep = _Keeper(state.store, owner, self, background=True)
        self._tasks[making.id] = asyncio.create_task(self._work(making, keep, state.traffic))
        await asyncio.sleep(0)  # a task that is cancelled before it has begun would leave the response as it is
        return json_response(queued)

    async def _work(self, making: _Making, keep: _Keeper, traffic: Any) -> None:
        traffic.num_running += 1
        try:
            await keep(making, is_running=True)
            async with contextlib.aclosing(making.events()) as events:
                async for said in events:
                    if any(each["type"] == "response.output_item.done" for each in said):
                        await keep(making, is_running=True)
        except asyncio.CancelledError:
            making.writer.close("cancelled", making.usage())
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("a response in the background failed")
            making.fail(error)
        finally:
            traffic.num_running -= 1
            self._tasks.pop(making.id, None)
            await keep(making)

    def cancel(self, response_id: str) -> None:
        """Cancels a background response, at most once: its clean-up must not be cancelled too."""
        if (task := self._tasks.pop(response_id, None)) is not None:
            task.cancel()

    async def count(self, body: ResponsesRequest, request: Request) -> Response:
        """Counts the tokens of the conversation. Raises RequestError, ApiError."""
        await choose_model(self._engine, body.model, self._names)
        earlier: Sequence[dict[str, Any]] = ()
        if body.previous_response_id is not None:
            earlier = await _finished(_store(request), body.previous_response_id, _owner(request))
        request.state.ignored_fields += [*body.ignored_parts, *left_out_items(body.input)]
        try:
            chat = body.chat_request([*earlier, *read_input(body.input)])
            ids = await self.server.renderer.token_ids(chat)
        except RequestError as error:
            raise as_response_error(error) from None
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


@dataclass(frozen=True)
class _Keeper:
    """Stores successive states of one response."""

    store: Responses
    owner: str
    worker: _Responses
    background: bool = False

    async def __call__(self, making: _Making, *, is_running: bool = False) -> None:
        """Stores the current state. A failure is only logged: even a stored response might be evicted at once."""
        stored = making.stored(self.owner)
        stored.background, stored.is_running = self.background, is_running
        try:
            await self.store.put(stored, self.worker)
        except (EngineDeadError, OverloadedError) as error:
            logger.warning("response %s is not kept: %s", making.id, error)


def _input_items(stored: StoredResponse, limit: int, after: str | None, newest_first: bool) -> Response:
    """Returns a page of a response's input items. Raises RequestError."""
    items = msgspec.json.decode(stored.input)
    if newest_first:
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise RequestError(f"after is {show_value(after)}, which is none of the response's items", param="after")
    first = 0 if after is None else ids.index(after) + 1
    page, shown = items[first : first + limit], ids[first : first + limit]
    ends = {"first_id": shown[0] if shown else None, "last_id": shown[-1] if shown else None}
    return json_response({"object": "list", "data": page, **ends, "has_more": first + limit < len(items)})


async def _finished(store: Responses, response_id: str, owner: str) -> Sequence[dict[str, Any]]:
    """Returns the conversation of a response that is to be continued. Raises ApiError, RequestError."""
    previous = _there(await store.get(response_id, owner), response_id)
    if previous.is_running:
        raise RequestError("previous_response_id is of a response that is not complete", param="previous_response_id")
    return msgspec.json.decode(previous.messages)


def _there(stored: StoredResponse | None, response_id: str) -> StoredResponse:
    """Returns `stored`; raises ApiError for None, a response that is not stored or belongs to another client."""
    if stored is None:
        raise ApiError(404, f"there is no stored response {show_value(response_id)}", param="response_id")
    return stored


def _store(request: Request) -> Responses:
    return request.app.state.store


def _json(stored: StoredResponse) -> Response:
    return Response(stored.response, media_type="application/json")


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Creates the routes. Raises ConfigError for an unknown parser."""
    routes = APIRouter(tags=["responses"], route_class=JsonRoute)
    responses = _Responses(engine, config)

    @routes.post("/v1/responses", response_class=Response)
    @answers(ResponseAnswer, ResponseStreamEvent)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        return await responses.create(body, request)

    @routes.get("/v1/responses/{response_id}", response_class=Response)
    @answers(ResponseAnswer)
    async def get_response(response_id: str, request: Request) -> Response:
        for name in request.query_params:
            raise RequestError(f"the query parameter {show_value(name)} is not supported", param=name)
        return _json(_there(await _store(request).get(response_id, _owner(request)), response_id))

    @routes.post("/v1/responses/input_tokens", response_class=Response)
    @answers(ResponseTokens)
    async def count_response_tokens(body: ResponsesRequest, request: Request) -> Response:
        return await responses.count(body, request)

    @routes.get("/v1/responses/{response_id}/input_items", response_class=Response)
    @answers(InputItems)
    async def get_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        stored = _there(await _store(request).get(response_id, _owner(request)), response_id)
        return _input_items(stored, limit, after, order == "desc")

    @routes.post("/v1/responses/{response_id}/cancel", response_class=Response)
    @answers(ResponseAnswer)
    async def cancel_response(response_id: str, request: Request) -> Response:
        owner, store = _owner(request), _store(request)
        if not _there(await store.get(response_id, owner), response_id).background:
            raise RequestError("only a response made with background can be cancelled", param="response_id")
        return _json(_there(await store.stop(response_id, owner), response_id))

    @routes.delete("/v1/responses/{response_id}", response_class=Response)
    @answers(DeletedResponse)
    async def delete_response(response_id: str, request: Request) -> Response:
        _there(await _store(request).delete(response_id, _owner(request)), response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return routes
