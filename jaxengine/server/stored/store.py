"""Store of responses, in memory and of bounded size; the oldest finished ones are evicted.

Tracks the owner and the worker of a response; of its content, it reads only the status.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from jaxengine.scheduler.errors import OverloadedError

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20
_LOST = {"code": "server_error", "message": "the process that worked on the response has ended"}


class StoredResponse(msgspec.Struct):
    """A stored response.

    Attributes:
      owner: hash of its client's credentials; no other client can retrieve it.
      response: JSON, the response as the client sees it.
      messages: JSON, the conversation with its answer; instructions are not part of it.
      input: JSON, its input items, each with an id.
      background: made in the background, and may be cancelled.
      is_running: it is still being generated.
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
    """Generates responses."""

    def cancel(self, response_id: str) -> None:
        """Ends the work on a response soon, and then puts its final state."""
        ...


class Responses(Protocol):
    """Interface of a store, local or remote. A missing response and another owner's are both None."""

    async def put(self, stored: StoredResponse, worker: Worker) -> None:
        """Stores a response, replacing its earlier state, except where the id is another owner's.

        worker: generates the response while is_running. Raises OverloadedError if running ones take all the room. All
          methods raise EngineDeadError if the store is down.
        """
        ...

    async def knows(self, response_id: str) -> bool:
        """Whether the id is taken."""
        ...

    async def get(self, response_id: str, owner: str) -> StoredResponse | None: ...

    async def stop(self, response_id: str, owner: str) -> StoredResponse | None:
        """Stops the generation of a response, if it is running, and returns the final state."""
        ...

    async def delete(self, response_id: str, owner: str) -> StoredResponse | None:
        """Stops and removes a response; returns it."""
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
        """Marks the responses of a lost worker as failed."""
        for response_id in [name for name, each in self._workers.items() if each is worker]:
            stored = self._stored[response_id]
            shown = {**msgspec.json.decode(stored.response), "status": "failed", "error": _LOST}
            self._num_bytes -= stored.num_bytes
            stored.response, stored.is_running = msgspec.json.encode(shown), False
            self._num_bytes += stored.num_bytes
            self._rest(response_id)

    def _rest(self, response_id: str) -> None:
        """Marks a response as no longer running."""
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
