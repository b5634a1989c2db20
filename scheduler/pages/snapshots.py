"""Snapshots: recurrent states of prefixes, for models whose layers keep a state for each sequence in addition to pages.

A prefix can be continued only if its pages and the state after its last token are stored. The state is saved by the
step that computes this token, which must be the last token of its row. So prefills are split at the tokens whose states
are saved: where a prompt leaves the cached prefix, and at its last page boundary, from which a longer prompt may
continue.

Entries of an additional page table tell the device what to do. A slot's columns are the snapshot from which its first
row starts (LOAD), and the position and the snapshot of the next state to save (POSITION, SAVE).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxengine.scheduler.pages.page_pool import PageListener

LOAD, POSITION, SAVE = range(3)


class Hits(NamedTuple):
    """Cached pages of a prefix.

    Attributes:
      num_columns: columns of the prefix.
      pages: for each group i32 [n], the pages of the prefix's last n columns: all of them, or those that are still in
        the group's window.
      num_known: number of columns that the prefix would have if all states were saved.
    """

    num_columns: int
    pages: tuple[np.ndarray, ...]
    num_known: int


class Snapshots:
    """Snapshots of one replica, least recently used first, and the states that its slots will save.

    The rows of a step read and write states in no particular order. So a snapshot can only be found in the steps after
    the one that saves it, a snapshot that a step reads or writes is not reused in that step, and one that is written
    from outside (`put`) is not reused before the next step.

    Attributes:
      page_size: tokens of a page.
      listener: observer of the states that can be found; None for none.
    """

    listener: PageListener | None = None

    def __init__(self, num_snapshots: int, max_num_seqs: int, page_size: int):
        """Create `num_snapshots` free snapshots for `max_num_seqs` slots. page_size: tokens of a page."""
        self.page_size = page_size
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._of: dict[bytes, int] = {}
        self._saved_now: dict[bytes, int] = {}
        self._busy: set[int] = set()
        self._borders: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._entries: dict[tuple[int, int], int] = {}

    def begin_step(self) -> None:
        """Start a step. The snapshots that the previous step saves can now be found, and those that it uses may be
        reused.
        """
        self._of |= self._saved_now
        self._saved_now.clear()
        self._busy.clear()

    def has(self, digest: bytes) -> bool:
        """Return whether the state after the page with this digest can be found; False for one that the newest step
        saves.
        """
        return digest in self._of

    @property
    def digests(self) -> list[bytes]:
        """Digests of the states that are stored, or that a step in flight will store."""
        return [*self._of, *self._saved_now]

    def find(self, digest: bytes) -> int | None:
        """Return the snapshot of the state after the page with this digest; None if `has` is False."""
        return self._of.get(digest)

    def forget(self, digest: bytes) -> None:
        """Free the snapshot of the state after the page with this digest, if there is one, without calling the
        listener. Steps in flight that write or read it are not affected.
        """
        for snapshots in (self._of, self._saved_now):
            if (snapshot := snapshots.pop(digest, None)) is not None:
                self._free.append(snapshot)

    def borders(self, hits: Hits, num_tokens: int) -> list[int]:
        """Return the numbers of tokens, ascending, after which a sequence's state should be saved: where its prompt
        leaves the cached prefix, and at the last page boundary before its last token.

        hits: the cached prefix with which it begins; boundaries within it are left out. num_tokens: number of tokens
        that are known when it begins.
        """
        last = (num_tokens - 1) // self.page_size
        columns = sorted({min(hits.num_known, last), last})
        return [column * self.page_size for column in columns if column > hits.num_columns]

    def begin(self, slot: int, digest: bytes | None, borders: list[int]) -> None:
        """Set up the slot of a new sequence, whose states after `borders` tokens are to be saved.

        digest: digest of the last page of its cached prefix, from whose state the slot starts; None to start without
        one. That state must be stored, otherwise KeyError is raised, and becomes the most recently used one.
        """
        self._borders[slot] = borders
        self._entries[slot, POSITION] = 0
        if digest is not None:
            self._of[digest] = snapshot = self._of.pop(digest)
            self._busy.add(snapshot)
            self._entries[slot, LOAD] = snapshot

    def cut(self, slot: int, computed: int, count: int) -> int:
        """Return how many of `count` tokens a chunk may have without passing the slot's next border. computed: number
        of the slot's tokens before the chunk.
        """
        return min([count, *(border - computed for border in self._borders[slot] if border > computed)])

    def keep(self, slot: int, digests: Sequence[bytes], computed: int, count: int) -> None:
        """If a slot's first `computed` tokens end at one of its borders, let the step save the state after them, in a
        free snapshot or in place of the least recently used one, and call the listener's `registered`.

        Do nothing if the state is already stored, if the step uses every snapshot, or if count is below 2. digests:
        digests of the slot's pages from the first one on. count: how many of these tokens the step computes; the device
        saves no states of rows of one token.
        """
        if computed not in self._borders[slot] or count < 2:
            return
        digest = digests[computed // self.page_size - 1]
        if digest in self._of or digest in self._saved_now:
            return
        if not self._make_room():
            return
        self._saved_now[digest] = snapshot = self._free.pop()
        self._busy.add(snapshot)
        self._entries[slot, POSITION], self._entries[slot, SAVE] = computed, snapshot
        if self.listener is not None:
            self.listener.registered(digest, snapshot)

    def put(self, digest: bytes) -> int | None:
        """Return a snapshot for the state after the page with this digest. The caller must write the state before the
        next step; it can be found from now on, and is not replaced before that step. None if the state is already
        stored, or if all snapshots are busy: used by the newest step or returned by `put` since.
        """
        if digest in self._of or digest in self._saved_now or not self._make_room():
            return None
        self._of[digest] = snapshot = self._free.pop()
        self._busy.add(snapshot)
        return snapshot

    def _make_room(self) -> bool:
        """Make sure that a snapshot is free: if none is, evict the least recently used state that is not busy and call
        the listener's `evicted`. Return False if all snapshots are busy: used by the newest step or returned by `put`
        since.
        """
        if self._free:
            return True
        unused = next((old for old, snapshot in self._of.items() if snapshot not in self._busy), None)
        if unused is None:
            return False
        self._free.append(self._of.pop(unused))
        if self.listener is not None:
            self.listener.evicted([unused], self._free[-1:])
        return True

    def reset(self) -> None:
        """Free all snapshots, without calling the listener. Steps in flight that write or read them are not
        affected.
        """
        self._free += [*self._of.values(), *self._saved_now.values()]
        self._of.clear()
        self._saved_now.clear()

    def take_entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return the entries of the snapshots' page table that were written since the last call, and clear them: slots,
        columns (LOAD, POSITION or SAVE) and values, each i32 [n]. None if there are none.
        """
        if not self._entries:
            return None
        slots, columns = zip(*self._entries, strict=True)
        values = np.array(list(self._entries.values()), np.int32)
        self._entries = {}
        return np.array(slots, np.int32), np.array(columns, np.int32), values
