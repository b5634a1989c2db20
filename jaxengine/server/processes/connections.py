"""Limits on idle connections: how long one may wait for its request, and how many there may be.

A connection is idle from its first byte, or its last answer, until the headers of a request are complete. Partial
headers, or a body after its answer, do not change that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

# Seconds between two log lines, which count closed connections together so that they cannot fill a disk.
_LOG_SECONDS = 10.0


class Connections:
    """Open connections of a server process. Calling this object creates the protocol of a new connection, so it can be
    uvicorn's `http` option.
    """

    def __init__(self, most: int, read_timeout: float):
        """Start without connections. most: largest number of connections. read_timeout: seconds that a connection may
        wait for a request.
        """
        self._most = most
        self.read_timeout = read_timeout
        self._count = 0
        # Idle connections, those idle for longest first.
        self._waiting: dict[_Protocol, None] = {}
        self._closed: dict[str, int] = {}
        self._logged_at = -_LOG_SECONDS

    def __call__(self, *args: Any, **kwargs: Any) -> _Protocol:
        """Return the protocol of a new connection, which is counted once `made` is called. Arguments: those of
        uvicorn's protocol.
        """
        return _Protocol(self, *args, **kwargs)

    def made(self, protocol: _Protocol) -> None:
        """Add a connection, which is idle. If there are too many, close the one that has been idle for longest, or this
        one if no other is idle.
        """
        self._count += 1
        if self._count > self._most:
            victim = next(iter(self._waiting), protocol)
            self.close(victim, f"there are more than {self._most}")
        self.waits(protocol)

    def waits(self, protocol: _Protocol) -> None:
        """Record that a connection is idle from now on, and move it to the end of the idle connections."""
        self._waiting.pop(protocol, None)
        self._waiting[protocol] = None

    def works(self, protocol: _Protocol) -> None:
        """Record that a connection has a request, so that it is not closed to make room."""
        self._waiting.pop(protocol, None)

    def lost(self, protocol: _Protocol) -> None:
        """Remove a connection that has ended from the count and from the idle connections. Call it once for each
        connection.
        """
        self._count -= 1
        self._waiting.pop(protocol, None)

    def close(self, protocol: _Protocol, why: str) -> None:
        """Close an idle connection at once. why: reason; closures are counted by reason, and logged every 10 s at most.

        A closure within 10 s of the last log lines is logged together with later ones.
        """
        self._waiting.pop(protocol, None)
        protocol.transport.abort()
        self._closed[why] = self._closed.get(why, 0) + 1
        now = time.monotonic()
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            for reason, count in self._closed.items():
                logger.warning("connections without a request that were closed, because %s: %d", reason, count)
            self._closed.clear()


class _Protocol(H11Protocol):
    """uvicorn's protocol with an idle timeout. It uses h11 because httptools does not limit the size of headers."""

    def __init__(self, connections: Connections, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._all = connections
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Add the connection, which may close another one or this one, and start its idle timer. asyncio calls this."""
        super().connection_made(transport)
        self._all.made(self)
        self._look()

    def data_received(self, data: bytes) -> None:
        """Pass data on. Once a request has begun, store its arrival, in seconds of time.monotonic, in its scope's state
        as "arrival", and stop the idle timer.
        """
        now = time.monotonic()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            # The application may run much later.
            self.scope.setdefault("state", {}).setdefault("arrival", now)
        self._look()

    def on_response_complete(self) -> None:
        """Record that the connection is idle, and start its idle timer. uvicorn calls this."""
        super().on_response_complete()
        self._all.waits(self)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection, which has ended, and stop its idle timer. asyncio calls this."""
        self._all.lost(self)
        self._cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Start the idle timer if the connection is idle and no timer runs, or stop the timer if the connection has a
        request. Data that arrives does not extend a running timer.
        """
        waits = self.cycle is None or self.cycle.response_complete
        if not waits:
            self._cancel()
            self._all.works(self)
        elif self._end is None and not self.transport.is_closing():
            self._end = self.loop.call_later(self._all.read_timeout, self._expired)

    def _expired(self) -> None:
        """Close the connection, which has been idle for read_timeout seconds; the closure is counted for the log."""
        self._all.close(self, f"none came within {self._all.read_timeout:g} s")

    def _cancel(self) -> None:
        """Stop the idle timer."""
        if self._end is not None:
            self._end.cancel()
            self._end = None
