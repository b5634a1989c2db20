"""Metrics of how long pages of prefixes stay in the pool, stay unused and are reused, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from jaxengine.engine.extension import Loop, LoopExtension
from jaxengine.engine.stats.metric_types import Histogram
from jaxengine.engine.stats.stats import Histogram as Durations
from jaxengine.scheduler.extensions.page_ages import NAME, PageAge
from jaxengine.scheduler.extensions.page_ages import PageAges as Ages

# Upper bounds in seconds, the same as vLLM's.
_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_BOUNDS += (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0)


class PageAges(LoopExtension):
    """Loop extension with histograms of the ages of observed pages, counted when pages are evicted."""

    def __init__(self) -> None:
        self._lifetime, self._idle, self._gaps = (Durations(_BOUNDS) for _ in range(3))

    def attach(self, loop: Loop) -> None:
        super().attach(loop)
        ages: Ages = loop.scheduler.extension(NAME)
        ages.evicted = self._evicted

    def metrics(self) -> Iterator[Histogram]:
        yield self._lifetime.metric("vllm:kv_block_lifetime_seconds")
        yield self._idle.metric("vllm:kv_block_idle_before_evict_seconds")
        yield self._gaps.metric("vllm:kv_block_reuse_gap_seconds")

    def _evicted(self, now: float, page: PageAge) -> None:
        """Add the lifetime, idle time and reuse gaps, in seconds, of a page evicted at time `now` to the histograms."""
        self._lifetime.observe(now - page.filled)
        self._idle.observe(now - (page.found[-1] if page.found else page.filled))
        for before, after in pairwise(page.found):
            self._gaps.observe(after - before)
