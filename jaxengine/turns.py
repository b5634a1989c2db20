"""Thread pool with one queue for each owner, served in turn (round robin).

An owner is the holder of an API key; all requests with that key share one queue. Work without an owner (from Python, or
from a server with one key) may use all threads. An owner may also be a pair of names: a client, and the machine that
its work waits for.
"""

from __future__ import annotations

import contextvars
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

# Owner of the request that the current task or thread works for.
OWNER: ContextVar[str | None] = ContextVar("owner", default=None)

Owner = str | None | tuple[str | None, str | None]
_P = ParamSpec("_P")
_T = TypeVar("_T")


def share_of(owner: str | None, total: int) -> int:
    """Return how many of `total` threads an owner may occupy at once: half of them, rounded down, but at least one.
    Without an owner, all of them.
    """
    return total if owner is None else max(1, total // 2)


class Turns(Generic[_T]):
    """Waiting items, in one queue per owner, and the number of running items of each owner. At most `num_places` items
    run at once. Must be used by one thread at a time.

    Owners are served in turn. An owner that has as many running items as `share_of` allows is skipped. Owners that are
    pairs have queues of their own, and take turns by their first names, then by their second; the running items of all
    owners with the same first name, or with the same second name, count together against the share of that name.
    """

    def __init__(self, num_places: int):
        self._num_places, self._num_running = num_places, 0
        # By first name, the queues of its owners; none is empty. What is to be served next comes first in both. A
        # first name with many queues, such as a client that names many addresses, does not slow down the others.
        self._queues: OrderedDict[str | None, OrderedDict[Owner, deque[_T]]] = OrderedDict()
        # By the index of a name in its owner, and the name.
        self._running: Counter[tuple[int, str | None]] = Counter()

    def push(self, owner: Owner, item: _T) -> None:
        """Append an item to its owner's queue."""
        self._queues.setdefault(_names(owner)[0][1], OrderedDict()).setdefault(owner, deque()).append(item)

    def remove(self, owner: Owner, item: _T) -> None:
        """Remove an item from its owner's queue, if it is still there."""
        queue = self._queues.get(_names(owner)[0][1], {}).get(owner, deque())
        if item in queue:
            queue.remove(item)
            self._drop_if_empty(owner)

    def start(self) -> tuple[Owner, _T] | None:
        """Remove the next item that may run from its queue, count it as running, and return (owner, item). Returns None
        if all places are occupied or no waiting item may run.
        """
        if self._num_running >= self._num_places:
            return None
        for first, queues in self._queues.items():
            if self._may_run((0, first)):
                for owner in queues:
                    if all(map(self._may_run, _names(owner))):
                        return owner, self._take(owner)
        return None

    def _may_run(self, name: tuple[int, str | None]) -> bool:
        """Return whether a name, after its index in its owner, has fewer running items than its share."""
        return self._running[name] < share_of(name[1], self._num_places)

    def _take(self, owner: Owner) -> _T:
        """Remove and return the first item of an owner's queue, count it as running, and move the owner behind the
        others of its first name, and that name behind the others.
        """
        names = _names(owner)
        queues = self._queues[names[0][1]]
        item = queues[owner].popleft()
        self._num_running += 1
        self._running.update(names)
        queues.move_to_end(owner)
        self._queues.move_to_end(names[0][1])
        self._drop_if_empty(owner)
        return item

    def _drop_if_empty(self, owner: Owner) -> None:
        """Drop an owner's queue if it is empty, and its first name if that has no other."""
        first = _names(owner)[0][1]
        if not self._queues[first][owner]:
            del self._queues[first][owner]
            if not self._queues[first]:
                del self._queues[first]

    def end(self, owner: Owner) -> None:
        """Record that an item of this owner has ended, which frees its place."""
        self._num_running -= 1
        for each in _names(owner):
            self._running[each] -= 1
            if not self._running[each]:
                del self._running[each]


def _names(owner: Owner) -> list[tuple[int, str | None]]:
    """Return (index, name) for each name of an owner, in order; the one pair (0, name) for a single name or None."""
    return list(enumerate(owner if isinstance(owner, tuple) else (owner,)))


class _Work:
    """Call that waits for a thread, and the future of its result."""

    def __init__(self, call: Callable[[], Any]):
        self.future: Future[Any] = Future()
        # Released after the call, since the future lives longer than the data to which the call refers.
        self._call: Callable[[], Any] | None = call

    def run(self) -> None:
        """Make the call, unless it was cancelled, and set the result or the exception of its future."""
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

    def fail(self, error: Exception) -> None:
        """Set the exception of the future instead of making the call, unless it was cancelled."""
        self._call = None
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class FairThreads:
    """Threads that serve owners in turn (see Turns), at most `num_threads` at once; each call has a thread of its own.

    A process that ends waits for the calls that are running, and makes no others. Unlike in a ThreadPoolExecutor, a
    running call can see that the process is ending: its main thread is no longer alive.
    """

    def __init__(self, num_threads: int, name: str):
        self._turns: Turns[_Work] = Turns(num_threads)
        self._name = name
        self._lock = threading.Lock()

    def submit(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Queue `function(*args, **kwargs)` for a thread, to run in a copy of the caller's context, and return the
        future of its result.

        The call joins the queue of the context's OWNER. If its future is cancelled before it starts, it leaves the
        queue at once, and what it refers to is released.
        """
        return self.submit_for(OWNER.get(), function, *args, **kwargs)

    def submit_for(self, owner: Owner, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Queue a call as `submit` does, but in the queue of `owner`."""
        context = contextvars.copy_context()
        work = _Work(lambda: context.run(function, *args, **kwargs))

        def leave(done: Future[Any]) -> None:
            """Remove the call from its owner's queue if its future was cancelled."""
            if done.cancelled():
                with self._lock:
                    self._turns.remove(owner, work)

        with self._lock:
            self._turns.push(owner, work)
        work.future.add_done_callback(leave)
        self._start()
        return work.future

    def _start(self) -> None:
        """Start the threads of all queued calls that may run now; none if the process is ending. A call for which the
        system has no thread fails with its RuntimeError.
        """
        failed: list[tuple[_Work, RuntimeError]] = []
        with self._lock:
            while threading.main_thread().is_alive() and (turn := self._turns.start()) is not None:
                try:
                    threading.Thread(target=self._run, args=turn, name=self._name).start()
                except RuntimeError as error:
                    self._turns.end(turn[0])
                    failed.append((turn[1], error))
        for work, error in failed:  # not under the lock, as callbacks of futures may submit calls
            work.fail(error)

    def _run(self, owner: Owner, work: _Work) -> None:
        """Run one queued call on this thread, free its owner's place, and start the calls that may run then."""
        try:
            work.run()
        finally:
            with self._lock:
                self._turns.end(owner)
            self._start()
