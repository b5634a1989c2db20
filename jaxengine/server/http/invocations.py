"""POST /invocations, SageMaker's route: a chat completion, completion or pooling request, depending on the body's
fields.
"""

from __future__ import annotations

import json

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from jaxengine.api.engine_client import EngineClient
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.request.limits import LONG_BODY, convert, read_json

# Path of a route, by a field that only its requests have.
_PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}
_SCORES = {"query": "/rerank", "text_1": "/score", "queries": "/score", "data_1": "/score"}
_BY_TASK = {"embed": "/v1/embeddings", "classify": "/classify", "token_embed": "/pooling", "token_classify": "/pooling"}
_POOLING_PATHS = {task: {"input": path, "messages": path, **_SCORES} for task, path in _BY_TASK.items()}
# Name of an adapter, which SageMaker sends where a caller chooses an inference component that is an adapter.
_ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"


class _PassedOn(Response):
    """Response that forwards a request, whose body has been read, to the route of another path."""

    def __init__(self, request: Request, path: str, body: bytes):
        super().__init__()
        self._request = request
        self._path = path
        self._whole: bytes | None = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the other route's response to the same body."""

        async def again():
            if (body := self._whole) is not None:
                self._whole = None
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        path = scope["root_path"] + self._path
        await self._request.app.router({**scope, "path": path, "raw_path": path.encode()}, again, send)


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the route /invocations, which forwards requests to the model's other routes."""
    routes = APIRouter(tags=["invocations"])
    pooling = engine.inputs.pooling
    paths = _PATHS if pooling is None else _POOLING_PATHS[pooling.task]
    body = {"type": "object", "oneOf": [{"required": [name]} for name in paths]}
    described = {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}

    @routes.post("/invocations", response_class=Response, openapi_extra=described)
    async def invoke(request: Request) -> Response:
        """Answer a request by the route that its fields belong to. The header X-Amzn-SageMaker-Adapter-Identifier takes
        the place of `model`. Raises ApiError (400) for a body that is not valid JSON, and RequestError unless it has
        exactly one of the fields that tell routes apart.
        """
        body = await request.body()
        request.state.is_long = len(body) > LONG_BODY
        value = await convert(request, read_json, body)
        fields = [name for name in paths if isinstance(value, dict) and name in value]
        if len(fields) != 1:
            raise RequestError(f"the body must have one of {', '.join(paths)}, got {fields or 'none'}")
        if adapter := request.headers.get(_ADAPTER_HEADER):
            body = (await convert(request, json.dumps, {**value, "model": adapter})).encode()
        return _PassedOn(request, paths[fields[0]], body)

    return routes
