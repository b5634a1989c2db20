"""Threads for what of a request takes long, reading and tokenising, so that the event loop answers others meanwhile.

Owns how much of it runs at once and how much may wait. Knows nothing of what is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from scheduler.errors import OverloadedError

# Pieces of work that may wait for a thread. Each holds a request's body or its texts.
_MAX_WAITING = 256

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Workers:
    """A few threads with a bounded line in front of them; used on one event loop."""

    def __init__(self, num_threads: int = 2, max_waiting: int = _MAX_WAITING):
        self._threads = ThreadPoolExecutor(num_threads, "worker")
        self._most = num_threads + max_waiting
        self._count = 0

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The function's result. Raises what it raises, and OverloadedError where the line is full."""
        if self._count >= self._most:
            raise OverloadedError(f"{self._count} requests are being read already; try again later")
        self._count += 1
        # Counted until it has run: a caller that leaves does not end what a thread has begun.
        work = asyncio.ensure_future(
            asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        )
        work.add_done_callback(self._ended)
        return await asyncio.shield(work)

    def _ended(self, work: asyncio.Future[_T]) -> None:
        self._count -= 1
        if not work.cancelled():
            work.exception()  # it may be that nobody waits for it any more
