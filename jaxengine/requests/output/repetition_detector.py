"""Detection of an output that repeats itself, see RepetitionDetectionParams. A module of its own, as it needs numpy."""

from __future__ import annotations

import numpy as np

from jaxengine.requests.params.repetition import RepetitionDetectionParams

# stop_reason of an output that a repetition ended.
STOP_REASON = "repetition_detected"


class RepetitionDetector:
    """Detector of repetitions in one output, token by token, at a cost per token proportional to max_pattern_size."""

    def __init__(self, params: RepetitionDetectionParams):
        sizes = np.arange(1, params.max_pattern_size + 1)
        self._first = max(params.min_pattern_size, 1) - 1
        self._needed = sizes * (params.min_count - 1)
        # The last tokens, newest first, and for each size of a pattern how many of the newest tokens equal the one that
        # is a pattern's size before them.
        self._recent = np.full(len(sizes), -1, np.int64)
        self._equal = np.zeros(len(sizes), np.int64)

    def append(self, token_id: int) -> bool:
        """Add the output's next token; return whether the output now ends with a pattern, of min_pattern_size to
        max_pattern_size tokens, that occurs min_count times in a row.
        """
        self._equal += 1
        self._equal *= self._recent == token_id
        self._recent[1:] = self._recent[:-1]
        self._recent[0] = token_id
        return bool((self._equal >= self._needed)[self._first :].any())
