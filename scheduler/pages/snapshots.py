"""Where states of prefixes are kept, for models whose layers keep a state of each sequence beside pages.

A prefix can be gone on from where its pages and the state behind its last token are there. Such a state is copied by
the step that computes that token, so it must be the last of its row in some step: prefills are cut there. That is done
where a prompt leaves what is known, and at its last page border, from which a longer prompt may go on.

The device learns of it by entries of one more page table: a slot's columns are the snapshot that its first row begins
from, and the position and the snapshot of the state to be kept next (LOAD, POSITION, SAVE). Knows nothing of requests
but their digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LOAD, POSITION, SAVE = range(3)


class Hits(NamedTuple):
    """Pages that hold a prefix.

    Attributes:
      num_columns: columns of the prefix.
      pages: for each group i32[n], those of its last n columns: all of them, or those that its window still sees.
      num_known: columns that would be known if states were kept everywhere.
    """

    num_columns: int
    pages: tuple[np.ndarray, ...]
    num_known: int


class Snapshots:
    """The snapshots of one rank, least recently used first, and what its slots are still to keep.

    A snapshot is found from the step after the one that makes it on: a step's rows read states before others write them
    in no order. For the same reason one that a step reads or writes is not taken for another state in it.
    """

    def __init__(self, num_snapshots: int, max_num_seqs: int, page_size: int):
        self.page_size = page_size
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._of: dict[bytes, int] = {}
        self._made: dict[bytes, int] = {}
        self._busy: set[int] = set()
        self._borders: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._entries: dict[tuple[int, int], int] = {}

    def begin_step(self) -> None:
        """Starts a step: what the step before has made can be found from now on."""
        self._of |= self._made
        self._made.clear()
        self._busy.clear()

    def has(self, digest: bytes) -> bool:
        """Whether there is a state behind the page of this digest."""
        return digest in self._of

    def borders(self, hits: Hits, num_tokens: int) -> list[int]:
        """The numbers of tokens, ascending, behind which a state of a sequence is to be kept: where its prompt leaves
        what is known, and its last page border before its last token.

        hits: the prefix that it begins with; borders within that are left out. num_tokens: tokens that are known when
        it begins.
        """
        last = (num_tokens - 1) // self.page_size
        columns = sorted({min(hits.num_known, last), last})
        return [column * self.page_size for column in columns if column > hits.num_columns]

    def begin(self, slot: int, digest: bytes | None, borders: list[int]) -> None:
        """Sets up the slot of a sequence that begins, which keeps states behind these numbers of tokens.

        digest: of the page behind whose state it goes on, which there must be (`has`); None to begin without one.
        """
        self._borders[slot] = borders
        self._entries[slot, POSITION] = 0
        if digest is not None:
            self._of[digest] = snapshot = self._of.pop(digest)
            self._busy.add(snapshot)
            self._entries[slot, LOAD] = snapshot

    def cut(self, slot: int, computed: int, count: int) -> int:
        """How many of `count` tokens a chunk may have, so that it does not go beyond the next border.

        computed: tokens of the slot in front of the chunk.
        """
        return min([count, *(border - computed for border in self._borders[slot] if border > computed)])

    def keep(self, slot: int, digests: Sequence[bytes], computed: int, count: int) -> None:
        """Has the step keep the state behind the first `computed` tokens of a slot if that is a border, in the place of
        the snapshot least recently used where none is free.

        Not if it is kept already, or every snapshot is in use by the step. count: how many of these tokens the step
        computes; the device keeps no state of rows of one token. digests: of the slot's pages from the first on.
        """
        if computed not in self._borders[slot] or count < 2:
            return
        digest = digests[computed // self.page_size - 1]
        if digest in self._of or digest in self._made:
            return
        if not self._free:
            unused = next((old for old, snapshot in self._of.items() if snapshot not in self._busy), None)
            if unused is None:
                return
            self._free.append(self._of.pop(unused))
        self._made[digest] = snapshot = self._free.pop()
        self._busy.add(snapshot)
        self._entries[slot, POSITION], self._entries[slot, SAVE] = computed, snapshot

    def reset(self) -> None:
        """Forgets every state; those that steps in flight make or read stay as they are."""
        self._free += [*self._of.values(), *self._made.values()]
        self._of.clear()
        self._made.clear()

    def take_entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Entries of the snapshots' page table written since the last call: slots, columns (LOAD, POSITION or SAVE) and
        values, i32[n] each; None for none."""
        if not self._entries:
            return None
        slots, columns = zip(*self._entries, strict=True)
        values = np.array(list(self._entries.values()), np.int32)
        self._entries = {}
        return np.array(slots, np.int32), np.array(columns, np.int32), values
