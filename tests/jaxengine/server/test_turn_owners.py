"""Whose turn a request's pictures are read at: its key's, over HTTP and gRPC, whatever the policy of requests."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from jaxengine.server.base.keys import Keys
from jaxengine.server.grpc.auth import KeyInterceptor
from jaxengine.server.http.request.auth import AuthMiddleware
from jaxengine.turns import OWNER

# Keys of clients and operators, key shown, owner.
OWNERS = [
    (("one", "two"), (), "one", "key-0"),
    (("one", "two"), (), "two", "key-1"),
    (("one",), ("operator",), "operator", "admin-key-0"),
    # With nobody to leave room for, there is no owner.
    (("one",), (), "one", None),
    ((), (), "one", None),
]


async def over_http(keys: Keys, key: str) -> str | None:
    found = []

    async def app(scope, receive, send) -> None:
        # As endpoints do: reading and answering are tasks and threads of the request.
        found.append(await asyncio.create_task(asyncio.to_thread(OWNER.get)))

    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "path": "/v1/models", "root_path": "", "headers": headers}

    async def nothing(*_: object) -> dict:
        return {}

    await asyncio.create_task(AuthMiddleware(app, keys, False)(scope, nothing, nothing))
    return found[0]


async def over_grpc(keys: Keys, key: str) -> str | None:
    async def method(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return str(await asyncio.to_thread(OWNER.get)).encode()

    server = grpc.aio.server(interceptors=[KeyInterceptor(keys)])
    handler = grpc.unary_unary_rpc_method_handler(method)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("some", {"Method": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/some/Method")
            answer = await call(b"", metadata=(("authorization", f"Bearer {key}"),), timeout=60)
    finally:
        await server.stop(None)
    return None if answer == b"None" else answer.decode()


@pytest.mark.parametrize("ask", [over_http, over_grpc])
async def test_a_key_has_turns_of_its_own(ask):
    OWNER.set("somebody before")
    for clients, admins, key, owner in OWNERS:
        assert await ask(Keys(clients, admins), key) == owner, (clients, admins, key)
