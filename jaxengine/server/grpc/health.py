"""grpc.health.v1: how the engine is, for whoever asks once and for a bounded number who stay to hear of changes.

Open to all, with a key or without. Knows nothing of other services.
"""

from __future__ import annotations

import asyncio
import collections
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2
from grpc_health.v1._async import HealthServicer

from jaxengine.api.engine_client import EngineClient, EngineDeadError
from jaxengine.server.grpc.service import Requests, first_message

# Seconds between two looks at the engine's health.
HEALTH_INTERVAL = 0.25
# Streams that may watch it, of one address and altogether. Anybody may open them, and they stay open.
MAX_WATCHES_OF_ADDRESS, MAX_WATCHES = 16, 128


class Health(HealthServicer):
    """grpc.health.v1 for the server as a whole ("") and each of its services."""

    def __init__(self, services: tuple[str, ...]):
        super().__init__()
        self._names = ("", *services)
        self._watches: collections.Counter[str] = collections.Counter()

    async def follow(self, engine: EngineClient) -> None:
        """Reports what the engine says of itself, until cancelled."""
        known = None
        while True:
            try:
                await engine.check_health()
                status = health_pb2.HealthCheckResponse.SERVING
            except EngineDeadError:
                status = health_pb2.HealthCheckResponse.NOT_SERVING
            if status != known:
                for name in self._names:
                    await self.set(name, status)
                known = status
            await asyncio.sleep(HEALTH_INTERVAL)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        address = context.peer().rpartition(":")[0]
        if self._watches[address] >= MAX_WATCHES_OF_ADDRESS or self._watches.total() >= MAX_WATCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch already; ask with Check")
        self._watches[address] += 1
        try:
            await super().Watch(request, context)
        finally:
            self._watches[address] -= 1
            if not self._watches[address]:
                del self._watches[address]


def health_handlers(servicer: Health, read_timeout: float) -> grpc.GenericRpcHandler:
    """Serves grpc.health.v1. A call whose message does not come within `read_timeout` seconds is ended."""

    def waiting(method: Any) -> Any:
        async def call(requests: Requests, context: grpc.aio.ServicerContext) -> Any:
            return await method(await first_message(requests, context, read_timeout), context)

        return call

    coded = (health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString)
    made = {
        "Check": grpc.stream_unary_rpc_method_handler(waiting(servicer.Check), *coded),
        "Watch": grpc.stream_stream_rpc_method_handler(waiting(servicer.Watch), *coded),
    }
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, made)
