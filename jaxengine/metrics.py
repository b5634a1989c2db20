"""What the engine counts, under vLLM's names: for `LLM.get_metrics()` and for the periodic log line."""

from __future__ import annotations

import bisect
import logging
import time
from dataclasses import dataclass, field

from jaxengine.engine import Engine
from jaxengine.outputs import RequestMetrics, RequestOutput
from scheduler.request import FinishReason

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 10.0
_LATENCY_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True)
class Metric:
    """A named number. Counters only grow."""

    name: str
    value: float


@dataclass(frozen=True)
class Counter(Metric):
    pass


@dataclass(frozen=True)
class Gauge(Metric):
    pass


@dataclass
class Histogram:
    """Counts by upper bound, cumulative as in Prometheus; `value` is the number of observations."""

    name: str
    bounds: tuple[float, ...] = _LATENCY_BOUNDS
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0
    count: int = 0

    def __post_init__(self):
        self.counts = [0] * (len(self.bounds) + 1)

    @property
    def value(self) -> int:
        return self.count

    @property
    def buckets(self) -> dict[str, int]:
        total, result = 0, {}
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            result[bound] = total
        return result

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.count += 1


class Metrics:
    """Gathers an engine's numbers and those of the requests that ended."""

    def __init__(self, engine: Engine, *, log_stats: bool):
        self._engine = engine
        self._log_stats = log_stats
        self._prompt_tokens = 0
        self._finished = {reason.value: 0 for reason in FinishReason}
        self._time_to_first_token = Histogram("vllm:time_to_first_token_seconds")
        self._time_per_output_token = Histogram("vllm:request_time_per_output_token_seconds")
        self._e2e_latency = Histogram("vllm:e2e_request_latency_seconds")
        self._queue_time = Histogram("vllm:request_queue_time_seconds")
        self._logged = (time.monotonic(), 0, 0)

    def observe(self, output: RequestOutput) -> None:
        """Takes in a request's output; only the last one counts."""
        if not output.finished or output.metrics is None:
            return
        metrics = output.metrics
        self._prompt_tokens += len(output.prompt_token_ids)
        for completion in output.outputs:
            if completion.finish_reason is not None:
                self._finished[completion.finish_reason] += 1
        if metrics.time_to_first_token is not None:
            self._time_to_first_token.observe(metrics.time_to_first_token)
        if metrics.time_in_queue is not None:
            self._queue_time.observe(metrics.time_in_queue)
        self._observe_end(metrics, max(len(each.token_ids) for each in output.outputs))

    def collect(self) -> list[Metric | Histogram]:
        """Every metric as it stands."""
        engine, runner = self._engine, self._engine.runner
        scheduler, stats = engine.scheduler, engine.stats
        counters = {
            "vllm:prompt_tokens": self._prompt_tokens,
            "vllm:generation_tokens": stats.num_generated_tokens,
            "vllm:num_preemptions": scheduler.num_preemptions,
            "vllm:prefix_cache_queries": scheduler.num_prefix_queries,
            "vllm:prefix_cache_hits": scheduler.num_prefix_hits,
            **{f"vllm:request_success_{reason}": count for reason, count in self._finished.items()},
            "jaxengine:compilations_since_ready": runner.compiles.count,
            "jaxengine:executables_compiled": runner.num_compiled,
            "jaxengine:executables_loaded": runner.num_loaded,
            "jaxengine:steps": stats.num_steps,
            "jaxengine:scheduled_tokens": stats.num_tokens,
            "jaxengine:padding_tokens": stats.num_padding_tokens,
            "jaxengine:schedule_seconds": stats.schedule_seconds,
            "jaxengine:dispatch_seconds": stats.dispatch_seconds,
            "jaxengine:wait_seconds": stats.wait_seconds,
            "jaxengine:update_seconds": stats.update_seconds,
            "jaxengine:page_slots_used": stats.page_slots_used,
            "jaxengine:page_slots_empty": stats.page_slots_empty,
        }
        gauges = {
            "vllm:num_requests_running": scheduler.num_running,
            "vllm:num_requests_waiting": scheduler.num_waiting,
            "vllm:kv_cache_usage_perc": scheduler.page_usage,
            "jaxengine:num_pages": scheduler.num_pages,
        }
        return [
            *(Counter(name, value) for name, value in counters.items()),
            *(Gauge(name, value) for name, value in gauges.items()),
            self._time_to_first_token,
            self._time_per_output_token,
            self._e2e_latency,
            self._queue_time,
        ]

    def maybe_log(self) -> None:
        """vLLM's log line, every ten seconds while requests run."""
        now = time.monotonic()
        then, prompt_before, generated_before = self._logged
        if not self._log_stats or now - then < LOG_INTERVAL_SECONDS:
            return
        scheduler, stats = self._engine.scheduler, self._engine.stats
        prompt = stats.num_tokens - stats.num_generated_tokens
        queries = scheduler.num_prefix_queries
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%, compilations since ready: %d",
            max(0, prompt - prompt_before) / (now - then),
            (stats.num_generated_tokens - generated_before) / (now - then),
            scheduler.num_running,
            scheduler.num_waiting,
            100 * scheduler.page_usage,
            100 * scheduler.num_prefix_hits / queries if queries else 0.0,
            self._engine.runner.compiles.count,
        )
        self._logged = (now, prompt, stats.num_generated_tokens)

    def _observe_end(self, metrics: RequestMetrics, num_output: int) -> None:
        if metrics.finished_time is None:
            return
        self._e2e_latency.observe(metrics.finished_time - metrics.arrival_time)
        if metrics.first_token_time is not None and num_output > 1:
            self._time_per_output_token.observe((metrics.finished_time - metrics.first_token_time) / (num_output - 1))
