"""POST /score and /rerank, with all their paths: similarity or relevance of pairs of texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxengine.api.engine_client import EngineClient
from jaxengine.api.scoring import Side, by_role, pairs_of, reads_apart, refuse_variables, role_params
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.pooling.listwise import list_prompts, list_scores, refuse_cut
from jaxengine.requests.pooling.outputs import ScoringRequestOutput
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import answers
from jaxengine.server.http.answer.sse import answer, json_response
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.pooling.answers import Listed, Ranking, Scored
from jaxengine.server.http.pooling.protocol import RerankRequest, ScoreRequest
from jaxengine.server.http.pooling.run import PoolingServer, counts
from jaxengine.server.http.request.limits import JsonRoute


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes /score and /v1/score, and /rerank, /v1/rerank and /v2/rerank."""
    routes = APIRouter(tags=["scores"], route_class=JsonRoute)
    server, names = PoolingServer(engine, config), served_names(engine, config)

    @answers(Listed[Scored])
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Return the similarity or relevance of pairs of texts. Raises RequestError, OverloadedError, EngineDeadError,
        and ApiError for an unknown model (404) or a pair without a result.
        """
        model, lora = await choose_model(engine, body.model, names)
        name = body.register("score", request)
        sides = body.texts()
        _check_number(sides, body, config)
        pairs = pairs_of(*sides, engine.inputs.media_reader, body.sides)

        async def whole() -> Response:
            """Compute the scores and return the response, with one entry per pair, in order."""
            given = await _scores(server, pairs, body, name, body.options(request, config, lora))
            scores = enumerate(each.outputs.score for each in given)
            data = [{"index": index, "object": "score", "score": score} for index, score in scores]
            head = {"id": name, "object": "list", "created": int(time.time()), "model": model}
            return json_response({**head, "data": data, "usage": counts(given)})

        return await answer(request, whole())

    @answers(Ranking)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Return the top_n documents (all without top_n) by their relevance to a query, the best first, equal ones as
        given. Raises RequestError, also for an empty query, OverloadedError, EngineDeadError, and ApiError for an
        unknown model (404) or a document without a result.
        """
        model, lora = await choose_model(engine, body.model, names)
        name = body.register("rerank", request)
        documents, reader = body.texts(), engine.inputs.media_reader
        if not body.query:
            raise RequestError("query is empty; at least one character is needed", param="query")
        _check_number([documents], body, config)
        pairs = pairs_of(body.query, documents, reader, body.sides)

        async def whole() -> Response:
            """Compute the scores and return the response: the `top_n` best documents, best first, without their texts
            if return_documents is False.
            """
            given = await _scores(server, pairs, body, name, body.options(request, config, lora))
            scores = [each.outputs.score for each in given]
            best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or len(scores)]
            results: list[dict[str, Any]] = []
            for index in best:
                document = {"text": None, "multi_modal": None} | _shown(documents[index])
                shown = {} if body.return_documents is False else {"document": document}
                results.append({"index": index, **shown, "relevance_score": scores[index]})
            return json_response({"id": name, "model": model, "results": results, "usage": counts(given)})

        return await answer(request, whole())

    for path in ("/score", "/v1/score"):
        routes.post(path, response_class=Response)(score)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        routes.post(path, response_class=Response)(rerank)
    return routes


def _shown(document: str | dict[str, Any]) -> dict[str, Any]:
    """Return the field with a document in the response: "text", or "multi_modal" with the parts of a content."""
    return {"text": document} if isinstance(document, str) else {"multi_modal": document["content"]}


def _check_number(sides: Sequence[Any], body: ScoreRequest | RerankRequest, config: ServerConfig) -> None:
    """Raise RequestError for more pairs than the server's max_prompts, before the media of any are looked for. sides:
    those of `body`, each a list or a single text or content.
    """
    number = max(len(side) if isinstance(side, list) else 1 for side in sides)
    if number > config.max_prompts:
        problem = f"there are {number} pairs of texts; allowed: 1 to {config.max_prompts} (max_prompts)"
        raise RequestError(problem, param=body.sides[1])


async def _scores(
    server: PoolingServer,
    pairs: Sequence[tuple[Side, Side]],
    body: ScoreRequest | RerankRequest,
    name: str,
    options: RequestOptions,
) -> list[ScoringRequestOutput]:
    """Return the score of each pair, in order, with the token counts of both texts. A text that is in several pairs is
    counted in each. A model that reads lists has one prompt for all documents of a single query, whose tokens count
    once; truncation of it is refused with RequestError.

    body: request whose truncation, activation and cache_salt apply to all pairs. name: the request's id in the engine.
    Raises the errors of PoolingServer.encode_pairs and `answers`, and of `refuse_variables` for prompts of single texts
    and of lists.
    """
    model, params = server.engine.inputs.require_pooling(), body.pooling_params()
    if model.reads_lists or reads_apart(model):
        refuse_variables(body.chat_template_kwargs if model.reads_lists else body.variables)
    pairs = await server.shortened(pairs, body)
    if model.reads_lists:
        refuse_cut(params, body.truncate_prompt_tokens)
        lists = list_prompts(pairs, body.instruction)
        encoded = await server.encode_given([text for text, _ in lists], body, params, param=body.sides[1])
        given = zip(await server.answers(encoded, params, body, name, options), lists, strict=True)
        token_id = server.engine.inputs.require_tokenizer().backend.token_to_id
        return [score for output, (_, number) in given for score in list_scores(output, number, token_id)]
    if not reads_apart(model):
        prompts = await server.encode_pairs(pairs, body)
        encoded = await server.encode_given(prompts, body, params, param=body.sides[1])
        given = await server.answers(encoded, params, body, name, options)
        return [ScoringRequestOutput.from_base(each) for each in given]
    roles = role_params(model, params)
    texts = list(dict.fromkeys(by_role(pairs, roles)))
    prompts, (query, document) = list[Any](), body.sides
    for number, params in enumerate(roles):
        own = [text for role, text in texts if role == number]
        field = query if number == 0 and roles[0] != roles[1] else document
        plain = [each for each in own if isinstance(each, str)]
        encoded = iter(await server.encode_given(plain, body, params, param=field))
        prompts += [
            next(encoded) if isinstance(each, str) else partial(server.encode_content, each, body) for each in own
        ]
    texts.sort(key=lambda each: each[0])  # as in `prompts`
    given = dict(zip(texts, await server.answers(prompts, params, body, name, options), strict=True))
    found = iter(given[each] for each in by_role(pairs, roles))
    return [ScoringRequestOutput.of_pair(one, other) for one, other in zip(found, found, strict=True)]
