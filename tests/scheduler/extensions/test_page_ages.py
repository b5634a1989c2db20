"""Ages of pages when they are evicted, and the sample that is observed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxengine.scheduler.extensions import page_ages
from jaxengine.scheduler.extensions.page_ages import PageAge, PageAges
from jaxengine.scheduler.pages.page_pool import PagePool


def test_pages_are_followed_until_they_are_evicted(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(page_ages, "time", SimpleNamespace(monotonic=lambda: clock.now))
    pool, evicted, request = PagePool(8), list[tuple[float, PageAge]](), Any
    ages = PageAges(1.0)
    ages.evicted = lambda now, page: evicted.append((now, page))
    ages.start([SimpleNamespace(index=0, pool=pool)])  # pyright: ignore[reportArgumentType]
    (rank,) = ages.ranks
    pages = pool.allocate(4)
    for page in pages.tolist():
        clock.now += 1.0
        pool.register(page, bytes([page]) * 32)
    pool.free(pages)
    for clock.now in (10.0, 11.0, 13.0, 16.0, 20.0):
        rank.admit(request, 8, SimpleNamespace(pages=(pages[:1], pages[1:1])))  # pyright: ignore[reportArgumentType]
    pool.forget(bytes([pages[1]]) * 32)
    clock.now = 30.0
    pool.free(pool.allocate(8))
    assert {age.filled: (time, list(age.found)) for time, age in evicted} == {
        1.0: (30.0, [11.0, 13.0, 16.0, 20.0]),
        3.0: (30.0, []),
        4.0: (30.0, []),
    }
    pool.register(int(pool.allocate(1)[0]), bytes(32))
    assert len(rank.ages) == len(rank.numbers) == 1
    pool.reset_prefix_cache()
    assert not (rank.ages or rank.numbers)


@pytest.mark.parametrize("sample", [0.01, 0.5])
def test_a_share_of_the_pages_is_observed(sample):
    pool, ages = PagePool(4000), PageAges(sample)
    ages.start([SimpleNamespace(index=0, pool=pool)])  # pyright: ignore[reportArgumentType]
    for page in pool.allocate(4000).tolist():
        pool.register(page, np.int64(page).tobytes() * 4)
    assert 0.6 * sample < len(ages.ranks[0].ages) / 4000 < 1.4 * sample
