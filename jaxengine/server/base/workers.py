"""Threads for the slow parts of requests, parsing, tokenising and writing, so that the event loop stays responsive.

Limits how many calls run at once and how many may wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from jaxengine.requests.output.outputs import RequestOutput
from jaxengine.scheduler.base.errors import OverloadedError

# Calls that may wait for a thread. Each keeps a request's body or texts in memory.
_MAX_WAITING = 256
# Log-probabilities of so many positions take some ten milliseconds to write.
_MANY_POSITIONS = 1000

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Workers:
    """Thread pool of `num_threads`, with a queue of at most `max_waiting` further calls, for one event loop."""

    def __init__(self, num_threads: int = 2, max_waiting: int = _MAX_WAITING):
        self._threads = ThreadPoolExecutor(num_threads, "worker")
        self._most = num_threads + max_waiting
        self._count = 0

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `function` on a thread; return its result or raise its exception.

        If the caller is cancelled, the function still runs to its end, and counts as running until then. Raises
        OverloadedError, without running the function, if the queue is full.
        """
        if self._count >= self._most:
            raise OverloadedError(f"{self._count} requests are being read already; try again later")
        self._count += 1
        # Counted until it has run: cancelling the caller does not stop the thread.
        work = asyncio.ensure_future(
            asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        )
        work.add_done_callback(self._ended)
        return await asyncio.shield(work)

    def _ended(self, work: asyncio.Future[_T]) -> None:
        """Decrease the count of calls for one that has ended on its thread, and mark its exception as retrieved."""
        self._count -= 1
        if not work.cancelled():
            work.exception()  # mark as retrieved: there may be no caller any more


async def written(output: RequestOutput, write: Callable[[], _T]) -> _T:
    """Return `write()`, which writes an engine's output; on a thread if its prompt and completions have
    log-probabilities at more than _MANY_POSITIONS positions together.
    """
    number = len(output.prompt_logprobs or ()) + sum(len(each.logprobs or ()) for each in output.outputs)
    return await asyncio.to_thread(write) if number > _MANY_POSITIONS else write()
