"""Events of a stored response whose stream may be followed, also by clients that come later or come back."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

# Bytes after which no further event is returned at once: thousands of followers may wait for theirs.
_MOST_BYTES = 64 << 10
# Memory of an event beside its data.
_EVENT_BYTES = 128

# Number of an event in its stream, and the event, encoded.
NumberedEvent = tuple[int, bytes]


class Told(msgspec.Struct, array_like=True):
    """Some events of a response, in order. is_last: whether no event follows these. is_cut: whether, besides, the
    response ended without a last event of its own, as its worker was lost.
    """

    events: list[NumberedEvent]
    is_last: bool
    is_cut: bool = False


class EventLog:
    """Events of one response so far.

    Attributes:
      num_bytes: memory of all events.
    """

    def __init__(self):
        self.num_bytes = 0
        self._events: list[NumberedEvent] = []
        self._has_ended = self._is_cut = False
        self._more = asyncio.Event()

    def append(self, events: Sequence[NumberedEvent], *, ends: bool = False) -> None:
        """Add events, with numbers above all earlier ones, and wake all calls of `after`. ends: whether they are the
        last ones, and without any the log ends cut; once a log has ended, nothing is added.
        """
        if not self._has_ended:
            self._events += events
            self.num_bytes += sum(len(data) + _EVENT_BYTES for _, data in events)
            self._has_ended, self._is_cut = ends, ends and not events
            self._more.set()
            self._more = asyncio.Event()

    async def after(self, number: int) -> Told:
        """Return the first events with numbers above `number`, until they have 64 KiB: at least one, for which this
        waits, or none if the log has ended.
        """
        while True:
            start = bisect_right(self._events, number, key=lambda each: each[0])
            stop, size = start, 0
            while stop < len(self._events) and size < _MOST_BYTES:
                size += len(self._events[stop][1])
                stop += 1
            found, is_last = self._events[start:stop], self._has_ended and stop == len(self._events)
            if found or is_last:
                return Told(found, is_last, is_last and self._is_cut)
            await self._more.wait()
