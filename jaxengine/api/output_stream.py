"""Buffer between the engine and the reader of one request's outputs."""

from __future__ import annotations

import asyncio
from typing import Any

from jaxengine.requests.output.outputs import RequestOutput
from jaxengine.requests.pooling.outputs import PoolingRequestOutput


class OutputStream:
    """Buffer of one output, into which later outputs are merged, so that a slow reader does not cost memory.

    All methods must be called on the same event loop.
    """

    def __init__(self, aggregate: bool):
        """Make an empty buffer. aggregate: whether outputs only have new tokens (RequestOutputKind.DELTA), so that they
        are merged by concatenation.
        """
        self._aggregate = aggregate
        self._waiting: RequestOutput | PoolingRequestOutput[Any] | None = None
        self._error: BaseException | None = None
        self._ready = asyncio.Event()

    def put(self, item: RequestOutput | PoolingRequestOutput[Any] | BaseException) -> None:
        """Add an output, or the error that ends the stream, and wake the reader.

        A RequestOutput is merged into one that is waiting; a PoolingRequestOutput replaces it.
        """
        if isinstance(item, BaseException):
            self._error = item
        elif isinstance(self._waiting, RequestOutput) and isinstance(item, RequestOutput):
            self._waiting.add(item, self._aggregate)
        else:
            self._waiting = item
        self._ready.set()

    async def get(self) -> Any:
        """Wait for an output, and return what has arrived since the last call as one output. Raises the error that ends
        the stream once no output is left; it must not be called again after that.
        """
        await self._ready.wait()
        self._ready.clear()
        if self._waiting is not None:
            output, self._waiting = self._waiting, None
            if self._error is not None:
                self._ready.set()
            return output
        assert self._error is not None
        raise self._error
