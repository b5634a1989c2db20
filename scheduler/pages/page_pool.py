"""Pages of one KV pool: their reference counts, the free ones, and those that hold a cached prefix.

A page is in exactly one state: referenced (ref_count > 0), blank (free and without useful content) or cached (free, but
its content can be found by its digest until the page is allocated again).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np


class PageListener(Protocol):
    """Observer of the cached pages of a pool, or of snapshots. When it is called, and until the next step is
    dispatched, a page has the content that the steps dispatched so far give it.
    """

    def registered(self, digest: bytes, page: int) -> None:
        """Called when a page has been registered under a digest. The step being scheduled may be the one that fills
        the page.
        """

    def dropped(self, digest: bytes) -> None:
        """Called when the pool has forgotten a digest, so that its page can no longer be found."""

    def evicted(self, digests: Sequence[bytes], pages: Sequence[int]) -> None:
        """Called when pages are about to get other content and can no longer be found by their digests."""

    def forgotten(self) -> None:
        """Called when all digests have been forgotten."""


class PagePool:
    """Allocator of pages with a prefix cache. The time of an operation depends only on the pages that it touches.

    Blank pages are allocated first, then the least recently freed of the cached ones. The cached pages are ordered by a
    ring of page ids. A page that is used again leaves a stale entry in it: an entry is valid only while
    `_position[page]` is its position.

    Attributes:
      num_pages: pages of the pool, numbered from 0.
      enable_caching: whether `register` has an effect.
      ref_count: i32 [num_pages], references to each page.
      listeners: observers of the cached pages.

    Raises ValueError for num_pages below 1.
    """

    def __init__(self, num_pages: int, *, enable_caching: bool = True):
        """Start with blank pages only. Raises ValueError for num_pages below 1."""
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; a pool needs at least 1")
        self.num_pages = num_pages
        self.enable_caching = enable_caching
        self.ref_count = np.zeros(num_pages, np.int32)
        self._blank = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_blank = num_pages
        self._ring = np.zeros(2 * num_pages + 2, np.int32)
        self._position = np.full(num_pages, -1, np.int64)
        self._head = self._tail = 0
        self._num_cached = 0
        self._digest_of: list[bytes | None] = [None] * num_pages
        # Pages that have been registered since they were allocated, even if their digest has been forgotten since. The
        # last entry, always True, stands for page -1.
        self._was_registered = np.zeros(num_pages + 1, np.bool_)
        self._was_registered[num_pages] = True
        self._page_of: dict[bytes, int] = {}
        self.listeners: list[PageListener] = []

    @property
    def num_free(self) -> int:
        """Number of pages that can be allocated now, including cached ones."""
        return self._num_blank + self._num_cached

    def allocate(self, count: int) -> np.ndarray:
        """Return `count` free pages, i32 [count], each with one reference: blank ones first, then the least recently
        freed of the cached ones, whose digests are forgotten (listeners' `evicted` is called). Raises ValueError for
        more than `num_free`.
        """
        if count > self.num_free:
            raise ValueError(f"count is {count}; only {self.num_free} pages are free")
        blank = min(count, self._num_blank)
        self._num_blank -= blank
        pages = self._blank[self._num_blank : self._num_blank + blank][::-1].copy()
        if blank < count:
            pages = np.concatenate([pages, self._evict(count - blank)])
        self.ref_count[pages] = 1
        return pages

    def acquire(self, pages: np.ndarray) -> None:
        """Add one reference to each of `pages`, i32 [n] without repeats, which `lookup` has found. A cached page is
        then no longer free, but keeps its digest.
        """
        free = pages[self.ref_count[pages] == 0]
        self._position[free] = -1
        self._num_cached -= len(free)
        self.ref_count[pages] += 1

    def num_free_among(self, pages: np.ndarray) -> int:
        """Return how many of `pages` are free now, so that `acquire` would reduce the number of free pages by it."""
        return int(np.count_nonzero(self.ref_count[pages] == 0))

    def free(self, pages: np.ndarray) -> None:
        """Remove one reference from a page for each time that it occurs in `pages`, i32 [n] in sequence order. A page
        without references becomes cached if it has a digest, otherwise blank.

        Later pages of a sequence are reused before earlier ones. Raises ValueError for a page without a reference.
        """
        counts = self.ref_count[pages]
        if len(pages) and counts.min() < 1:
            raise ValueError("a freed page had no reference left")
        if self.never_registered(pages):
            self.ref_count[pages] = 0
            blank = pages[::-1]
        else:  # several owners may hold a page, and free it in this call
            np.subtract.at(self.ref_count, pages, 1)
            free = pages[self.ref_count[pages] == 0].tolist()
            released, digests = np.array(list(dict.fromkeys(free)), np.int32)[::-1], self._digest_of
            cached = np.fromiter((digests[page] is not None for page in released.tolist()), np.bool_, len(released))
            blank = released[~cached]
            self._was_registered[blank] = False
            self._append_cached(released[cached])
        self._blank[self._num_blank : self._num_blank + len(blank)] = blank
        self._num_blank += len(blank)

    def never_registered(self, pages: np.ndarray) -> bool:
        """Return whether none of `pages` i32 [n] has been registered since it was allocated, so that each has at most
        one owner. False if one of them is -1, which stands for no page.
        """
        return not self._was_registered[pages].any()

    def register(self, page: int, digest: bytes) -> None:
        """Register a referenced page under the digest of its tokens and call the listeners' `registered`. Do nothing
        without enable_caching, if another page has this digest, or if the page already has a digest.
        """
        if self.enable_caching and digest not in self._page_of and self._digest_of[page] is None:
            self._page_of[digest] = page
            self._digest_of[page] = digest
            self._was_registered[page] = True
            for each in self.listeners:
                each.registered(digest, page)

    def lookup(self, digests: Sequence[bytes]) -> np.ndarray:
        """Return the pages, i32 [n], of the longest known prefix of a digest chain; n is 0 if the first digest is
        unknown. Nothing is reserved: until `acquire`, the pages may be allocated to others.
        """
        pages: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return np.array(pages, np.int32)

    @property
    def digests(self) -> Collection[bytes]:
        """Digests under which pages can be found now."""
        return self._page_of.keys()

    def find(self, digest: bytes) -> int | None:
        """Return the page registered under a digest; None if there is none."""
        return self._page_of.get(digest)

    def forget(self, digest: bytes) -> None:
        """Forget a digest, if it is known, and call the listeners' `dropped`. A cached page becomes blank; a referenced
        page stays with its owners.
        """
        page = self._page_of.pop(digest, None)
        if page is None:
            return
        self._digest_of[page] = None
        if self._position[page] >= 0:
            self._position[page] = -1
            self._was_registered[page] = False
            self._num_cached -= 1
            self._blank[self._num_blank] = page
            self._num_blank += 1
        for each in self.listeners:
            each.dropped(digest)

    def reset_prefix_cache(self) -> None:
        """Forget all digests, and call the listeners' `forgotten`. Cached pages become blank; referenced pages stay
        with their owners.
        """
        for page in self._page_of.values():
            self._digest_of[page] = None
        self._page_of.clear()
        cached = np.flatnonzero(self._position >= 0).astype(np.int32)
        self._was_registered[cached] = False
        self._position[cached] = -1
        self._blank[self._num_blank : self._num_blank + len(cached)] = cached
        self._num_blank += len(cached)
        self._num_cached = self._head = self._tail = 0
        for each in self.listeners:
            each.forgotten()

    def page_states(self) -> np.ndarray:
        """Return the state of each page, u8 [num_pages]: 0 blank, 1 cached, 2 referenced once, 3 referenced several
        times. It takes O(num_pages) time.
        """
        return np.minimum(self.ref_count, 2).astype(np.uint8) + (self.ref_count > 0) + (self._position >= 0)

    def check(self) -> None:
        """Raise AssertionError unless every page is in exactly one state and all counts agree. For tests; takes
        O(num_pages) time.
        """
        state = (self.ref_count > 0).astype(np.int32)
        state[self._blank[: self._num_blank]] += 1
        cached = np.flatnonzero(self._position >= 0)
        state[cached] += 1
        assert (state == 1).all(), f"pages in no state or in two: {np.flatnonzero(state != 1)}"
        assert len(cached) == self._num_cached, f"{len(cached)} cached pages, {self._num_cached} counted"
        assert (self._ring[self._position[cached] % len(self._ring)] == cached).all(), "the ring lacks a cached page"
        assert all(self._digest_of[page] == digest for digest, page in self._page_of.items()), "digest maps disagree"
        assert len(self._page_of) == sum(digest is not None for digest in self._digest_of), "a digest leads nowhere"
        assert all(self._digest_of[page] is not None for page in cached), "a cached page without digest"
        marked = self._was_registered[:-1]
        assert all(marked[page] for page in self._page_of.values()), "a cached page is not marked as registered"
        assert (marked | (self.ref_count <= 1)).all(), "an unregistered page has several owners"
        assert self._was_registered[-1], "page -1 is not marked"
        assert not marked[self._blank[: self._num_blank]].any(), "a blank page is marked as registered"

    def _append_cached(self, pages: np.ndarray) -> None:
        """Mark free pages i32 [n] as cached. They will be reused in this order, after all pages that are already
        cached.
        """
        if self._tail + len(pages) - self._head > len(self._ring):
            self._compact()
        positions = np.arange(self._tail, self._tail + len(pages))
        self._ring[positions % len(self._ring)] = pages
        self._position[pages] = positions
        self._tail += len(pages)
        self._num_cached += len(pages)

    def _compact(self) -> None:
        """Remove stale entries from the ring. At most num_pages valid ones remain, which is less than half its size."""
        live = np.argsort(self._position, kind="stable")
        live = live[self._position[live] >= 0].astype(np.int32)
        self._ring[: len(live)] = live
        self._position[live] = np.arange(len(live))
        self._head, self._tail = 0, len(live)

    def _evict(self, count: int) -> np.ndarray:
        """Take the `count` least recently freed cached pages, call the listeners' `evicted`, forget the pages' digests,
        and return the pages, i32 [count].

        There must be as many cached pages. The returned pages are in no state, so the caller must add references.
        """
        taken: list[int] = []
        ring, position, size = self._ring, self._position, len(self._ring)
        while len(taken) < count:
            window = np.arange(self._head, min(self._tail, self._head + 2 * (count - len(taken)) + 8))
            pages = ring[window % size]
            valid = np.flatnonzero(position[pages] == window)[: count - len(taken)]
            taken += pages[valid].tolist()
            full = len(taken) == count
            self._head = int(window[valid[-1]]) + 1 if full else int(window[-1]) + 1
        if self.listeners:
            digests = [self._digest_of[page] or b"" for page in taken]
            for each in self.listeners:
                each.evicted(digests, taken)
        for page in taken:
            digest = self._digest_of[page]
            assert digest is not None
            del self._page_of[digest]
            self._digest_of[page] = None
        pages = np.array(taken, np.int32)
        position[pages] = -1
        self._was_registered[pages] = False
        self._num_cached -= count
        return pages
