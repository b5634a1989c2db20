"""POST /generative_scoring: how likely certain tokens follow a query and each of several items, as in vLLM."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import SkipValidation

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.output.outputs import Logprob, RequestOutput
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError, prompt_length_error, show_value
from jaxengine.scheduler.base.token_params import MAX_LOGPROB_TOKEN_IDS
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.base.prompts import PromptEncoder, check_token_ids, read_prompts
from jaxengine.server.http.answer.answers import Answer, Usage, answers
from jaxengine.server.http.answer.interleave import interleave
from jaxengine.server.http.answer.sse import answer, json_response
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.request.errors import abort_error
from jaxengine.server.http.request.fields import TokenIds, at_most
from jaxengine.server.http.request.limits import JsonRoute
from jaxengine.server.http.request.protocol import HINTS, NamedRequest, usage


class GenerativeScoringRequest(NamedRequest):
    """A query, items, and the tokens whose probabilities after them are asked for.

    Attributes:
      query: a text or a list of token ids.
      items: a list of texts or of lists of token ids; the prompt of an item is the query followed by it.
      label_token_ids: the first one's probability is the score; repeated ids count once.
      apply_softmax: whether probabilities are relative to the label tokens, so that theirs add up to 1; otherwise they
        are relative to the whole vocabulary.
      item_first: whether an item stands before the query instead.
      add_special_tokens: whether the tokenizer adds special tokens to the part that stands first, if it is a text.
    """

    ignored = HINTS

    # Checked by read_prompts: pydantic would try the unions' lists item by item.
    query: Annotated[str | list[int], SkipValidation]
    items: Annotated[list[str] | list[list[int]], SkipValidation]
    label_token_ids: Annotated[TokenIds, at_most(MAX_LOGPROB_TOKEN_IDS)]
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True


class ItemScore(Answer):
    index: int
    object: Literal["score"]
    score: float


class GenerativeScores(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ItemScore]
    usage: Usage


def score(logprobs: Mapping[int, Logprob], labels: list[int], apply_softmax: bool) -> float:
    """Return the probability of the first label token. logprobs: of all `labels`, which are distinct. apply_softmax:
    relative to the labels, for which `logprobs` may also be logits; all labels are equally likely if none is possible.
    """
    values = np.array([logprobs[label].logprob for label in labels], np.float64)
    if not apply_softmax:
        return float(np.exp(values[0]))
    most = values.max()
    shares = np.exp(values - most) if np.isfinite(most) else np.ones(len(values))
    return float(shares[0] / shares.sum())


class _Scoring:
    """Request for scores in progress: call `read_prompts`, then `whole`. Raises RequestError for labels that are
    missing or outside the vocabulary, and for probabilities of the whole vocabulary where the engine returns logits.
    """

    def __init__(self, engine: EngineClient, body: GenerativeScoringRequest, name: str, options: RequestOptions):
        self._engine, self._body, self._name, self._options = engine, body, name, options
        self._labels = list(dict.fromkeys(body.label_token_ids))
        if not self._labels:
            raise RequestError("label_token_ids is empty; at least one token id is needed", param="label_token_ids")
        check_token_ids("label_token_ids", self._labels, engine.inputs.model_config.vocab_size)
        mode = engine.inputs.config.logprobs_mode
        if not body.apply_softmax and mode.endswith("_logits"):
            problem = f"apply_softmax is false; allowed with logprobs_mode={mode!r}, which gives logits: true"
            raise RequestError(problem, param="apply_softmax", value=False)
        # A draw without truncation, so that processed log-probabilities are those of the model, too.
        self._params = SamplingParams(
            max_tokens=1, seed=0, logprob_token_ids=self._labels, detokenize=False, return_sampling_mask=False
        )
        self._prompts: list[list[int]] = []

    async def read_prompts(self, encoder: PromptEncoder, most: int) -> None:
        """Make the prompt of each item before any of them runs. Raises RequestError for a query or items of another
        form, for more than `most` items and for a prompt that leaves no room for a token; OverloadedError.
        """
        body, inputs = self._body, self._engine.inputs
        longest = inputs.config.max_model_len - 1
        (query,) = await self._token_ids(encoder, "query", [body.query], 1, not body.item_first)
        items = await self._token_ids(encoder, "items", body.items, most, body.item_first)
        for number, item in enumerate(items):
            ids = item + query if body.item_first else query + item
            if len(ids) > longest:
                raise prompt_length_error(f"items[{number}]", len(ids), longest, inputs.config.max_model_len)
            self._prompts.append(ids)

    async def _token_ids(
        self, encoder: PromptEncoder, param: str, given: Any, most: int, begins: bool
    ) -> list[list[int]]:
        """Return the token ids of each part in a field, a list. begins: whether the parts stand first in their prompts.
        Raises RequestError for parts of another form or more than `most`; OverloadedError.
        """
        inputs = self._engine.inputs
        if not isinstance(given, list) or type(next(iter(given), None)) is int:
            problem = f"{param} must be a list of texts or of lists of token ids, got {show_value(given)}"
            raise RequestError(problem, param=param)
        parts: list[Any] = read_prompts(given, most, inputs, inputs.config.max_model_len - 1, param=param)
        if not isinstance(parts[0], str):
            return parts
        special = begins and self._body.add_special_tokens
        return await encoder.encode(parts, add_special_tokens=special, param=param)

    def _generate(self, index: int) -> AsyncIterator[RequestOutput]:
        """Return the stream of outputs of prompt number `index`, whose id in the engine is NAME-index."""
        prompt: Any = {"prompt_token_ids": self._prompts[index], "cache_salt": self._body.cache_salt}
        return self._engine.stream(prompt, self._params, f"{self._name}-{index}", self._options)

    async def whole(self, model: str) -> Response:
        """Run the prompts, at most max_num_seqs at a time, and return the response. model: the model's name in it.
        Raises the first error of any prompt, after ending the others, and ApiError for one that was aborted, such as by
        the request's timeout.
        """
        scores: dict[int, float] = {}
        num_cached = 0
        places = max(1, self._engine.inputs.config.max_num_seqs)
        async with contextlib.aclosing(interleave(self._generate, len(self._prompts), places)) as outputs:
            async for index, output in outputs:
                ended = output.outputs[0]
                if not ended.logprobs:
                    raise abort_error(ended.finish_reason, ended.stop_reason)
                scores[index] = score(ended.logprobs[0], self._labels, self._body.apply_softmax)
                num_cached += output.num_cached_tokens or 0
        num_prompt_tokens = sum(map(len, self._prompts))
        return json_response(
            {
                "id": self._name,
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "data": [{"index": each, "object": "score", "score": scores[each]} for each in range(len(scores))],
                "usage": usage(num_prompt_tokens, len(scores), num_cached),
            }
        )


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the route /generative_scoring."""
    routes = APIRouter(tags=["completions"], route_class=JsonRoute)
    encoder = PromptEncoder(engine.inputs)
    names = served_names(engine, config)

    @routes.post("/generative_scoring", response_class=Response)
    @answers(GenerativeScores)
    async def score_items(body: GenerativeScoringRequest, request: Request) -> Response:
        """Score items by the probability of a label token after each of them; fail as a whole if one cannot be scored.
        Raises RequestError, ApiError (404) for an unknown model, OverloadedError, EngineDeadError.
        """
        model, lora = await choose_model(engine, body.model, names)
        name = body.register("generative-scoring", request)
        scoring = _Scoring(engine, body, name, body.options(request, config, lora))
        await scoring.read_prompts(encoder, config.max_prompts)
        return await answer(request, scoring.whole(model))

    return routes
