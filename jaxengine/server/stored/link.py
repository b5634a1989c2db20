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
from jaxengine.server.stored.store import ResponseStore, StoredResponse, Worker
from jaxengine.workers.frames import Frames, frame
from scheduler.errors import OverloadedError

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_RECONNECT_SECONDS = 0.05


class Ask(msgspec.Struct, array_like=True):
    """A call of the store's method `name`. number: counts those of a connection."""

    number: int
    name: Literal["put", "knows", "get", "stop", "delete"]
    response_id: str
    owner: str = ""
    stored: StoredResponse | None = None


class Told(msgspec.Struct, array_like=True, tag="told"):
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
        worker = _Far(writer)
        frames, answers = Frames(Ask), set[asyncio.Task[None]]()
        try:
            while data := await reader.read(_READ_BYTES):
                for ask in frames.feed(data):
                    # Calls start in the order of arrival; only those that wait for work to end are overtaken.
                    task = asyncio.create_task(self._answer(ask, worker))
                    answers.add(task)
                    task.add_done_callback(answers.discard)
        except (OSError, msgspec.MsgspecError) as error:
            logger.error("a connection to the store of responses was ended: %s", error)
        finally:
            for task in answers:
                task.cancel()
            self._store.lose(worker)
            writer.close()

    async def _answer(self, ask: Ask, worker: _Far) -> None:
        told = Told(ask.number)
        store, key = self._store, (ask.response_id, ask.owner)
        try:
            match ask.name:
                case "put":
                    assert ask.stored is not None
                    await store.put(ask.stored, worker)
                case "knows":
                    told.known = await store.knows(ask.response_id)
                case "get":
                    told.stored = await store.get(*key)
                case "stop":
                    told.stored = await store.stop(*key)
                case "delete":
                    told.stored = await store.delete(*key)
        except OverloadedError as error:
            told.full, told.retry_after = str(error), error.retry_after
        worker.say(told)


class _Far:
    """A worker at the other end of a connection."""

    def __init__(self, writer: asyncio.StreamWriter):
        self._writer = writer

    def cancel(self, response_id: str) -> None:
        self.say(Cancel(response_id))

    def say(self, message: Told | Cancel) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame(message))


class RemoteStore:
    """`Responses` over the store that listens at a path; it reconnects whenever the store restarts."""

    def __init__(self, path: str):
        self._path = path
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Told]] = {}
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
        await self._ask("put", stored.id, stored=stored)

    async def knows(self, response_id: str) -> bool:
        return (await self._ask("knows", response_id)).known

    async def get(self, response_id: str, owner: str) -> StoredResponse | None:
        return (await self._ask("get", response_id, owner)).stored

    async def stop(self, response_id: str, owner: str) -> StoredResponse | None:
        return (await self._ask("stop", response_id, owner)).stored

    async def delete(self, response_id: str, owner: str) -> StoredResponse | None:
        return (await self._ask("delete", response_id, owner)).stored

    def close(self) -> None:
        """Closes the connection."""
        self._task.cancel()

    async def _ask(
        self,
        name: Literal["put", "knows", "get", "stop", "delete"],
        response_id: str,
        owner: str = "",
        stored: StoredResponse | None = None,
    ) -> Told:
        if self._writer is None:
            raise _gone()
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(frame(Ask(number, name, response_id, owner, stored)))
            told = await future
        finally:
            self._asked.pop(number, None)
        if told.full is not None:
            raise OverloadedError(told.full, retry_after=told.retry_after)
        return told

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
                    for future in self._asked.values():
                        if not future.done():
                            future.set_exception(_gone())
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        frames = Frames(Told | Cancel)
        while data := await reader.read(_READ_BYTES):
            for message in frames.feed(data):
                if isinstance(message, Told):
                    future = self._asked.get(message.number)
                    if future is not None and not future.done():
                        future.set_result(message)
                elif (worker := self._workers.get(message.response_id)) is not None:
                    worker.cancel(message.response_id)


def _gone() -> EngineDeadError:
    return EngineDeadError("the store of responses is being started again")
