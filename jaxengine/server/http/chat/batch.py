"""POST /v1/chat/completions/batch: several conversations in one request, as in vLLM; one choice for each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.params.options import RequestOptions
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.captured import check_captured
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import NULL_BODY, answers
from jaxengine.server.http.answer.interleave import interleave
from jaxengine.server.http.answer.sse import answer, json_response
from jaxengine.server.http.chat.answers import ChatCompletion
from jaxengine.server.http.chat.completion import ChatAnswer
from jaxengine.server.http.chat.protocol import ChatRequest, Messages
from jaxengine.server.http.chat.run import ChatServer
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.request.fields import at_most
from jaxengine.server.http.request.limits import JsonRoute

_MAX_CONVERSATIONS = 1 << 20


class BatchChatRequest(ChatRequest):
    """A chat request with a list of conversations as messages. All other fields hold for each of them; those of
    `refused`, such as stream, n and tools, are refused unless their values have no effect.
    """

    # A choice has the answer to one conversation, and no field for its prompt.
    refused = {
        **ChatRequest.refused,
        "best_of": (1,),
        "early_stopping": (False,),
        "kv_transfer_params": (),
        "n": (1,),
        "prompt_logprobs": (),
        "return_prompt_text": (False,),
        "stream": (False,),
        "stream_options": (),
        "tool_choice": ("none",),
        "tools": (),
        "use_beam_search": (False,),
    }

    messages: Annotated[list[Messages], Field(fail_fast=True), at_most(_MAX_CONVERSATIONS)]  # pyright: ignore[reportIncompatibleVariableOverride]

    def conversations(self, most: int) -> list[ChatRequest]:
        """Return one request for each conversation, in order; `self` is not changed.

        Raises RequestError for more than `most` conversations and for one without messages.
        """
        if len(self.messages) > most:
            problem = f"messages holds {len(self.messages)} conversations; allowed: 1 to {most}"
            raise RequestError(problem, param="messages")
        for number, each in enumerate(self.messages):
            if not each:
                raise RequestError(f"messages[{number}] is empty", param="messages")
        return [self.model_copy(update={"messages": each}) for each in self.messages]


class _Batch:
    """Request with several conversations in progress: call `prepare`, then `whole`."""

    def __init__(self, server: ChatServer, body: BatchChatRequest, name: str, model: str, options: RequestOptions):
        """Create a ChatAnswer for each conversation; runs nothing.

        name: id of the request; if there are several conversations, number i runs under NAME-i. model: model name in
        the response. options: scheduling options of each conversation. Raises RequestError for values that are not
        allowed.
        """
        self._server = server
        requests = body.conversations(server.config.max_prompts)
        self._head = {"id": name, "object": "chat.completion", "created": int(time.time()), "model": model}
        self._places = max(1, server.engine.inputs.config.max_num_seqs)
        self._completions = [
            ChatAnswer(server, each, name if len(requests) == 1 else f"{name}-{number}", model, options)
            for number, each in enumerate(requests)
        ]

    async def prepare(self, ignored: list[str]) -> None:
        """Prepare the prompts, and append to `ignored` the fields that have no effect for this model.

        Raises RequestError for a conversation that cannot be rendered and for activations beyond the server's limit,
        OverloadedError.
        """
        for number, each in enumerate(self._completions):
            await each.prepare(ignored if number == 0 else [])
        # The conversations have the same fields, so their activations differ only by the lengths of their prompts.
        params, lengths = self._completions[0].captured[0], [each.captured[1] for each in self._completions]
        check_captured(self._server.engine.inputs, self._server.config, params, lengths)

    async def whole(self) -> Response:
        """Run all conversations, at most max_num_seqs at a time, and return the complete response, with the sums of
        their token counts. Call it after `prepare`.

        Raises the first error of any conversation, after cancelling the others.
        """
        bodies: dict[int, dict[str, Any]] = {}
        streams = interleave(self._answer, len(self._completions), self._places)
        async with contextlib.aclosing(streams):
            async for number, body in streams:
                bodies[number] = body
        choices = [{**bodies[number]["choices"][0], "index": number} for number in range(len(bodies))]
        total = _added([body["usage"] for body in bodies.values()])
        about = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        return json_response({**self._head, "choices": choices, "usage": total, **NULL_BODY, **about})

    async def _answer(self, number: int) -> AsyncGenerator[dict[str, Any], None]:
        """Run conversation number `number` and yield its complete response, a single item, as JSON values."""
        yield await self._completions[number].body()


def _added(counts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a dict with the sum of each number over all dicts; nested dicts are summed in the same way. counts: at
    least one dict; all have the names of the first.
    """
    first = counts[0]
    return {
        name: _added([each[name] for each in counts])
        if isinstance(first[name], dict)
        else sum(each[name] for each in counts)
        for name in first
    }


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the route /v1/chat/completions/batch. Raises ConfigError for an unknown parser."""
    routes = APIRouter(tags=["chat"], route_class=JsonRoute)
    server = ChatServer.open(engine, config)
    names = served_names(engine, config)

    @routes.post("/v1/chat/completions/batch", response_class=Response)
    @answers(ChatCompletion)
    async def create_chat_completions(body: BatchChatRequest, request: Request) -> Response:
        """Answer several conversations; fail as a whole if one of them cannot be answered. Raises RequestError,
        ApiError (404) for an unknown model, OverloadedError, EngineDeadError.
        """
        model, lora = await choose_model(engine, body.model, names)
        name = body.register("chatcmpl", request)
        batch = _Batch(server, body, name, model, body.options(request, config, lora))
        await batch.prepare(request.state.ignored_fields)
        return await answer(request, batch.whole())

    return routes
