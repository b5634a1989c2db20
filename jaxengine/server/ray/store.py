"""Store of responses as a Ray Serve deployment, so that any replica continues what another one has answered."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Any

import msgspec
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from ray.serve.exceptions import RayServeException  # pyright: ignore[reportMissingImports]

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.server.stored.link import StoreCall, StoreClient, StoreReply, answer
from jaxengine.server.stored.records import StoreBounds
from jaxengine.server.stored.store import ResponseStore

# Longest wait of a replica for orders, and time without a new one after which it is lost.
_POLL_SECONDS, _LOST_SECONDS = 5.0, 20.0
_AGAIN_SECONDS = 0.2

_encode = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(StoreCall).decode
_decode_reply = msgspec.msgpack.Decoder(StoreReply).decode


class _Replica:
    """Worker in another process. Its orders to cancel responses are queued here until that process asks for them.

    Attributes:
      orders: queue of (response id, owner).
      asked: time.monotonic() of the process's last call.
    """

    def __init__(self):
        self.orders: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.asked = time.monotonic()

    def cancel(self, response_id: str, owner: str) -> None:
        """Queue the order to cancel a response."""
        self.orders.put_nowait((response_id, owner))


class Store:
    """Ray Serve deployment that holds the stored responses of all engines. bounds: fields of StoreBounds."""

    async def __init__(self, bounds: dict[str, int]):
        self._store = ResponseStore(StoreBounds(**bounds))
        self._replicas: dict[str, _Replica] = {}
        self._task = asyncio.create_task(self._lose())

    async def call(self, name: str, call: bytes) -> bytes:
        """Execute a StoreCall and return its StoreReply, both encoded as msgpack (see `answer`). Calls "stop" and
        "delete" wait until the response no longer runs. name: name of the client, which is the worker of the responses
        that it puts; the call records that it has asked now.
        """
        return _encode(await answer(self._store, _decode_call(call), self._replica(name)))

    async def orders(self, name: str) -> list[tuple[str, str]]:
        """Remove all orders to cancel from the queue of client `name` and return them as (response id, owner). Waits up
        to 5 s for the first one, and returns [] if none comes. Records that the client has asked, at the beginning of
        the call.
        """
        replica, found = self._replica(name), list[tuple[str, str]]()
        with contextlib.suppress(TimeoutError):
            found.append(await asyncio.wait_for(replica.orders.get(), _POLL_SECONDS))
        while not replica.orders.empty():
            found.append(replica.orders.get_nowait())
        return found

    def _replica(self, name: str) -> _Replica:
        """Return the worker of a client's name, created if it is unknown, and record that it has asked now."""
        replica = self._replicas.setdefault(name, _Replica())
        replica.asked = time.monotonic()
        return replica

    async def _lose(self) -> None:
        """Every 5 s until cancelled, mark the running responses of clients that have not asked for more than 20 s as
        failed, and forget these clients.
        """
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            for name, replica in list(self._replicas.items()):
                if time.monotonic() - replica.asked > _LOST_SECONDS:
                    self._store.lose(replica)
                    del self._replicas[name]


class RayStore(StoreClient):
    """Client of a Store deployment, in a process that generates responses or reads them. Starts a task on the running
    event loop that cancels responses on the store's orders.

    store: handle of the deployment.
    """

    def __init__(self, store: Any):
        super().__init__()
        self._store, self._name = store, secrets.token_hex(8)
        self._task = asyncio.create_task(self._obey())

    async def reply(self, call: StoreCall) -> StoreReply:
        try:
            return _decode_reply(await self._store.call.remote(self._name, _encode(call)))
        except (RayError, RayServeException) as error:
            raise EngineDeadError("the store of responses cannot be reached") from error

    async def _obey(self) -> None:
        """Cancel the responses that the store orders to cancel, until this task is cancelled. After an error of Ray,
        ask again 0.2 s later.
        """
        while True:
            try:
                for response_id, owner in await self._store.orders.remote(self._name):
                    self.cancel(response_id, owner)
            except (RayError, RayServeException):
                await asyncio.sleep(_AGAIN_SECONDS)
