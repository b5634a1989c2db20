"""GET /metrics: the engine's counters in Prometheus' text format.

The metrics belong to the engine, so every API process answers the same. OpenMetrics is not offered: prometheus_client
would replace the ":" of the names with "_".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from jaxengine.api.engine_client import EngineClient
from jaxengine.engine.metrics import HELP
from jaxengine.engine.stats.server_stats import HttpCounts, process_facts
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig

# Names of earlier versions of vLLM, for dashboards made for them.
ALIASES = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}
ENGINE = "0"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the route /metrics, which first reports this process's requests to the engine (`report`). Samples are
    labelled with the first served model name and engine "0".
    """
    routes = APIRouter(tags=["operations"])
    labels = {"model_name": served_names(engine, config)[0], "engine": ENGINE}

    text = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}

    @routes.get("/metrics", response_class=Response, responses={200: text})
    async def metrics(request: Request) -> Response:
        """Return the engine's counters, gauges and histograms, after adding this process's requests to them. Raises
        EngineDeadError if the engine cannot answer.
        """
        await report(engine, request.app.state.traffic)
        snapshot = await engine.utility("metrics")
        registry = CollectorRegistry()
        registry.register(_Snapshot(snapshot, labels))
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE})

    return routes


class Traffic(Protocol):
    """Counts of an API process's requests, as jaxengine.server.http.app has them."""

    http: HttpCounts
    process: str


async def report(engine: EngineClient, traffic: Traffic) -> None:
    """Add the requests that this process has counted since the last report, and data about the process, to the engine's
    metrics. Raises the engine's errors, such as EngineDeadError; these requests are then part of the next report.
    """
    rows = traffic.http.take()
    try:
        await engine.utility("report", traffic.process, rows, process_facts())
    except BaseException:
        traffic.http.add(rows)
        raise


class _Snapshot:
    """Collector for prometheus_client that returns the result of `Metrics.snapshot`."""

    def __init__(self, snapshot: Sequence[Mapping[str, Any]], labels: Mapping[str, str]):
        self._snapshot = snapshot
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, then those that also have a name of earlier vLLM versions under that name."""
        by_name: dict[str, list[Mapping[str, Any]]] = {}
        for metric in self._snapshot:
            by_name.setdefault(metric["name"], []).append(metric)
        for name, samples in by_name.items():
            yield self._family(name, HELP[name], samples)
        for alias, name in ALIASES.items():
            yield self._family(alias, f"{HELP[name]} As {name}.", by_name[name])

    def _family(self, name: str, about: str, samples: Sequence[Mapping[str, Any]]) -> Metric:
        """Return the metric `name` with these samples: at least one, and all of one kind. about: its help text."""
        names = (*self._labels, *samples[0].get("labels", ()))
        if samples[0]["kind"] == "histogram":
            histogram = HistogramMetricFamily(name, about, labels=names)
            for sample in samples:
                histogram.add_metric(self._values(sample), list(sample["buckets"].items()), sample["sum"])
            return histogram
        family = (CounterMetricFamily if samples[0]["kind"] == "counter" else GaugeMetricFamily)(
            name, about, labels=names
        )
        for sample in samples:
            family.add_metric(self._values(sample), sample["value"])
        return family

    def _values(self, sample: Mapping[str, Any]) -> list[str]:
        """Return the label values of a sample: first those that all metrics have, then the sample's own."""
        own: Iterable[str] = sample.get("labels", {}).values()
        return [*self._labels.values(), *own]
