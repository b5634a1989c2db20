"""The pool's conservation law, against a plain dictionary model that knows nothing of rings and stacks."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxengine.scheduler.pages.page_pool import PagePool

NUM_PAGES = 12


def digest(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


class PoolMachine(RuleBasedStateMachine):
    """Random holders of pages; the model is a list of owners per page and the order in which pages became free."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.holdings: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.freed: list[int] = []
        self.operations = 0

    def references(self, page: int) -> int:
        return sum(page in holding for holding in self.holdings)

    @rule(count=st.integers(1, 5))
    def allocate(self, count):
        free = NUM_PAGES - len({page for holding in self.holdings for page in holding})
        assert self.pool.num_free == free
        if count > free:
            with pytest.raises(ValueError, match="only"):
                self.pool.allocate(count)
            return
        blank = free - len(self.freed)
        pages = self.pool.allocate(count).tolist()
        assert len(set(pages)) == count
        assert all(self.references(page) == 0 for page in pages)
        evicted = [page for page in pages if page in self.freed]
        assert evicted == self.freed[: max(0, count - blank)]  # blank pages first, then least recently freed
        for page in evicted:
            self.freed.remove(page)
            del self.content[page]
        self.holdings.append(pages)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def free(self, data):
        index = data.draw(st.integers(0, len(self.holdings) - 1))
        pages = self.holdings.pop(index)
        self.pool.free(np.array(pages, np.int32))
        for page in reversed(pages):
            if not self.references(page) and page in self.content:
                self.freed.append(page)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data(), number=st.integers(0, 20))
    def register(self, data, number):
        holding = self.holdings[data.draw(st.integers(0, len(self.holdings) - 1))]
        page = holding[data.draw(st.integers(0, len(holding) - 1))]
        self.pool.register(page, digest(number))
        if page not in self.content and digest(number) not in self.content.values():
            self.content[page] = digest(number)

    @rule(numbers=st.lists(st.integers(0, 20), min_size=1, max_size=4, unique=True))
    def find(self, numbers):
        pages = self.pool.lookup([digest(number) for number in numbers])
        where = {content: page for page, content in self.content.items()}
        expected = []
        for number in numbers:
            if digest(number) not in where:
                break
            expected.append(where[digest(number)])
        assert pages.tolist() == expected
        if expected:
            assert self.pool.num_free_among(pages) == sum(self.references(page) == 0 for page in expected)
            self.pool.acquire(pages)
            self.freed = [page for page in self.freed if page not in expected]
            self.holdings.append(expected)

    @rule(number=st.integers(0, 20))
    def forget_one(self, number):
        self.pool.forget(digest(number))
        page = next((page for page, content in self.content.items() if content == digest(number)), None)
        if page is not None:
            del self.content[page]
            self.freed = [each for each in self.freed if each != page]

    @rule()
    def forget(self):
        self.pool.reset_prefix_cache()
        self.content.clear()
        self.freed.clear()

    @invariant()
    def conserved(self):
        self.pool.check()
        counts = [self.references(page) for page in range(NUM_PAGES)]
        assert self.pool.ref_count.tolist() == counts


# The walk below is of more operations.
PoolMachine.TestCase.settings = settings(stateful_step_count=100, deadline=None)
TestPool = PoolMachine.TestCase


def walk(num_operations: int, seed: int, num_pages: int = 40) -> PagePool:
    """A long random walk, checked after each operation."""
    rng = np.random.default_rng(seed)
    pool, holdings = PagePool(num_pages), []
    for _ in range(num_operations):
        action = rng.integers(0, 5)
        if action == 0 and pool.num_free:
            holdings.append(pool.allocate(int(rng.integers(1, min(6, pool.num_free) + 1))))
        elif action == 1 and holdings:
            pool.free(holdings.pop(int(rng.integers(len(holdings)))))
        elif action == 2 and holdings:
            page = int(rng.choice(holdings[int(rng.integers(len(holdings)))]))
            pool.register(page, digest(int(rng.integers(0, 60))))
        elif action == 3 and len(holdings) < 30:
            found = pool.lookup([digest(int(number)) for number in rng.choice(60, 3, replace=False)])
            if len(found):
                pool.acquire(found)
                holdings.append(found)
        elif action == 4 and rng.random() < 0.002:
            pool.reset_prefix_cache()
        pool.check()
    for holding in holdings:
        pool.free(holding)
    pool.check()
    return pool


def test_long_walk_conserves_pages(pytestconfig):
    pool = walk(pytestconfig.getoption("--pool-operations"), seed=7)
    assert pool.num_free == pool.num_pages


def test_pool_without_pages_is_refused():
    with pytest.raises(ValueError, match="num_pages is 0"):
        PagePool(0)


def test_double_free_is_refused():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(ValueError, match="no reference"):
        pool.free(pages)


def test_first_page_keeps_a_digest():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.register(int(pages[0]), digest(1))
    pool.register(int(pages[1]), digest(1))
    assert pool.lookup([digest(1)]).tolist() == [pages[0]]


def test_caching_off_finds_nothing():
    pool = PagePool(4, enable_caching=False)
    pool.register(int(pool.allocate(1)[0]), digest(1))
    assert len(pool.lookup([digest(1)])) == 0


def test_ring_survives_many_times_its_length():
    pool = PagePool(5)
    for number in range(500):
        pages = pool.allocate(3)
        for offset, page in enumerate(pages.tolist()):
            pool.register(page, digest(3 * number + offset))
        pool.free(pages)
        pool.check()
    assert len(pool.lookup([digest(3 * 499)])) == 1
