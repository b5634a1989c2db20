"""Results of a capability with a row for each token, collected over the steps of one sequence."""

from __future__ import annotations

import numpy as np


class FoundRows:
    """Rows [n, ...] of one sequence, in the order of its tokens."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._num_sent = 0
        # What was taken as a whole so far: the first `_num_kept` rows of a buffer that doubles where it is full.
        self._kept: np.ndarray | None = None
        self._num_kept = 0

    def add(self, rows: np.ndarray) -> None:
        """Append the rows of the next tokens."""
        self._parts.append(rows)

    def take(self, count: int, only_new: bool) -> np.ndarray | dict[str, np.ndarray]:
        """Return the first `count` rows, or fewer if there are fewer; only_new: of these, those not returned before,
        which are then dropped.

        For rows with named fields, a dict with the rows of each. Raises ValueError without an `add` before. Needs the
        same `only_new` each time. Takes time in proportion to the new rows; without only_new, on average. Steps that
        ran before it was known that the sequence had ended may have added more than `count`.
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
        """Return the first `count` rows, a view of a buffer that later rows are appended to."""
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
    """Return the parts as one array, a single one without a copy. Raises ValueError for none."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
