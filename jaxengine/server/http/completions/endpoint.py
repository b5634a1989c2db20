"""POST /v1/completions: OpenAI's older endpoint, with vLLM's fields, which evaluations use to score prompts.

A request has several prompts, each of which is answered n times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.output.outputs import SAMPLING_FIELDS, CompletionOutput, RequestOutput, WeightSpan
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.requests.run_in_thread import make_ready
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.beam_search import beam_search
from jaxengine.server.base.captured import check_captured
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.base.prompts import PromptEncoder, read_prompts
from jaxengine.server.base.workers import written
from jaxengine.server.http.answer.answers import NULL_BODY, Error, answers
from jaxengine.server.http.answer.interleave import interleave
from jaxengine.server.http.answer.request_metrics import request_times, stream_times
from jaxengine.server.http.answer.routed_experts import encoded_experts
from jaxengine.server.http.answer.sse import answer, event, json_response, stream_events
from jaxengine.server.http.completions.answers import Completion, CompletionChunk
from jaxengine.server.http.completions.output import ChoiceWriter
from jaxengine.server.http.completions.protocol import CompletionRequest
from jaxengine.server.http.load_header import with_load
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.request.limits import JsonRoute
from jaxengine.server.http.request.protocol import NULL_CHOICE, usage, usage_in_stream


class CompletionRun:
    """Completion request in progress: call `read_prompts`, then `whole` for one response or `events` for a stream.

    name: id of the response. model: model name in the response. options: scheduling options of its prompts. Raises
    RequestError for parameters that are not allowed.

    Attributes:
      head: fields with which the complete response and each chunk begin.
      params: the engine's sampling parameters.
      prompts: what the engine takes for each prompt; empty before `read_prompts`.
    """

    def __init__(
        self,
        engine: EngineClient,
        config: ServerConfig,
        body: CompletionRequest,
        name: str,
        model: str,
        options: RequestOptions,
    ):
        self.body = body
        self.id = name
        self._options = options
        self._engine = engine
        self._config = config
        self.head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model}
        self.params = self._sampling_params()
        self._beams = body.beam_params(engine.inputs, self.params, body.best_of)
        self.prompts: list[dict[str, Any]] = []
        self._num_prompt_tokens = 0
        self._num_completion_tokens = 0
        self._num_cached_tokens: dict[int, int] = {}

    def _sampling_params(self) -> SamplingParams:
        """Return the engine's sampling parameters. For echo with max_tokens 0, one token is sampled; echo also asks for
        log-probabilities of the prompt if `logprobs` is given. Raises RequestError for values that are not allowed.
        """
        body = self.body
        changes: dict[str, Any] = {"max_tokens": body.max_tokens}
        if body.echo and body.max_tokens == 0:
            changes["max_tokens"] = 1  # the engine always samples one; it is left out of the answer
        if body.echo and body.prompt_logprobs is None:
            changes["prompt_logprobs"] = body.logprobs
        return body.sampling_params(self._engine.inputs, self._config, **changes)

    async def read_prompts(self, encoder: PromptEncoder) -> None:
        """Read all prompts before any of them runs, those of prompt_embeds first. Texts are tokenized; texts and token
        ids are truncated if the request has truncate_prompt_tokens.

        Raises RequestError for the first prompt that cannot run, for more than max_prompts, for activations beyond the
        server's limit, and for fields that several prompts or embeddings cannot have; OverloadedError. The length of a
        text that is the only prompt is checked when it runs.
        """
        body, inputs = self.body, self._engine.inputs
        embedded, most = body.embedded, self._config.max_prompts
        if len(embedded) > most:
            problem = f"prompt_embeds holds {len(embedded)} prompts; allowed: 1 to {most}"
            raise RequestError(problem, param="prompt_embeds")
        for each in embedded:
            ready: Any = await make_ready(inputs, {"prompt_embeds": each, "cache_salt": body.cache_salt})
            self._add(ready)
        longest = inputs.config.max_model_len - 1 if body.truncate_prompt_tokens is None else None
        most -= len(embedded)
        given = [] if embedded and not body.prompt else read_prompts(body.prompt, most, inputs, longest)
        special = body.add_special_tokens is not False
        texts = [each for each in given if isinstance(each, str)]
        side = encoder.cut_side(body.truncate_prompt_tokens, body.truncation_side)
        encoded = iter(await encoder.encode(texts, add_special_tokens=special, cut_side=side) if texts else ())
        for each in given:
            whole = next(encoded) if isinstance(each, str) else each
            ids = encoder.cut(whole, body.truncate_prompt_tokens, body.truncation_side, body.max_tokens)
            prompt: dict[str, Any] = {"prompt_token_ids": ids, "cache_salt": body.cache_salt}
            if isinstance(each, str) and len(ids) == len(whole):
                prompt["prompt"] = each
            self._add(prompt)
        check_captured(inputs, self._config, self.params, (len(each["prompt_token_ids"]) for each in self.prompts))
        if len(self.prompts) > 1:
            if body.kv_transfer_params is not None:
                problem = f"kv_transfer_params needs a single prompt, got {len(self.prompts)}"
                raise RequestError(problem, param="kv_transfer_params")
            for prompt in self.prompts:
                inputs.prepare(prompt, self.params, options=self._options)

    def _add(self, prompt: dict[str, Any]) -> None:
        """Append a prompt, and add its token ids to the count of prompt tokens."""
        self.prompts.append(prompt)
        self._num_prompt_tokens += len(prompt["prompt_token_ids"])

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Run the prompts; yield (index of the prompt, output) as outputs arrive. At most as many prompts run at once
        as the engine has slots for their n outputs. With max_tokens=0 the sampled token is removed. Updates the counts
        of tokens.

        Raises the first error of any prompt, which is one of EngineClient.stream, after ending all prompts.
        """
        async with contextlib.aclosing(interleave(self._generate, len(self.prompts), self._places())) as outputs:
            async for index, output in outputs:
                if self.body.max_tokens == 0:
                    output.outputs = [_without_output(each) for each in output.outputs]
                self._num_completion_tokens += sum(len(each.token_ids) for each in output.outputs)
                self._num_cached_tokens[index] = output.num_cached_tokens or 0
                yield index, output

    async def whole(self) -> Response:
        """Run the prompts and return the complete response. Raises the errors of `outputs`."""
        return json_response(await self.answer())

    async def answer(self) -> dict[str, Any]:
        """Run the prompts and return the complete response as JSON values, with choices sorted by index. Raises the
        errors of `outputs`.
        """
        choices, about = [], dict[str, Any](NULL_BODY)
        writer = self._writer()
        async with contextlib.aclosing(self.outputs()) as outputs:
            async for prompt, output in outputs:
                about["kv_transfer_params"] = output.kv_transfer_params
                about["metrics"] = self._times(output)
                for each in output.outputs:
                    choice = await written(output, partial(writer.choice, prompt, output, each))
                    choices.append(choice | {"routed_experts": encoded_experts(each)})
        choices.sort(key=lambda choice: choice["index"])
        choices = [{**NULL_CHOICE, "prompt_logprobs": None, **choice} for choice in choices]
        return {**self.head, "choices": choices, "usage": self._usage(), **about}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Run the prompts and yield `chunks` as server-sent events, without [DONE]: for each list an item, b"" for an
        empty one. Raises the errors of `outputs`.
        """
        async with contextlib.aclosing(self.chunks()) as found:
            async for chunks in found:
                yield b"".join(map(event, chunks))

    async def chunks(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Run the prompts and yield the response as chunks, a list for each output of the engine.

        As the request's stream_options and the server's say, each chunk has the token counts of its choice so far, and
        a last chunk without choices has those of all, with the request's times if the server measures them. Raises the
        errors of `outputs`.
        """
        num_tokens: Counter[int] = Counter()
        times = None
        writer = self._writer()
        last, always = usage_in_stream(self.body.stream_options, self._config)
        async with contextlib.aclosing(self.outputs()) as outputs:
            async for prompt, output in outputs:
                chunks, times = [], self._times(output)
                for each in output.outputs:
                    choice = await written(output, partial(writer.choice, prompt, output, each))
                    num_tokens[choice["index"]] += len(each.token_ids)
                    count, cached = num_tokens[choice["index"]], output.num_cached_tokens or 0
                    counts = {"usage": usage(len(output.prompt_token_ids), count, cached)} if always else {}
                    if always or ChoiceWriter.says_something(choice):
                        chunks.append({**self.head, "choices": [choice], **counts})
                yield chunks
        if last:
            yield [{**self.head, "choices": [], "usage": self._usage(), **stream_times(times)}]

    def _writer(self) -> ChoiceWriter:
        """Return a new writer of choices for this request."""
        by_id = self.body.names_tokens_by_id(self._config)
        return ChoiceWriter(self.body, self.params, self._engine.inputs.tokenizer, by_id)

    def _generate(self, index: int) -> AsyncIterator[RequestOutput]:
        """Return the stream of outputs of prompt number `index`. Its id in the engine is the response's id or, with
        several prompts, ID-index.
        """
        request_id = self.id if len(self.prompts) == 1 else f"{self.id}-{index}"
        if self._beams is not None:
            prompt, n = self.prompts[index], self.body.n or 1
            return beam_search(self._engine, prompt, self._beams, request_id, self._options, n)
        return self._engine.stream(self.prompts[index], self.params, request_id, self._options)

    def _places(self) -> int:
        """Return how many prompts may run at once: max_num_seqs divided by n, at least one."""
        return max(1, self._engine.inputs.config.max_num_seqs // self.params.n)

    def _times(self, output: RequestOutput) -> dict[str, float | None] | None:
        """Return the times of a request for one output; None for others, or if the server does not measure them."""
        if not self._config.enable_per_request_metrics or len(self.prompts) > 1 or self.body.n not in (None, 1):
            return None
        return request_times(output.metrics, self._num_completion_tokens)

    def _usage(self) -> dict[str, Any]:
        """Return the usage object with the token counts so far."""
        cached = sum(self._num_cached_tokens.values())
        return usage(self._num_prompt_tokens, self._num_completion_tokens, cached)


def _without_output(output: CompletionOutput) -> CompletionOutput:
    """Return a copy of an output without the sampled token, its text and its scores, which is the answer for
    max_tokens=0. The finish reason "stop" becomes "length", the stop reason None, and the first weight span, if there
    are any, an empty one at 0. Captured activations stay.
    """
    reason = "length" if output.finish_reason == "stop" else output.finish_reason
    spans = [WeightSpan(each.version, 0, 0) for each in (output.weight_versions or ())[:1]] or None
    rows = {
        name: None if (own := getattr(output, name)) is None else own[:0] for name in ("logprobs", *SAMPLING_FIELDS)
    }
    changes: dict[str, Any] = {
        "text": "",
        "token_ids": [],
        "finish_reason": reason,
        "stop_reason": None,
        "weight_versions": spans,
    }
    return dataclasses.replace(output, **changes, **rows)


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the route /v1/completions."""
    routes = APIRouter(tags=["completions"], route_class=JsonRoute)
    encoder = PromptEncoder(engine.inputs)
    names = served_names(engine, config)

    @routes.post("/v1/completions", response_class=Response)
    @answers(Completion, CompletionChunk | Error)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts, complete or as a stream of events. Raises RequestError, ApiError (404) for an unknown
        model, OverloadedError, EngineDeadError; of a stream, until its first event.
        """
        model, lora = await choose_model(engine, body.model, names)
        name = body.register("cmpl", request)
        completion = CompletionRun(engine, config, body, name, model, body.options(request, config, lora))
        await completion.read_prompts(encoder)
        if body.stream:
            return await stream_events(request, completion.events(), config)
        return await with_load(engine, request, await answer(request, completion.whole()))

    return routes
