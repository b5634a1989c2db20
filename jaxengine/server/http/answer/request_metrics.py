"""Times of one request for its own answer, in vLLM's field `metrics` (enable_per_request_metrics)."""

from __future__ import annotations

from jaxengine.requests.output.outputs import RequestMetrics
from jaxengine.server.http.answer.answers import RequestTimes


def request_times(metrics: RequestMetrics | None, num_tokens: int) -> dict[str, float | None]:
    """Return all fields of RequestTimes, by name, for a request with one output of `num_tokens` tokens. A field is None
    if a time that it needs is not known, or there is no interval for it.
    """
    found: dict[str, float | None] = dict.fromkeys(RequestTimes.model_fields)
    if metrics is None:
        return found

    def between(start: float | None, end: float | None) -> float | None:
        """Return the milliseconds from `start` to `end`; None if either is not known."""
        return None if start is None or end is None else (end - start) * 1000

    began, first, last = metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time
    found["time_to_first_token_ms"] = between(began, first)
    found["queue_time_ms"] = between(metrics.queued_time, began)
    found["generation_time_ms"] = decoded = between(first, last)
    if decoded is not None and num_tokens > 1:
        found["mean_itl_ms"] = decoded / (num_tokens - 1)
    if whole := between(began, last):
        found["tokens_per_second"] = num_tokens / whole * 1000
    return found


def stream_times(times: dict[str, float | None] | None) -> dict[str, dict[str, float]]:
    """Return `metrics` for the last event of a stream, without the times that are None; {} for None."""
    return {} if times is None else {"metrics": {name: each for name, each in times.items() if each is not None}}
