"""Rates of tokens beside those of a series of steps with known times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxengine.engine.metrics import Metrics


class Counted(Metrics):
    """Metrics whose time and counts a test sets: `now`, a sample."""

    now = (0.0, 0, 0)

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
    for second in range(31, 34):
        metrics.now = (idle + second, 100 * second, 1000 * second)
        metrics.stepped()
    least, most = ((100, 100), (1000, 1000)) if not idle else ((25, 31), (250, 310))
    prompt, generated = metrics.throughput()
    assert least[0] <= prompt <= least[1]
    assert most[0] <= generated <= most[1]
