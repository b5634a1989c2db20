"""POST /v1/embeddings, /pooling and /classify: one vector per prompt or, for some tasks, per token."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from fastapi import APIRouter, Request, Response

from jaxengine.api.engine_client import EngineClient
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import answers
from jaxengine.server.http.answer.sse import answer, json_response
from jaxengine.server.http.models import choose_model
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
        Where encoding_format says so, it is the bytes of all vectors.

        prefix: prefix of the response's id. task: the pooling parameters' task; None for the body's task, or the
        model's. Raises RequestError, OverloadedError, EngineDeadError, and ApiError for an unknown model (404) or a
        prompt without a result.
        """
        model, lora = await choose_model(engine, body.model, names)
        name = body.register(prefix, request)
        params = body.pooling_params(task)
        prompts = await server.prompts(body, params)

        async def whole() -> Response:
            given = await server.answers(prompts, params, body, name, body.options(request, config, lora))

            def write() -> Response:
                if isinstance(body, EmbeddingRequest) and body.is_binary:
                    return _bytes_response(body, given, name, model)
                data = [entry(index, each) for index, each in enumerate(given)]
                head = {"id": name, "object": "list", "created": int(time.time()), "model": model}
                return json_response({**head, "data": data, "usage": counts(given)})

            many = sum(each.outputs.data.size for each in given) > _MANY_NUMBERS
            return await server.writers.run(write) if many else write()

        return await answer(request, whole())

    @routes.post("/v1/embeddings", response_class=Response)
    @answers(Listed[Embedding])
    async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
        """Return an embedding of each prompt or, where token_embed is the model's task, one of each of its tokens.
        Raises the errors of `run`.
        """
        pooling = engine.inputs.pooling
        task = "token_embed" if pooling is not None and pooling.task == "token_embed" else "embed"
        return await run(body, request, "embd", task, _vectors("embedding", "embedding", body))

    @routes.post("/pooling", response_class=Response)
    @answers(Listed[Pooled])
    async def create_pooling(body: PoolingRequest, request: Request) -> Response:
        """Return a vector of each prompt or, for some tasks, one of each of its tokens. Raises `run`'s errors."""
        return await run(body, request, "pooling", None, _vectors("pooling", "data", body))

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
    """Return a function (index, output) -> entry of a JSON response, a dict in which `field` is the vector in the
    request's encoding: a list of numbers, or base64 of `_bytes`.

    kind: the entry's "object".
    """

    def entry(index: int, each: PooledAnswer) -> dict[str, Any]:
        """Return the entry of one answer: its index, and its vector as a list of numbers or in base64."""
        data: Any = each.outputs.data
        data = base64.b64encode(_bytes(data, body)).decode() if body.encoding_format == "base64" else data.tolist()
        return {"index": index, "object": kind, field: data}

    return entry


def _bytes_response(body: EmbeddingRequest, given: Sequence[PooledAnswer], name: str, model: str) -> Response:
    """Return the response with the `_bytes` of all vectors, one after the other, as vLLM does.

    With encoding_format "bytes" the header `metadata` is a JSON object of id, created, model, data and usage, in which
    data has the form of each vector: its index, embed_dtype, endianness, first byte `start`, `end` after its last one,
    and shape. "bytes_only" has no such header. name: the request's id. model: name of the model.
    """
    vectors, about, at = [_bytes(each.outputs.data, body) for each in given], list[dict[str, Any]](), 0
    number = {"embed_dtype": body.embed_dtype or "float32", "endianness": body.endianness or "native"}
    for index, (each, vector) in enumerate(zip(given, vectors, strict=True)):
        span = {"start": at, "end": (at := at + len(vector)), "shape": each.outputs.data.shape}
        about.append({"index": index, **number, **span})
    headers = {}
    if body.encoding_format == "bytes":
        head = {"id": name, "created": int(time.time()), "model": model}
        headers["metadata"] = json.dumps({**head, "data": about, "usage": counts(given)})
    return Response(b"".join(vectors), headers=headers, media_type="application/octet-stream")


def _bytes(values: np.ndarray, body: EmbeddingRequest) -> bytes:
    """Return float32 values as numbers of the request's embed_dtype, in its byte order."""
    numbers = values.astype(_DTYPES[body.embed_dtype or "float32"])
    bits = numbers.view(f"u{numbers.itemsize}")
    return bits.astype(bits.dtype.newbyteorder(">" if body.endianness == "big" else "<")).tobytes()
