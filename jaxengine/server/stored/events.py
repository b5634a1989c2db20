"""Events of a stored response whose stream may be followed, also by clients that come later or come back."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

# Most events that are returned at once.
_MOST_EVENTS = 1000

# Number of an event in its stream, and the event, encoded.
NumberedEvent = tuple[int, bytes]


class Told(msgspec.Struct, array_like=True):
    """Some events of a response, in order. is_last: whether no event follows these."""

    events: list[NumberedEvent]
    is_last: bool


class EventLog:
    """Events of one response so far.

    Attributes:
      num_bytes: size of all encoded events.
    """

    def __init__(self):
        self.num_bytes = 0
        self._events: list[NumberedEvent] = []
        self._has_ended = False
        self._more = asyncio.Event()

    def append(self, events: Sequence[NumberedEvent], *, ends: bool = False) -> None:
        """Add events, with numbers above all earlier ones, and wake all calls of `after`. ends: whether they are the
        last ones; once a log has ended, nothing is added.
        """
        if not self._has_ended:
            self._events += events
            self.num_bytes += sum(len(data) for _, data in events)
            self._has_ended = ends
            self._more.set()
            self._more = asyncio.Event()

    async def after(self, number: int) -> Told:
        """Return events with numbers above `number`, at least one, or none if the log has ended; waits for them."""
        while True:
            start = bisect_right(self._events, number, key=lambda each: each[0])
            found = self._events[start : start + _MOST_EVENTS]
            is_last = self._has_ended and start + len(found) == len(self._events)
            if found or is_last:
                return Told(found, is_last)
            await self._more.wait()
