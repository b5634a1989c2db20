"""Which pages the slots of a rank hold, in every cache group.

A cache group is a set of layers that need the same keys: those of all tokens, or those of a window. All groups take
pages from one pool, where every page is as large as any other, and each has a page table of its own; one page of each
group holds the keys and values of `page_size` tokens, a *column*. A group with a window gives pages back as the window
leaves them behind. (The layout is that of vLLM's hybrid KV cache manager.)

Steps run on the device in the order in which they were scheduled, so a page that is given back while a step in flight
still reads it is written again only after that. Knows nothing of requests but their digests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.pages.page_pool import PagePool
from scheduler.pages.snapshots import Hits, Snapshots

Deltas = tuple[np.ndarray, np.ndarray, np.ndarray]


class PageTables:
    """The pages of slots 0 .. max_num_seqs - 1 of one rank.

    Attributes:
      pool: where pages come from.
      table: i32[G, max_num_seqs, columns], -1 where a slot holds no page.
      num_columns: i32[max_num_seqs], columns that a slot has taken.
      first_column: i32[G, max_num_seqs], the columns before it have been given back or were never held.
      snapshots: states of prefixes; None where none are kept.
      deltas: entries written since `take_deltas`: rows (group * max_num_seqs + slot), columns, pages.
    """

    def __init__(self, config: SchedulerConfig):
        self.pool = PagePool(config.num_pages, enable_caching=config.enable_prefix_caching)
        self.page_size = config.page_size
        groups, slots = len(config.windows), config.max_num_seqs
        self.table = np.full((groups, slots, config.max_pages_per_seq), -1, np.int32)
        self.num_columns = np.zeros(slots, np.int32)
        self.first_column = np.zeros((groups, slots), np.int32)
        count = config.num_snapshots
        self.snapshots = Snapshots(count, slots, config.page_size) if count else None
        self.deltas: list[Deltas] = []
        self._num_registered = np.zeros(slots, np.int32)
        self._windowed = [(group, window) for group, window in enumerate(config.windows) if window is not None]
        self._whole = [group for group, window in enumerate(config.windows) if window is None]

    @property
    def num_groups(self) -> int:
        return len(self.table)

    def num_held(self, slots: np.ndarray) -> np.ndarray:
        """Pages that each of `slots` holds, over all groups."""
        return self.num_groups * self.num_columns[slots] - self.first_column[:, slots].sum(axis=0)

    def num_missing(self, slot: int, num_tokens: int) -> int:
        """Pages that the slot's first `num_tokens` tokens still need."""
        return self.num_groups * max(0, self._columns(num_tokens) - int(self.num_columns[slot]))

    def can_take(self, hits: Hits, num_pages: int) -> bool:
        """Whether the pool has so many free pages beside those of `hits`."""
        return num_pages <= self.pool.num_free - sum(self.pool.num_free_among(pages) for pages in hits.pages)

    def lookup(self, digests: Sequence[bytes]) -> Hits:
        """The longest prefix of a digest chain that every group can serve, with a state behind it where there are
        snapshots."""
        run, whole = len(digests), {}
        for group in self._whole:
            whole[group] = self.pool.lookup([page_key(digest, group) for digest in digests[:run]])
            run = len(whole[group])
        found = [[self.pool.find(page_key(digest, group)) for digest in digests[:run]] for group, _ in self._windowed]
        # For each column, how many before it are there without a gap.
        gapless = [_gapless(pages) for pages in found]
        num_known = run
        while run and (
            (self.snapshots is not None and not self.snapshots.has(digests[run - 1]))
            or any(
                count[run] < run - self._behind(run * self.page_size, window)
                for count, (_, window) in zip(gapless, self._windowed, strict=True)
            )
        ):
            run -= 1
        pages: list[np.ndarray] = [np.empty(0, np.int32)] * self.num_groups
        for group, every in whole.items():
            pages[group] = every[:run]
        for each, (group, window) in zip(found, self._windowed, strict=True):
            pages[group] = np.array(each[self._behind(run * self.page_size, window) : run], np.int32)
        return Hits(run, tuple(pages), num_known)

    def begin(self, slot: int, hits: Hits) -> None:
        """Gives an empty slot the pages of a known prefix."""
        self.num_columns[slot] = self._num_registered[slot] = hits.num_columns
        for group, pages in enumerate(hits.pages):
            first = hits.num_columns - len(pages)
            self.first_column[group, slot] = first
            if len(pages):
                self.pool.acquire(pages)
                self._write(group, slot, first, pages)

    def grow(self, slot: int, num_tokens: int) -> None:
        """Takes the pages that the slot's first `num_tokens` tokens still need; they are free."""
        first, last = int(self.num_columns[slot]), self._columns(num_tokens)
        if last > first:
            pages = self.pool.allocate(self.num_groups * (last - first)).reshape(self.num_groups, -1)
            for group in range(self.num_groups):
                self._write(group, slot, first, pages[group])
            self.num_columns[slot] = last

    def grow_by_one(self, slots: np.ndarray) -> None:
        """Takes the pages of one column more for each of `slots`, i64[n] without repeats; they are free."""
        pages = self.pool.allocate(self.num_groups * len(slots)).reshape(self.num_groups, -1)
        columns = self.num_columns[slots]
        for group in range(self.num_groups):
            self.table[group, slots, columns] = pages[group]
            self.deltas.append((self._rows(group, slots), columns, pages[group]))
        self.num_columns[slots] += 1

    def give_back(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Frees pages that no token of `slots` i64[n] from `positions` i32[n] on will see."""
        for group, window in self._windowed:
            keep = np.maximum(positions - (window - 1), 0) // self.page_size
            for index in np.flatnonzero(keep > self.first_column[group, slots]).tolist():
                slot, end = int(slots[index]), int(keep[index])
                start = int(self.first_column[group, slot])
                self.pool.free(self.table[group, slot, start:end].copy())
                self.table[group, slot, start:end] = -1
                self.first_column[group, slot] = end

    def register(self, slot: int, digests: Sequence[bytes], num_tokens: int) -> None:
        """Makes pages findable that the slot's first `num_tokens` tokens fill; a step writes all before any reads."""
        first, last = int(self._num_registered[slot]), min(num_tokens // self.page_size, len(digests))
        for column in range(first, last):
            for group in range(self.num_groups):
                page = int(self.table[group, slot, column])
                if page >= 0:
                    self.pool.register(page, page_key(digests[column], group))
        self._num_registered[slot] = max(first, last)

    def is_registered(self, slot: int, num_tokens: int) -> bool:
        """Whether all full pages of the slot's first `num_tokens` tokens have been registered."""
        return num_tokens // self.page_size <= int(self._num_registered[slot])

    def release(self, slot: int) -> None:
        """Frees all pages of a slot."""
        end = int(self.num_columns[slot])
        for group in range(self.num_groups):
            self.pool.free(self.table[group, slot, int(self.first_column[group, slot]) : end].copy())
        self.table[:, slot, :end] = -1
        self.num_columns[slot] = self._num_registered[slot] = 0
        self.first_column[:, slot] = 0

    def reset_prefix_cache(self) -> None:
        """Forgets all pages and states of prefixes. Those that slots hold stay with them."""
        self.pool.reset_prefix_cache()
        if self.snapshots is not None:
            self.snapshots.reset()

    def take_deltas(self) -> list[Deltas]:
        """The entries written since the last call."""
        deltas, self.deltas = self.deltas, []
        if self.snapshots is not None and (entries := self.snapshots.take_entries()) is not None:
            slots, columns, values = entries
            deltas.append((self._rows(self.num_groups, slots), columns, values))
        return deltas

    def _write(self, group: int, slot: int, first: int, pages: np.ndarray) -> None:
        columns = np.arange(first, first + len(pages), dtype=np.int32)
        self.table[group, slot, columns] = pages
        self.deltas.append((self._rows(group, np.full(len(pages), slot)), columns, pages))

    def _rows(self, group: int, slots: np.ndarray) -> np.ndarray:
        return (slots + group * self.table.shape[1]).astype(np.int32)

    def _columns(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _behind(self, position: int, window: int) -> int:
        """Columns that a token at `position`, and all after it, do not see."""
        return max(0, position - (window - 1)) // self.page_size


def page_key(digest: bytes, group: int) -> bytes:
    """What a page of a group is found by."""
    return digest + bytes((group,)) if group else digest


def _gapless(pages: Sequence[int | None]) -> list[int]:
    """For each n up to len(pages), how many of the first n stand at their end without a gap."""
    counts = [0]
    for page in pages:
        counts.append(0 if page is None else counts[-1] + 1)
    return counts
