"""What a metric is: a named number, or how observations are spread. Knows no names of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metric:
    """A named number.

    Attributes:
      labels: what tells apart metrics of one name.
    """

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows, until the process ends."""


@dataclass(frozen=True)
class Gauge(Metric):
    """A number that goes up and down."""


@dataclass(frozen=True)
class Histogram:
    """Distribution of observations.

    Attributes:
      buckets: observations up to each bound, the last "+Inf", as in Prometheus.
      sum, count: of all observations.
    """

    name: str
    buckets: dict[str, int]
    sum: float
    count: int

    @property
    def value(self) -> int:
        """The number of observations."""
        return self.count
