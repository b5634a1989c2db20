"""Endpoint /v1/responses, OpenAI's newer one. A response is a chat completion in another format, and may be stored."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response

from jaxengine.api.engine_client import EngineClient
from jaxengine.parsers.scan.events import message_of
from jaxengine.requests.output.outputs import RequestOutput
from jaxengine.requests.params.options import RequestOptions
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import answers
from jaxengine.server.http.answer.request_metrics import request_times
from jaxengine.server.http.answer.sse import answer, json_response, stream_events, typed_event
from jaxengine.server.http.chat.output import token_logprobs
from jaxengine.server.http.chat.run import ChatRun, ChatServer
from jaxengine.server.http.lists import there
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.request.auth import check_query
from jaxengine.server.http.request.errors import as_api_error, error_body, renaming
from jaxengine.server.http.request.limits import JsonRoute, convert
from jaxengine.server.http.responses.answers import (
    DeletedResponse,
    InputItems,
    ResponseAnswer,
    ResponseStreamEvent,
    ResponseTokens,
)
from jaxengine.server.http.responses.following import followed
from jaxengine.server.http.responses.head import raw_message, response_head
from jaxengine.server.http.responses.input import left_out_items, named_items, read_input
from jaxengine.server.http.responses.keeping import (
    Asked,
    Held,
    Keeper,
    Memory,
    check_size,
    input_items,
    joined,
    only,
    read_back,
)
from jaxengine.server.http.responses.output import ResponseWriter, Said, called
from jaxengine.server.http.responses.protocol import ENCRYPTED, ResponsesRequest, as_response_error
from jaxengine.server.http.responses.references import with_items
from jaxengine.server.stored.records import Part, Responses

logger = logging.getLogger(__name__)

# Bytes of stored conversations that requests may hold at a time, if the process has no memory limit.
_MEMORY_BYTES = 1 << 30


class _Making:
    """Response that is being generated.

    Attributes:
      id: id of the response and of its engine request.
      earlier: messages of the stored conversation that it continues.
      writer: builds the response.
      held: account of the memory of its conversation.
    """

    def __init__(
        self,
        server: ChatServer,
        body: ResponsesRequest,
        response_id: str,
        model: str,
        earlier: Sequence[dict[str, Any]],
        question: Sequence[dict[str, Any]],
        store: bool,
        options: RequestOptions,
        held: Held,
    ):
        """Create the engine request; nothing runs yet.

        question: the messages after `earlier`. model: model name in the response. store: whether the response says that
        it is stored. options: scheduling options. Raises RequestError with ResponsesRequest's field names.
        """
        self.id = response_id
        self.earlier = earlier
        self.held = held
        self._tokenizer = server.engine.inputs.require_tokenizer()
        with renaming(as_response_error):
            chat = body.chat_request([*earlier, *question])
            self._run = ChatRun(server, chat, response_id, options, is_stream=bool(body.stream))
        wants_logprobs = body.wants_logprobs and not self._run.hides_tokens
        self._num_logprobs = (body.top_logprobs or 0) if wants_logprobs else None
        self._has_times = server.config.enable_per_request_metrics
        self._has_messages = bool(body.enable_response_messages)
        self._written: tuple[list[str], list[int]] | None = None  # texts and tokens of the output, if they are shown
        if self._has_messages and not self._run.hides_tokens:
            self._written = [], []
        head = response_head(body, response_id, model, store, self._run.params)
        self._origins = body.callables.origins
        self.writer = ResponseWriter(head, self._origins, encrypted=ENCRYPTED in (body.include or ()))

    async def prepare(self, ignored: list[str]) -> None:
        """Prepare the prompt, and append "reasoning" to `ignored` if that field has no effect for this model. Raises
        RequestError with ResponsesRequest's field names, OverloadedError.
        """
        with renaming(as_response_error):
            await self._run.prepare()
        ignored += ["reasoning"] if self._run.ignored else []

    async def events(self, said: list[Said]) -> AsyncGenerator[list[Said], None]:
        """Generate the response to its end; for each output, yield the list of stream events, which may be empty. Call
        it after `prepare`. `writer.response` is the current state. Raises the errors of EngineClient.stream.

        said: events that the first output's follow in its list.
        """
        async with contextlib.aclosing(self._run.pieces()) as pieces:
            with renaming(as_response_error):
                async for whole, outputs in pieces:
                    for output, events in outputs:
                        if self._written is not None:
                            self._written[0].append(output.text)
                            self._written[1].extend(output.token_ids)
                        logprobs = token_logprobs(self._tokenizer, output, self._num_logprobs)
                        said += self.writer.add(events, logprobs)
                        if output.finish_reason is not None:
                            self.writer.response |= self._about(whole)
                            said += self._end(output.finish_reason, output.stop_reason)
                    yield said
                    said = []

    def _about(self, output: RequestOutput) -> dict[str, Any]:
        """Return the fields of the response that its last output completes: its times if the server measures them, and
        prompt and output as text and tokens if the request asks for them. An output that has hidden reasoning stays
        None.
        """
        run, found = self._run, dict[str, Any]()
        if self._has_times:
            found["metrics"] = request_times(output.metrics, run.num_completion_tokens)
        if self._has_messages:
            found["input_messages"] = [raw_message(str(run.prompt["prompt"]), run.prompt["prompt_token_ids"])]
        if self._written is not None:
            texts, token_ids = self._written
            found["output_messages"] = [raw_message("".join(texts), token_ids)]
        return found

    def answer(self) -> dict[str, Any]:
        """Return the answer so far as a chat message: content ("" without a text), and reasoning and tool_calls if
        there are any.
        """
        parsed = message_of(self.writer.parts)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content or ""}
        if parsed.reasoning:
            message["reasoning"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": called(call, self._origins)}
                for call in parsed.tool_calls
            ]
        return message

    def usage(self) -> dict[str, Any]:
        """Return the usage object with the token counts so far."""
        run, given = self._run, len(self._run.prompt["prompt_token_ids"])
        cached = {"cached_tokens": run.num_cached_tokens, "cache_write_tokens": run.num_created_cache_tokens}
        return {
            "input_tokens": given,
            "input_tokens_details": cached,
            "output_tokens": run.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": run.num_reasoning_tokens},
            "total_tokens": given + run.num_completion_tokens,
        }

    def fail(self, error: Exception) -> list[Said]:
        """End the response with status "failed" and the message that a client would get for `error`; return its last
        events.
        """
        shown = error_body(as_api_error(error))["error"]
        return self.writer.close("failed", self.usage(), {"code": "server_error", "message": shown["message"]})

    def _end(self, reason: str, stop_reason: int | str | None) -> list[Said]:
        """End the response for the engine's finish reason; return its last events. "stop" becomes status "completed",
        "length" "incomplete", "abort" "cancelled"; an abort with the stop_reason "timeout", and any other reason,
        becomes "failed".
        """
        if reason == "stop":
            return self.writer.close("completed", self.usage())
        if reason == "length":
            return self.writer.close("incomplete", self.usage(), reason="max_output_tokens")
        if reason == "abort" and stop_reason != "timeout":
            return self.writer.close("cancelled", self.usage())
        why = "the request's time was up" if reason == "abort" else str(stop_reason or "the output cannot be used")
        return self.writer.close("failed", self.usage(), {"code": "server_error", "message": why})


class _Responses:
    """Objects shared by all responses of this process. Stored responses are in `app.state.store`."""

    def __init__(self, engine: EngineClient, config: ServerConfig):
        self.server = ChatServer.open(engine, config)
        self._engine, self._config = engine, config
        self._names = served_names(engine, config)
        self._memory = Memory(config.api_memory_limit_bytes // 4 or _MEMORY_BYTES)
        self._most_bytes = config.store_bounds()["conversation_bytes"]
        # Background tasks, by owner and response id.
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        """Create a response and return it: complete, as a stream, or queued if it is generated in the background. The
        stream of one in the background may be left and followed again.

        Raises RequestError, ApiError (404) for an unknown model or conversation, OverloadedError, and EngineDeadError
        if the engine or the store cannot answer. After an error the memory of its conversation is released.
        """
        model, lora = await choose_model(self._engine, body.model, self._names)
        response_id = body.register("resp", request)
        held = self._memory.hold()
        try:
            body.input = await with_items(body.input, _store(request), request.state.owner, held)
            making, keeper = await self._make(body, request, response_id, model, lora, held)
            request.state.ignored_fields += [*body.ignored_parts, *left_out_items(body.input)]
            await making.prepare(request.state.ignored_fields)
            if body.background:
                assert keeper is not None
                queued = await self._begin(making, keeper, request.app.state)
                return await self.follow(request, making.id) if body.stream else json_response(queued)
            if body.stream:
                events = self._stream(making, keeper)
                return await stream_events(request, events, self._config, done=b"")
            return await answer(request, self._whole(making, keeper))
        except BaseException:
            held.release()
            raise

    async def _make(
        self, body: ResponsesRequest, request: Request, response_id: str, model: str, lora: str | None, held: Held
    ) -> tuple[_Making, Keeper | None]:
        """Return a new response, whose prompt is not rendered yet, and its keeper, None if it is not to be stored.

        Without `store` in the request, a response is stored if its conversation is small enough; one that is made in
        the background or continues a stored one must be. held: takes the bytes of the conversation; the caller releases
        it after an error. Raises RequestError, also for a request_id in use and for a conversation that must be stored
        and is too large, ApiError (404) if there is none to continue, OverloadedError, EngineDeadError.
        """
        owner, store = request.state.owner, _store(request)
        earlier, earlier_bytes = await self._earlier(body, request, held)
        if body.request_id is not None and await store.find(response_id, owner) is not None:
            raise RequestError(f"request_id {show_value(response_id)} is in use", param="request_id")
        question, keeper = await convert(request, read_input, body.input), None
        if body.store is not False:
            asked = await Asked.of(question, named_items(body.input))
            size, previous = earlier_bytes + asked.question.num_bytes, body.previous_response_id
            # By default a response is stored if it is small enough; its field `store` says whether it is.
            if size <= self._most_bytes or body.store or body.background or previous is not None:
                check_size(size, self._most_bytes, continued=previous is not None)
                held.take(asked.num_bytes)
                background = bool(body.background)
                keeper = Keeper(store, owner, self, asked, previous, background, background and bool(body.stream))
        options = body.options(request, self._config, lora)
        stored = keeper is not None
        return _Making(self.server, body, response_id, model, earlier, question, stored, options, held), keeper

    async def _earlier(
        self, body: ResponsesRequest, request: Request, held: Held
    ) -> tuple[Sequence[dict[str, Any]], int]:
        """Return the messages of the stored conversation that the request continues, and their size in bytes; ((), 0)
        for a new one. held: takes these bytes. Raises ApiError (404) if the response is not stored, RequestError if it
        is not complete, OverloadedError, EngineDeadError.
        """
        name = body.previous_response_id
        if name is None:
            return (), 0
        store, owner = _store(request), request.state.owner
        if there(await store.find(name, owner), "response", name, "previous_response_id").is_running:
            text = "previous_response_id is of a response that is not complete"
            raise RequestError(text, param="previous_response_id")
        found, messages = await read_back(store, name, owner, "conversation", held, joined)
        return messages, found.num_bytes["conversation"]

    async def _whole(self, making: _Making, keeper: Keeper | None) -> Response:
        """Generate a response to its end, store it if there is a keeper (a failure of that is only logged), and return
        it. Releases its memory in every case. Raises the errors of `making.events`.
        """
        try:
            async with contextlib.aclosing(making.events([])) as events:
                async for _ in events:
                    continue
            if keeper is not None:
                await keeper.keep(making, making.writer.response)
            return json_response(making.writer.response)
        finally:
            making.held.release()

    async def _stream(self, making: _Making, keeper: Keeper | None) -> AsyncGenerator[bytes, None]:
        """Generate a response and yield its events, encoded. It is stored, if there is a keeper, before its last event
        is yielded. Releases its memory in every case. Raises the errors of `making.events`.
        """
        try:
            # An error before the first output is the answer's status, which the first event would end.
            async with contextlib.aclosing(making.events(making.writer.open())) as events:
                async for said in events:
                    if keeper is not None and making.writer.response["status"] != "in_progress":
                        await keeper.keep(making, making.writer.response)
                    yield b"".join(map(typed_event, said))
        finally:
            making.held.release()

    async def follow(self, request: Request, response_id: str, number: int = -1) -> Response:
        """Return the stream of a stored response's events after `number`. If the client leaves, the generation goes on.
        Raises EngineDeadError if the store is down before the first event.
        """
        events = followed(_store(request), response_id, request.state.owner, number)
        return await stream_events(request, events, self._config, done=b"")

    async def _begin(self, making: _Making, keeper: Keeper, state: Any) -> dict[str, Any]:
        """Store a background response as "queued", with the first events of its stream, start its generation as a task,
        and return this state. state: the application's. Raises OverloadedError or EngineDeadError if the response
        cannot be stored.
        """
        queued = {**making.writer.response, "status": "queued"}
        await keeper.put(making, queued, is_running=True, said=making.writer.open())
        self._tasks[keeper.owner, making.id] = asyncio.create_task(self._work(making, keeper, state.traffic))
        await asyncio.sleep(0)  # the work counts as running when the client has its answer
        return queued

    async def _work(self, making: _Making, keeper: Keeper, traffic: Any) -> None:
        """Generate a response in the background and store its states: at the beginning, after each completed item, and
        at the end, also after an error or a cancellation. Errors are not raised; those other than RequestError are
        logged. It counts as running in `traffic`. Its memory is released at the end.
        """
        traffic.num_running += 1
        last: list[Said] = []
        try:
            await keeper.keep(making, making.writer.response, is_running=True)
            async with contextlib.aclosing(making.events([])) as events:
                async for said in events:
                    if making.writer.response["status"] != "in_progress":
                        last = said
                        continue
                    await keeper.tell(making, said)
                    if any(each["type"] == "response.output_item.done" for each in said):
                        await keeper.keep(making, making.writer.response, is_running=True)
        except asyncio.CancelledError:
            last = making.writer.close("cancelled", making.usage())
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("a response in the background failed")
            last = making.fail(error)
        finally:
            traffic.num_running -= 1
            self._tasks.pop((keeper.owner, making.id), None)
            await keeper.keep(making, making.writer.response, said=last)
            making.held.release()

    def cancel(self, response_id: str, owner: str) -> None:
        """Cancel a background response's task soon: after its first step, without which the response stays running."""
        asyncio.get_running_loop().call_soon(self._cancel_now, (owner, response_id))

    def _cancel_now(self, key: tuple[str, str]) -> None:
        """Cancel the task of (owner, response's id), never twice, as that would end its clean-up. Ignores other ids."""
        if (task := self._tasks.pop(key, None)) is not None:
            task.cancel()

    async def count(self, body: ResponsesRequest, request: Request) -> Response:
        """Return, as `input_tokens`, the number of tokens of the request's conversation, which may exceed the context.
        Nothing is generated. Raises RequestError, ApiError (404) for an unknown model or conversation, OverloadedError,
        EngineDeadError.
        """
        await choose_model(self._engine, body.model, self._names)
        request.state.ignored_fields += [*body.ignored_parts, *left_out_items(body.input)]
        held = self._memory.hold()
        try:
            body.input = await with_items(body.input, _store(request), request.state.owner, held)
            earlier, _ = await self._earlier(body, request, held)
            with renaming(as_response_error):
                chat = body.chat_request([*earlier, *await convert(request, read_input, body.input)])
                ids = await self.server.renderer.token_ids(chat)
        finally:
            held.release()
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def show(self, request: Request, response_id: str, part: Part, use: Callable[[list[Any]], bytes]) -> Response:
        """Return the response whose body is `use(values)`, JSON made of the values in a part of this client's stored
        response. `use` may run on a thread.

        Raises ApiError (404) if there is no such response, OverloadedError, EngineDeadError, and the errors of `use`.
        """
        held = self._memory.hold()
        try:
            _, shown = await read_back(_store(request), response_id, request.state.owner, part, held, use)
            return Response(shown, media_type="application/json")
        finally:
            held.release()


def _store(request: Request) -> Responses:
    """Return the store of responses of the application that answers the request."""
    return request.app.state.store


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes /v1/responses, /v1/responses/input_tokens, and /v1/responses/{id} with /input_items and
    /cancel. Raises ConfigError for an unknown parser.
    """
    routes = APIRouter(tags=["responses"], route_class=JsonRoute)
    responses = _Responses(engine, config)

    @routes.post("/v1/responses", response_class=Response)
    @answers(ResponseAnswer, ResponseStreamEvent)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer a request: whole, as a stream, or in the background. Raises `_Responses.create`'s errors."""
        return await responses.create(body, request)

    @routes.get("/v1/responses/{response_id}", response_class=Response, dependencies=[Depends(check_query)])
    @answers(ResponseAnswer, ResponseStreamEvent)
    async def get_response(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        """Return a stored response. stream: the events of one that was made with background and stream instead, those
        after number `starting_after`. Raises ApiError (404) if there is none, RequestError for a stream of another one
        and for starting_after without stream.
        """
        if starting_after is not None and not stream:
            raise RequestError("starting_after is only allowed with stream=true", param="starting_after")
        if stream:
            found = there(await _store(request).find(response_id, request.state.owner), "response", response_id)
            if not found.is_streamed:
                raise RequestError("only a response made with background and stream can be streamed", param="stream")
            return await responses.follow(request, response_id, -1 if starting_after is None else starting_after)
        return await responses.show(request, response_id, "response", only)

    @routes.post("/v1/responses/input_tokens", response_class=Response)
    @answers(ResponseTokens)
    async def count_response_tokens(body: ResponsesRequest, request: Request) -> Response:
        """Count the tokens of a request's conversation, which may exceed the context. Raises the errors of `count`."""
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
        """List the input items of a stored response, at most `limit`, those after the one with id `after`; "desc":
        newest first. Raises RequestError for an unknown `after`, ApiError (404) without a response.
        """
        listed = partial(input_items, limit=limit, after=after, newest_first=order == "desc")
        return await responses.show(request, response_id, "input", listed)

    @routes.post("/v1/responses/{response_id}/cancel", response_class=Response)
    @answers(ResponseAnswer)
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Cancel a response that is made in the background, and return its final state once that is stored. One that
        has ended already is returned as it is. Raises RequestError for one made otherwise, ApiError (404) without a
        response.
        """
        owner, store = request.state.owner, _store(request)
        if not there(await store.find(response_id, owner), "response", response_id).background:
            raise RequestError("Cannot cancel a synchronous response: it needs background", param="response_id")
        there(await store.stop(response_id, owner), "response", response_id)
        return await responses.show(request, response_id, "response", only)

    @routes.delete("/v1/responses/{response_id}", response_class=Response)
    @answers(DeletedResponse)
    async def delete_response(response_id: str, request: Request) -> Response:
        """Remove a stored response, and end its generation. Raises ApiError (404) if there is none."""
        there(await _store(request).delete(response_id, request.state.owner), "response", response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return routes
