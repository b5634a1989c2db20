"""Results of a capability with a row for each token, collected over the steps of one sequence."""

from __future__ import annotations

import numpy as np


class FoundRows:
    """Rows [n, ...] of one sequence, in the order of its tokens."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._num_sent = 0

    def add(self, rows: np.ndarray) -> None:
        """Append the rows of the next tokens."""
        self._parts.append(rows)

    def take(self, count: int, only_new: bool) -> np.ndarray | dict[str, np.ndarray]:
        """Return the first `count` rows, or fewer if there are fewer; only_new: of these, those that were not returned
        before.

        Of rows with named fields, a dict with the rows of each. Needs an `add` before.

        Steps that ran before it was known that the sequence had ended may have brought more than `count`.
        """
        rows = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        self._parts = [rows]
        first, self._num_sent = self._num_sent if only_new else 0, min(count, len(rows))
        new = rows[first : self._num_sent]
        return new if new.dtype.names is None else {name: new[name] for name in new.dtype.names}
