"""Rates of tokens beside those of a series of steps with known times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxengine.engine.metrics import Metrics


class Counted(Metrics):
    """Metrics whose time and counts a test sets: `now`, a sample."""

    now: tuple[float, int, int] = (0.0, 0, 0)

    def _now(self) -> tuple[float, int, int]:
        return self.now


@pytest.mark.parametrize("idle", [0.0, 60.0])
def test_time_without_requests_before_the_window_does_not_count(idle):
    engine: Any = SimpleNamespace(busy_since=0.0)
    metrics = Counted(engine, log_stats=False)
    for second in range(1, 31):
        metrics.now = (float(second), 100 * second, 1000 * second)
        metrics.stepped()
    assert metrics.throughput() == (100.0, 1000.0)
    engine.busy_since = idle + 30.5 if idle else 0.0
    for second in range(31, 34):
        metrics.now = (idle + second, 100 * second, 1000 * second)
        metrics.stepped()
    assert metrics.throughput() == ((30.0, 300.0) if idle else (100.0, 1000.0))


def test_long_steps_count_with_all_of_their_time():
    engine: Any = SimpleNamespace(busy_since=0.0)
    metrics = Counted(engine, log_stats=False)
    for second in range(9, 91, 9):
        metrics.now = (float(second), 100 * second, 1000 * second)
        metrics.stepped()
        assert metrics.throughput() == (100.0, 1000.0)


def test_short_requests_with_times_without_any():
    """Samples are then closer than a second, and cover the interval nevertheless."""
    engine: Any = SimpleNamespace(busy_since=0.0)
    metrics = Counted(engine, log_stats=False)
    for number in range(40):
        engine.busy_since = 1.5 * number
        for part in (0.1, 0.3):
            metrics.now = (1.5 * number + part, 10 * number + 5, 10 * number)
            metrics.stepped()
    prompt, generated = metrics.throughput()
    assert 6 <= prompt <= 7.4 and 6 <= generated <= 7.4
