"""How many tokens a decode has in the next step: its last one and drafts, as many as pay at this number of rows.

A width is worth the tokens that a row of it is expected to bring, for each second that its steps take. Both are
measured while serving: which drafts were right, by place, and how long steps took, by width and number of rows. Of
drafts that must be right it is told before. A width that has not been tried at a number of rows is, and one that lost
is tried again now and then, for what runs changes. Tokens do not depend on the choice. Knows no device and no request.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

# Steps of a width that are tried before it is judged, and steps between two trials of one that lost, by turns the next
# wider and the next narrower one.
TRIALS = 3
RETRY_STEPS = 16
# The weight of the latest step, or row, in what is remembered of those before.
_LATEST = 0.1


class DraftWidth:
    """Chooses among 1 and the widths it is given; without any, always 1.

    Attributes:
      kept: f64[W - 1], the share of rows in which the draft at each place was accepted.
    """

    def __init__(self, most_rows: Mapping[int, int]):
        """most_rows: for each width, the most rows of a step that may have it."""
        self._most_rows = dict(sorted(most_rows.items()))
        self.kept = np.ones(max(most_rows, default=1) - 1)
        # By (width, class of numbers of rows).
        self._seconds: dict[tuple[int, int], float] = {}
        self._num_tried: dict[tuple[int, int], int] = {}
        self._num_steps = 0

    def has_any(self, num_rows: int) -> bool:
        """Whether a step of at most so many decodes in a rank may have more than one token of each."""
        return 0 < num_rows <= max(self._most_rows.values(), default=0)

    def choose(self, num_rows: int, runs: np.ndarray) -> int:
        """The width for a step of at most so many decodes in a rank. runs: i32[n], of all decodes, how many drafts each
        has that must be right, -1 where any would be guesses."""
        guesses, longest, size = bool((runs < 0).any()), 1 + int(runs.max(initial=0)), num_rows.bit_length()
        allowed = [1]
        for width, most in self._most_rows.items():
            if num_rows <= most and (guesses or allowed[-1] < longest):
                allowed.append(width)
        if len(allowed) == 1:
            return 1
        for width in reversed(allowed):
            tried = self._num_tried.get((width, size), 0)
            if tried < TRIALS:
                self._num_tried[width, size] = tried + 1
                return width
        # A step may get less than was chosen: a width that none ever had has no time.
        known = [width for width in allowed if (width, size) in self._seconds]
        best = max(known, key=lambda width: self.expected(width, runs) / self._seconds[width, size], default=1)
        self._num_steps += 1
        num_retries, since = divmod(self._num_steps, RETRY_STEPS)
        if since:
            return best
        place = allowed.index(best) + (1 if num_retries % 2 else -1)
        return allowed[min(max(place, 0), len(allowed) - 1)]

    def expected(self, width: int, runs: np.ndarray) -> float:
        """Tokens that a row is expected to bring in a step of this width; runs: as in `choose`."""
        drafts = np.where(runs < 0, self.kept[: width - 1].sum(), np.minimum(runs, width - 1))
        return 1.0 + float(drafts.mean())

    def observe(self, width: int, num_rows: int, accepted: np.ndarray, seconds: float | None) -> None:
        """Told of a step of at most `num_rows` rows in a rank: drafts accepted of each row with guesses, i64[n], and
        how long it took, if known."""
        if width > 1 and len(accepted):
            share = (accepted[:, None] > np.arange(width - 1)).mean(axis=0)
            self.kept[: width - 1] += (1 - (1 - _LATEST) ** len(accepted)) * (share - self.kept[: width - 1])
        if seconds is not None:
            key = width, num_rows.bit_length()
            before = self._seconds.get(key)
            # The first of its kind may have waited for something else; no single step counts for much.
            seconds = seconds if before is None else before + _LATEST * (min(seconds, 4 * before) - before)
            self._seconds[key] = seconds
