"""A request's time begins when it comes to the server, before its body is read, and its limits count from there."""

from __future__ import annotations

import asyncio
import json
import time

import grpc.aio
import pytest

from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.grpc import inference_pb2 as pb
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import Recorder, http_client
from tests.jaxengine.server.grpc.grpc_rig import request, serving
from tests.jaxengine.server.scripted_engine import ScriptedEngine

LONG_AGO = 1000.0
MESSAGES = [{"role": "user", "content": "Hi"}]
HISTOGRAMS = {
    "e2e": "vllm:e2e_request_latency_seconds",
    "first": "vllm:time_to_first_token_seconds",
    "preprocessing": "jaxengine:request_preprocessing_time_seconds",
    "queue": "vllm:request_queue_time_seconds",
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    ],
)
async def test_over_http_before_the_body(chat_engine, path, body):
    engine = ScriptedEngine(chat_engine, "Hello there")
    app = create_app(engine, ServerConfig(request_timeout=60))
    sent = []

    async def parts():
        whole = json.dumps(body).encode()
        yield whole[:5]
        sent.append(time.monotonic())
        yield whole[5:]

    began = time.monotonic()
    async with http_client(app) as client:
        answer = await client.post(path, content=parts(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert began <= engine.arrivals[0] <= sent[0]
    assert engine.calls[0][4] == 60  # counted from there, whatever has passed since


async def test_over_grpc_before_the_message(chat_engine):
    engine = Recorder(chat_engine)
    asked = request(stopping={"max_new_tokens": 2, "ignore_eos": True})
    async with serving(engine, request_timeout=60) as server, asyncio.timeout(60):
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
        coded = pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        call = channel.stream_unary("/jaxengine.v1.Inference/Generate", *coded)()
        while not len(server._calls):
            await asyncio.sleep(0.01)
        sent = time.monotonic()
        await call.write(asked)
        await call.done_writing()
        assert (await call).outputs
        await channel.close()
    assert engine.arrivals[0] <= sent
    assert engine.calls[0][4] == 60


async def test_what_is_measured_begins_with_it(chat_engine):
    def sums():
        values = {metric.name: metric for metric in chat_engine.get_metrics()}
        return {name: values[metric].sum for name, metric in HISTOGRAMS.items()}

    before, params = sums(), SamplingParams(max_tokens=2, ignore_eos=True)
    options = RequestOptions(arrival=time.monotonic() - LONG_AGO)
    *_, last = [output async for output in chat_engine.stream("Hi", params, options=options)]
    grew = {name: value - before[name] for name, value in sums().items()}
    assert min(grew["e2e"], grew["first"], grew["preprocessing"]) >= LONG_AGO
    assert 0 <= grew["queue"] < LONG_AGO
    metrics = last.metrics
    assert metrics.time_to_first_token >= LONG_AGO and 0 <= metrics.time_in_queue < LONG_AGO
    assert metrics.queued_time - metrics.arrival_time >= LONG_AGO


async def test_a_timeout_counts_from_it(chat_engine):
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    options = RequestOptions(timeout=LONG_AGO / 2, arrival=time.monotonic() - LONG_AGO)
    *_, last = [output async for output in chat_engine.stream("Hi", params, options=options)]
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("abort", "timeout")
