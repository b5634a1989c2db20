"""Waiting queue of the fair policy: the client that has been served least is next.

It is the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2.
While two clients both have requests waiting, the service that they get differs by no more than twice the larger of
INPUT_WEIGHT * the longest input and OUTPUT_WEIGHT * the tokens that run at once, however long that lasts (their theorem
4.4).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.policy.waiting import WaitingQueue

# Service of one token, as in the paper.
INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2

_NOBODY = np.iinfo(np.int64).max


class FairQueue:
    """Waiting queue with a queue for each client, in order of arrival, and a counter of the service that it received.

    The next request is the first one of the client with the smallest counter; of equals, the one that arrived first. An
    input is charged when its request is first admitted, without tokens found in the prefix cache; an output token when
    the step that samples it is scheduled. Tokens computed again after preemption are not charged.

    When a client begins to wait, its counter is raised to the smallest counter of the clients that wait already, or to
    that of the client that waited last. A counter that such a raise would reach anyway is forgotten once its client
    neither waits nor runs; all are forgotten when no request waits or runs.

    Attributes:
      size: number of waiting requests.
      num_tokens: number of their prompt tokens.
    """

    def __init__(self, num_ranks: int = 1, max_num_seqs: int = 1):
        """Start empty, for requests that run on `num_ranks` replicas with `max_num_seqs` slots each."""
        self.num_tokens = 0
        self.size = 0
        # Number of the client whose request runs in a slot.
        self._owner = np.zeros((num_ranks, max_num_seqs), np.int64)
        self._forget_all()

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return self.size

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests that wait, in no particular order."""
        for number in self._numbers.values():
            yield from self._lines[number]

    @property
    def service(self) -> dict[str, int]:
        """Remembered counters, by client."""
        return {client: int(self._service[number]) for client, number in self._numbers.items()}

    def num_waiting(self, client: str) -> int:
        """Return the number of waiting requests of one client."""
        number = self._numbers.get(client)
        return 0 if number is None else len(self._lines[number])

    def push(self, request: Request) -> None:
        """Add a request to its client's queue, a new one at the end and a preempted one in its old position, at the
        front. When the client begins to wait, its counter is raised to the smallest one of those that wait, or, if none
        waits, to that of the client that waited last; idle clients at or below that are forgotten.
        """
        number = self._numbers.get(request.client)
        if number is None:
            number = self._add(request.client)
        begins, level = self._head[number] == _NOBODY, self._level()
        self._lines[number].push(request)
        self._head[number] = min(self._head[number], request.arrival_index)
        self.size += 1
        self.num_tokens += request.num_prompt_tokens
        self._last = None
        if begins:
            self._service[number] = max(int(self._service[number]), level)
            self._forget(level)

    def first(self) -> Request | None:
        """Return the first request of the waiting client with the smallest counter, among equals of the one whose
        request came first, without removing it; None if no request waits.
        """
        if not self.size:
            return None
        waiting = np.flatnonzero(self._head != _NOBODY)
        least = waiting[self._service[waiting] == self._service[waiting].min()]
        return self._lines[int(least[np.argmin(self._head[least])])].first()

    def remove(self, request: Request) -> None:
        """Remove a waiting request, at any position of its queue. If no request waits or runs then, all clients are
        forgotten. Raises KeyError if it does not wait.
        """
        number = self._numbers[request.client]
        line = self._lines[number]
        line.remove(request)
        head = line.first()
        self._head[number] = _NOBODY if head is None else head.arrival_index
        self.size -= 1
        self.num_tokens -= request.num_prompt_tokens
        if head is None:
            self._last = number
        self._forget_if_idle()

    def start(self, request: Request, num_tokens: int) -> None:
        """Remove a request that has got a slot, count it as running, and charge its client `num_tokens` tokens of
        input. Raises KeyError if it does not wait.
        """
        number = self._numbers[request.client]
        self._owner[request.rank, request.slot] = number
        self._running[number] += 1
        self._service[number] += INPUT_WEIGHT * num_tokens
        self.remove(request)

    def charge_outputs(self, rank: int, slots: np.ndarray) -> None:
        """Charge one output token to the client of each of a replica's running `slots` i64 [n]; a slot that occurs k
        times is charged k tokens.
        """
        counts = np.bincount(self._owner[rank, slots], minlength=len(self._service))
        self._service += OUTPUT_WEIGHT * counts

    def take_back_output(self, request: Request) -> None:
        """Undo the charge for one output token of a running request: the token will be dropped and sampled again."""
        self._service[self._numbers[request.client]] -= OUTPUT_WEIGHT

    def stop(self, request: Request) -> None:
        """Count a request as no longer running, and forget all clients if none waits or runs. Call it after `push` if
        the request waits again.
        """
        self._running[self._numbers[request.client]] -= 1
        self._forget_if_idle()

    def _level(self) -> int:
        """Return the counter to which that of a client is raised when it begins to wait: the smallest of the waiting
        clients, or that of the client that waited last; 0 if there is neither.
        """
        if self.size:
            return int(self._service[self._head != _NOBODY].min())
        return 0 if self._last is None else int(self._service[self._last])

    def _add(self, client: str) -> int:
        """Assign a free number, with a counter of 0, to a client without one, and return it. If no number is free, the
        arrays grow from n to 2 n + 8 entries.
        """
        if not self._free:
            size = len(self._lines)
            more = np.full(size + 8, _NOBODY)  # twice as many at least: n clients copy O(n) entries in all
            self._service, self._head = np.append(self._service, more), np.append(self._head, more)
            self._running = np.append(self._running, np.zeros_like(more))
            self._lines += [WaitingQueue() for _ in more]
            self._clients += [""] * len(more)
            self._free += range(len(self._lines) - 1, size - 1, -1)
        number = self._numbers[client] = self._free.pop()
        self._clients[number] = client
        self._service[number] = 0
        return number

    def _forget(self, level: int) -> None:
        """Remove the counters of clients without requests that are at most `level`: if such a client came back, its
        counter would be raised to that level anyway.
        """
        idle = (self._service <= level) & (self._head == _NOBODY) & (self._running == 0)
        for number in np.flatnonzero(idle).tolist():
            del self._numbers[self._clients[number]]
            self._service[number] = _NOBODY
            self._free.append(number)

    def _forget_if_idle(self) -> None:
        """Forget all clients and counters if no request waits or runs."""
        if not self.size and not self._running.any():
            self._forget_all()

    def _forget_all(self) -> None:
        """Clear all clients, counters, queues and numbers."""
        self._numbers: dict[str, int] = {}
        # By a client's number: service is _NOBODY for a free number; head is the arrival_index of the first waiting
        # request, _NOBODY without one.
        self._service, self._running, self._head = (np.zeros(0, np.int64) for _ in range(3))
        self._lines: list[WaitingQueue] = []
        self._clients: list[str] = []
        self._free: list[int] = []
        # The client that waited last, while no request waits.
        self._last: int | None = None
