"""How many requests may wait, and when one that is refused should come again.

The engine's process applies the limits to what is; an API process, which hears of it after every step, to what it
knows, so that a refusal does not have to wait for a step.
"""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass

from jaxengine.server.link.messages import Load
from scheduler.errors import OverloadedError, RequestError

_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 1.0, 60.0


@dataclass(frozen=True)
class QueueLimits:
    """What may wait beyond the requests that find a free slot.

    Attributes:
      num_slots: requests that run at once.
      max_requests: that may wait.
      max_tokens: prompt tokens that may wait; None for no limit of its own.
    """

    num_slots: int
    max_requests: int
    max_tokens: int | None

    @classmethod
    def of(cls, num_slots: int, max_requests: int | None, max_tokens: int | None) -> QueueLimits:
        """With the options of ServerConfig; max_requests None: four times as many as run."""
        return cls(num_slots, 4 * num_slots if max_requests is None else max_requests, max_tokens)

    def check(self, load: Load, num_requests: int, num_tokens: int) -> None:
        """Raises OverloadedError for `num_requests` more with `num_tokens` prompt tokens, RequestError for more than
        ever find room. Of tokens there may be any number while nobody waits."""
        most = self.num_slots + self.max_requests
        if num_requests > most:
            text = f"n is {num_requests}; allowed are 1 to {most} (max_num_seqs and max_num_queued_reqs)"
            raise RequestError(text, param="n", value=num_requests)
        places = most - load.num_running - load.num_waiting
        if num_requests > places:
            raise OverloadedError(
                f"{load.num_waiting} requests are waiting already (max_num_queued_reqs is {self.max_requests})",
                retry_after=load.retry_after,
            )
        if self.max_tokens is not None and load.num_waiting and load.num_waiting_tokens + num_tokens > self.max_tokens:
            raise OverloadedError(
                f"{load.num_waiting_tokens} prompt tokens are waiting already (max_num_queued_tokens is "
                f"{self.max_tokens})",
                retry_after=load.retry_after,
            )

    def check_client(self, load: Load, num_waiting: int, num_requests: int) -> None:
        """Raises OverloadedError where `num_requests` more of a client that has `num_waiting` in line would leave less
        than half of the line to others: their fair share begins with a place in it."""
        places = self.num_slots + self.max_requests // 2 - load.num_running - num_waiting
        if num_waiting and num_requests > places:
            raise OverloadedError(
                f"{num_waiting} requests of this client are waiting already (with scheduling_policy 'fair' one may "
                f"have half of max_num_queued_reqs, which is {self.max_requests})",
                retry_after=load.retry_after,
            )


class RetryEstimate:
    """When a queue will have moved, from how fast requests ended lately."""

    def __init__(self):
        self._ends: collections.deque[float] = collections.deque(maxlen=64)

    def ended(self, count: int) -> None:
        """`count` requests ended now."""
        self._ends.extend([time.monotonic()] * min(count, 64))

    def seconds(self, num_waiting: int) -> float:
        """Until a quarter of the waiting ones will have run, at least 1 and at most 60."""
        if len(self._ends) < 2:
            return _LEAST_RETRY_SECONDS
        each = (time.monotonic() - self._ends[0]) / len(self._ends)
        return min(max(each * num_waiting / 4, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
