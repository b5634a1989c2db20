"""What anybody may do without a key: ask how the engine is, and never so that others cannot."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxengine.server.grpc import server
from jaxengine.server.grpc.health import MAX_WATCHES_OF_ADDRESS
from jaxengine.server.grpc.inference_pb2_grpc import InferenceStub
from tests.jaxengine.server.grpc.grpc_rig import connected, refusal, request, serving

KEY = (("authorization", "Bearer key"),)
ASK = health_pb2.HealthCheckRequest()


async def test_watching_keeps_nobody_out(chat_engine, monkeypatch):
    monkeypatch.setattr(server, "SPARE_CALLS", 0)
    async with serving(chat_engine, api_key="key", max_num_queued_reqs=2) as running:
        address = f"127.0.0.1:{running.port}"
        channels: list[Any] = [grpc.aio.insecure_channel(address, _own_connection(n)) for n in range(3)]
        watches = [_health(channels[n % 3]).Watch(ASK) for n in range(300)]
        answers = await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
        refused = [each.code() for each in answers if isinstance(each, grpc.aio.AioRpcError)]
        assert refused == [grpc.StatusCode.RESOURCE_EXHAUSTED] * (300 - MAX_WATCHES_OF_ADDRESS)
        checked = await _health(channels[0]).Check(ASK, timeout=20)
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        some = request(stopping={"max_new_tokens": 2, "ignore_eos": True})
        assert (await InferenceStub(channels[0]).Generate(some, metadata=KEY, timeout=60)).outputs
        for watch in watches:
            watch.cancel()
        # Who leaves makes room.
        async with asyncio.timeout(60):
            while True:
                again = _health(channels[0]).Watch(ASK)
                try:
                    assert (await again.read()).status == health_pb2.HealthCheckResponse.SERVING
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)
        again.cancel()
        for channel in channels:
            await channel.close()


async def test_calls_whose_message_does_not_come_are_ended(chat_engine):
    async with connected(chat_engine, read_timeout=0.2) as (channel, _):
        for method in ("/grpc.health.v1.Health/Check", "/jaxengine.v1.Inference/Generate"):
            code, details, _ = await refusal(channel.stream_unary(method)())
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED and "did not arrive within 0.2 s" in details
        call = channel.stream_unary("/jaxengine.v1.Inference/Generate")()
        await call.done_writing()
        assert (await refusal(call))[0] is grpc.StatusCode.INVALID_ARGUMENT


def _own_connection(number: int) -> list[tuple[str, int]]:
    return [("grpc.use_local_subchannel_pool", 1), ("test.number", number)]


def _health(channel: Any) -> Any:
    return health_pb2_grpc.HealthStub(channel)
