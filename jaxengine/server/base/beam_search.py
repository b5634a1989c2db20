"""Beam search as one request of a server: many one-token requests to the engine, and one output at the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.beam_search import BeamSearch, BeamSearchParams, candidates
from jaxengine.requests.output.outputs import CompletionOutput, RequestOutput
from jaxengine.requests.params.options import RequestOptions


async def beam_search(
    engine: EngineClient,
    prompt: dict[str, Any],
    params: BeamSearchParams,
    request_id: str,
    options: RequestOptions,
    n: int | None = None,
) -> AsyncGenerator[RequestOutput, None]:
    """Yield a single output, when the search has ended, with a completion for each sequence, best first.

    Texts and token ids are those after the prompt; texts are empty without a tokenizer.

    Args:
      prompt: its prompt_token_ids are the beginning of all beams, its cache_salt is used for all requests, and its
        "prompt" is copied to the output.
      params: validated already.
      request_id: id of the output. The engine's requests have ids that begin with it.
      options: options of all requests to the engine, of which at most max_num_seqs run at a time.
      n: number of best sequences to return; None for all beam_width.

    If the engine aborts one of the requests, the search ends with the sequences so far. Those that had not stopped have
    finish_reason "abort" and the aborted request's stop_reason: "timeout" after `options.timeout`, None if an update of
    the weights ends running requests. Raises the errors of EngineClient.stream, and RequestError for an output without
    logprobs.
    """
    inputs, one = engine.inputs, params.token_params()
    token_ids, salt = prompt["prompt_token_ids"], prompt.get("cache_salt")
    inputs.prepare(prompt, one, options=options)
    search = BeamSearch(token_ids, params, inputs.eos_token_ids(), inputs.config.max_model_len)
    num_cached: int | None = None
    slots = asyncio.Semaphore(max(1, inputs.config.max_num_seqs))

    async def follow(number: int, index: int, beam: list[int]) -> RequestOutput:
        """Return the finished output of one request: step `number` of the beam with this index. Waits until fewer than
        max_num_seqs requests run.

        beam: token ids of the beam, with those of the prompt.
        """
        own = {"prompt_token_ids": beam, "cache_salt": salt}
        async with slots:
            return await _last(engine.stream(own, one, f"{request_id}-{number}-{index}", options))

    number, aborted = 0, None
    while prompts := search.prompts:
        tasks = [asyncio.create_task(follow(number, index, beam)) for index, beam in enumerate(prompts)]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        num_cached = outputs[0].num_cached_tokens if num_cached is None else num_cached
        aborted = next((part for output in outputs if (part := output.outputs[0]).finish_reason == "abort"), None)
        if aborted is not None:
            break
        search.advance([candidates(output) for output in outputs])
        number += 1
    completions = []
    for index, beam in enumerate(search.result(None).sequences[:n]):
        own_ids = search.output_token_ids(beam)
        skip, tokenizer = params.skip_special_tokens, inputs.tokenizer
        text = "" if tokenizer is None else tokenizer.decode(own_ids, skip_special_tokens=skip)
        reason = "abort" if aborted is not None and beam.finish_reason != "stop" else beam.finish_reason
        completions.append(
            CompletionOutput(
                index,
                text,
                own_ids,
                cumulative_logprob=beam.cum_logprob,
                finish_reason=reason,
                stop_reason=aborted.stop_reason if aborted is not None and reason == "abort" else beam.stop_reason,
            )
        )
    yield RequestOutput(request_id, prompt.get("prompt"), token_ids, completions, True, num_cached_tokens=num_cached)


async def _last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """Return the first output of a stream that is `finished`, and close the stream. Raises AssertionError if the stream
    ends without one.
    """
    async with contextlib.aclosing(outputs):  # pyright: ignore[reportArgumentType]
        async for output in outputs:
            if output.finished:
                return output
    raise AssertionError("a stream ended before its request")
