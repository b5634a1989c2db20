"""POST /skyrl/v1/generate: /inference/v1/generate in the form of SkyRL's own servers, with arrays as base64."""

from __future__ import annotations

import base64
from typing import Any, Self

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import model_validator

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.output.outputs import CompletionOutput
from jaxengine.requests.output.sampling_mask import SamplingMask
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import Answer, answers
from jaxengine.server.http.answer.sse import answer, json_response
from jaxengine.server.http.generate import GenerateRequest, GenerateSampling, last_output
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.request.json_logprobs import json_logprob
from jaxengine.server.http.request.limits import JsonRoute


class SkyRLSampling(GenerateSampling):
    """Fields of GenerateSampling whose results SkyRL's answers can contain.

    logprobs: at most 1, as only those of the sampled tokens are returned.
    """

    refused = {
        **GenerateSampling.refused,
        **dict.fromkeys(("prompt_logprobs", "logprob_token_ids", "prompt_logprob_token_ids", "stream_interval"), ()),
        "return_sampling_mass": (False,),
    }

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        """Return these parameters. Raises RequestError for log-probabilities of other tokens than the sampled ones."""
        if self.logprobs not in (None, 0, 1):
            raise RequestError(f"logprobs is {self.logprobs}; allowed: null, 0 and 1", param="sampling_params.logprobs")
        return self


class SkyRLRequest(GenerateRequest):
    """A prompt as token ids, as SkyRL's clients send it. Fields whose results its answers cannot contain are refused.

    Attributes:
      return_sample_support: also return the tokens that could have been sampled; without it, only as
        `sampling_params` says.
    """

    refused = {
        **GenerateRequest.refused,
        "kv_transfer_params": (),
        **dict.fromkeys(("return_token_ids", "stream"), (False,)),
        "stream_options": (),
    }

    sampling_params: SkyRLSampling  # pyright: ignore[reportIncompatibleVariableOverride]
    return_sample_support: bool | None = None

    def params(self, inputs: InputProcessor, config: ServerConfig) -> SamplingParams:
        """Return the engine's sampling parameters: those of GenerateRequest, with sampling masks if
        return_sample_support is true or, where it is None, as `sampling_params` says. Raises RequestError for a value
        that is not allowed.
        """
        params = super().params(inputs, config)
        asked = self.return_sample_support
        params.return_sampling_mask = bool(params.return_sampling_mask if asked is None else asked)
        return params


class PackedArray(Answer):
    """An array in the machine's byte order, `data` as base64; SkyRL's clients expect the keys in this order."""

    data: str
    shape: list[int]
    dtype: str


class SkyRLLogprob(Answer):
    logprob: float


class SkyRLLogprobs(Answer):
    content: list[SkyRLLogprob]


class SkyRLChoice(Answer):
    token_ids: list[int]
    finish_reason: str
    logprobs: SkyRLLogprobs | None
    routed_experts: PackedArray | None
    rollout_sample_support: PackedArray | None


class SkyRLGenerated(Answer):
    choices: list[SkyRLChoice]


def packed(array: np.ndarray) -> dict[str, Any]:
    """Return an array in the form of PackedArray."""
    data = base64.b64encode(np.ascontiguousarray(array).data).decode("ascii")
    return {"data": data, "shape": [*array.shape], "dtype": array.dtype.name}


def packed_experts(experts: np.ndarray) -> dict[str, Any]:
    """Return routed experts in the form of PackedArray, in SkyRL's dtype: uint8 if all ids fit it, or else int16."""
    return packed(experts.astype(np.uint8 if experts.max(initial=0) < 256 else np.int16))


def packed_support(mask: SamplingMask, top_k: int) -> dict[str, Any]:
    """Return sampling masks as a PackedArray i32[tokens, top_k], -1 after the ids of a token; wider if a token has more
    ids because some are equally likely.
    """
    support = np.full((len(mask), max(top_k, *np.diff(mask.cu_lens), 0)), -1, np.int32)
    for ids, row in zip(mask.rows, support, strict=True):
        row[: len(ids)] = ids
    return packed(support)


def _choice(output: CompletionOutput, params: SamplingParams) -> dict[str, Any]:
    """Return one completion as a SkyRLChoice, its log-probabilities by `json_logprob`. params: those of the request."""
    logprobs = None
    if output.logprobs is not None:
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        logprobs = {"content": [{"logprob": json_logprob(position[token].logprob)} for token, position in pairs]}
    experts, mask = output.routed_experts, output.sampling_mask
    return {
        "token_ids": [*output.token_ids],
        "finish_reason": output.finish_reason,
        "logprobs": logprobs,
        "routed_experts": None if experts is None else packed_experts(experts),
        "rollout_sample_support": None if mask is None else packed_support(mask, params.top_k),
    }


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the route /skyrl/v1/generate."""
    routes = APIRouter(tags=["generate"], route_class=JsonRoute)
    names = served_names(engine, config)

    @routes.post("/skyrl/v1/generate", response_class=Response)
    @answers(SkyRLGenerated)
    async def skyrl_generate(body: SkyRLRequest, request: Request) -> Response:
        """Continue a prompt of token ids, and answer with token ids, and with experts and sampling supports as arrays.
        Raises RequestError, ApiError (404) for an unknown model, and the errors of EngineClient.stream.
        """
        model, lora = await choose_model(engine, body.model, names)
        name = body.register("skyrl-generate", request)
        prompt, params = body.prompt(engine.inputs), body.params(engine.inputs, config)
        options = body.options(request, config, lora)

        async def whole() -> Response:
            last = await last_output(engine.stream(prompt, params, name, options))
            return json_response({"choices": [_choice(each, params) for each in last.outputs]})

        return await answer(request, whole())

    return routes
