"""POST /v1/chat/completions: OpenAI's endpoint, with vLLM's fields."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from jaxengine.api.engine_client import EngineClient
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import Error, answers
from jaxengine.server.http.answer.sse import answer, stream_events
from jaxengine.server.http.chat.answers import ChatCompletion, ChatCompletionChunk
from jaxengine.server.http.chat.completion import ChatAnswer
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.server.http.chat.run import ChatServer
from jaxengine.server.http.load_header import with_load
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.request.limits import JsonRoute


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the route /v1/chat/completions. Raises ConfigError for an unknown parser."""
    routes = APIRouter(tags=["chat"], route_class=JsonRoute)
    server = ChatServer.open(engine, config)
    names = served_names(engine, config)

    @routes.post("/v1/chat/completions", response_class=Response)
    @answers(ChatCompletion, ChatCompletionChunk | Error)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, complete or as a stream of events. Raises RequestError, ApiError (404) for an unknown
        model, OverloadedError, EngineDeadError; of a stream, until its first event.
        """
        model, lora = await choose_model(engine, body.model, names)
        name = body.register("chatcmpl", request)
        completion = ChatAnswer(server, body, name, model, body.options(request, config, lora))
        await completion.prepare(request.state.ignored_fields)
        if body.stream:
            return await stream_events(request, completion.events(), config)
        return await with_load(engine, request, await answer(request, completion.whole()))

    return routes
