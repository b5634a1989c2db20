"""Choice of how many tokens a decode has in the next step (its last one and drafts), by what pays at this number of
rows.

A width's value is the expected number of tokens per row, for each second that its steps take. Both are measured while
serving: acceptance of drafts, by draft position, and step times, by width and number of rows. Grammar drafts, which
must be right, are known in advance. A width not yet tried at a number of rows is tried, and one that lost is tried
again: soon after the choice has changed, ever more rarely while it does not, and when new prompts have come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

# Number of trial steps of a width before it is compared with others.
TRIALS = 3
# Steps between two trials of widths that lost: initially, and at most. Each trial that changes nothing doubles them.
RETRY_STEPS = 8
MOST_RETRY_STEPS = 32
# Weight of the latest step in the average step time, and of the latest row in the average acceptance: texts change
# faster than machines do.
_LATEST_STEP = 0.1
_LATEST_ROW = 0.3
# Least expected acceptance of the first draft of rows whose texts are new, and its decay with each new text until a
# draft is accepted.
_OF_NEW_TEXT, _LEFT = 0.5, 0.85


@dataclass
class _Retries:
    """Schedule of trials of the widths that lost against `best`.

    Attributes:
      since: steps since the last trial. interval: steps from one trial to the next.
      wider: whether the next trial is of the next wider width, else of the next narrower one.
    """

    best: int
    since: int = 0
    interval: int = RETRY_STEPS
    wider: bool = True


class DraftWidth:
    """Chooser between width 1 and the given widths; without any, the choice is always 1.

    Attributes:
      kept: f64 [W - 1], for each draft position the share of rows whose draft there was accepted, among rows whose
        earlier drafts all were. The share at the first position changes with every text, the later ones hardly do; so
        one accepted draft suffices to estimate what more drafts would bring.
    """

    def __init__(self, most_rows: Mapping[int, int]):
        """Start without measurements. most_rows: for each width, the most rows that a step of that width may have."""
        self._most_rows = dict(sorted(most_rows.items()))
        self.kept = np.ones(max(most_rows, default=1) - 1)
        # By (width, bit length of the number of rows).
        self._seconds: dict[tuple[int, int], float] = {}
        self._num_tried: dict[tuple[int, int], int] = {}
        # By the bit length of the number of rows.
        self._retries: dict[int, _Retries] = {}
        self._num_prefills, self._of_new_text = 0, _OF_NEW_TEXT

    def has_any(self, num_rows: int) -> bool:
        """Return whether decodes of a step with at most `num_rows` decodes in a replica may have more than one token
        each.
        """
        return 0 < num_rows <= max(self._most_rows.values(), default=0)

    def choose(self, num_rows: int, runs: np.ndarray) -> int:
        """Return the width for a step of at most num_rows decodes in a replica; 1 if drafts do not pay. Widths that
        allow fewer rows are left out and, without proposed drafts, those wider than the longest run needs; if only 1 is
        left, it is returned and nothing is counted. Each width is tried TRIALS times, the widest first; then the one
        with the most expected tokens per second is taken, except in `_retried` steps. After as many prefills as there
        are rows, the expected share of kept drafts rises to that of new text. Counts trials, so it must be called once
        for each step.

        runs: i32 [n], for the decodes of all replicas, how many grammar drafts each has, -1 for one with proposed
        drafts.
        """
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
        if self._num_prefills >= num_rows:
            self._num_prefills, self.kept[0] = 0, max(self.kept[0], self._of_new_text)
            self._of_new_text *= _LEFT
        # A step may get a smaller width than was chosen, so some widths may have no measured time.
        known = [width for width in allowed if (width, size) in self._seconds]
        best = max(known, key=lambda width: self.expected(width, runs) / self._seconds[width, size], default=1)
        return self._retried(best, allowed, num_rows)

    def _retried(self, best: int, allowed: list[int], num_rows: int) -> int:
        """Return `best`, or, if a trial is due, the next wider or narrower width of `allowed`, alternately. Counts
        steps and trials.

        allowed: widths, ascending, at least two, `best` among them. num_rows: see `choose`.
        """
        retries = self._retries.setdefault(num_rows.bit_length(), _Retries(best))
        if retries.best != best:
            retries.best, retries.since, retries.interval = best, 0, RETRY_STEPS
        retries.since += 1
        if retries.since < retries.interval:
            return best
        retries.since, retries.interval = 0, min(2 * retries.interval, MOST_RETRY_STEPS)
        place = allowed.index(best)
        wider = place == 0 or (retries.wider and place + 1 < len(allowed))
        retries.wider = not wider
        return allowed[place + 1 if wider else place - 1]

    def prefilled(self) -> None:
        """Count a step with prompt tokens. After as many such steps as there are rows, the running texts are taken to
        be new, and more is expected of the first draft again.
        """
        self._num_prefills += 1

    def expected(self, width: int, runs: np.ndarray) -> float:
        """Return the mean number of tokens that a row is expected to get in a step of this width: one, and its run
        (`choose`), at most width - 1, or, for a run of -1, that which `kept` predicts.
        """
        guessed = np.cumprod(self.kept[: width - 1]).sum()
        return 1.0 + float(np.where(runs < 0, guessed, np.minimum(runs, width - 1)).mean())

    def observe(self, width: int, num_rows: int, accepted: np.ndarray, seconds: float | None) -> None:
        """Update the moving averages `kept` and step times with the result of a step of decodes only, with at most
        `num_rows` rows in a replica.

        Args:
          width: width of the step; with 1, `accepted` is not used.
          accepted: i64 [n], number of accepted drafts of each row with proposed drafts.
          seconds: duration of the step, of which at most four times the average so far counts; None if unknown.
        """
        if width > 1:
            place = np.arange(width - 1)
            came, right = ((accepted[:, None] >= least).sum(axis=0) for least in (place, place + 1))
            share = right / np.maximum(came, 1)
            self.kept[: width - 1] += (1 - (1 - _LATEST_ROW) ** came) * (share - self.kept[: width - 1])
            if right[0]:
                self._of_new_text = _OF_NEW_TEXT
        if seconds is not None:
            key = width, num_rows.bit_length()
            before = self._seconds.get(key)
            # A step may have waited for something else, so no single one counts for much.
            seconds = seconds if before is None else before + _LATEST_STEP * (min(seconds, 4 * before) - before)
            self._seconds[key] = seconds
