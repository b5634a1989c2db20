"""/v1/responses: OpenAI's newer endpoint. A response is a chat completion with another wire, and may be kept.

Owns the life of a response: made at once, as a stream or in the background, asked for, continued, cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from jaxengine.api.engine_client import EngineClient
from jaxengine.parsers.events import message_of
from jaxengine.requests.options import RequestOptions
from jaxengine.requests.sampling_params import SamplingParams
from jaxengine.server.http.chat.output import token_logprobs
from jaxengine.server.http.chat.run import ChatRun, ChatServer
from jaxengine.server.http.errors import as_api_error, error_body
from jaxengine.server.http.limits import JsonRoute
from jaxengine.server.http.models import check_model
from jaxengine.server.http.responses.input import named_items, read_input
from jaxengine.server.http.responses.output import ResponseWriter, Said
from jaxengine.server.http.responses.protocol import ENCRYPTED, ResponsesRequest, as_response_error
from jaxengine.server.http.responses.store import ResponseStore, StoredResponse
from jaxengine.server.http.sse import answer, event, json_response, stream_events
from jaxengine.server.names import served_names
from jaxengine.server.options import ServerConfig
from scheduler.errors import RequestError, show_value

logger = logging.getLogger(__name__)


class _Making:
    """One response under way.

    Attributes:
      id: of the response, and of its request in the engine.
      messages: the conversation without instructions.
      input: the items that the client sent.
      writer: holds the response.
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
        """options: of its request in the engine. Raises RequestError."""
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
        self.writer = ResponseWriter(head, encrypted=ENCRYPTED in (body.include or ()))

    async def prepare(self, ignored: list[str]) -> None:
        """ignored: gets the fields that say nothing to this model. Raises RequestError."""
        try:
            await self._run.prepare()
        except RequestError as error:
            raise as_response_error(error) from None
        ignored += ["reasoning"] if self._run.ignored else []

    async def events(self) -> AsyncGenerator[list[Said], None]:
        """Works until the response is complete; yields what there is to say."""
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
        """The messages with the answer."""
        parsed = message_of(self.writer.parts)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content or ""}
        if parsed.reasoning:
            message["reasoning"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.tool_calls
            ]
        return [*self.messages, message]

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
        """Ends the response with what a client is told about `error`."""
        told = error_body(as_api_error(error))["error"]
        self.writer.close("failed", self.usage(), {"code": "server_error", "message": told["message"]})

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
    """What a response says that does not change."""
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
    """Who asks, as far as the server knows: by the key."""
    shown = [request.headers.get(name, "") for name in ("authorization", "x-api-key")]
    return hashlib.sha256("\n".join(shown).encode()).hexdigest()


class _Responses:
    """What the server's responses have in common."""

    def __init__(self, engine: EngineClient, config: ServerConfig):
        self.server = ChatServer.open(engine, config)
        self.store = ResponseStore()
        self._config = config
        self._names = served_names(engine, config)

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        """Raises RequestError, ApiError."""
        model = check_model(body.model, self._names)
        # Another process would not find what this one keeps.
        can_store = self._config.api_server_count == 1
        for name in ("store", "background", "previous_response_id"):
            if getattr(body, name) and not can_store:
                raise RequestError(f"{name} needs a server with --api-server-count 1", param=name)
        owner, earlier = _owner(request), []
        if body.previous_response_id is not None:
            earlier = self._finished(body.previous_response_id, owner)
        response_id = body.request_id or f"resp_{secrets.token_hex(16)}"
        if response_id in self.store:
            raise RequestError(f"request_id {show_value(response_id)} is in use", param="request_id")
        request.state.user = body.user
        stored = can_store and body.store is not False
        messages = [*earlier, *read_input(body.input)]
        options = body.options(request, self._config)
        making = _Making(self.server, body, response_id, model, messages, stored, options)
        if body.text is not None and body.text.verbosity is not None:
            request.state.ignored_fields.append("text.verbosity")
        await making.prepare(request.state.ignored_fields)
        if body.background:
            return await self._begin(making, owner, request.app.state.traffic)
        keep_for = owner if stored else None
        if body.stream:
            events = self._stream(making, keep_for)
            return await stream_events(request, events, self._config.stream_write_timeout, done=b"")
        return await answer(request, self._whole(making, keep_for))

    def _finished(self, response_id: str, owner: str) -> Sequence[dict[str, Any]]:
        previous = self.store.get(response_id, owner)
        if previous.is_running:
            raise RequestError(
                "previous_response_id is of a response that is not complete", param="previous_response_id"
            )
        return previous.messages

    async def _whole(self, making: _Making, owner: str | None) -> Response:
        async with contextlib.aclosing(making.events()) as events:
            async for _ in events:
                continue
        self._keep(making, owner)
        return json_response(making.writer.response)

    async def _stream(self, making: _Making, owner: str | None) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(making.events()) as events:
            async for said in events:
                if making.writer.response["status"] != "in_progress":
                    self._keep(making, owner)
                yield b"".join(b"event: %b\n%b" % (each["type"].encode(), event(each)) for each in said)

    def _keep(self, making: _Making, owner: str | None) -> None:
        if owner is not None:
            self.store.put(StoredResponse(owner, making.writer.response, making.conversation(), making.input))

    async def _begin(self, making: _Making, owner: str, traffic: Any) -> Response:
        """Answers at once; the work goes on."""
        queued = {**making.writer.response, "status": "queued"}
        stored = StoredResponse(owner, queued, making.messages, making.input)
        self.store.put(stored)
        stored.task = asyncio.create_task(self._work(making, stored, traffic))
        await asyncio.sleep(0)  # a task that is cancelled before it has begun would leave the response as it is
        return json_response(queued)

    async def _work(self, making: _Making, stored: StoredResponse, traffic: Any) -> None:
        traffic.num_running += 1
        try:
            stored.response = making.writer.response
            async with contextlib.aclosing(making.events()) as events:
                async for _ in events:
                    continue
        except asyncio.CancelledError:
            making.writer.close("cancelled", making.usage())
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("a response in the background failed")
            making.fail(error)
        finally:
            traffic.num_running -= 1
            if making.id in self.store:
                stored.response, stored.messages = making.writer.response, making.conversation()
                self.store.put(stored)

    async def count(self, body: ResponsesRequest, request: Request) -> Response:
        """How many tokens the conversation has. Raises RequestError, ApiError."""
        check_model(body.model, self._names)
        earlier: Sequence[dict[str, Any]] = ()
        if body.previous_response_id is not None:
            earlier = self._finished(body.previous_response_id, _owner(request))
        try:
            chat = body.chat_request([*earlier, *read_input(body.input)])
            ids = await self.server.renderer.token_ids(chat)
        except RequestError as error:
            raise as_response_error(error) from None
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    def input_items(self, stored: StoredResponse, limit: int, after: str | None, newest_first: bool) -> Response:
        """A page of what a response was asked with. Raises RequestError."""
        items = list(reversed(stored.input)) if newest_first else list(stored.input)
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise RequestError(f"after is {show_value(after)}, which is none of the response's items", param="after")
        first = 0 if after is None else ids.index(after) + 1
        page, shown = items[first : first + limit], ids[first : first + limit]
        ends = {"first_id": shown[0] if shown else None, "last_id": shown[-1] if shown else None}
        return json_response({"object": "list", "data": page, **ends, "has_more": first + limit < len(items)})

    async def cancel(self, response_id: str, owner: str) -> Response:
        """Ends one that runs in the background. Raises ApiError, RequestError."""
        stored = self.store.get(response_id, owner)
        if stored.task is None:
            raise RequestError("only a response made with background can be cancelled", param="response_id")
        await self._stop(stored)
        return json_response(stored.response)

    async def delete(self, response_id: str, owner: str) -> Response:
        """Raises ApiError."""
        stored = self.store.get(response_id, owner)
        await self._stop(stored)
        self.store.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _stop(self, stored: StoredResponse) -> None:
        if stored.task is not None and stored.is_running:
            stored.task.cancel()
            await asyncio.wait((stored.task,))


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Raises ConfigError for a parser that is not known."""
    routes = APIRouter(tags=["responses"], route_class=JsonRoute)
    responses = _Responses(engine, config)

    @routes.post("/v1/responses", response_class=Response)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        return await responses.create(body, request)

    @routes.get("/v1/responses/{response_id}", response_class=Response)
    async def get_response(response_id: str, request: Request) -> Response:
        for name in request.query_params:
            raise RequestError(f"the query parameter {show_value(name)} is not supported", param=name)
        return json_response(responses.store.get(response_id, _owner(request)).response)

    @routes.post("/v1/responses/input_tokens", response_class=Response)
    async def count_response_tokens(body: ResponsesRequest, request: Request) -> Response:
        return await responses.count(body, request)

    @routes.get("/v1/responses/{response_id}/input_items", response_class=Response)
    async def get_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        stored = responses.store.get(response_id, _owner(request))
        return responses.input_items(stored, limit, after, order == "desc")

    @routes.post("/v1/responses/{response_id}/cancel", response_class=Response)
    async def cancel_response(response_id: str, request: Request) -> Response:
        return await responses.cancel(response_id, _owner(request))

    @routes.delete("/v1/responses/{response_id}", response_class=Response)
    async def delete_response(response_id: str, request: Request) -> Response:
        return await responses.delete(response_id, _owner(request))

    return routes
