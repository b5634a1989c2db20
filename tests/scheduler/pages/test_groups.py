"""Page tables of several cache groups: what is given back, what is found again, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.pages.groups import PageTables, most_pages, most_pages_of, page_key
from tests.scheduler.loop import Loop, check_output, make, random_request
from tests.tables import each_row

# One window smaller than a page of 4 tokens, as large as one, larger; several groups of one window; no full group.
GROUPS = [(None, 3), (4, None), (9, None, 9, 2), (7,), (5, 17)]


def shown(windows):
    """Tokens that the next one is made of: see FakeDevice."""
    return None if None in windows else max(windows)


FURTHER = pytest.mark.thorough("preemption finds cached pages in the others")


@pytest.mark.parametrize("windows", GROUPS)
@pytest.mark.parametrize(
    ("num_pages", "caching", "num_micro_batches"),
    [
        (18, True, 3),
        (200, True, 1),
        pytest.param(18, True, 1, marks=FURTHER),
        pytest.param(18, False, 1, marks=FURTHER),
        pytest.param(18, False, 3, marks=FURTHER),
        pytest.param(200, True, 3, marks=FURTHER),
    ],
)
def test_outputs_do_not_depend_on_windows_given_back(windows, num_pages, caching, num_micro_batches):
    rng = np.random.default_rng(num_pages)
    shared = rng.integers(0, 50, 40).astype(np.int32)
    loop = Loop(
        windows=windows,
        num_pages=num_pages * len(windows),
        enable_prefix_caching=caching,
        num_micro_batches=num_micro_batches,
    )
    requests = [random_request(rng, index, shared=shared) for index in range(60)]
    for request in requests:
        loop.scheduler.add_request(request)
        loop.step()
    loop.run()
    for request in requests:
        check_output(request, shown(windows))
    assert loop.pool.num_free == num_pages * len(windows)
    assert not (caching and num_pages == 200) or loop.scheduler.num_prefix_hits > 200


def held_pages(windows, *, length):
    """The most pages that one request holds at once, prompt and output."""
    loop = Loop(windows=windows, num_pages=100, max_model_len=256)
    loop.scheduler.add_request(make("a", range(length), 100))
    most = 0
    while loop.scheduler.num_unfinished:
        loop.step()
        most = max(most, int(loop.scheduler.ranks[0].pages.num_held.sum(axis=0).max()))
    return most


def test_a_window_holds_what_it_sees():
    # Pages of 4 tokens, steps of 24, 100 tokens of output.
    assert held_pages((None,), length=60) == 40
    assert held_pages((8,), length=60) == 8  # tokens 24 to 47 and the 7 before them, which begin amid a page
    assert held_pages((8,), length=5) == 3  # a decode's window of 8 tokens lies over three pages at most
    assert held_pages((None, 8), length=60) == 43  # at the end


@pytest.mark.parametrize("windows", [(8,), (None, 8), (1,), (9, None, 9, 2)])
def test_what_is_left_for_the_next_token_is_what_it_takes(windows):
    loop, slot, left = Loop(windows=windows, num_pages=200, sync=True, max_model_len=128), np.array([0]), set()
    loop.scheduler.add_request(make("a", range(30), 90))
    loop.step()
    pages = loop.scheduler.ranks[0].pages
    for _ in range(80):
        held, columns, allowed = int(pages.num_held[:, 0].sum()), int(pages.num_columns[0]), pages.num_to_grow(slot)
        loop.step()
        assert int(pages.num_held[:, 0].sum()) <= held + allowed
        if columns < pages.num_columns[0]:
            left.add(allowed)
    # A window that gives a page back first needs none; one that saw whole pages until now takes one.
    assert windows.count(None) in left or windows == (1,)


def test_admission_leaves_no_pages_to_windows_that_are_full():
    """Eight decodes hold three pages of a window each, and a ninth prompt of one page comes in beside them."""
    loop = Loop(windows=(8,), num_pages=25, max_num_seqs=9, max_model_len=128)
    for index in range(8):
        loop.scheduler.add_request(make(index, range(3), 90))
    for _ in range(12):
        loop.step()
    assert loop.scheduler.num_free_pages == 1
    loop.scheduler.add_request(make("late", range(2), 2))
    for _ in range(6):
        loop.step()
    assert [request.request_id for request in loop.finished] == ["late"] and loop.scheduler.num_preemptions == 0
    loop.run()
    for request in loop.finished:
        check_output(request, 8)


@pytest.mark.parametrize("windows", GROUPS)
@pytest.mark.parametrize("length", [1, 4, 5, 23, 24, 63])
def test_admission_counts_what_is_held_at_most(windows, length):
    loop = Loop(windows=windows, num_pages=200)
    limit = most_pages_of(loop.config, length)
    assert limit == most_pages(length, windows, page_size=4, chunk=24)
    full = sum(-(-length // 4) for window in windows if window is None)
    assert full <= limit <= len(windows) * -(-length // 4)
    # A pool of so many pages serves the request, alone and to its end.
    loop = Loop(windows=windows, num_pages=limit, max_model_len=max(length, 2))
    if length > 1:
        request = make("a", range(length - 1), 1)
        loop.scheduler.add_request(request)
        loop.run()
        check_output(request, shown(windows))
        assert loop.scheduler.num_preemptions == 0


@each_row("page_size", [1, 3, 4])
@each_row("window", [1, 2, 4, 5, 9])
@each_row("chunk", [1, 4, 7])
def test_admission_counts_no_page_more(window, page_size, chunk):
    """Wherever a chunk begins, what its tokens and their windows lie on is counted, and reached."""
    length = window + chunk + page_size
    held = max(
        (start + chunk - 1) // page_size - max(0, start - (window - 1)) // page_size + 1
        for start in range(length - chunk + 1)
    )
    assert most_pages(length, (window,), page_size=page_size, chunk=chunk) == held


def brute_force(found, windows, page_size):
    """found[group][column]: whether a page is there. The longest prefix that every group can serve."""
    for columns in range(len(found[0]), 0, -1):
        seen = [0 if window is None else max(0, columns * page_size - (window - 1)) // page_size for window in windows]
        if all(all(have[first:columns]) for have, first in zip(found, seen, strict=True)):
            return columns
    return 0


@pytest.mark.parametrize("windows", GROUPS)
def test_hits_are_the_longest_that_every_group_serves(windows):
    rng = np.random.default_rng(1)
    config = SchedulerConfig(400, 4, 2, 64, 256, windows=windows)
    lengths = set()
    for _ in range(60):
        tables = PageTables(config)
        digests = [bytes([column]) * 32 for column in range(12)]
        found = rng.random((len(windows), 12)) < 0.85
        for group, column in np.argwhere(found).tolist():
            page = tables.pool.allocate(1)
            tables.pool.register(int(page[0]), page_key(digests[column], group))
            tables.pool.free(page)
        hits = tables.lookup(digests)
        assert hits.num_columns == brute_force(found.tolist(), windows, 4)
        lengths.add(hits.num_columns)
        before = tables.pool.num_free
        tables.begin(1, hits)
        tables.pool.check()
        assert before - tables.pool.num_free == sum(map(len, hits.pages)) == tables.num_held[:, 1].sum()
    assert len(lengths) > 3


def test_a_prefix_is_found_again_after_its_window_has_moved_on():
    """Pages behind a window stay findable until they are taken again."""
    loop = Loop(windows=(None, 6), num_pages=120)
    prompt = np.arange(30, dtype=np.int32) % 50
    for name in "abc":
        request = make(name, prompt, 20)
        loop.scheduler.add_request(request)
        loop.run()
        check_output(request)
    assert loop.scheduler.num_prefix_hits == 2 * 28
