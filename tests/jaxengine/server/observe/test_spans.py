"""OpenTelemetry: a span for each request, with vLLM's attributes, within the caller's trace."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import sys
import types

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jaxengine.config.engine_config import ConfigError
from jaxengine.requests.pooling.outputs import PoolingOutput, PoolingRequestOutput
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from jaxengine.server.observe.spans import TracedEngine, check_endpoint, traced
from tests.jaxengine.server.asgi_client import Connection, http_client, idle

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"prompt": [504, 3575, 282], "max_tokens": 6, "ignore_eos": True, "n": 2, "temperature": 0.5, "top_p": 0.9}


@pytest.fixture
def exported():
    return InMemorySpanExporter()


@pytest.fixture
def app(chat_engine, exported):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    engine = TracedEngine(chat_engine, provider.get_tracer("test"), "tiny")
    return create_app(engine, ServerConfig(served_model_name=("tiny",), otlp_traces_endpoint="http://localhost:4318"))


async def test_a_pooling_request_is_a_span(chat_engine, exported, monkeypatch):
    async def pool(*_):
        yield PoolingRequestOutput("p", PoolingOutput(np.ones(2, np.float32)), [5, 6, 7])

    monkeypatch.setattr(chat_engine, "pool", pool)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    engine = TracedEngine(chat_engine, provider.get_tracer("test"), "tiny")
    assert [output.request_id async for output in engine.pool({"prompt_token_ids": [5, 6, 7]})] == ["p"]
    (span,) = exported.get_finished_spans()
    assert dict(span.attributes) == {
        "gen_ai.response.model": "tiny",
        "gen_ai.request.id": "p",
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 0,
        "gen_ai.response.finish_reasons": ("stop",),
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_of_its_callers_trace(app, exported, stream):
    async with http_client(app) as client:
        answer = await client.post(
            "/v1/completions", json=BODY | {"stream": stream}, headers={"traceparent": CALLER, "x-request-id": "abc"}
        )
    assert answer.status_code == 200
    (span,) = exported.get_finished_spans()
    assert span.name == "llm_request" and span.kind is trace.SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" in CALLER and f"{span.parent.span_id:016x}" in CALLER
    attributes = dict(span.attributes)
    latencies = {name: attributes.pop(name) for name in list(attributes) if name.startswith("gen_ai.latency.")}
    assert "abc" in attributes.pop("gen_ai.request.id")
    assert attributes == {
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 12,
        "gen_ai.response.finish_reasons": ("length", "length"),
    }
    queue, first, prefill, decode, inference, e2e = (
        latencies[f"gen_ai.latency.{name}"]
        for name in (
            *("time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode"),
            *("time_in_model_inference", "e2e"),
        )
    )
    # Before it is queued, a request is read and tokenised.
    assert queue + prefill <= first and prefill + decode == pytest.approx(inference)
    assert min(queue, decode) > 0 and first + decode <= e2e + 1e-9
    assert e2e <= (span.end_time - span.start_time) / 1e9 + 0.001
    assert span.status.is_ok or span.status.status_code is trace.StatusCode.UNSET


async def test_without_a_callers_trace_it_begins_one(app, exported):
    async with http_client(app) as client:
        for headers in ({}, {"traceparent": "nonsense"}):
            assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
    assert [span.parent for span in exported.get_finished_spans()] == [None, None]


async def test_one_that_is_left_or_refused_is_a_span_too(app, chat_engine, exported):
    left = Connection.of_json(app, "/v1/completions", **BODY | {"max_tokens": 200, "stream": True, "n": 1})
    await asyncio.wait_for(left.chunks.get(), 30)
    await left.leave()
    await idle(chat_engine)
    async with http_client(app) as client:
        assert (await client.post("/v1/completions", json=BODY | {"prompt": [1] * 300})).status_code == 400
    aborted, *refused = exported.get_finished_spans()
    assert aborted.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert aborted.attributes["gen_ai.usage.completion_tokens"] < 200
    assert [span.status.status_code for span in refused] == [trace.StatusCode.ERROR] * len(refused)


@pytest.mark.parametrize(
    ("endpoint", "package"),
    [
        ("http://localhost:4318/v1/traces", "opentelemetry-exporter-otlp-proto-http"),
        ("grpc://localhost:4317", "opentelemetry-exporter-otlp-proto-grpc"),
    ],
)
def test_a_missing_exporter_is_named(chat_engine, monkeypatch, endpoint, package):
    def missing(name: str):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=f"otlp_traces_endpoint.*{package}"):
        traced(chat_engine, ServerConfig(otlp_traces_endpoint=endpoint))


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://host", "http://", "grpc:host", "http://[::1"])
def test_a_wrong_endpoint_is_refused(endpoint):
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        check_endpoint(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "options"),
    [
        ("http://host:4318/v1/traces", {"endpoint": "http://host:4318/v1/traces"}),
        ("grpc://host:4317", {"endpoint": "host:4317", "insecure": True}),
        ("grpcs://host:4317", {"endpoint": "host:4317", "insecure": False}),
    ],
)
async def test_spans_go_to_the_endpoint(chat_engine, monkeypatch, endpoint, options):
    sent = []

    class Exporter(SpanExporter):
        def __init__(self, **given):
            assert given == options

        def export(self, spans):
            sent.extend(spans)
            return SpanExportResult.SUCCESS

    kind = "grpc" if "grpc" in endpoint else "http"
    module = types.SimpleNamespace(OTLPSpanExporter=Exporter)
    monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter", module)
    check_endpoint(endpoint)
    monkeypatch.setattr(chat_engine.inputs, "config", dataclasses.replace(chat_engine.inputs.config, model=None))
    engine = traced(chat_engine, ServerConfig(otlp_traces_endpoint=endpoint))
    async with contextlib.aclosing(engine.stream({"prompt_token_ids": [5, 6]})) as outputs:
        await anext(outputs)
    engine._tracer.span_processor.force_flush()
    assert [span.resource.attributes["service.name"] for span in sent] == ["jaxengine"]
    assert [span.attributes["gen_ai.response.model"] for span in sent] == ["SmolLM2-135M-Instruct"]  # as in /v1/models
    assert traced(chat_engine, ServerConfig()) is chat_engine
