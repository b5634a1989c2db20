"""The drafts of one rank's decodes in the step being put together: how many each has, and those that the host knows.

A draft is a guess, made where the proposer is, or a token that must be right: a grammar allows no other in its place.
Knows nothing of pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.slots import Slots
from scheduler.token_params import LAST_TOKEN, MASK

_NONE = np.empty(0, np.bool_)


class DecodeDrafts:
    """For each step `begin`; then, where decodes may be widened, `look_ahead` and `widen`.

    Attributes:
      widths: tokens of each decode, its last one and drafts, i32[n]; None: one.
    """

    def __init__(self, config: SchedulerConfig, slots: Slots):
        self._config = config
        self._slots = slots
        self.widths: np.ndarray | None = None
        # As `look_ahead` gives them, the tokens of these by row, and all that the host has, by row.
        self._runs = np.empty(0, np.int32)
        self._masked = _NONE
        self._forced: dict[int, Sequence[int]] = {}
        self._known: dict[int, Sequence[int] | np.ndarray] = {}

    @property
    def is_forced(self) -> np.ndarray:
        """Of a step with drafts which decodes have no guesses, bool[n]; else empty."""
        return _NONE if self.widths is None else self._runs >= 0

    @property
    def is_guided(self) -> np.ndarray:
        """Of a step with drafts which decodes have guesses under a grammar, bool[n]; else empty."""
        return _NONE if self.widths is None else self._masked & (self._runs < 0) & (self.widths > 1)

    def begin(self) -> None:
        """Every decode has one token."""
        self.widths = None

    def look_ahead(self, decodes: np.ndarray, most: int) -> np.ndarray:
        """How many drafts each of the slots i64[n] has that must be right, i32[n], at most so many; -1 where any would
        be guesses.

        A request whose next choice the host must prepare has none but those that its grammar leaves no choice, or
        guesses where the configuration lets it; without guesses no request has others.
        """
        s = self._slots
        self._masked = s.features[decodes] & MASK > 0
        # min_tokens forbids stop tokens up to a place that must be known.
        is_early = s.num_tokens[decodes] < s.min_stop[decodes]
        is_prepared = (s.features[decodes] & (MASK | LAST_TOKEN) > 0) | is_early
        has_none = is_prepared | (not self._config.guesses)
        self._runs, self._forced = np.where(has_none, 0, -1).astype(np.int32), {}
        if self._config.forced is not None:
            for row in np.flatnonzero(self._masked & ~is_early).tolist():
                slot = decodes[row]
                room, num_output = s.limit[slot] - s.num_tokens[slot], s.num_tokens[slot] - s.num_prompt[slot]
                tokens = self._config.forced(s.requests[slot], int(num_output), min(most, int(room) - 1))
                if tokens is not None:
                    self._forced[row], self._runs[row] = tokens, len(tokens)
                elif self._config.guided:
                    self._runs[row] = -1
        return self._runs

    def widen(self, decodes: np.ndarray, width: int) -> np.ndarray:
        """Gives the decodes that `look_ahead` was asked of up to `width` tokens each; `widths`."""
        s = self._slots
        widths = np.minimum(s.limit[decodes] - s.num_tokens[decodes], width)
        self.widths = np.where(self._runs < 0, widths, 1 + np.minimum(self._runs, width - 1))
        self._known = {row: tokens[: width - 1] for row, tokens in self._forced.items() if tokens}
        if self._config.draft is not None:
            for row in np.flatnonzero(self._runs < 0).tolist():
                tokens = self._config.draft(s.known_token_ids(decodes[row]), int(self.widths[row]) - 1)
                self._known[row], self.widths[row] = tokens, 1 + len(tokens)
        return self.widths

    def token_ids(self, last: np.ndarray | None) -> np.ndarray | None:
        """The decodes' tokens as ScheduledBatch has them; `last` ones i32[n], None where the device knows these."""
        if self.widths is None or (last is None and not self._known):
            return last
        first = np.cumsum(self.widths, dtype=np.int64) - self.widths
        tokens = np.full(int(self.widths.sum()), -1, np.int32)
        tokens[first] = -1 if last is None else last
        for row, drafts in self._known.items():
            tokens[first[row] + 1 : first[row] + 1 + len(drafts)] = drafts
        return tokens
