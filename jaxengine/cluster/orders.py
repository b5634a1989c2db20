"""Orders of host 0 to its workers in addition to steps, and the answers: new weights, sleep, parts of weights.

An order is a name with arguments; a worker's answers may come in any order, while steps go on.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxengine.cluster.channel import Message
from jaxengine.runner.peers import NO_ANSWER, Answer, Orders

_CHECK_SECONDS = 0.05


class _Answers(list[Answer]):
    """Answers to one order: a list that, unlike a plain one, can be referred to weakly."""


class OpenOrders(Orders):
    """Host 0's orders, and the answers that have come. Any thread may give orders."""

    def __init__(
        self, announce: Callable[..., None], check: Callable[[], None], later: Callable[..., None], num_workers: int
    ):
        """Start without orders. announce, check: of the Cluster, whose errors they raise. later: calls a function on
        another thread. num_workers: number of answers to an order.
        """
        self._announce, self._check, self._later, self._num_workers = announce, check, later, num_workers
        self._numbers = itertools.count(1)
        # Answers by number of the order, as long as the function that waits for them exists.
        self._answers: weakref.WeakValueDictionary[int, _Answers] = weakref.WeakValueDictionary()
        self._changed = threading.Condition()

    def give(self, name: str, arrays: Sequence[np.ndarray] = (), /, **arguments: Any) -> Callable[[], list[Answer]]:
        """Send all workers the order `name`, and return a function that waits for their answers and returns them.
        Raises ClusterError, as that function does, if a process is lost.
        """
        number = next(self._numbers)
        with self._changed:
            found = self._answers[number] = _Answers()
        self._announce("order", arrays, number=number, name=name, arguments=arguments)
        return lambda: self._await(found)

    def leave(self, name: str, /, **arguments: Any) -> None:
        """Have another thread send all workers the order `name`, which none answers; return at once."""
        self._later(lambda: self._announce("order", (), number=NO_ANSWER, name=name, arguments=arguments))

    def answered(self, who: str, message: Message) -> None:
        """Record a worker's answer, `message`, and wake those that wait for it; dropped if nobody can. who: names the
        worker.
        """
        with self._changed:
            found = self._answers.get(message.fields["number"])
            if found is not None:  # else no caller can wait for it any more
                found.append(Answer(who, message.fields["content"], message.arrays))
                self._changed.notify_all()

    def _await(self, found: _Answers) -> list[Answer]:
        """Wait until `found` has the answers of all workers, and return it. Raises ClusterError if a process is lost or
        the engine is shut down.
        """
        with self._changed:
            while len(found) < self._num_workers:
                self._check()
                self._changed.wait(_CHECK_SECONDS)
            return found
