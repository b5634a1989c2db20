"""OpenTelemetry spans: one for each request, with vLLM's attributes, in the caller's trace if there is one.

Wraps the engine, so that requests of every protocol are traced.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import context, trace
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxengine.api.engine_client import EngineClient, EngineWrapper
from jaxengine.config.engine_config import ConfigError
from jaxengine.requests.output.outputs import RequestOutput
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.prepared import Prompt
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.requests.pooling.outputs import PoolingOutput, PoolingRequestOutput
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.server.adapters.owned_ids import shown_id
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.version import __version__

# Scheme of an endpoint -> (module of the exporter, package that contains it).
_EXPORTERS = {
    scheme: (f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter", f"opentelemetry-exporter-otlp-proto-{kind}")
    for kind in ("http", "grpc")
    for scheme in (kind, f"{kind}s")
}
_PROPAGATOR = TraceContextTextMapPropagator()


def traced(engine: EngineClient, config: ServerConfig) -> EngineClient:
    """Return `engine`, wrapped to send a span for each request if an endpoint is configured, else `engine` itself.

    Raises ConfigError for an unusable endpoint; if a package is missing, the error names it.
    """
    if config.otlp_traces_endpoint is None:
        return engine
    return TracedEngine(engine, _tracer(config.otlp_traces_endpoint), served_names(engine, config)[0])


def check_endpoint(endpoint: str | None) -> None:
    """Raise ConfigError for an endpoint with an unknown scheme, without a host, or whose exporter package is not
    installed. None passes.
    """
    if endpoint is not None:
        _exporter(endpoint)


@contextlib.contextmanager
def caller_trace(headers: Mapping[str, str]) -> Iterator[None]:
    """Context in which new spans join the trace that the headers name (traceparent, tracestate; in lower case), if they
    name one.
    """
    token = context.attach(_PROPAGATOR.extract(headers))
    try:
        yield
    finally:
        context.detach(token)


class CallerTraceMiddleware:
    """Middleware that applies `caller_trace` to HTTP requests."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the wrapped application; spans that begin meanwhile join the trace that the request's
        headers name.
        """
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        with caller_trace(headers):
            await self._app(scope, receive, send)


class TracedEngine(EngineWrapper):
    """EngineClient that wraps another one and sends a span for each request.

    tracer: sends the spans. model: name of the model in them.
    """

    def __init__(self, engine: EngineClient, tracer: Tracer, model: str):
        super().__init__(engine)
        self._tracer = tracer
        self._model = model

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of a request, with the arguments and errors of EngineClient.stream. When the iteration
        ends, a span is sent with n, temperature, top_p and max_tokens of the parameters; none is sent if the iteration
        never begins.

        sampling_params: None for the model's defaults.
        """
        params = self.inputs.default_sampling_params() if sampling_params is None else sampling_params
        options = options or RequestOptions()
        asked = {"n": params.n, "temperature": params.temperature, "top_p": params.top_p}
        if params.max_tokens is not None:
            asked["max_tokens"] = params.max_tokens
        delta = params.output_kind is RequestOutputKind.DELTA
        request = _RequestSpan(self._tracer, self._model, asked, options.arrival, delta)
        return self._spanned(self._engine.stream(prompt, params, request_id, options), request)

    def pool(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """Yield the output of a pooling request, with the arguments and errors of EngineClient.pool. When the iteration
        ends, a span is sent.
        """
        options = options or RequestOptions()
        request = _RequestSpan(self._tracer, self._model, {}, options.arrival)
        return self._spanned(self._engine.pool(prompt, pooling_params, request_id, options), request)

    async def _spanned(self, stream: Any, request: _RequestSpan) -> AsyncIterator[Any]:
        """Yield the outputs of `stream`, and record them in the span, which ends after the last output, with an error,
        or when this generator is closed.

        Closes `stream` in every case. Raises its errors.
        """
        try:
            async with contextlib.aclosing(stream):  # now, as closing it early aborts the request
                async for output in stream:
                    request.add(output)
                    yield output
        except Exception as error:
            request.failed(error)
            raise
        finally:
            request.end()


class _RequestSpan:
    """Data of one request's span until it ends."""

    def __init__(self, tracer: Tracer, model: str, asked: Mapping[str, Any], arrival: float, delta: bool = False):
        """Record the start of a request. Its parent is the span of the current context.

        tracer: sends the span. model: the model's name; asked: sampling parameters by name; both become attributes.
        arrival: time of arrival in seconds of time.monotonic. delta: whether each output has only the new tokens.
        """
        self._tracer = tracer
        self._parent = context.get_current()
        self._start = time.time_ns() - int((time.monotonic() - arrival) * 1e9)
        self._start_clock = arrival
        self._delta = delta
        self._num_tokens: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        self._last: RequestOutput | PoolingRequestOutput[PoolingOutput] | None = None
        self._error: Exception | None = None
        self._attributes: dict[str, Any] = {"gen_ai.response.model": model}
        self._attributes |= {f"gen_ai.request.{name}": value for name, value in asked.items()}

    def add(self, output: RequestOutput | PoolingRequestOutput[PoolingOutput]) -> None:
        """Record an output of the request: its token counts and finish reasons. Ids and times are taken from the last
        output recorded.
        """
        self._last = output
        if isinstance(output, PoolingRequestOutput):
            self._num_tokens[0], self._reasons[0] = 0, output.finish_reason
            return
        for completion in output.outputs:
            seen = self._num_tokens.get(completion.index, 0) if self._delta else 0
            self._num_tokens[completion.index] = seen + len(completion.token_ids)
            if completion.finish_reason is not None:
                self._reasons[completion.index] = completion.finish_reason

    def failed(self, error: Exception) -> None:
        """Record the error that ends the request; `end` puts the error's type into the span."""
        self._error = error

    def end(self) -> None:
        """Send the span, from the request's arrival until now. Call it once. Finish reasons are those of the outputs by
        ascending index; one without, because the caller left, counts as aborted.
        """
        attributes = {**self._attributes, "gen_ai.usage.completion_tokens": sum(self._num_tokens.values())}
        output = self._last
        if output is not None:
            attributes["gen_ai.request.id"] = shown_id(output.request_id)
            attributes["gen_ai.usage.prompt_tokens"] = len(output.prompt_token_ids)
            attributes.update(_latencies(output) if isinstance(output, RequestOutput) else {})
            reasons = [self._reasons.get(index, "abort") for index in sorted(self._num_tokens)]
            attributes["gen_ai.response.finish_reasons"] = reasons
        span = self._tracer.start_span(
            "llm_request", self._parent, SpanKind.SERVER, {**attributes}, start_time=self._start
        )
        if self._error is not None or "error" in self._reasons.values():
            span.set_status(Status(StatusCode.ERROR, type(self._error).__name__ if self._error else "error"))
        span.end(self._start + int((time.monotonic() - self._start_clock) * 1e9))


def _latencies(output: RequestOutput) -> dict[str, float]:
    """Return the attributes gen_ai.latency.* of a span, in seconds, by name. Latencies whose start or end is unknown
    are left out; {} for an output without metrics.
    """
    metrics = output.metrics
    if metrics is None:
        return {}
    queued, began = metrics.queued_time, metrics.first_scheduled_time
    first, last = metrics.first_token_time, metrics.last_token_time
    times = {
        "time_in_queue": (queued, began),
        "time_to_first_token": (metrics.arrival_time, first),
        "time_in_model_prefill": (began, first),
        "time_in_model_decode": (first, last),
        "time_in_model_inference": (began, last),
        "e2e": (metrics.arrival_time, metrics.finished_time),
    }
    return {
        f"gen_ai.latency.{name}": end - start
        for name, (start, end) in times.items()
        if start is not None and end is not None
    }


def _tracer(endpoint: str) -> Tracer:
    """Return a tracer that sends spans to an OTLP endpoint in the background. Raises ConfigError for an unusable
    endpoint; whether a server answers there is not checked.
    """
    exporter = _exporter(endpoint)
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    url = urlsplit(endpoint)
    options: dict[str, Any] = {"endpoint": endpoint}
    if url.scheme.startswith("grpc"):
        options = {"endpoint": url.netloc, "insecure": url.scheme == "grpc"}
    provider = TracerProvider(resource=Resource.create({"service.name": "jaxengine"}))
    provider.add_span_processor(BatchSpanProcessor(exporter(**options)))
    return trace.get_tracer("jaxengine", __version__, provider)


def _exporter(endpoint: str) -> Any:
    """Import and return the class that exports spans to the endpoint; its package includes the SDK.

    Raises ConfigError for an address that is not one of http, https, grpc or grpcs, or if the package is missing.
    """
    try:
        url = urlsplit(endpoint)
    except ValueError:  # such as half an IPv6 address
        url = urlsplit("")
    if url.scheme not in _EXPORTERS or not url.netloc:
        raise ConfigError("otlp_traces_endpoint", endpoint, "an address that begins with http, https, grpc or grpcs://")
    module, package = _EXPORTERS[url.scheme]
    try:
        return importlib.import_module(module).OTLPSpanExporter
    except ImportError:
        problem = f"otlp_traces_endpoint is {endpoint!r}, and the package {package} is not installed"
        raise ConfigError.because("otlp_traces_endpoint", problem, f"pip install {package}") from None
