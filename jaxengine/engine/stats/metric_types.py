"""Types of metrics: counters, gauges, vectors of counters and histograms. It contains no metric names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metric:
    """Number under a metric's name.

    Attributes:
      name: vLLM's name of the metric, or one that begins with "jaxengine:".
      value: value in the unit that the name has.
      labels: labels that distinguish metrics of one name.
    """

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Counter(Metric):
    """Metric that only grows until the process ends."""


@dataclass(frozen=True)
class Gauge(Metric):
    """Metric that may go up and down."""


@dataclass(frozen=True)
class Vector:
    """Counters of one name by position, as vLLM's class of this name. /metrics has each with a label `position`.

    Attributes:
      name: name of the metric.
      values: the counters, the first position first.
      labels: labels that distinguish metrics of one name.
    """

    name: str
    values: list[int]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def value(self) -> int:
        """Sum of the counters."""
        return sum(self.values)

    def counters(self) -> list[Counter]:
        """Return the counters, each with its position as a label."""
        return [Counter(self.name, each, {**self.labels, "position": str(at)}) for at, each in enumerate(self.values)]


@dataclass(frozen=True)
class Histogram:
    """Distribution of observations.

    Attributes:
      name: name of the metric.
      buckets: cumulative counts of observations by upper bound, the last bound "+Inf", as in Prometheus.
      sum, count: sum and number of all observations.
      labels: labels that distinguish metrics of one name.
    """

    name: str
    buckets: dict[str, int]
    sum: float
    count: int
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def value(self) -> int:
        """Number of observations."""
        return self.count
