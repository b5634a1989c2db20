"""Queue of the requests that wait for a slot."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jaxengine.scheduler.base.request import Request


class WaitingQueue:
    """Queue ordered by arrival, or by priority and then arrival. A preempted request returns to its old position, which
    is the front.

    A request that is removed from the middle leaves a stale heap entry, which is dropped when it reaches the top.

    Attributes:
      size: number of waiting requests.
      num_tokens: number of their prompt tokens.
    """

    def __init__(self, policy: str = "fcfs"):
        """Start empty. policy: "priority" orders by priority and then arrival, any other value by arrival."""
        self._by_priority = policy == "priority"
        self._heap: list[tuple[int, int, int, Request]] = []
        self._entries: dict[Request, int] = {}
        self._num_pushed = 0
        self.size = self.num_tokens = 0

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return self.size

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiting requests, in no particular order."""
        return iter(self._entries)

    def push(self, request: Request) -> None:
        """Add a request at its position in the order of the queue."""
        self._num_pushed += 1
        self.size += 1
        self.num_tokens += request.num_prompt_tokens
        self._entries[request] = self._num_pushed
        priority = request.priority if self._by_priority else 0
        heapq.heappush(self._heap, (priority, request.arrival_index, self._num_pushed, request))

    def first(self) -> Request | None:
        """Return the request with the smallest priority (if the policy is "priority") and then the earliest arrival,
        without removing it; None if the queue is empty.
        """
        while self._heap:
            _, _, number, request = self._heap[0]
            if self._entries.get(request) == number:
                return request
            heapq.heappop(self._heap)
        return None

    def start(self, request: Request, num_tokens: int) -> None:
        """Remove a request that has got a slot. num_tokens: not used here; the fair policy's queue charges its client
        for them. Raises KeyError if the request is not in the queue.
        """
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a request from any position of the queue. Raises KeyError if it is not in the queue."""
        del self._entries[request]
        self.size -= 1
        self.num_tokens -= request.num_prompt_tokens
        if len(self._heap) > 64 + 2 * len(self._entries):
            self._heap = [entry for entry in self._heap if self._entries.get(entry[3]) == entry[2]]
            heapq.heapify(self._heap)
