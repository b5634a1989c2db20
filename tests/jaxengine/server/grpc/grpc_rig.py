"""A gRPC server over an engine for one test, and channels to it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from jaxengine.server.base.options import ServerConfig
from jaxengine.server.grpc import inference_pb2 as pb
from jaxengine.server.grpc.inference_pb2_grpc import InferenceStub
from jaxengine.server.grpc.server import GrpcServer, start_grpc


@contextlib.asynccontextmanager
async def serving(engine: Any, **options: Any) -> AsyncIterator[GrpcServer]:
    server = await start_grpc(engine, ServerConfig(**{"grpc_port": 0, "disable_access_log": True, **options}))
    try:
        yield server
    finally:
        await server.stop(0.0)


@contextlib.asynccontextmanager
async def connected(engine: Any, **options: Any) -> AsyncIterator[tuple[grpc.aio.Channel, InferenceStub]]:
    """A server, a channel to it and the stub of its Inference service."""
    async with serving(engine, **options) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel, InferenceStub(channel)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, list[str]]:
    """(code, details, names of the fields at fault) of a call that must fail."""
    answer = None
    try:
        if not hasattr(call, "read"):
            answer = await call
        else:
            while (part := await call.read()) is not grpc.aio.EOF:
                answer = part
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or "", await _fields(error)
    raise AssertionError(f"was served: {answer}")


async def _fields(error: grpc.aio.AioRpcError) -> list[str]:
    status = rpc_status.from_call(_WithMetadata(error))  # type: ignore[arg-type]
    found = []
    for detail in () if status is None else status.details:
        bad = error_details_pb2.BadRequest()
        assert detail.Unpack(bad)
        found += [violation.field for violation in bad.field_violations]
    return found


class _WithMetadata:
    """grpc_status reads calls, of which an AioRpcError has all but the form of the metadata."""

    def __init__(self, error: grpc.aio.AioRpcError):
        self._error = error

    def code(self):
        return self._error.code()

    def details(self):
        return self._error.details()

    def trailing_metadata(self):
        return tuple(self._error.trailing_metadata() or ())


async def idle(engine: Any) -> None:
    """Wait until the engine runs nothing and all its pages are free again; fail after a minute."""
    async with asyncio.timeout(60):
        while True:
            status = await engine.utility("status")
            counts = dict(zip(status["pages"]["states"], status["pages"]["counts"], strict=True))
            if not (status["num_running"] or status["num_waiting"] or counts["active"] or counts["shared"]):
                return
            await asyncio.sleep(0.002)


def request(text: str = "Hello there", **groups: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **groups)


def certificates(folder: Path) -> dict[str, Path]:
    """Files of an authority, of a server at 127.0.0.1 and of a client, each with its key."""

    folder.mkdir(exist_ok=True)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    openssl("req", "-x509", *new_key, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    for name in ("server", "client"):
        openssl(
            *("req", "-x509", *new_key, "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", f"{name}.key", "-out", f"{name}.pem"),
        )
    return {path.name: path for path in folder.iterdir()}
