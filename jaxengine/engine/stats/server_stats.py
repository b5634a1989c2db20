"""Counts of the processes of a server: HTTP requests, processes and restarts, shown with the engine's own metrics.

An API process counts its HTTP requests (`HttpCounts`) and reports them now and then to the engine (`ServerStats`), so
that every process gives the same answer to /metrics.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.engine.stats import metric_types
from jaxengine.engine.stats.metric_types import Counter, Gauge, Metric
from jaxengine.engine.stats.stats import Histogram

# Upper bounds of a request's seconds, its stream included.
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STARTED = time.time()
# Rows [method, route, status, counts by bound, sum of seconds], and rows [mode, outcome, request type, number].
Rows = tuple[list[list[Any]], list[list[Any]]]


class HttpCounts:
    """Counts and seconds of requests by method, route and status, and outputs in which tool calls were looked for."""

    def __init__(self):
        """Begin without counts."""
        self._rows: dict[tuple[str, str, str], Histogram] = {}
        self._parsed: dict[tuple[str, str, str], int] = {}

    def observe(self, method: str, route: str, status: str, seconds: float) -> None:
        """Count a request that took `seconds`. route: a route pattern of the server, such as "/v1/models/{name}", not
        the path that a client sent, which would add rows without bound.
        """
        self._row(method, route, status).observe(seconds)

    def parsed(self, mode: str, outcome: str, request_type: str, number: int = 1) -> None:
        """Add `number` outputs that a parser of tool calls has read to their end. mode, outcome, request_type: vLLM's
        labels.
        """
        key = mode, outcome, request_type
        self._parsed[key] = self._parsed.get(key, 0) + number

    @property
    def has_counts(self) -> bool:
        """Whether anything was counted since the last `take`."""
        return bool(self._rows or self._parsed)

    def take(self) -> Rows:
        """Return the counts since the last call as JSON values, in the form that `add` takes, and clear them."""
        rows, self._rows = self._rows, {}
        parsed, self._parsed = self._parsed, {}
        counted = [[*key, row.counts.tolist(), row.sum] for key, row in rows.items()]
        return counted, [[*key, number] for key, number in parsed.items()]

    def add(self, rows: Rows) -> None:
        """Add counts that another process took with `take`."""
        for method, route, status, counts, seconds in rows[0]:
            row = self._row(method, route, status)
            row.counts += np.array(counts, np.int64)
            row.sum += seconds
        for row in rows[1]:
            self.parsed(*row)

    def metrics(self) -> Iterator[Metric | metric_types.Histogram]:
        """Yield counters for each method, route and status, a histogram of seconds for each method and route, and the
        counters of parsed outputs. vLLM's counter has classes of statuses, such as "4xx".
        """
        for (mode, outcome, kind), number in self._parsed.items():
            labels = {"mode": mode, "outcome": outcome, "request_type": kind}
            yield Counter("vllm:tool_call_parser_invocations", number, labels)
        durations: dict[tuple[str, str], Histogram] = {}
        classes: dict[tuple[str, str, str], int] = {}
        for (method, route, status), row in self._rows.items():
            number, labels = int(row.counts.sum()), {"method": method, "handler": route, "status": status}
            yield Counter("jaxengine:http_responses", number, labels)
            key = method, route, f"{status[0]}xx" if status.isdecimal() else status
            classes[key] = classes.get(key, 0) + number
            whole = durations.setdefault((method, route), Histogram(_BOUNDS))
            whole.counts += row.counts
            whole.sum += row.sum
        for (method, route, status), number in classes.items():
            yield Counter("http_requests", number, {"method": method, "handler": route, "status": status})
        bounds = (*map(str, _BOUNDS), "+Inf")
        for (method, route), row in durations.items():
            buckets = dict(zip(bounds, accumulate(row.counts.tolist()), strict=True))
            labels = {"method": method, "handler": route}
            yield metric_types.Histogram("http_request_duration_seconds", buckets, row.sum, buckets["+Inf"], labels)

    def _row(self, method: str, route: str, status: str) -> Histogram:
        """Return the histogram of a method, route and status, adding an empty one if there is none."""
        return self._rows.setdefault((method, route, status), Histogram(_BOUNDS))


class ServerStats:
    """Counts that the processes of a server reported to this engine.

    Attributes:
      num_restarts: times that the engine's process was started again since the server was started.
    """

    def __init__(self):
        """Begin without reports."""
        self.num_restarts = 0
        self._http = HttpCounts()
        self._processes: dict[str, dict[str, float]] = {}

    def report(self, process: str, rows: Rows, facts: dict[str, float]) -> None:
        """Add the counts of a process since its last report, and replace its figures. rows: result of
        `HttpCounts.take`. facts: result of `process_facts`.
        """
        self._http.add(rows)
        self._processes[process] = facts

    def metrics(self) -> Iterator[Metric | metric_types.Histogram]:
        """Yield the metrics of HTTP requests, restarts and processes, those of this process included."""
        yield from self._http.metrics()
        yield Counter("jaxengine:engine_restarts", self.num_restarts)
        for process, facts in {"engine": process_facts(), **self._processes}.items():
            for name, value in facts.items():
                kind = Counter if name == "process_cpu_seconds" else Gauge
                yield kind(name, value, {"process": process})


def process_facts() -> dict[str, float]:
    """Return figures of this process by their usual Prometheus names: process_cpu_seconds, process_start_time_seconds
    (since the epoch) and, on a system with /proc, process_resident_memory_bytes and process_open_fds, the number of
    open files.
    """
    times = os.times()
    facts = {"process_cpu_seconds": times.user + times.system, "process_start_time_seconds": _STARTED}
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        facts["process_resident_memory_bytes"] = float(pages * os.sysconf("SC_PAGE_SIZE"))
        facts["process_open_fds"] = float(len(os.listdir("/proc/self/fd")))
    return facts
