"""Counts of an engine's steps and requests. The names of the metrics are in `metrics.py`.

Events are counted where they happen, on the engine's thread. A step costs a few array operations for all running
requests together; Python objects are touched only for requests that begin or end.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from jaxengine.engine.stats import metric_types
from jaxengine.scheduler.base.request import NOT_FINITE, FinishReason, Request
from jaxengine.scheduler.batches.batch import ScheduledStep, StepResult
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.scheduler.rank import Rank

# Upper bounds in seconds. They are vLLM's, so that dashboards made for vLLM work.
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTION_BOUNDS = (0, 1, 2, 5, 10, 20, 50)


def bounds_up_to(most: int) -> tuple[int, ...]:
    """Return the histogram bounds 1, 2, 5, 10, 20, 50, ... that are at most `most`."""
    steps = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= most)


class Histogram:
    """Histogram of observed values.

    Attributes:
      bounds: upper bounds of the buckets, inclusive, ascending.
      counts: i64[len(bounds) + 1], values in each bucket, not cumulative; the last is for values above all bounds.
      sum: sum of all observed values.
    """

    def __init__(self, bounds: Sequence[float]):
        """Begin without observations. bounds: at least one."""
        self.bounds = tuple(bounds)
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.sum = 0.0
        self._bounds = np.array(bounds, np.float64)

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: np.ndarray) -> None:
        """Count all values of an array. values: f64[n] with n > 0."""
        # The token intervals of a step are mostly about equal, so all of them fall into one bucket.
        lowest, highest = bisect.bisect_left(self.bounds, values.min()), bisect.bisect_left(self.bounds, values.max())
        if lowest == highest:
            self.counts[lowest] += len(values)
        else:
            self.counts += np.bincount(self._bounds.searchsorted(values), minlength=len(self.counts))
        self.sum += float(values.sum())

    def metric(self, name: str, labels: Mapping[str, str] | None = None) -> metric_types.Histogram:
        """Return the cumulative counts as a metric with this name and these labels, by default none."""
        totals = accumulate(self.counts.tolist())
        buckets = dict(zip((*(str(float(bound)) for bound in self.bounds), "+Inf"), totals, strict=True))
        return metric_types.Histogram(name, buckets, self.sum, buckets["+Inf"], labels or {})


class Recent:
    """Ring buffer of the latest observed values, for percentiles of recent work."""

    def __init__(self, size: int):
        """Begin without values. size: how many of the latest values are kept."""
        self._values = np.zeros(size)
        self._count = 0

    def add(self, values: np.ndarray) -> None:
        """Add values f64[n], the latest last, in place of the oldest ones. If n exceeds `size`, only the latest are
        kept.
        """
        size, first = len(self._values), self._count % len(self._values)
        values = values[-size:]
        fits = min(len(values), size - first)
        self._values[first : first + fits] = values[:fits]
        self._values[: len(values) - fits] = values[fits:]
        self._count += len(values)

    def percentiles(self, *shares: float) -> list[float | None]:
        """Return the percentiles `shares`, from 0 to 100, of the stored values, linearly interpolated; None for each if
        there are no values.
        """
        held = self._values[: min(self._count, len(self._values))]
        return [float(value) for value in np.percentile(held, shares)] if len(held) else [None] * len(shares)


@dataclass
class BucketUse:
    """Use of one compiled shape.

    Attributes:
      num_steps: steps of the shape.
      num_tokens, num_padding_tokens: real and padding tokens of these steps over all replicas.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_padding_tokens: int = 0


@dataclass
class StepStats:
    """Counts of steps over the engine's life.

    Attributes:
      buckets: uses of each compiled shape.
      num_steps: steps dispatched.
      num_tokens, num_padding_tokens: real and padding tokens of these steps.
      schedule_seconds, dispatch_seconds, wait_seconds, update_seconds: host time by part of the step.
      idle_seconds: time with unfinished requests in which the device was idle, as far as the host can tell: from when
        the host saw that the device was done until it dispatched the next step.
      num_generated_tokens: tokens delivered to callers, without those that were sampled after the end of a text.
      _num_undelivered_tokens: tokens that were counted although callers did not get them; later counts are reduced by
        them.
      page_slots_used, page_slots_empty: token slots of pages held by running requests, summed over steps.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_padding_tokens: int = 0
    num_generated_tokens: int = 0
    schedule_seconds: float = 0.0
    dispatch_seconds: float = 0.0
    wait_seconds: float = 0.0
    update_seconds: float = 0.0
    idle_seconds: float = 0.0
    page_slots_used: int = 0
    page_slots_empty: int = 0
    buckets: dict[Bucket, BucketUse] = field(default_factory=dict)
    _num_undelivered_tokens: int = 0

    def count_step(self, step: ScheduledStep, bucket: Bucket, ranks: Sequence[Rank]) -> None:
        """Count a dispatched step, in total and by its compiled shape `bucket`. ranks: all replicas, whose used and
        empty page slots are added.
        """
        padding = bucket.num_tokens * len(step.batches) - step.num_tokens
        for counts in (self, self.buckets[bucket]):
            counts.num_steps += 1
            counts.num_tokens += step.num_tokens
            counts.num_padding_tokens += padding
        for rank in ranks:
            held, empty = rank.count_token_slots()
            self.page_slots_used += held - empty
            self.page_slots_empty += empty

    def count_generated(self, num_tokens: int) -> None:
        """Add generated tokens, minus those reported to `count_undelivered` that have not been subtracted yet. The
        total never decreases.
        """
        undelivered = min(num_tokens, self._num_undelivered_tokens)
        self._num_undelivered_tokens -= undelivered
        self.num_generated_tokens += num_tokens - undelivered

    def count_undelivered(self, num_tokens: int) -> None:
        """Record tokens that were counted but sampled after the end of their request's text. `count_generated`
        subtracts them from later counts.
        """
        self._num_undelivered_tokens += num_tokens


@dataclass
class RequestStats:
    """Counts of requests. Each of a request's n outputs counts as one.

    Attributes:
      num_rejections: requests refused because too many were waiting.
      num_corrupted: requests that ended because their logits were not finite.
      num_prompt_tokens: tokens of completed prompts, including those found in the prefix cache.
      num_cached_tokens: prompt tokens that were found in the prefix cache when their requests were first admitted.
      num_external_tokens: cached prompt tokens that came from outside of the devices.
      max_model_len: longest sequence of the engine, which bounds the histograms of tokens.
      finished: number of requests that have ended, by reason.
      first_token, intervals, time_per_output_token, e2e, preprocessing, queue, prefill, decode, inference: histograms
        of seconds. `metrics.HELP` says what they measure, by the names of their metrics.
      prompt_tokens, generation_tokens, max_tokens, computed_tokens, preemptions, n: histograms of counts per request.
      most_generated: histogram of the tokens of the longest among the n outputs of one call.
      step_tokens: histogram of the tokens of a step.
      recent_first_token, recent_intervals: latest times to first token, and between tokens, in seconds.
    """

    max_model_len: int
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_rejections: int = 0
    num_corrupted: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def __post_init__(self):
        """Make the histograms, whose bounds are constants or depend on max_model_len."""
        lengths = bounds_up_to(self.max_model_len)
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self.intervals = Histogram(TOKEN_BOUNDS)
        self.time_per_output_token = Histogram(TOKEN_BOUNDS)
        self.e2e = Histogram(REQUEST_BOUNDS)
        self.preprocessing = Histogram(FIRST_TOKEN_BOUNDS)
        self.queue = Histogram(REQUEST_BOUNDS)
        self.prefill = Histogram(REQUEST_BOUNDS)
        self.decode = Histogram(REQUEST_BOUNDS)
        self.inference = Histogram(REQUEST_BOUNDS)
        self.prompt_tokens = Histogram(lengths)
        self.generation_tokens = Histogram(lengths)
        self.max_tokens = Histogram(lengths)
        self.computed_tokens = Histogram(lengths)
        self.preemptions = Histogram(PREEMPTION_BOUNDS)
        self.n = Histogram(N_BOUNDS)
        self.most_generated = Histogram(lengths)
        # For calls with several outputs: [unfinished outputs, tokens of the longest finished one], one list per call.
        self._calls: dict[Request, list[int]] = {}
        self.step_tokens = Histogram(STEP_TOKENS_BOUNDS)
        self.recent_first_token = Recent(1024)
        self.recent_intervals = Recent(16384)

    def observe_queued(self, requests: Sequence[Request]) -> None:
        """Count a caller's request by its n outputs. requests: the engine's requests for these outputs."""
        self.n.observe(len(requests))
        if len(requests) > 1:
            self._calls |= dict.fromkeys(requests, [len(requests), 0])

    def observe_first_token(self, request: Request) -> None:
        """Count a request that got its first token: its prompt tokens, by source, and the seconds since its arrival."""
        assert request.first_token_time is not None
        seconds = request.first_token_time - request.arrival_time
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += max(request.num_cached_tokens, 0)
        self.num_external_tokens += request.num_external_tokens
        self.first_token.observe(seconds)
        self.recent_first_token.add(np.array([seconds]))

    def observe_intervals(self, intervals: np.ndarray) -> None:
        """Count the seconds between successive tokens of requests. intervals: f64[n]; nothing for n = 0."""
        if len(intervals):
            self.intervals.observe_all(intervals)
            self.recent_intervals.add(intervals)

    def observe_tokens(self, result: StepResult) -> None:
        """Count the token intervals and first tokens of a step's result."""
        for intervals in result.intervals:
            self.observe_intervals(intervals)
        for request in result.first_tokens:
            self.observe_first_token(request)

    def observe_end(self, request: Request, reason: FinishReason | None = None, num_output: int | None = None) -> int:
        """Count the end of a request as its caller saw it, and return how many of its tokens the caller did not get.

        reason, num_output: finish reason and number of output tokens that the caller got; None for the request's own.
        Requests without an output token are left out of the histograms of prefill, decode and inference times and of
        computed tokens, those with fewer than two of time_per_output_token. One that never ran waited until its end.
        """
        reason, num_known = reason or request.finish_reason, min(len(request.output_token_ids), request.max_tokens)
        num_output = num_known if num_output is None else num_output
        assert reason is not None and request.queued_time is not None and request.finished_time is not None
        self.finished[reason] += 1
        self.num_corrupted += request.stop_reason == NOT_FINITE
        end = request.finished_time
        self.prompt_tokens.observe(request.num_prompt_tokens)
        self.generation_tokens.observe(num_output)
        self.max_tokens.observe(request.max_tokens)
        call = self._calls.pop(request, [1, 0])
        call[:] = call[0] - 1, max(call[1], num_output)
        if not call[0]:
            self.most_generated.observe(call[1])
        self.preemptions.observe(request.num_preemptions)
        self.e2e.observe(end - request.arrival_time)
        self.preprocessing.observe(request.queued_time - request.arrival_time)
        began, first, last = request.first_scheduled_time, request.first_token_time, request.last_token_time
        self.queue.observe((end if began is None else began) - request.queued_time)
        if began is not None and first is not None:
            self.prefill.observe(first - began)
            self.computed_tokens.observe(request.num_prompt_tokens - max(request.num_cached_tokens, 0))
            self.decode.observe(last - first)
            self.inference.observe(last - began)
            if num_output > 1:
                self.time_per_output_token.observe((last - first) / (num_output - 1))
        return num_known - num_output
