"""Server of a response store in its own process, and the client that implements `Responses` in the other processes.

They exchange frames over a Unix socket in a folder that only the user can read. When a connection ends, the responses
that its client was generating are marked as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import Any, Literal

import msgspec

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.scheduler.base.errors import OverloadedError
from jaxengine.server.stored.events import NumberedEvent, Told
from jaxengine.server.stored.records import Found, Needs, Part, Reading, StoredResponse, Worker
from jaxengine.server.stored.store import ResponseStore
from jaxengine.workers.frames import Frames, frame

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_RECONNECT_SECONDS = 0.05


_Method = Literal["put", "find", "read", "append_events", "events_after", "stop", "delete"]


class StoreCall(msgspec.Struct, array_like=True):
    """Call of the store's method `name`.

    Attributes:
      number: number of the call among the client's calls.
      name: the method's name; the other fields are its arguments, by name.
    """

    number: int
    name: _Method
    response_id: str
    owner: str
    stored: StoredResponse | None = None
    texts: dict[bytes, bytes] | None = None
    part: Part = "response"
    events: list[NumberedEvent] | None = None
    after: int = -1


class StoreReply(msgspec.Struct, array_like=True, tag="reply"):
    """Result of a call.

    Attributes:
      number: number of the call.
      needs: result of `put`.
      found: result of `find`, `stop` or `delete`.
      reading: result of `read`.
      told: result of `events_after`.
      full: reason why there is no room; None if there is.
      retry_after: seconds after which the client may try again, if `full` is set.
    """

    number: int
    needs: Needs | None = None
    found: Found | None = None
    reading: Reading | None = None
    full: str | None = None
    retry_after: float = 1.0
    told: Told | None = None


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """Order to the worker to end its work on a response, given by its id and owner."""

    response_id: str
    owner: str


class StoreServer:
    """Server of one store for all connections."""

    def __init__(self, store: ResponseStore):
        self._store = store

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends or sends a message that cannot be decoded, which is logged as an error.
        Then cancels the connection's unfinished calls, marks its running responses as failed, and closes it.
        """
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
        """Execute a call and queue its reply. Reads of a connection are executed one at a time: each waits until the
        other end has received most of the previous read's reply.
        """
        if call.name != "read":
            worker.say(await answer(self._store, call, worker))
            return
        # One at a time for each connection: an encoded reply is a copy of all its texts.
        async with worker.turn:
            worker.say(await answer(self._store, call, worker))
            await worker.sent()


async def answer(store: ResponseStore, call: StoreCall, worker: Worker) -> StoreReply:
    """Execute a call on `store` and return the reply. An OverloadedError is returned as the reply's `full` and
    `retry_after`. Calls "stop" and "delete" wait until the response no longer runs, and "events_after" until
    there is an event. worker: the process that generates the responses which are put.
    """
    reply, key = StoreReply(call.number), (call.response_id, call.owner)
    try:
        match call.name:
            case "put":
                assert call.stored is not None
                reply.needs = await store.put(call.stored, worker, call.texts)
            case "find":
                reply.found = await store.find(*key)
            case "read":
                reply.reading = await store.read(*key, call.part)
            case "append_events":
                await store.append_events(*key, call.events or [])
            case "events_after":
                reply.told = await store.events_after(*key, call.after)
            case "stop":
                reply.found = await store.stop(*key)
            case "delete":
                reply.found = await store.delete(*key)
    except OverloadedError as error:
        reply.full, reply.retry_after = str(error), error.retry_after
    return reply


class _RemoteWorker:
    """Worker at the other end of a connection.

    Attributes:
      turn: lock that admits one call with a large reply at a time.
    """

    def __init__(self, writer: asyncio.StreamWriter):
        """Store `writer`, whose connection the caller closes."""
        self._writer = writer
        self.turn = asyncio.Lock()

    def cancel(self, response_id: str, owner: str) -> None:
        """Send the order to end the work on a response."""
        self.say(Cancel(response_id, owner))

    def say(self, message: StoreReply | Cancel) -> None:
        """Queue a message for the connection without waiting. Drops it if the connection is closing."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def sent(self) -> None:
        """Wait until the other end has read most of what was sent. Returns without an error if the connection is
        lost.
        """
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()


class StoreClient:
    """Client of a remote store that implements `Responses`. A subclass implements `reply`, which sends a call."""

    def __init__(self):
        self._numbers = itertools.count(1)
        # By (owner, id).
        self._workers: dict[tuple[str, str], Worker] = {}

    async def reply(self, call: StoreCall) -> StoreReply:
        """Send a call and return its reply. Raises EngineDeadError if the store is down."""
        raise NotImplementedError

    async def put(
        self, stored: StoredResponse, worker: Worker, texts: dict[bytes, bytes] | None = None
    ) -> Needs | None:
        """Store a response, replacing its earlier state, and return None; or return what is missing to store it, in
        which case the store has not changed.

        While the response is running and stored, its worker is remembered for `cancel`; once it has finished, the
        worker is forgotten, stored or not. texts: long texts by digest. Raises EngineDeadError if the store is down,
        OverloadedError if it has no room.
        """
        key = stored.owner, stored.id
        is_new = stored.is_running and key not in self._workers
        if stored.is_running:
            self._workers[key] = worker
        else:
            self._workers.pop(key, None)
        is_stored = False
        try:
            needs = (await self._call("put", stored.id, stored.owner, stored=stored, texts=texts)).needs
            is_stored = needs is None
            return needs
        finally:
            if is_new and not is_stored:  # nothing more comes of a response that was refused
                self._workers.pop(key, None)

    async def find(self, response_id: str, owner: str) -> Found | None:
        """Return a stored response's state and sizes; None for an unknown one or another owner's. Raises
        EngineDeadError if the store is down.
        """
        return (await self._call("find", response_id, owner)).found

    async def read(self, response_id: str, owner: str, part: Part) -> Reading | None:
        """Return a part of a stored response: "response", "input" or "conversation"; None for an unknown one or another
        owner's. Raises EngineDeadError if the store is down.
        """
        return (await self._call("read", response_id, owner, part=part)).reading

    async def append_events(self, response_id: str, owner: str, events: list[NumberedEvent]) -> None:
        """Store further events of a response that is running and streamed. Raises EngineDeadError if the store is
        down.
        """
        await self._call("append_events", response_id, owner, events=events)

    async def events_after(self, response_id: str, owner: str, number: int) -> Told | None:
        """Return events of a streamed response with numbers above `number`; waits until there are some, or until the
        response has ended. None for an unknown one or another owner's, and for one that is not streamed. Raises
        EngineDeadError if the store is down.
        """
        return (await self._call("events_after", response_id, owner, after=number)).told

    async def stop(self, response_id: str, owner: str) -> Found | None:
        """Stop the generation of a response, wait until its final state is stored, and return its state and sizes; None
        for an unknown one or another owner's. Raises EngineDeadError if the store is down.
        """
        return (await self._call("stop", response_id, owner)).found

    async def delete(self, response_id: str, owner: str) -> Found | None:
        """Stop a response, wait until it no longer runs, remove it, and return its state and sizes; None for an unknown
        one or another owner's. Raises EngineDeadError if the store is down.
        """
        return (await self._call("delete", response_id, owner)).found

    def cancel(self, response_id: str, owner: str) -> None:
        """Order the worker of a running response to end its work. Does nothing if this client has not put that response
        or it no longer runs.
        """
        if (worker := self._workers.get((owner, response_id))) is not None:
            worker.cancel(response_id, owner)

    async def _call(self, name: _Method, response_id: str, owner: str, **more: Any) -> StoreReply:
        """Send a call and return its reply. more: further fields of StoreCall. Raises EngineDeadError if the store is
        down, OverloadedError if it has no room.
        """
        reply = await self.reply(StoreCall(next(self._numbers), name, response_id, owner, **more))
        if reply.full is not None:
            raise OverloadedError(reply.full, retry_after=reply.retry_after)
        return reply


class RemoteStore(StoreClient):
    """Client of the store that listens at a Unix socket's path. Reconnects whenever the store restarts. Its constructor
    starts the task that connects, so it needs a running event loop.
    """

    def __init__(self, path: str):
        super().__init__()
        self._path = path
        self._calls: dict[int, asyncio.Future[StoreReply]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()
        self._task = asyncio.create_task(self._stay_connected())

    @classmethod
    async def connect(cls, path: str) -> RemoteStore:
        """Return a client that is connected to the store at `path`. Waits without a limit until the store listens."""
        store = cls(path)
        await store._connected.wait()
        return store

    def close(self) -> None:
        """Cancel the task that holds the connection, which closes it soon after the call. Calls in progress raise
        EngineDeadError.
        """
        self._task.cancel()

    async def reply(self, call: StoreCall) -> StoreReply:
        if self._writer is None:
            raise _gone()
        future = self._calls[call.number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(frame(call))
            return await future
        finally:
            self._calls.pop(call.number, None)

    async def _stay_connected(self) -> None:
        """Connect to the store and process its messages, until cancelled. When the connection ends, fail the calls in
        progress with EngineDeadError. Connect again 0.05 s after the connection ends or cannot be made.
        """
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
        """Give each reply to the call that waits for it, and pass orders to cancel responses to `cancel`, until the
        connection ends. Replies that no call waits for are dropped. Raises OSError, and MsgspecError for a message that
        cannot be decoded.
        """
        frames = Frames(StoreReply | Cancel)
        while data := await reader.read(_READ_BYTES):
            for message in frames.feed(data):
                if isinstance(message, StoreReply):
                    future = self._calls.get(message.number)
                    if future is not None and not future.done():
                        future.set_result(message)
                else:
                    self.cancel(message.response_id, message.owner)


def _gone() -> EngineDeadError:
    """Return (not raise) the EngineDeadError for calls without a connection."""
    return EngineDeadError("the store of responses is being started again")
