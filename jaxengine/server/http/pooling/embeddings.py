"""POST /v1/embeddings, /pooling and /classify: one vector per prompt."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import ml_dtypes
import numpy as np
from fastapi import APIRouter, Request, Response

from jaxengine.api.engine_client import EngineClient
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import answers
from jaxengine.server.http.answer.sse import answer, json_response
from jaxengine.server.http.models import check_model
from jaxengine.server.http.pooling.answers import Classified, Embedding, Listed, Pooled
from jaxengine.server.http.pooling.protocol import ClassifyRequest, EmbeddingRequest, InputBody, PoolingRequest
from jaxengine.server.http.pooling.run import PooledAnswer, PoolingServer, counts
from jaxengine.server.http.request.limits import JsonRoute

_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
_MANY_NUMBERS = 20_000  # they take a few milliseconds to write


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes /v1/embeddings, /pooling and /classify."""
    routes = APIRouter(tags=["pooling"], route_class=JsonRoute)
    server, names = PoolingServer(engine, config), served_names(engine, config)

    async def run(body: InputBody, request: Request, prefix: str, task: str | None, entry: Any) -> Response:
        """Run the body's prompts; return a response whose data is a list with `entry(index, output)` for each prompt.

        prefix: prefix of the response's id. task: the pooling parameters' task; None for the body's task, or the
        model's. Raises RequestError, OverloadedError, EngineDeadError, and ApiError for an unknown model (404) or a
        prompt without a result.
        """
        model = check_model(body.model or None, names)
        name = body.register(prefix, request)
        params = body.pooling_params(task)
        prompts = await server.prompts(body, params)

        async def whole() -> Response:
            """Run the prompts and return the response."""
            given = await server.answers(prompts, params, body, name, body.options(request, config))

            def write() -> Response:
                data = [entry(index, each) for index, each in enumerate(given)]
                head = {"id": name, "object": "list", "created": int(time.time()), "model": model}
                return json_response({**head, "data": data, "usage": counts(given)})

            many = sum(each.outputs.data.size for each in given) > _MANY_NUMBERS
            return await asyncio.to_thread(write) if many else write()

        return await answer(request, whole())

    @routes.post("/v1/embeddings", response_class=Response)
    @answers(Listed[Embedding])
    async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
        """Return an embedding of each prompt. Raises the errors of `run`."""
        return await run(body, request, "embd", "embed", _vectors("embedding", "embedding", body))

    @routes.post("/pooling", response_class=Response)
    @answers(Listed[Pooled])
    async def create_pooling(body: PoolingRequest, request: Request) -> Response:
        """Return a vector of each prompt or, for some tasks, one of each of its tokens. Raises `run`'s errors."""
        return await run(body, request, "pool", None, _vectors("pooling", "data", body))

    @routes.post("/classify", response_class=Response)
    @answers(Listed[Classified])
    async def classify(body: ClassifyRequest, request: Request) -> Response:
        """Return each prompt's likeliest label, "LABEL_N" if unnamed, and all probabilities. Raises `run`'s errors."""
        labels = engine.inputs.require_pooling().labels

        def entry(index: int, each: PooledAnswer) -> dict[str, Any]:
            """Return the entry of one answer: its label, all probabilities and their number."""
            best = int(each.outputs.data.argmax())
            probs = each.outputs.data.tolist()
            label = labels.get(best, f"LABEL_{best}")
            return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}

        return await run(body, request, "classify", "classify", entry)

    return routes


def _vectors(kind: str, field: str, body: EmbeddingRequest) -> Any:
    """Return a function (index, output) -> entry of the response, a dict in which `field` is the vector in the
    request's encoding: a list of numbers, or base64 of its embed_dtype and endianness.

    kind: the entry's "object".
    """

    def entry(index: int, each: PooledAnswer) -> dict[str, Any]:
        """Return the entry of one answer: its index, and its vector as a list of numbers or in base64."""
        data: Any = each.outputs.data
        if body.encoding_format == "base64":
            data = _encoded(data, body.embed_dtype or "float32", body.endianness == "big")
            return {"index": index, "object": kind, field: data}
        return {"index": index, "object": kind, field: data.tolist()}

    return entry


def _encoded(values: np.ndarray, dtype: str, is_big: bool) -> str:
    """Return base64 of float32 values as numbers of `dtype`, one of _DTYPES, big-endian or else little-endian."""
    numbers = values.astype(_DTYPES[dtype])
    bits = numbers.view(f"u{numbers.itemsize}")
    return base64.b64encode(bits.astype(bits.dtype.newbyteorder(">" if is_big else "<")).tobytes()).decode()
