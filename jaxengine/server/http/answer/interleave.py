"""Merging of several streams of outputs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")


async def interleave(
    start: Callable[[int], AsyncIterator[T]], number: int, at_once: int
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index, item) from the streams `start(0)` to `start(number - 1)`, at most `at_once` of them concurrently.

    start: returns an async generator; called when a stream may begin. Items of one stream stay in order. at_once: 1 or
    more. Each stream is at most one item ahead of the reader, so that a slow reader holds the streams back. Raises the
    first error of any stream. All streams are closed in every case.
    """
    if number == 1:
        async with _closing(start(0)) as stream:
            async for item in stream:
                yield 0, item
        return
    waiting: asyncio.Queue[Any] = asyncio.Queue(1)
    indices = iter(range(number))

    async def work() -> None:
        """Put the items of streams into the queue, each with its stream's number, one stream after another until none
        is left; then put None, or the error that ended a stream.
        """
        try:
            for index in indices:
                async with _closing(start(index)) as stream:
                    async for item in stream:
                        await waiting.put((index, item))
        except Exception as error:
            await waiting.put(error)
        else:
            await waiting.put(None)

    workers = [asyncio.create_task(work()) for _ in range(min(number, at_once))]
    running = len(workers)
    try:
        while running:
            item = await waiting.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _closing(stream: AsyncIterator[T]) -> contextlib.aclosing[AsyncGenerator[T, None]]:
    """Return a context manager that enters with the stream, an async generator, and closes it at the end."""
    return contextlib.aclosing(cast("AsyncGenerator[T, None]", stream))
