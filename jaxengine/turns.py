"""Thread pool whose clients take turns, so that slow files of one client do not delay those of another.

An owner is the holder of an API key; all requests with that key share a turn. Work without an owner (from Python, or
from a server with one key) has nobody to leave room for and may use all threads.
"""

from __future__ import annotations

import contextvars
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

# Whose request the current task or thread works for.
OWNER: ContextVar[str | None] = ContextVar("owner", default=None)

_P = ParamSpec("_P")
_T = TypeVar("_T")


def share_of(owner: str | None, total: int) -> int:
    """Return how many of `total` threads an owner may occupy at once: half of them, at least one; all
    without an owner.
    """
    return total if owner is None else max(1, total // 2)


class Turns(Generic[_T]):
    """Items that wait for one of `num_places` places, in one queue per owner. Must be used by one thread at a time.

    Owners take turns; an owner that occupies its share of the places (`share_of`) lets the others go first.
    """

    def __init__(self, num_places: int):
        self._num_places = num_places
        # Queues that are not empty; the owner whose turn is next comes first.
        self._queues: OrderedDict[str | None, deque[_T]] = OrderedDict()
        self._running: Counter[str | None] = Counter()

    def push(self, owner: str | None, item: _T) -> None:
        """Put an item at the end of its owner's queue."""
        self._queues.setdefault(owner, deque()).append(item)

    def remove(self, owner: str | None, item: _T) -> None:
        """Take an item out of its owner's queue, if it is still there."""
        queue = self._queues.get(owner, deque())
        if item in queue:
            queue.remove(item)
            if not queue:
                del self._queues[owner]

    def start(self) -> tuple[str | None, _T] | None:
        """Give a place to the next waiting item and return (owner, item); None if no place is free for any item."""
        if self._running.total() >= self._num_places:
            return None
        free = (owner for owner in self._queues if self._running[owner] < share_of(owner, self._num_places))
        for owner in free:
            return owner, self._take(owner)
        return None

    def _take(self, owner: str | None) -> _T:
        """Return the first item of an owner's queue, counting a place as occupied; the owner's next turn is after the
        others'.
        """
        queue = self._queues[owner]
        item = queue.popleft()
        self._running[owner] += 1
        self._queues.move_to_end(owner)
        if not queue:
            del self._queues[owner]
        return item

    def end(self, owner: str | None) -> None:
        """Free a place that this owner occupied."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]


class _Work:
    """A call that waits for its turn, and the future of its result."""

    def __init__(self, call: Callable[[], Any]):
        self.future: Future[Any] = Future()
        # Dropped after the call, since futures are kept longer than the files that were read.
        self._call: Callable[[], Any] | None = call

    def run(self) -> None:
        """Make the call, unless it was cancelled, and settle its future."""
        call, self._call = self._call, None
        if call is None or not self.future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:
            self.future.set_exception(error)
            # The traceback refers to this frame: a cycle otherwise.
            self = call = None
        else:
            self.future.set_result(result)


class FairThreads:
    """A thread pool whose owners take turns (see Turns). Threads are started on first use."""

    def __init__(self, num_threads: int, name: str):
        self._turns: Turns[_Work] = Turns(num_threads)
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()

    def submit(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Queue `function(*args, **kwargs)` for a thread, to run in the caller's context; return the future of its
        result.

        It waits for a turn of the context's OWNER. A future that is cancelled before then leaves the queue at once, and
        what the call refers to is released.
        """
        owner, context = OWNER.get(), contextvars.copy_context()
        work = _Work(lambda: context.run(function, *args, **kwargs))

        def leave(done: Future[Any]) -> None:
            if done.cancelled():
                with self._lock:
                    self._turns.remove(owner, work)

        with self._lock:
            self._turns.push(owner, work)
        work.future.add_done_callback(leave)
        self._start()
        return work.future

    def _start(self) -> None:
        """Hand every queued call that may run now to the threads."""
        with self._lock:
            while (turn := self._turns.start()) is not None:
                self._threads.submit(self._run, *turn)

    def _run(self, owner: str | None, work: _Work) -> None:
        try:
            work.run()
        finally:
            with self._lock:
                self._turns.end(owner)
            self._start()
