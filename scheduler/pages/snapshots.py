"""Snapshots: recurrent states of prefixes, for models whose layers keep a state per sequence besides pages.

A prefix can be continued only if its pages and the state after its last token are stored. The step that computes
that token copies the state, so the token must be the last of its row: prefills are cut there, namely where a prompt
leaves the known prefix, and at its last page boundary, from which a longer prompt may continue.

The device gets this from entries of one more page table: a slot's columns are the snapshot that its first row begins
from, and the position and the snapshot of the state to be saved next (LOAD, POSITION, SAVE). Of requests this module
has only their digests.
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
      pages: for each group i32 [n], the pages of the prefix's last n columns: all of them, or those that its window
      still
        sees.
      num_known: number of columns that the prefix would have if states were saved everywhere.
    """

    num_columns: int
    pages: tuple[np.ndarray, ...]
    num_known: int


class Snapshots:
    """Snapshots of one replica, least recently used first, and the states that its slots have yet to save.

    A snapshot can be found only from the step after the one that saves it, because a step's rows read and write states
    in no order. For the same reason a snapshot that a step reads or writes is not reused within that step, nor one that
    is written from outside (`put`) before the next step.

    Attributes:
      listener: observer of the states that can be found; None for none.
    """

    listener: PageListener | None = None

    def __init__(self, num_snapshots: int, max_num_seqs: int, page_size: int):
        """Create `num_snapshots` free snapshots, for `max_num_seqs` slots. page_size: tokens of a page."""
        self.page_size = page_size
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._of: dict[bytes, int] = {}
        self._made: dict[bytes, int] = {}
        self._busy: set[int] = set()
        self._borders: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._entries: dict[tuple[int, int], int] = {}

    def begin_step(self) -> None:
        """Start a step: snapshots saved by the previous step can be found from now on, and those that it used may be
        reused.
        """
        self._of |= self._made
        self._made.clear()
        self._busy.clear()

    def has(self, digest: bytes) -> bool:
        """Whether the state after the page with this digest can be found. False for a state that only the newest step
        saves.
        """
        return digest in self._of

    @property
    def digests(self) -> list[bytes]:
        """Digests whose states are stored, including those that the newest step saves; a step in flight may be the one
        that writes them.
        """
        return [*self._of, *self._made]

    def find(self, digest: bytes) -> int | None:
        """Return the snapshot of the state after the page with this digest; None if it cannot be found (`has`)."""
        return self._of.get(digest)

    def forget(self, digest: bytes) -> None:
        """Free the snapshot of the state after the page with this digest, if there is one, without calling the
        listener. Steps in flight that write or read it are not affected.
        """
        for own in (self._of, self._made):
            if (snapshot := own.pop(digest, None)) is not None:
                self._free.append(snapshot)

    def borders(self, hits: Hits, num_tokens: int) -> list[int]:
        """Return the numbers of tokens, ascending, after which a sequence's state should be saved: where its prompt
        leaves the known prefix, and at its last page boundary before its last token.

        hits: the cached prefix that it begins with; boundaries within it are left out. num_tokens: tokens known when it
        begins.
        """
        last = (num_tokens - 1) // self.page_size
        columns = sorted({min(hits.num_known, last), last})
        return [column * self.page_size for column in columns if column > hits.num_columns]

    def begin(self, slot: int, digest: bytes | None, borders: list[int]) -> None:
        """Set up the slot of a new sequence, whose states after `borders` tokens are to be saved.

        digest: of the last page of its cached prefix, from whose state the slot starts; None to start without one. The
        state must be stored (`has`; KeyError otherwise), and counts as used last.
        """
        self._borders[slot] = borders
        self._entries[slot, POSITION] = 0
        if digest is not None:
            self._of[digest] = snapshot = self._of.pop(digest)
            self._busy.add(snapshot)
            self._entries[slot, LOAD] = snapshot

    def cut(self, slot: int, computed: int, count: int) -> int:
        """Return how many of `count` tokens a chunk may have without passing the slot's next border.

        computed: tokens of the slot before the chunk.
        """
        return min([count, *(border - computed for border in self._borders[slot] if border > computed)])

    def keep(self, slot: int, digests: Sequence[bytes], computed: int, count: int) -> None:
        """If a slot's first `computed` tokens end at one of its borders, make the step save the state after them, in a
        free snapshot or in place of the least recently used one, and call the listener (`registered`).

        Does nothing if that state is stored already, if the step uses every snapshot, or if count is below 2. count:
        how many of these tokens the step computes; the device saves no state of rows of one token. digests: of the
        slot's pages from the first on.
        """
        if computed not in self._borders[slot] or count < 2:
            return
        digest = digests[computed // self.page_size - 1]
        if digest in self._of or digest in self._made:
            return
        if not self._make_room():
            return
        self._made[digest] = snapshot = self._free.pop()
        self._busy.add(snapshot)
        self._entries[slot, POSITION], self._entries[slot, SAVE] = computed, snapshot
        if self.listener is not None:
            self.listener.registered(digest, snapshot)

    def put(self, digest: bytes) -> int | None:
        """Return the snapshot to which the caller must write the state after the page with this digest before the next
        step, and under which it can be found from now on. No other state takes its place before that step. None if the
        state is stored already, or if every snapshot is used by the newest step or was returned since.
        """
        if digest in self._of or digest in self._made or not self._make_room():
            return None
        self._of[digest] = snapshot = self._free.pop()
        self._busy.add(snapshot)
        return snapshot

    def _make_room(self) -> bool:
        """Return True if a snapshot is free, after evicting the least recently used state (and calling the listener) if
        none was; False if all of them are busy: read or written by the newest step, or by `put` since.
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
        self._free += [*self._of.values(), *self._made.values()]
        self._of.clear()
        self._made.clear()

    def take_entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return the entries of the snapshots' page table written since the last call, and clear them: slots, columns
        (LOAD, POSITION or SAVE) and values, i32 [n] each; None if there are none.
        """
        if not self._entries:
            return None
        slots, columns = zip(*self._entries, strict=True)
        values = np.array(list(self._entries.values()), np.int32)
        self._entries = {}
        return np.array(slots, np.int32), np.array(columns, np.int32), values
