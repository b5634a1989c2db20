"""POST /inference/v1/generate: token ids in, token ids out, in vLLM's format, as trainers request rollouts."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request, Response
from pydantic import SkipValidation, create_model, model_validator

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.output.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.base.output_limit import limited
from jaxengine.server.base.prompts import read_prompts
from jaxengine.server.base.workers import written
from jaxengine.server.http.answer.answers import ABSENT, Answer, Error, FinishReason, PromptLogprobs, Usage, answers
from jaxengine.server.http.answer.routed_experts import encoded_experts
from jaxengine.server.http.answer.sampling_mass import SampledChoice, sampling_fields
from jaxengine.server.http.answer.sse import answer, event, json_response, stream_events
from jaxengine.server.http.answer.weight_spans import SpanWriter
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.request.fields import (
    MAX_OPTIONS,
    JsonObject,
    Texts,
    TokenIds,
    at_most,
    bias_by_id,
    check_n,
)
from jaxengine.server.http.request.json_logprobs import json_logprob, json_position
from jaxengine.server.http.request.kv_transfer import ExtraArgs, TransferParams, with_kv_transfer
from jaxengine.server.http.request.limits import JsonRoute
from jaxengine.server.http.request.protocol import (
    NUMBERS,
    ClosedModel,
    NamedRequest,
    StreamOptions,
    usage,
    usage_in_stream,
)

_Numbers: Any = create_model("_Numbers", __base__=ClosedModel, **NUMBERS)
# Fields of vLLM's own objects that no caller sets, and that are in what its render server answers.
_INTERNAL = frozenset(("skip_clone", "output_text_buffer_length", "_backend", "_backend_was_auto"))


class GenerateSampling(_Numbers, ClosedModel):
    """Fields of SamplingParams, by vLLM's names; None is SamplingParams' default, whatever the model suggests.

    max_tokens: None: the rest of the context, or what the server sets. detokenize has no effect: texts are made where
    `stop` is looked for.
    """

    refused = {
        "flat_logprobs": (False, True),  # selects a Python class, not a JSON format
        "logits_processors": (),
        "output_kind": (0, 1, 2),
        "thinking_token_budget": (-1,),
        "trace_decode_token_ids": (),
        "watermarking": (False,),
    }

    n: int | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: TokenIds | None = None
    prompt_logprob_start: int | None = None
    prompt_logprob_token_ids: TokenIds | None = None
    return_sampling_mass: bool | None = None
    return_sampling_mask: bool | None = None
    routed_experts_prompt_start: int | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: JsonObject | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    structured_outputs: Annotated[JsonObject, at_most(MAX_OPTIONS)] | None = None
    extra_args: ExtraArgs | None = None
    repetition_detection: Annotated[JsonObject, at_most(MAX_OPTIONS)] | None = None
    skip_reading_prefix_cache: bool | None = None
    stream_interval: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_internal(cls, data: Any) -> Any:
        """Return the data without fields of _INTERNAL, also in its structured_outputs."""
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if name not in _INTERNAL}
        if isinstance(structured := data.get("structured_outputs"), dict):
            data["structured_outputs"] = {name: value for name, value in structured.items() if name not in _INTERNAL}
        return data


class GenerateRequest(NamedRequest):
    """A prompt as token ids.

    Attributes:
      token_ids: the prompt.
      sampling_params: parameters of the n outputs.
      kv_transfer_params: vLLM's description of the prompt's pages that another engine has computed or is to fetch.
      return_token_ids: also return the prompt's token ids.
    """

    refused = {
        "content_parts": (),
        "ec_transfer_params": (),
        "features": (),
        "output_mode": ("tokens",),
        "reasoning_ended": (),
        "reasoning_parser_kwargs": (),
    }
    # The first is only used with other values of output_mode; the second says where a /render found the tokens.
    ignored = frozenset(("parse_context", "token_offsets"))

    # Checked by read_prompts, as the prompts of completions are.
    token_ids: Annotated[list[int], SkipValidation]
    sampling_params: GenerateSampling
    kv_transfer_params: TransferParams | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        """Return this request after checking it. Raises RequestError for log-probabilities of the prompt in a stream,
        and for stream_options without a stream.
        """
        if self.stream_options is not None and self.stream_options.model_fields_set and not self.stream:
            raise RequestError("stream_options is only allowed with stream=true", param="stream_options")
        for name in ("prompt_logprobs", "prompt_logprob_token_ids") if self.stream else ():
            if getattr(self.sampling_params, name) is not None:
                param = f"sampling_params.{name}"
                raise RequestError(f"{param} is not available with stream=true", param=param)
        return self

    def prompt(self, inputs: InputProcessor) -> dict[str, Any]:
        """Return token_ids, after checking them, and cache_salt as a prompt for the engine. Raises RequestError for a
        value that is not a list of ids or is empty, for more than max_model_len - 1 ids, and for ids outside the
        vocabulary.
        """
        ids = self.token_ids
        if not isinstance(ids, list) or not ids or type(ids[0]) is not int:
            problem = f"token_ids must be a list of token ids, at least one, got {show_value(ids)}"
            raise RequestError(problem, param="token_ids")
        (ids,) = read_prompts(ids, 1, inputs, inputs.config.max_model_len - 1, param="token_ids")
        return {"prompt_token_ids": ids, "cache_salt": self.cache_salt}

    def params(self, inputs: InputProcessor, config: ServerConfig) -> SamplingParams:
        """Return the engine's sampling parameters. Fields that are None get SamplingParams' defaults, except
        max_tokens, which gets the model's default and is lowered to the operator's limit. A stream has outputs of kind
        DELTA. Texts are generated only if `stop` is given.

        Raises RequestError for a value that is not allowed.
        """
        asked = self.sampling_params
        check_n(asked.n, config)
        given = {name: getattr(asked, name) for name in type(asked).model_fields if getattr(asked, name) is not None}
        if asked.logit_bias is not None:
            given["logit_bias"] = bias_by_id(asked.logit_bias, inputs.model_config.vocab_size)
        extra = with_kv_transfer(asked.extra_args, self.kv_transfer_params, bool(self.stream))
        given |= {} if extra is None else {"extra_args": extra}
        given["detokenize"] = bool(asked.stop)
        given["output_kind"] = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return limited(SamplingParams(**{"max_tokens": inputs.generation_defaults.get("max_tokens"), **given}), inputs)


class GenerateLogprob(Answer):
    """A token with its log-probability; `token` is vLLM's text for an id, "token_id:5"."""

    token: str
    token_id: int
    logprob: float
    bytes: None
    rank: int | None


class GenerateTokenLogprob(GenerateLogprob):
    top_logprobs: list[GenerateLogprob]


class GenerateLogprobs(Answer):
    content: list[GenerateTokenLogprob]


class GenerateChunkChoice(SampledChoice):
    index: int
    token_ids: list[int]
    logprobs: GenerateLogprobs | None
    finish_reason: FinishReason | None
    sampling_mask: list[list[int]] | None = ABSENT  # pyright: ignore[reportIncompatibleVariableOverride]


class GenerateChoice(GenerateChunkChoice):
    finish_reason: FinishReason
    stop_reason: int | str | None
    routed_experts: str | None


class Generated(Answer):
    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens"]
    choices: list[GenerateChoice]
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None
    usage: Usage


class GeneratedChunk(Answer):
    request_id: str
    output_mode: Literal["tokens"]
    choices: list[GenerateChunkChoice]
    prompt_token_ids: list[int] = ABSENT
    usage: Usage = ABSENT


class _Writer:
    """Writer of the answer to one request, complete or in pieces of a stream.

    name: request_id of the response. model: model name in the complete answer. num_prompt_tokens: number of prompt
    tokens for the usage.
    """

    def __init__(self, body: GenerateRequest, config: ServerConfig, name: str, model: str, num_prompt_tokens: int):
        self._body, self._num_prompt_tokens = body, num_prompt_tokens
        self._head = {"request_id": name, "output_mode": "tokens"}
        self._model, self._spans = model, SpanWriter()
        self._num_tokens: Counter[int] = Counter()
        self._num_cached_tokens = 0
        self._counts_last, self._counts_always = usage_in_stream(body.stream_options, config)
        self._has_begun = False

    def whole(self, output: RequestOutput) -> Response:
        """Return the complete answer, with choices sorted by index. output: the request's only output. Call it once."""
        choices = []
        for each in output.outputs:
            more = {"stop_reason": each.stop_reason, "routed_experts": encoded_experts(each)}
            choices.append({"sampling_mask": None, **self._choice(each), **more})
        self._count(output)
        asked = self._body.sampling_params
        scored = asked.prompt_logprobs is not None or bool(asked.prompt_logprob_token_ids)
        return json_response(
            {
                **self._head,
                "model": self._model,
                "created": int(time.time()),
                "choices": sorted(choices, key=lambda choice: choice["index"]),
                "prompt_logprobs": [json_position(each) for each in output.prompt_logprobs or ()] if scored else None,
                "prompt_token_ids": output.prompt_token_ids if self._body.return_token_ids else None,
                "kv_transfer_params": output.kv_transfer_params,
                "usage": self._usage(),
            }
        )

    def pieces(self, output: RequestOutput) -> bytes:
        """Return server-sent events with the new parts of `output`, one for each completion that has new tokens or has
        ended; b"" if there are none. The request's first event also has the prompt's token ids if they are requested.
        Counts tokens, so call it once for each output.
        """
        self._count(output)
        found = b""
        for each in output.outputs:
            if not each.token_ids and each.finish_reason is None:
                continue
            more: dict[str, Any] = {"usage": self._usage(each.index)} if self._counts_always else {}
            if self._body.return_token_ids and not self._has_begun:
                more["prompt_token_ids"] = output.prompt_token_ids
            self._has_begun = True
            found += event({**self._head, "choices": [self._choice(each)], **more})
        return found

    def end(self) -> bytes:
        """Return the last event, with the token counts, if usage is requested; b"" otherwise."""
        return event({**self._head, "choices": [], "usage": self._usage()}) if self._counts_last else b""

    def _count(self, output: RequestOutput) -> None:
        """Add an output's tokens to the counts, and store its number of cached tokens."""
        self._num_tokens.update({each.index: len(each.token_ids) for each in output.outputs})
        self._num_cached_tokens = output.num_cached_tokens or 0

    def _usage(self, index: int | None = None) -> dict[str, Any]:
        """Return the usage object with the token counts so far, of the completion `index`, or of all completions for
        None.
        """
        num_tokens = self._num_tokens.total() if index is None else self._num_tokens[index]
        return usage(self._num_prompt_tokens, num_tokens, self._num_cached_tokens)

    def _choice(self, output: CompletionOutput) -> dict[str, Any]:
        """Return the JSON of one completion, or of its new part. Counts its tokens for weight_versions, so call it once
        for each part.
        """
        logprobs = None
        if output.logprobs is not None:
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            logprobs = {"content": [_json_logprobs(token_id, position) for token_id, position in pairs]}
        return {
            "index": output.index,
            "token_ids": [*output.token_ids],
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            **self._spans.of(output.index, output),
            **sampling_fields(output),
        }


def _json_logprobs(token_id: int, position: PositionLogprobs) -> dict[str, Any]:
    """Return the JSON of the log-probability of `token_id`, the sampled token, with top_logprobs: all tokens of
    `position`, the sampled one first and the others in their given order.
    """
    others = [each for each in position if each != token_id]
    tops = [_json_logprob(each, position[each]) for each in (token_id, *others)]
    return {**tops[0], "top_logprobs": tops}


def _json_logprob(token_id: int, entry: Logprob) -> dict[str, Any]:
    """Return the JSON of one token, named "token_id:N", with its log-probability (`json_logprob`) and rank."""
    logprob = {"logprob": json_logprob(entry.logprob), "bytes": None, "rank": entry.rank}
    return {"token": f"token_id:{token_id}", "token_id": token_id, **logprob}


async def last_output(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """Return the last output of a request's stream, and close the stream. Raises RuntimeError if there is none."""
    last: RequestOutput | None = None
    async with contextlib.aclosing(outputs):  # pyright: ignore[reportArgumentType]
        async for output in outputs:
            last = output
    if last is None:
        raise RuntimeError("a request ended without an output")
    return last


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the route /inference/v1/generate."""
    routes = APIRouter(tags=["generate"], route_class=JsonRoute)
    names = served_names(engine, config)

    @routes.post("/inference/v1/generate", response_class=Response)
    @answers(Generated, GeneratedChunk | Error)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue a prompt of token ids, and answer with token ids, complete or as a stream of events. Raises
        RequestError, ApiError (404) for an unknown model, and the errors of EngineClient.stream before the first event.
        """
        model, lora = await choose_model(engine, body.model, names)
        name = body.register("generate-tokens", request)
        prompt, params = body.prompt(engine.inputs), body.params(engine.inputs, config)
        options = body.options(request, config, lora)
        writer = _Writer(body, config, name, model, len(prompt["prompt_token_ids"]))

        async def whole() -> Response:
            last = await last_output(engine.stream(prompt, params, name, options))
            return await written(last, partial(writer.whole, last))

        async def events() -> AsyncGenerator[bytes, None]:
            """Run the request and yield its events, then the event with the token counts, b"" if none are requested."""
            outputs = engine.stream(prompt, params, name, options)
            async with contextlib.aclosing(outputs):  # pyright: ignore[reportArgumentType]
                async for output in outputs:
                    yield writer.pieces(output)
            yield writer.end()

        if body.stream:
            return await stream_events(request, events(), config)
        return await answer(request, whole())

    return routes
