"""Limits on waiting requests, and the time after which a refused request should be retried.

The engine's process applies the limits to its queue. An API process applies them to the load that it last received,
which it gets after every step.
"""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass

from jaxengine.scheduler.base.errors import OverloadedError, RequestError
from jaxengine.server.link.messages import Load

_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 1.0, 60.0


@dataclass(frozen=True)
class QueueLimits:
    """Limits on requests that wait because no slot is free.

    Attributes:
      num_slots: number of requests that run at once.
      max_requests: number of requests that may wait.
      max_tokens: number of prompt tokens that may wait; None for no separate limit.
    """

    num_slots: int
    max_requests: int
    max_tokens: int | None

    @classmethod
    def of(cls, num_slots: int, max_requests: int | None, max_tokens: int | None) -> QueueLimits:
        """Return the limits for options of ServerConfig. max_requests: None for four times num_slots."""
        return cls(num_slots, 4 * num_slots if max_requests is None else max_requests, max_tokens)

    def check(self, load: Load, num_requests: int, num_tokens: int) -> None:
        """Raise OverloadedError, with the load's retry_after, if `num_requests` more requests, with `num_tokens` prompt
        tokens together, would exceed the limits at this load. Raise RequestError for more requests than may run and
        wait at all.

        The token limit does not apply while no request is waiting.
        """
        most = self.num_slots + self.max_requests
        if num_requests > most:
            text = f"n is {num_requests}; allowed: 1 to {most} (max_num_seqs and max_num_queued_reqs)"
            raise RequestError(text, param="n", value=num_requests)
        if num_requests > most - load.num_running - load.num_waiting:
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
        """Raise OverloadedError if a client with `num_waiting` requests in the queue may not add `num_requests` more.

        A fair share leaves others half of the queue: the client may fill the free slots and half of max_requests. A
        client with no request waiting is never refused here.
        """
        room = self.num_slots + self.max_requests // 2 - load.num_running - num_waiting
        if num_waiting and num_requests > room:
            raise OverloadedError(
                f"{num_waiting} requests of this client are waiting already (with scheduling_policy 'fair' one may "
                f"have half of max_num_queued_reqs, which is {self.max_requests})",
                retry_after=load.retry_after,
            )


class RetryEstimate:
    """Estimate of when a queue will have advanced, from the rate at which requests have ended recently."""

    def __init__(self):
        self._ends: collections.deque[float] = collections.deque(maxlen=64)

    def ended(self, count: int) -> None:
        """Record that `count` requests have ended now; only the last 64 ends are kept."""
        self._ends.extend([time.monotonic()] * min(count, 64))

    def seconds(self, num_waiting: int) -> float:
        """Return the estimated seconds until a quarter of the waiting requests will have run, at least 1 and at most
        60; 1 while fewer than two ends are recorded.
        """
        if len(self._ends) < 2:
            return _LEAST_RETRY_SECONDS
        each = (time.monotonic() - self._ends[0]) / len(self._ends)
        return min(max(each * num_waiting / 4, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
