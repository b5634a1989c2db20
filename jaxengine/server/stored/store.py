"""Responses that can be asked for again, in memory and of bounded size; the oldest that are finished make room.

Knows who may have a response and who works on it, nothing of what it says but for its status.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from scheduler.errors import OverloadedError

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20
_LOST = {"code": "server_error", "message": "the process that worked on the response has ended"}


class StoredResponse(msgspec.Struct):
    """One that is kept.

    Attributes:
      owner: what the client that made it showed to be let in; nobody else gets it.
      response: JSON, as the client sees it.
      messages: JSON, the conversation with its answer; instructions are not part of it.
      input: JSON, the items that it was asked with, each with an id.
      background: it was answered at once, and may be cancelled.
      is_running: somebody works on it.
    """

    id: str
    owner: str
    response: bytes
    messages: bytes
    input: bytes = b"[]"
    background: bool = False
    is_running: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages) + len(self.input)


class Worker(Protocol):
    """Who works on responses."""

    def cancel(self, response_id: str) -> None:
        """Is to end its work on a response soon, and to put it as it is then."""
        ...


class Responses(Protocol):
    """A store, wherever it is. What is not there is None to everybody, and so is another owner's response."""

    async def put(self, stored: StoredResponse, worker: Worker) -> None:
        """Keeps it, in place of an earlier state of it; where its name is another owner's, that one stays.

        worker: whose work is under way, if it is running.

        Raises OverloadedError when running ones take all the room, EngineDeadError when the store cannot answer; so do
        the others.
        """
        ...

    async def knows(self, response_id: str) -> bool:
        """Whether the name is taken."""
        ...

    async def get(self, response_id: str, owner: str) -> StoredResponse | None: ...

    async def stop(self, response_id: str, owner: str) -> StoredResponse | None:
        """The response when nobody works on it any more; whoever does is told to end."""
        ...

    async def delete(self, response_id: str, owner: str) -> StoredResponse | None:
        """Stops and forgets it."""
        ...


class ResponseStore:
    """`Responses` in this process, oldest first."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: dict[str, StoredResponse] = {}
        self._num_bytes = 0
        self._workers: dict[str, Worker] = {}
        self._at_rest: dict[str, asyncio.Event] = {}

    async def put(self, stored: StoredResponse, worker: Worker) -> None:
        known = self._stored.get(stored.id)
        if known is not None and known.owner != stored.owner:
            return
        if known is None and len(self._stored) >= self._max_responses and len(self._workers) == len(self._stored):
            raise OverloadedError(f"{len(self._stored)} responses run in the background already", retry_after=5)
        self._num_bytes += stored.num_bytes - (0 if known is None else known.num_bytes)
        self._stored[stored.id] = stored
        if stored.is_running:
            self._workers[stored.id] = worker
        else:
            self._rest(stored.id)
        self._make_room(stored.id)

    async def knows(self, response_id: str) -> bool:
        return response_id in self._stored

    async def get(self, response_id: str, owner: str) -> StoredResponse | None:
        stored = self._stored.get(response_id)
        return stored if stored is not None and stored.owner == owner else None

    async def stop(self, response_id: str, owner: str) -> StoredResponse | None:
        stored = await self.get(response_id, owner)
        if stored is None or not stored.is_running:
            return stored
        at_rest = self._at_rest.setdefault(response_id, asyncio.Event())
        self._workers[response_id].cancel(response_id)
        await at_rest.wait()
        return await self.get(response_id, owner)

    async def delete(self, response_id: str, owner: str) -> StoredResponse | None:
        stored = await self.stop(response_id, owner)
        if stored is not None:
            self._drop(response_id)
        return stored

    def lose(self, worker: Worker) -> None:
        """Somebody who worked is gone: those responses have failed."""
        for response_id in [name for name, each in self._workers.items() if each is worker]:
            stored = self._stored[response_id]
            shown = {**msgspec.json.decode(stored.response), "status": "failed", "error": _LOST}
            self._num_bytes -= stored.num_bytes
            stored.response, stored.is_running = msgspec.json.encode(shown), False
            self._num_bytes += stored.num_bytes
            self._rest(response_id)

    def _rest(self, response_id: str) -> None:
        """Nobody works on it any more."""
        self._workers.pop(response_id, None)
        if (at_rest := self._at_rest.pop(response_id, None)) is not None:
            at_rest.set()

    def _make_room(self, newest: str) -> None:
        finished = iter([name for name in self._stored if name not in self._workers and name != newest])
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            if (oldest := next(finished, None)) is None:
                return
            self._drop(oldest)

    def _drop(self, response_id: str) -> None:
        if (stored := self._stored.pop(response_id, None)) is not None:
            self._num_bytes -= stored.num_bytes
