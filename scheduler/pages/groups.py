"""Page tables: the pages that the slots of a replica hold, in every cache group.

A cache group is a set of layers that need the same keys: those of all tokens, or those of a sliding window. All groups
take pages of the same size from one pool, and each group has its own page table. `page_size` consecutive tokens of a
slot form a *column*, for which each group has one page. A group with a window frees its pages as the window leaves
them.

Steps run in the order in which they were scheduled, so a freed page is overwritten only after the steps that read it.
This module handles slots and digests, not requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.pages.page_pool import PagePool
from jaxengine.scheduler.pages.snapshots import Hits, Snapshots

Deltas = tuple[np.ndarray, np.ndarray, np.ndarray]


def most_pages_of(config: SchedulerConfig, num_tokens: int) -> int:
    """Return the most pages that a sequence of `num_tokens` tokens holds at once, over the configuration's cache
    groups.
    """
    chunk = min(config.max_num_batched_tokens, config.long_prefill_token_threshold or config.max_num_batched_tokens)
    return most_pages(num_tokens, config.windows, page_size=config.page_size, chunk=chunk)


def most_pages(num_tokens: int, windows: Sequence[int | None], *, page_size: int, chunk: int) -> int:
    """Return the most pages that a sequence of `num_tokens` tokens holds at once, over cache groups with these windows.

    windows: how many keys a token attends to, including its own; None for all. chunk: most tokens of the sequence that
    one step computes. A group with a window must hold the chunk and the window of its first token; these tokens may
    begin with the last one of a page.
    """
    columns = -(-num_tokens // page_size)
    return sum(
        columns if window is None else min(columns, -(-(window - 2 + min(chunk, num_tokens)) // page_size) + 1)
        for window in windows
    )


class PageTables:
    """Page tables of slots 0 .. max_num_seqs - 1 of one replica.

    Attributes:
      pool: the pool from which pages are allocated. page_size: tokens of a page.
      table: i32 [G, max_num_seqs, columns], page ids, -1 where a slot holds no page.
      num_groups: number of cache groups. whole: groups that keep all keys. windowed: (group, window) of the others.
      num_columns: i32 [max_num_seqs], number of columns that a slot has begun.
      snapshots: recurrent states of prefixes; None if none are kept.
      deltas: entries written since `take_deltas`: rows (group * max_num_seqs + slot), columns, pages.
    """

    def __init__(self, config: SchedulerConfig):
        """Create the pool, snapshots if the configuration has any, and empty tables. Raises ValueError for num_pages
        < 1.
        """
        self.pool = PagePool(config.num_pages, enable_caching=config.enable_prefix_caching)
        self.page_size = config.page_size
        groups, slots = len(config.windows), config.max_num_seqs
        count = config.num_snapshots
        self.snapshots = Snapshots(count, slots, config.page_size) if count else None
        self.windowed = [(group, window) for group, window in enumerate(config.windows) if window is not None]
        self.whole = [group for group, window in enumerate(config.windows) if window is None]
        # i64[g, 1] for the groups with windows: when a decode begins a new column, how many of the columns before it
        # its window reaches into. It holds these and the new one.
        behind = [min(-(-(window - 1) // self.page_size), config.max_pages_per_seq) for _, window in self.windowed]
        self._behind_new = np.array(behind, np.int64)[:, None]
        self._window_groups = np.array([group for group, _ in self.windowed], np.int64)[:, None]
        # All tables in one array. Empty columns are put in front, so that indices before column 0 are valid.
        pad = 1 + max(behind, default=0)
        padded = np.full((groups, slots, pad + config.max_pages_per_seq), -1, np.int32)
        self.table, self._flat, self._width, self._pad = padded[..., pad:], padded.ravel(), padded.shape[-1], pad
        self.num_groups = groups
        self.num_columns = np.zeros(slots, np.int32)
        # For the groups with windows: the number of columns, counted from the last, whose pages a slot holds.
        self._held = np.zeros((len(self.windowed), slots), np.int32)
        self.deltas: list[Deltas] = []
        self._num_registered = np.zeros(slots, np.int32)
        # A slot's row in group 0 is its number. The rows of groups with windows come first.
        order = [group for group, _ in self.windowed] + self.whole
        self._first_rows = slots * np.array(order, np.int64)[:, None]

    @property
    def num_held(self) -> np.ndarray:
        """Number of columns, counted from the last, whose pages a slot holds, i32 [G, max_num_seqs]. The slot has freed
        the pages of earlier columns, or never had them.
        """
        held = np.tile(self.num_columns, (self.num_groups, 1))
        held[self._window_groups[:, 0]] = self._held
        return held

    def count_held(self, slots: np.ndarray) -> int:
        """Return the number of pages that `slots` i64[n] hold, over all groups."""
        return len(self.whole) * int(self.num_columns[slots].sum()) + int(self._held[:, slots].sum())

    def num_missing(self, slot: int, num_tokens: int) -> int:
        """Return the number of pages, over all groups, that a slot lacks for its first `num_tokens` tokens."""
        return self.num_groups * max(0, self._columns(num_tokens) - int(self.num_columns[slot]))

    def num_missing_of(self, slots: np.ndarray, num_tokens: np.ndarray) -> int:
        """Return the number of pages, over all groups and slots, that `slots` i64 [n] lack for their first `num_tokens`
        i64 [n] tokens.
        """
        columns = -(-num_tokens // self.page_size) - self.num_columns[slots]
        return self.num_groups * int(columns[columns > 0].sum())

    def num_to_grow(self, slots: np.ndarray) -> int:
        """Return how many free pages one more column for each of `slots` i64 [n] takes, minus the pages that windows
        free at the same time.
        """
        return len(self.whole) * len(slots) + int(np.count_nonzero(self._held[:, slots] <= self._behind_new))

    def can_take(self, hits: Hits, num_pages: int) -> bool:
        """Return whether the pool has `num_pages` free pages in addition to those of `hits`."""
        return num_pages <= self.pool.num_free - sum(self.pool.num_free_among(pages) for pages in hits.pages)

    def lookup(self, digests: Sequence[bytes]) -> Hits:
        """Return the longest prefix of a digest chain for which every group has the pages that it needs and, if there
        are snapshots, whose state is saved.

        digests: digest chain, one for each page, in order. Nothing is reserved: until `begin`, the pages may be
        allocated to others.
        """
        run, whole = len(digests), {}
        for group in self.whole:
            whole[group] = self.pool.lookup([page_key(digest, group) for digest in digests[:run]])
            run = len(whole[group])
        found = [[self.pool.find(page_key(digest, group)) for digest in digests[:run]] for group, _ in self.windowed]
        # For each column, the number of pages directly before it that are cached without a gap.
        counts = [gapless([page is not None for page in pages]) for pages in found]
        num_known = run
        while run and (
            (self.snapshots is not None and not self.snapshots.has(digests[run - 1]))
            or any(
                count[run] < run - self.behind(run * self.page_size, window)
                for count, (_, window) in zip(counts, self.windowed, strict=True)
            )
        ):
            run -= 1
        pages: list[np.ndarray] = [np.empty(0, np.int32)] * self.num_groups
        for group, every in whole.items():
            pages[group] = every[:run]
        for each, (group, window) in zip(found, self.windowed, strict=True):
            pages[group] = np.array(each[self.behind(run * self.page_size, window) : run], np.int32)
        return Hits(run, tuple(pages), num_known)

    def begin(self, slot: int, hits: Hits) -> None:
        """Assign the pages of a cached prefix, the result of `lookup`, to a slot without pages. Each page gets one more
        reference and a table entry.
        """
        self.num_columns[slot] = self._num_registered[slot] = hits.num_columns
        self._held[:, slot] = [len(hits.pages[group]) for group, _ in self.windowed]
        for group, pages in enumerate(hits.pages):
            if len(pages):
                self.pool.acquire(pages)
                self._write(group, slot, hits.num_columns - len(pages), pages)

    def grow(self, slot: int, num_tokens: int) -> None:
        """Allocate the pages that the slot's first `num_tokens` tokens lack, in every group, and write their table
        entries. Raises ValueError, with nothing changed, if the pool has too few.
        """
        first, last = int(self.num_columns[slot]), self._columns(num_tokens)
        if last > first:
            pages = self.pool.allocate(self.num_groups * (last - first)).reshape(self.num_groups, -1)
            for group in range(self.num_groups):
                self._write(group, slot, first, pages[group])
            self.num_columns[slot] = last
            self._held[:, slot] += last - first

    def grow_by_one(self, slots: np.ndarray) -> None:
        """Allocate the pages of one more column for each of `slots`, i64 [n] without repeats, whose columns are all
        full.

        Pages that a window leaves, at most one per group and slot, are freed first. They are reused at once if none of
        them is shared or in the prefix cache. The caller must have checked that the pool has enough pages; otherwise a
        ValueError leaves the tables inconsistent.
        """
        columns, count = self.num_columns[slots], len(slots)
        rows = slots + self._first_rows
        entries = rows * self._width + (columns + self._pad)
        if not self.windowed:
            pages = self.pool.allocate(self.num_groups * count)
        else:
            left = entries[: len(self.windowed)] - (1 + self._behind_new)
            pages = self._flat[left].ravel()
            self._flat[left] = -1
            if self.pool.never_registered(pages):
                pages = np.concatenate((pages, self.pool.allocate(len(self.whole) * count)))
            else:
                self._held[:, slots] += (pages < 0).reshape(-1, count)
                self.pool.free(pages[pages >= 0])
                pages = self.pool.allocate(self.num_groups * count)
        self._flat[entries] = pages.reshape(entries.shape)
        self.deltas.append((rows.ravel().astype(np.int32), np.concatenate([columns] * self.num_groups), pages))
        self.num_columns[slots] += 1

    def grow_to(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """Allocate the pages that `slots` i64 [n] lack for their first `num_tokens` i64 [n] tokens. The caller must
        have checked that enough pages are free (`num_missing_of`).
        """
        while (needy := num_tokens > self.num_columns[slots] * self.page_size).any():
            self.grow_by_one(slots[needy])

    def give_back(self, slot: int, position: int) -> None:
        """Free the pages of groups with windows that no token of a slot from `position` on attends to. No deltas are
        written. `grow_by_one` frees such pages as well.
        """
        columns = int(self.num_columns[slot])
        for index, (group, window) in enumerate(self.windowed):
            first = columns - int(self._held[index, slot])
            if (end := min(self.behind(position, window), columns)) > first:
                self.pool.free(self.table[group, slot, first:end].copy())
                self.table[group, slot, first:end] = -1
                self._held[index, slot] = columns - end

    def register(self, slot: int, digests: Sequence[bytes], num_tokens: int) -> None:
        """Register in the prefix cache the pages of every group that the slot's first `num_tokens` tokens fill, unless
        they have been registered before. Other requests may use them in the same step.

        digests: digests of the slot's pages from the first one on, as far as they are known.
        """
        first, last = int(self._num_registered[slot]), min(num_tokens // self.page_size, len(digests))
        for column in range(first, last):
            for group in range(self.num_groups):
                page = int(self.table[group, slot, column])
                if page >= 0:
                    self.pool.register(page, page_key(digests[column], group))
        self._num_registered[slot] = max(first, last)

    def is_registered(self, slot: int, num_tokens: int) -> bool:
        """Return whether all full pages of the slot's first `num_tokens` tokens have been registered."""
        return num_tokens // self.page_size <= int(self._num_registered[slot])

    def release(self, slot: int) -> None:
        """Free all pages of a slot in all groups; registered ones stay in the prefix cache. No deltas are written."""
        end = int(self.num_columns[slot])
        for group in range(self.num_groups):
            pages = self.table[group, slot, :end]
            self.pool.free(pages[pages >= 0])
        self.table[:, slot, :end] = -1
        self.num_columns[slot] = self._num_registered[slot] = 0
        self._held[:, slot] = 0

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, both pages and states. Slots keep the pages that they hold."""
        self.pool.reset_prefix_cache()
        if self.snapshots is not None:
            self.snapshots.reset()

    def take_deltas(self) -> list[Deltas]:
        """Return the page-table entries written since the last call, and empty `deltas`. Entries for snapshots, whose
        table has the number num_groups, are last.
        """
        deltas, self.deltas = self.deltas, []
        if self.snapshots is not None and (entries := self.snapshots.take_entries()) is not None:
            slots, columns, values = entries
            deltas.append((self._rows(self.num_groups, slots), columns, values))
        return deltas

    def _write(self, group: int, slot: int, first: int, pages: np.ndarray) -> None:
        """Write pages i32 [n] into a slot's columns from `first` on, in a group's table and in `deltas`."""
        columns = np.arange(first, first + len(pages), dtype=np.int32)
        self.table[group, slot, columns] = pages
        self.deltas.append((self._rows(group, np.full(len(pages), slot)), columns, pages))

    def _rows(self, group: int, slots: np.ndarray) -> np.ndarray:
        """Return the page-table rows, i32[n], of `slots` [n] in a group."""
        return (slots + group * self.table.shape[1]).astype(np.int32)

    def _columns(self, num_tokens: int) -> int:
        """Return the number of columns that `num_tokens` tokens take; the last one may be partly filled."""
        return -(-num_tokens // self.page_size)

    def behind(self, position: int, window: int) -> int:
        """Return the number of leading columns to which, with this window, no token from `position` on attends."""
        return max(0, position - (window - 1)) // self.page_size


def short_digest(digest: bytes) -> int:
    """Return the last 64 bits of a page's digest as an unsigned integer, by which published events name the page."""
    return int.from_bytes(digest[-8:], "big")


def page_key(digest: bytes, group: int) -> bytes:
    """Return the key under which a PagePool stores a group's page with this digest: the digest for group 0, otherwise
    the digest followed by the group's number in one byte. Raises ValueError for a group above 255.
    """
    return digest + bytes((group,)) if group else digest


def gapless(is_there: Sequence[bool]) -> list[int]:
    """Return, for each n from 0 to len(is_there), the length of the run of true values at the end of the first n."""
    counts = [0]
    for each in is_there:
        counts.append(counts[-1] + 1 if each else 0)
    return counts
