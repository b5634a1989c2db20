"""grpc.health.v1: the engine's health, for single checks and for a limited number of watchers. Needs no key."""

from __future__ import annotations

import asyncio
import collections
import logging
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2
from grpc_health.v1._async import HealthServicer

from jaxengine.api.engine_client import EngineClient, EngineDeadError
from jaxengine.server.grpc.service import Requests, first_message
from jaxengine.server.grpc.status import end_call

logger = logging.getLogger(__name__)

# Seconds between two checks of the engine's health.
HEALTH_INTERVAL = 0.25
# Name of a service that is healthy as long as this process runs, for liveness probes: the server restarts its engine
# itself.
LIVE = "live"
# Limits of watching streams, per address and in total. They need no key, and stay open.
MAX_WATCHES_OF_ADDRESS, MAX_WATCHES = 16, 128


class Health(HealthServicer):
    """Implementation of grpc.health.v1 for the entire server (""), for each of its services, and for LIVE."""

    def __init__(self, services: tuple[str, ...]):
        """Start without a status and without watchers. services: full names of services whose health is reported."""
        super().__init__()
        self._names = ("", *services)
        self._watches: collections.Counter[str] = collections.Counter()

    async def follow(self, engine: EngineClient) -> None:
        """Publish the engine's health, checked every HEALTH_INTERVAL seconds, until cancelled. The server and each
        service are SERVING, or NOT_SERVING while the engine is dead or draining, or its health cannot be checked, which
        is logged; LIVE is always SERVING.
        """
        known = None
        await self.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        while True:
            try:
                await engine.check_health()
                status = health_pb2.HealthCheckResponse.SERVING
            except Exception as error:
                status = health_pb2.HealthCheckResponse.NOT_SERVING
                if status != known and not isinstance(error, EngineDeadError):
                    logger.exception("the engine's health could not be checked")
            if status != known:
                for name in self._names:
                    await self.set(name, status)
                known = status
            await asyncio.sleep(HEALTH_INTERVAL)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """Stream the health of a service, now and at each change, until the client leaves. Ends the call with
        RESOURCE_EXHAUSTED, by raising AbortError, if there are MAX_WATCHES streams already, or MAX_WATCHES_OF_ADDRESS
        from the client's address.
        """
        address = context.peer().rpartition(":")[0]
        if self._watches[address] >= MAX_WATCHES_OF_ADDRESS or self._watches.total() >= MAX_WATCHES:
            await end_call(
                context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams are watching already; use Check"
            )
        self._watches[address] += 1
        try:
            await super().Watch(request, context)
        finally:
            self._watches[address] -= 1
            if not self._watches[address]:
                del self._watches[address]


def health_handlers(servicer: Health, read_timeout: float) -> grpc.GenericRpcHandler:
    """Return the handlers of grpc.health.v1's Check and Watch, which call `servicer`.

    A call whose message does not arrive within `read_timeout` seconds ends with DEADLINE_EXCEEDED.
    """

    def waiting(method: Any) -> Any:
        """Return a handler that waits for a call's message for at most read_timeout seconds, then calls `method` with
        it.
        """

        async def call(requests: Requests, context: grpc.aio.ServicerContext) -> Any:
            return await method(await first_message(requests, context, read_timeout), context)

        return call

    coded = (health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString)
    made = {
        "Check": grpc.stream_unary_rpc_method_handler(waiting(servicer.Check), *coded),
        "Watch": grpc.stream_stream_rpc_method_handler(waiting(servicer.Watch), *coded),
    }
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, made)
