"""Connections that ask for nothing, ask slowly, or are too many: each has its end, and others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from pathlib import Path

import pytest
import uvicorn

from jaxengine.config.engine_config import ConfigError
from jaxengine.server.base.descriptors import max_connections, raise_descriptor_limit
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.request.arrival import LimitsMiddleware
from jaxengine.server.http.request.errors import ApiError, error_response
from jaxengine.server.processes.api_process import http_options
from jaxengine.server.processes.sockets import cut_unread, listen_at

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def application(scope, receive, send):
    """Answers /health at once, /never never, /arrival with when it came, and others with the size of their body."""
    if scope["path"] == "/never":
        await asyncio.sleep(600)
    size, more = 0, scope["path"] != "/health"
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    body = repr(scope["state"]["arrival"]).encode() if scope["path"] == "/arrival" else b"%d" % size
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def listening(app=application, **options):
    """The port of a server as an API process has it."""
    config = ServerConfig(port=0, disable_access_log=True, **options)
    settings = http_options(app, config)
    settings.port, settings.lifespan = 0, "off"
    server = uvicorn.Server(settings)
    server.capture_signals = contextlib.nullcontext  # pyright: ignore[reportAttributeAccessIssue]
    sockets = None if config.uds is None else [listen_at(config.uds)]
    for each in sockets or ():
        cut_unread(each, config.stream_write_timeout)
    task = asyncio.create_task(server.serve(sockets))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


async def opened(port, sent=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    return reader, writer


async def ended(reader):
    """All that came before the server closed the connection."""
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


async def answered(port):
    reader, writer = await opened(port, HEALTH)
    async with asyncio.timeout(60):
        line = await reader.readline()
    writer.close()
    return line.startswith(b"HTTP/1.1 200")


async def test_a_unix_domain_socket(tmp_path):
    path = str(tmp_path / "http")
    async with listening(uds=path) as port:
        assert port == path[1]  # of getsockname(), which is the path
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(HEALTH.replace(b"Host", b"Connection: close\r\nHost"))
        assert (await ended(reader)).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConfigError, match="uds .*http' cannot be bound .Address already in use.; name a file"):
            listen_at(path)
    assert Path(path).exists()
    with listen_at(path) as busy, socket.socket(socket.AF_UNIX) as first:  # nobody listens there any more
        busy.listen(0)
        first.connect(path)
        with pytest.raises(ConfigError, match="Address already in use"):  # also where no more connections are taken
            listen_at(path)
    for wrong in (str(tmp_path / "no" / "http"), "x" * 200, str(tmp_path), "", f"{tmp_path}/a\0b", "\0a"):
        with pytest.raises(ConfigError) as caught:
            listen_at(wrong)
        assert caught.value.param == "uds"


async def test_half_a_request_has_an_end(caplog):
    async with listening(read_timeout=0.5) as port:
        silent, half = await opened(port), await opened(port, b"GET / HTTP/1.1\r\nHost: x\r\n")
        dripping = await opened(port, b"GET / HTTP/1.1\r\n")
        second = await opened(port, HEALTH + b"GET / HT")
        # A body that goes on behind its answer is nobody's either.
        behind = await opened(port, b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nx")

        async def drip():
            with contextlib.suppress(ConnectionError):
                while True:
                    dripping[1].write(b"X-Y: z\r\n")
                    behind[1].write(b"x")
                    await dripping[1].drain()
                    await asyncio.sleep(0.05)

        dripper = asyncio.create_task(drip())
        assert [await ended(reader) for reader, _ in (silent, half, dripping)] == [b"", b"", b""]
        assert (await ended(second[0])).startswith(b"HTTP/1.1 200")
        assert (await ended(behind[0])).startswith(b"HTTP/1.1 200")
        dripper.cancel()
        assert await answered(port)
    assert "connections without a request that were closed, because none came within 0.5 s" in caplog.text


async def test_a_request_arrives_with_its_headers():
    async def ask(reader, writer):
        """When it was asked, when the server says that it came, and when its body was sent."""
        begun = time.monotonic()
        writer.write(b"POST /arrival HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n")
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
        sent = time.monotonic()
        writer.write(b"x")
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split()[0])
        return begun, float(await reader.readexactly(size)), sent

    async with listening() as port, asyncio.timeout(60):
        connection = await opened(port)
        times = [*await ask(*connection), *await ask(*connection)]
        connection[1].close()
    assert times == sorted(times)


async def test_who_waits_longest_makes_room_and_who_is_answered_stays():
    async with listening(read_timeout=60.0, max_connections=4) as port:
        busy = await opened(port, b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n")
        waiting = [await opened(port, b"GET ") for _ in range(20)]
        assert await answered(port)
        gone = [await ended(reader) for reader, _ in waiting[:17]]
        assert gone == [b""] * 17 and not busy[0].at_eof()
        # Where all are being answered there is no room.
        others = [await opened(port, b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(5)]
        assert await ended(others[-1][0]) == b""
        assert not busy[0].at_eof()


async def test_a_body_has_its_time_and_a_long_one_more():
    app = LimitsMiddleware(application, 1 << 16, 1 << 20, 0.3)
    sent = []

    async def send(message):
        sent.append(message)

    def pieces(size, seconds, count):
        async def receive():
            nonlocal count
            count -= 1
            await asyncio.sleep(seconds)
            return {"type": "http.request", "body": b"x" * size, "more_body": count > 0}

        return receive

    scope = {"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "query_string": b"", "headers": []}
    await app(scope, pieces(256 << 10, 0.2, 4), send)  # 0.8 s, of which a megabyte may take 4.3
    assert sent[0]["status"] == 200
    with contextlib.suppress(Exception):
        await app(scope, pieces(1, 0.2, 4), send)
        raise AssertionError("a slow body was taken")
    assert app._num_held == 0


async def test_bodies_that_are_held_at_once_are_bounded():
    held = asyncio.Event()

    async def slow(scope, receive, send):
        await receive()
        await held.wait()

    app = LimitsMiddleware(slow, 1 << 16, 1024, 30.0)
    scope = {"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "query_string": b"", "headers": []}

    async def receive():
        return {"type": "http.request", "body": b"x" * 1024, "more_body": False}

    async def send(message): ...

    running = [asyncio.create_task(app(scope, receive, send)) for _ in range(9)]
    done, rest = await asyncio.wait(running, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = done
    error = refused.exception()
    assert isinstance(error, ApiError) and error.status_code == 429 and len(rest) == 8
    held.set()
    await asyncio.gather(*rest)
    assert app._num_held == 0


async def test_a_length_beside_chunks_is_refused():
    app, sent = LimitsMiddleware(application, 1 << 16, 1024, 30.0), []

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        sent.append(message)

    headers = [(b"content-length", b"3"), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    assert sent[0]["status"] == 400 and (b"connection", b"close") in sent[0]["headers"]


def test_connections_are_fewer_than_descriptors(monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        raise_descriptor_limit(ServerConfig())
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft >= before[0] or soft == hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
        assert 2 * max_connections(ServerConfig()) < 1000
        assert max_connections(ServerConfig(max_connections=7)) == 7
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    # More than by default, where the system allows it.
    many, limits = ServerConfig(max_connections=30_000), [(1000, 80_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    raise_descriptor_limit(many)
    assert limits[-1] == (60_256, 80_000) and max_connections(many) == 30_000
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert max_connections(many) == 30_000


async def test_a_client_that_sends_too_much_reads_why():
    """Most clients read nothing before they have sent all; a connection that is reset then has no answer."""
    most, body = 8 << 20, b"x" * (12 << 20)

    async def answering(scope, receive, send):
        try:
            await application(scope, receive, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)

    for head, sent in (
        (b"Content-Length: %d" % len(body), body),
        (b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)),
        (b"X: %b\r\nContent-Length: %d" % (b"y" * 5000, len(body)), body),
    ):
        async with listening(LimitsMiddleware(answering, 1 << 12, most, 20.0)) as port:
            reader, writer = await opened(port, b"POST /size HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n%b" % (head, sent))
            async with asyncio.timeout(60):
                await writer.drain()
            assert b" 413 " in (answer := await ended(reader)) or b" 431 " in answer
            writer.close()
