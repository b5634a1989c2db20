"""Server of a response store in its own process, and the client that implements `Responses` in the others.

Frames over a Unix socket in a folder that only the user can read. When a connection ends, its responses in work fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import Literal

import msgspec

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.scheduler.errors import OverloadedError
from jaxengine.server.stored.store import ResponseStore, StoredResponse, Worker
from jaxengine.workers.frames import Frames, frame

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_RECONNECT_SECONDS = 0.05


class StoreCall(msgspec.Struct, array_like=True):
    """A call of the store's method `name`. number: counts those of a connection."""

    number: int
    name: Literal["put", "knows", "get", "stop", "delete"]
    response_id: str
    owner: str = ""
    stored: StoredResponse | None = None


class StoreReply(msgspec.Struct, array_like=True, tag="reply"):
    """The result of call `number`. full: reason why there is no room, with retry_after as OverloadedError has it."""

    number: int
    stored: StoredResponse | None = None
    known: bool = False
    full: str | None = None
    retry_after: float = 1.0


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """Asks the worker to end its work on a response."""

    response_id: str


class StoreServer:
    """Serves one store to every connection."""

    def __init__(self, store: ResponseStore):
        self._store = store

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until its end."""
        worker = _RemoteWorker(writer)
        frames, answers = Frames(StoreCall), set[asyncio.Task[None]]()
        try:
            while data := await reader.read(_READ_BYTES):
                for call in frames.feed(data):
                    # Calls start in the order of arrival; only those that wait for work to end are overtaken.
                    task = asyncio.create_task(self._answer(call, worker))
                    answers.add(task)
                    task.add_done_callback(answers.discard)
        except (OSError, msgspec.MsgspecError) as error:
            logger.error("a connection to the store of responses was ended: %s", error)
        finally:
            for task in answers:
                task.cancel()
            self._store.lose(worker)
            writer.close()

    async def _answer(self, call: StoreCall, worker: _RemoteWorker) -> None:
        reply = StoreReply(call.number)
        store, key = self._store, (call.response_id, call.owner)
        try:
            match call.name:
                case "put":
                    assert call.stored is not None
                    await store.put(call.stored, worker)
                case "knows":
                    reply.known = await store.knows(call.response_id)
                case "get":
                    reply.stored = await store.get(*key)
                case "stop":
                    reply.stored = await store.stop(*key)
                case "delete":
                    reply.stored = await store.delete(*key)
        except OverloadedError as error:
            reply.full, reply.retry_after = str(error), error.retry_after
        worker.say(reply)


class _RemoteWorker:
    """A worker at the other end of a connection."""

    def __init__(self, writer: asyncio.StreamWriter):
        self._writer = writer

    def cancel(self, response_id: str) -> None:
        self.say(Cancel(response_id))

    def say(self, message: StoreReply | Cancel) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame(message))


class RemoteStore:
    """`Responses` over the store that listens at a path; it reconnects whenever the store restarts."""

    def __init__(self, path: str):
        self._path = path
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[StoreReply]] = {}
        self._workers: dict[str, Worker] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()
        self._task = asyncio.create_task(self._stay_connected())

    @classmethod
    async def connect(cls, path: str) -> RemoteStore:
        """Connects, waiting for the store."""
        store = cls(path)
        await store._connected.wait()
        return store

    async def put(self, stored: StoredResponse, worker: Worker) -> None:
        if stored.is_running:
            self._workers[stored.id] = worker
        else:
            self._workers.pop(stored.id, None)
        await self._call("put", stored.id, stored=stored)

    async def knows(self, response_id: str) -> bool:
        return (await self._call("knows", response_id)).known

    async def get(self, response_id: str, owner: str) -> StoredResponse | None:
        return (await self._call("get", response_id, owner)).stored

    async def stop(self, response_id: str, owner: str) -> StoredResponse | None:
        return (await self._call("stop", response_id, owner)).stored

    async def delete(self, response_id: str, owner: str) -> StoredResponse | None:
        return (await self._call("delete", response_id, owner)).stored

    def close(self) -> None:
        """Closes the connection."""
        self._task.cancel()

    async def _call(
        self,
        name: Literal["put", "knows", "get", "stop", "delete"],
        response_id: str,
        owner: str = "",
        stored: StoredResponse | None = None,
    ) -> StoreReply:
        if self._writer is None:
            raise _gone()
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(frame(StoreCall(number, name, response_id, owner, stored)))
            reply = await future
        finally:
            self._calls.pop(number, None)
        if reply.full is not None:
            raise OverloadedError(reply.full, retry_after=reply.retry_after)
        return reply

    async def _stay_connected(self) -> None:
        while True:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                self._connected.set()
                try:
                    await self._listen(reader)
                finally:
                    self._writer.close()
                    self._writer = None
                    for future in self._calls.values():
                        if not future.done():
                            future.set_exception(_gone())
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        frames = Frames(StoreReply | Cancel)
        while data := await reader.read(_READ_BYTES):
            for message in frames.feed(data):
                if isinstance(message, StoreReply):
                    future = self._calls.get(message.number)
                    if future is not None and not future.done():
                        future.set_result(message)
                elif (worker := self._workers.get(message.response_id)) is not None:
                    worker.cancel(message.response_id)


def _gone() -> EngineDeadError:
    return EngineDeadError("the store of responses is being started again")
