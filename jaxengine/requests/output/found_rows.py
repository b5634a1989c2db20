"""Results of a capability with a row for each token, collected over the steps of one sequence."""

from __future__ import annotations

import numpy as np


class FoundRows:
    """Rows [n, ...] of one sequence, in the order of its tokens, collected by `add` and returned by `take`."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._num_sent = 0
        # Rows that `_take_all` has joined: the first `_num_kept` rows of a buffer, which doubles when it is full.
        self._kept: np.ndarray | None = None
        self._num_kept = 0

    def add(self, rows: np.ndarray) -> None:
        """Append the rows of the next tokens."""
        self._parts.append(rows)

    def take(self, count: int, only_new: bool) -> np.ndarray | dict[str, np.ndarray]:
        """Return the first `count` rows, or fewer if there are fewer. With only_new, only those of them that were not
        returned before, which are then dropped.

        For rows with named fields, returns a dict with the rows of each. The arrays are views, whose rows do not change
        later. Raises ValueError without an `add` before. Every call must have the same `only_new`. `count` may be below
        the number of rows.
        """
        new = self._take_new(count) if only_new else self._take_all(count)
        return new if new.dtype.names is None else {name: new[name] for name in new.dtype.names}

    def _take_new(self, count: int) -> np.ndarray:
        """Return the rows up to `count` that were not returned before, and drop them."""
        rows = _joined(self._parts)
        new = rows[: max(0, count - self._num_sent)]
        self._num_sent += len(new)
        self._parts = [rows[len(new) :].copy()]  # a view would keep the memory of what was returned
        return new

    def _take_all(self, count: int) -> np.ndarray:
        """Join the added rows into the buffer; return the first `count` rows, or fewer if there are fewer, as a view of
        the buffer.
        """
        parts, self._parts, kept = self._parts, [], self._kept
        if kept is None:
            kept = _joined(parts)
            self._num_kept = len(kept)
        elif parts:
            rows, used = _joined(parts), self._num_kept
            self._num_kept += len(rows)
            if self._num_kept > len(kept):
                larger = np.empty((max(self._num_kept, 2 * len(kept)), *rows.shape[1:]), rows.dtype)
                larger[:used] = kept[:used]
                kept = larger
            kept[used : self._num_kept] = rows
        self._kept = kept
        return kept[: min(count, self._num_kept)]


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Return the parts as one array; a single part is returned without a copy. Raises ValueError if `parts` is
    empty.
    """
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
