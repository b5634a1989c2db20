"""POST /v2/embed: embeddings in the form of Cohere's API."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import answers
from jaxengine.server.http.answer.sse import answer, json_response
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.pooling.answers import EmbeddingsByType
from jaxengine.server.http.pooling.protocol import CohereEmbedRequest
from jaxengine.server.http.pooling.run import Later, PooledAnswer, PoolingServer
from jaxengine.server.http.request.errors import renamed, renaming
from jaxengine.server.http.request.limits import JsonRoute

# Fields of /v1/embeddings, by which the checks that both routes have name what is wrong -> Cohere's fields.
_NAMES = {"dimensions": "output_dimension", "input": "texts", "truncate_prompt_tokens": "max_tokens"}


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the route /v2/embed."""
    routes = APIRouter(tags=["pooling"], route_class=JsonRoute)
    server, names = PoolingServer(engine, config), served_names(engine, config)

    @routes.post("/v2/embed", response_class=Response)
    @answers(EmbeddingsByType)
    async def embed(body: CohereEmbedRequest, request: Request) -> Response:
        """Return an embedding of each text, image or input in each of embedding_types. Raises RequestError,
        OverloadedError, EngineDeadError, and ApiError for an unknown model (404) or a prompt without a result.
        """
        _, lora = await choose_model(engine, body.model, names)
        name = body.register("embd", request)
        with renaming(partial(_as_asked, body)):
            prompts, params = await _prompts(body, server)

        async def whole() -> Response:
            with renaming(partial(_as_asked, body)):
                found = await server.answers(prompts, params, body, name, body.options(request, config, lora))
            _check_lengths(body, [len(each.prompt_token_ids) for each in found])
            return await server.writers.run(_response, body, name, found)

        return await answer(request, whole())

    return routes


def _as_asked(body: CohereEmbedRequest, error: RequestError) -> RequestError:
    """Return an error about a field of /v1/embeddings as one about the field of `body`; other errors unchanged."""
    field = (error.param or "").partition("[")[0]
    name = ("inputs" if body.images is None else "images") if field == "messages" else _NAMES.get(field)
    return error if name is None else renamed(error, name)


async def _prompts(
    body: CohereEmbedRequest, server: PoolingServer
) -> tuple[Sequence[list[int] | Later], PoolingParams]:
    """Return each prompt, truncated as the request says, as PoolingServer.prompts does, and the pooling parameters of
    all.

    Raises the errors of PoolingServer.prompts, and RequestError for an input_type that is no prompt of the model and
    for a prompt of more than max_tokens tokens with truncate NONE.
    """
    inputs = server.engine.inputs
    sentence = inputs.require_pooling().sentence
    known = {} if sentence is None else sentence.prompts
    if body.input_type is not None and body.input_type not in known:
        allowed = f"Supported values: {', '.join(known)}" if known else "The model has no prompts; leave it out"
        raise RequestError(f"Unsupported input_type {body.input_type!r}. {allowed}", param="input_type")
    asked = body.as_embeddings(inputs.config.max_model_len, known)
    params = asked.pooling_params("embed")
    params.recipe(inputs.require_pooling())
    prompts = await server.prompts(asked, params)
    ids = [each for each in prompts if isinstance(each, list)]
    _check_lengths(body, map(len, ids))
    ended = body.texts is not None and body.truncate == "END"
    return (await _ended(ids, asked.truncate_prompt_tokens, server) if ended else prompts), params


def _check_lengths(body: CohereEmbedRequest, lengths: Iterable[int]) -> None:
    """Raise RequestError if prompts of these numbers of tokens have one above max_tokens with truncate NONE."""
    longest = max(lengths, default=0)
    if body.truncate == "NONE" and body.max_tokens is not None and longest > body.max_tokens:
        problem = f"an input has {longest} tokens, and max_tokens is {body.max_tokens}; allowed: as many, or truncate"
        raise RequestError(f"{problem} END or START", param="max_tokens", value=body.max_tokens)


async def _ended(prompts: list[list[int]], most: int | None, server: PoolingServer) -> list[list[int]]:
    """Return the prompts of texts, those of `most` tokens with the special tokens that end a prompt as their last ones,
    in place of other tokens; with None all unchanged. A prompt that was cut may have lost them, and a decoder's
    embedding is that of its last token. Raises OverloadedError.
    """
    bare, some = await server.encode(["", "a"], PoolingParams(prompt_name=""))
    num_same = next((at for at in range(len(bare)) if bare[-1 - at] != some[-1 - at]), len(bare))
    end = bare[len(bare) - num_same :]
    return [[*ids[: len(ids) - len(end)], *end] if end and len(ids) == most else ids for ids in prompts]


def _response(body: CohereEmbedRequest, name: str, found: list[PooledAnswer]) -> Response:
    """Return the response with the embeddings in each of embedding_types, or as "float" if there are none. As in vLLM,
    all tokens count as those of images if there is an image. name: id of the response.

    Raises RequestError for bits of a vector whose length is not a multiple of 8.
    """
    vectors = np.array([each.outputs.data for each in found])
    given: dict[str, Any] = {}
    for kind in body.embedding_types or ("float",):
        if kind == "float":
            given[kind] = vectors.tolist()
        elif kind == "base64":
            given[kind] = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
        else:
            given[kind] = _bits(vectors, signed=kind == "binary")
    texts = {} if body.texts is None else {"texts": body.texts}
    number = sum(len(each.prompt_token_ids) for each in found)
    billed = {"input_tokens": 0 if body.has_images else number, "image_tokens": number if body.has_images else 0}
    meta = {"api_version": {"version": "2"}, "billed_units": billed}
    head = {"id": name, "response_type": "embeddings_by_type"}
    return json_response({**head, "embeddings": given, **texts, "meta": meta})


def _bits(vectors: np.ndarray, *, signed: bool) -> list[list[int]]:
    """Return the signs of f32[n, dimensions], 1 for numbers from 0, as ints of 8 signs each, the first one highest.

    signed: ints from -128 to 127, which are 128 less. Raises RequestError unless dimensions is a multiple of 8.
    """
    if vectors.shape[1] % 8:
        problem = f"embedding_types has bits of vectors of {vectors.shape[1]} numbers; allowed: a multiple of 8"
        raise RequestError(problem, param="embedding_types")
    packed = np.packbits(vectors >= 0, axis=1).astype(np.int16)
    return (packed - 128 if signed else packed).tolist()
