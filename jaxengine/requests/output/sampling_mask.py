"""Sampling masks of an output: which tokens could have been sampled in place of each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np


class SamplingMask:
    """The ids of the tokens that could have been sampled at each of T positions.

    Attributes:
      rows: i32[k] for each position, in ascending order; the token that was drawn is one of them.
    """

    def __init__(self, rows: Sequence[np.ndarray] = ()):
        """Store the rows, which must not change later."""
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.rows[index]

    def __add__(self, later: SamplingMask) -> SamplingMask:
        return SamplingMask([*self.rows, *later.rows])

    @property
    def token_ids(self) -> list[list[int]]:
        """The ids of each position as lists, in vLLM's form."""
        return [row.tolist() for row in self.rows]

    @cached_property
    def values(self) -> np.ndarray:
        """The ids of all positions, one after the other, i32[sum of k]."""
        return np.concatenate([np.empty(0, np.int32), *self.rows])

    @cached_property
    def cu_lens(self) -> np.ndarray:
        """Beginnings of the positions in `values`, and the end of the last, i64[T + 1]."""
        return np.cumsum([0, *map(len, self.rows)])


class MaskRows:
    """Sampling masks of one sequence, in the order of its tokens, collected by `add` and returned by `take`."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._num_sent = 0

    def add(self, rows: np.ndarray) -> None:
        """Append the masks of the next tokens: i32[n, k], ids followed by -1."""
        self._rows += [row[row >= 0] for row in rows]  # copies: a view would keep the whole array

    def take(self, count: int, only_new: bool) -> SamplingMask:
        """Return the masks of the first `count` tokens; with only_new, only those that were not returned before, which
        are then dropped. Every call must have the same `only_new`. `count` may be below the number of masks, as tokens
        may have been sampled before it was known that the sequence had ended.
        """
        if not only_new:
            return SamplingMask(self._rows[:count])
        size = max(0, count - self._num_sent)
        new, self._rows = self._rows[:size], self._rows[size:]
        self._num_sent += len(new)
        return SamplingMask(new)
