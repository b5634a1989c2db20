"""Ends and tokens are counted as callers were told, also where the text decides and the engine went on meanwhile."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from jaxengine import SamplingParams
from jaxengine.requests.params.sampling_params import RequestOutputKind
from jaxengine.scheduler.base.request import FinishReason

LENGTHS = range(1, 13)


def counts(engine):
    """(ends by reason, tokens, ends and tokens of the histogram)"""
    requests = engine.request_stats
    histogram = requests.generation_tokens
    return dict(requests.finished), engine.stats.num_generated_tokens, int(histogram.counts.sum()), histogram.sum


def told(outputs):
    reasons = [output.outputs[0].finish_reason for output in outputs]
    return {FinishReason(reason): reasons.count(reason) for reason in set(reasons)}, sum(
        len(output.outputs[0].token_ids) for output in outputs
    )


async def test_an_engine_in_this_process(chat_engine):
    """Some stop strings are completed by the very token that would have ended the request by its length."""

    async def answer(params):
        stream = chat_engine.generate({"prompt_token_ids": [500, 600, 700]}, params)
        return [output async for output in stream][-1]

    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    text = (await answer(plain)).outputs[0].text
    engine = chat_engine.core.engine
    before = counts(engine)
    stop = text[len(text) // 2 :][:4]
    outputs = await asyncio.gather(*(answer(plain.clone_with(max_tokens=n, stop=stop)) for n in LENGTHS))
    while chat_engine.core.has_unfinished:
        await asyncio.sleep(0.01)
    after = counts(engine)
    reasons, num_tokens = told(outputs)
    assert len(reasons) == 2
    assert {reason: after[0][reason] - before[0][reason] for reason in reasons} == reasons
    assert after[2] - before[2] == len(LENGTHS) and after[3] - before[3] == num_tokens
    assert after[1] - before[1] == num_tokens and not engine.uncounted


@pytest.mark.parametrize("num_told", [3, 8])
async def test_what_was_counted_too_much_is_left_out_of_what_comes(chat_engine, num_told):
    stats = type(chat_engine.core.engine.stats)()
    stats.count_generated(8)
    stats.count_undelivered(8 - num_told)
    stats.count_generated(2)
    stats.count_generated(10)
    assert stats.num_generated_tokens == num_told + 12


def metrics_of(server):
    """Values by sample of a server's /metrics."""
    text = httpx.get(f"{server.base_url}/metrics", timeout=60).text
    lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_an_engine_in_a_process_of_its_own(server):
    def answer(client, **fields):
        body = {"prompt": [500, 600, 700], "temperature": 0, "ignore_eos": True, "max_tokens": 12, **fields}
        choice = client.post(f"{server.base_url}/v1/completions", json=body, timeout=60).json()
        return choice["choices"][0], choice["usage"]["completion_tokens"]

    with httpx.Client(timeout=60) as client:
        text = answer(client)[0]["text"]
        stop, before, ends = text[len(text) // 2 :][:4], metrics_of(server), []
        ends = [answer(client, stop=stop, max_tokens=n) for n in LENGTHS]
        # The engine has heard of all ends before it ends this one, which has at least as many tokens as no caller got.
        answer(client)
    after = metrics_of(server)

    def grown(name, *parts):
        return sum(
            after[key] - before.get(key, 0) for key in after if key.startswith(name) and all(p in key for p in parts)
        )

    stops = sum(choice["finish_reason"] == "stop" for choice, _ in ends)
    assert 0 < stops < len(ends)
    assert grown("vllm:request_success_total", 'finished_reason="stop"') == stops
    assert grown("vllm:request_success_total", 'finished_reason="length"') == len(ends) - stops + 1
    assert grown("vllm:generation_tokens_total") == sum(tokens for _, tokens in ends) + 12
    assert grown("vllm:request_generation_tokens_sum") == sum(tokens for _, tokens in ends) + 12
