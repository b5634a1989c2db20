"""Orders of host 0 to its workers in addition to steps, and the answers: new weights, sleep, parts of weights.

An order is a name with arguments. Workers' answers may arrive in any sequence, while steps go on.
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
    """Answers to one order: a list that, unlike a plain one, can be the target of a weak reference."""


class OpenOrders(Orders):
    """Host 0's orders that are not complete, with the answers so far. Any thread may give orders."""

    def __init__(
        self, announce: Callable[..., None], check: Callable[[], None], later: Callable[..., None], num_workers: int
    ):
        """Start without orders.

        announce, check: methods of the Cluster, whose errors are raised. later: calls a function on another thread.
        num_workers: number of answers to an order.
        """
        self._announce, self._check, self._later, self._num_workers = announce, check, later, num_workers
        self._numbers = itertools.count(1)
        # Answers by number of the order; an entry lasts as long as the function that waits for them.
        self._answers: weakref.WeakValueDictionary[int, _Answers] = weakref.WeakValueDictionary()
        self._changed = threading.Condition()

    def give(self, name: str, arrays: Sequence[np.ndarray] = (), /, **arguments: Any) -> Callable[[], list[Answer]]:
        """Send all workers the order `name`, with these arrays and arguments (JSON values); return a function that
        waits for and returns the answers of all workers.

        Answers are in the order in which they arrive. Raises ClusterError if a process is lost; so does the returned
        function, also once the engine is shut down.
        """
        number = next(self._numbers)
        with self._changed:
            found = self._answers[number] = _Answers()
        self._announce("order", arrays, number=number, name=name, arguments=arguments)
        return lambda: self._await(found)

    def leave(self, name: str, /, **arguments: Any) -> None:
        """Have another thread send all workers the order `name`, which they do not answer; return at once.

        Errors of sending are dropped: a lost process is reported by the next call that checks for it.
        """
        self._later(lambda: self._announce("order", (), number=NO_ANSWER, name=name, arguments=arguments))

    def answered(self, who: str, message: Message) -> None:
        """Record a worker's answer, `message`, and wake the threads that wait; drop it if none can wait for it.

        who: name of the worker.
        """
        with self._changed:
            found = self._answers.get(message.fields["number"])
            if found is not None:  # else no caller can wait for it any more
                found.append(Answer(who, message.fields["content"], message.arrays))
                self._changed.notify_all()

    def _await(self, found: _Answers) -> list[Answer]:
        """Wait until all workers have answered, and return the answers. Raises ClusterError if a process is lost or the
        engine is shut down.
        """
        with self._changed:
            while len(found) < self._num_workers:
                self._check()
                self._changed.wait(_CHECK_SECONDS)
            return found
