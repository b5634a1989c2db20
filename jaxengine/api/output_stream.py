"""What waits for one reader of a request's outputs. Knows nothing of engines, threads or processes."""

from __future__ import annotations

import asyncio
from typing import Any

from jaxengine.requests.outputs import RequestOutput
from jaxengine.requests.pooling_outputs import PoolingRequestOutput


class OutputStream:
    """Holds at most one output, to which later ones are joined, so that a slow reader costs no memory.

    All of it is used on one event loop.
    """

    def __init__(self, aggregate: bool):
        """aggregate: outputs carry what is new (RequestOutputKind.DELTA), not everything so far."""
        self._aggregate = aggregate
        self._waiting: RequestOutput | PoolingRequestOutput[Any] | None = None
        self._error: BaseException | None = None
        self._ready = asyncio.Event()

    def put(self, item: RequestOutput | PoolingRequestOutput[Any] | BaseException) -> None:
        """Adds an output, or the error that ends the stream."""
        if isinstance(item, BaseException):
            self._error = item
        elif isinstance(self._waiting, RequestOutput) and isinstance(item, RequestOutput):
            self._waiting.add(item, self._aggregate)
        else:
            self._waiting = item
        self._ready.set()

    async def get(self) -> Any:
        """What has come since the last call; waits for it. Raises the error once there is nothing else left."""
        await self._ready.wait()
        self._ready.clear()
        if self._waiting is not None:
            output, self._waiting = self._waiting, None
            if self._error is not None:
                self._ready.set()
            return output
        assert self._error is not None
        raise self._error
