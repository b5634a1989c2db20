"""Behaviour of a server under attack: largest bodies in every field, connections that send nothing.

`jaxengine serve` runs as a user starts it and is attacked over sockets. While each attack runs, /health is requested
again and again on connections of its own. A row says what was tried, what was answered, how long /health took at worst
and by how much the memory of the process that serves clients grew. The exit status is 1 if a row's limit is not kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.engines import ask, serving
from benchmarks.harness import Option
from benchmarks.processes import memory
from benchmarks.recorder import Recorder
from benchmarks.server.reliability import ENGINE
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.server.http.completions.protocol import CompletionRequest
from jaxengine.server.http.responses.protocol import ResponsesRequest
from jaxengine.server.http.tokenize import DetokenizeRequest, TokenizeRequest
from tests.jaxengine.server.server_process import ServerProcess

MIB = 1 << 20
# Seconds that /health may take at worst, and how many times its size a body may take of memory.
HEALTH_SECONDS, BODY_TIMES = 0.1, 2.0
_READ_TIMEOUT = 2.0
ENDPOINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "Hi", "max_tokens": 1}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi", "max_output_tokens": 1}),
    "/tokenize": (TokenizeRequest, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}


def _list(entry: str, size: int) -> str:
    """Return a JSON array of about `size` bytes that repeats `entry`."""
    return "[" + ",".join([entry] * (size // (len(entry) + 1))) + "]"


def _names(size: int) -> str:
    """Return a JSON object of about `size` bytes with different names."""
    return "{" + ",".join(f'"{number}":1' for number in range(10**6, 10**6 + size // 12)) + "}"


# Shapes that exceed a limit of the JSON reader: refused whatever the field.
REFUSED: dict[str, Callable[[int], str]] = {
    "texts": lambda size: _list('"x"', size),
    "token ids": lambda size: _list("7", size),
    "numbers": lambda size: _list("1e1", size),
    "names": _names,
    "objects": lambda size: _list('{"type":"x"}', size),
}
# Shapes within the limits of the JSON reader, so that the field itself is validated.
SHAPES: dict[str, Callable[[int], str]] = {
    "one text": lambda size: '"' + "x" * size + '"',
    "ids within bounds": lambda size: "[" + ",".join(map(str, range(min(1_050_000, size // 9)))) + "]",
    "names within bounds": lambda size: _names(min(size, 265_000 * 12)),
    "objects within bounds": lambda size: _list('{"type":"x"}', min(size, 195_000 * 13)),
}


@dataclass
class Watched:
    """Measurements of a server during an attack.

    Attributes:
      health: seconds of the slowest request to /health.
      failures: requests to /health without status 200.
      before, most: resident bytes of the first API process before the attack, and the most during it.
    """

    health: float = 0.0
    failures: int = 0
    before: int = 0
    most: int = 0


class Table:
    """Writer of rows: area, what was tried, the result, figures, and whether the limits were kept."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder

    def add(self, area: str, tried: str, result: str, watched: Watched, *, size: int = 0) -> None:
        """Record a row; "kept" is whether /health answered in time and memory grew within bounds.

        size: bytes of the body, of which memory may grow by BODY_TIMES and 16 MiB; 0 for no limit. Milliseconds and MiB
        are rounded.
        """
        grown = watched.most - watched.before
        kept = not watched.failures and watched.health <= HEALTH_SECONDS
        kept = kept and (not size or grown <= BODY_TIMES * size + 16 * MIB)
        row = {"area": area, "tried": tried, "result": result, "health_ms": round(1e3 * watched.health)}
        self._recorder.add({**row, "grown_mib": round(grown / MIB), "kept": kept})

    def markdown(self) -> str:
        """Return the rows as a Markdown table."""
        lines = ["| tried | result | /health at worst, ms | memory grown, MiB |", "|---|---|---:|---:|"]
        for row in self._recorder.rows:
            lines.append(f"| {row['tried']} | {row['result']} | {row['health_ms']} | {row['grown_mib']} |")
        return "\n".join(lines) + "\n"


@contextlib.contextmanager
def watching(server: ServerProcess) -> Iterator[Watched]:
    """Context in which a thread requests /health all the time, each time on a new connection; yields the
    measurements.
    """
    watched, over = Watched(), threading.Event()
    (pid, *_) = server.api_pids
    watched.before = watched.most = memory(pid)

    def watch() -> None:
        while not over.is_set():
            start = time.monotonic()
            watched.failures += ask(server.base_url, "/health", timeout=120.0)[0] != 200
            watched.health = max(watched.health, time.monotonic() - start)
            watched.most = max(watched.most, memory(pid))
            over.wait(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield watched
    finally:
        over.set()
        thread.join()


def attack_fields(server: ServerProcess, table: Table, options: Namespace) -> None:
    """Send every field of every request with about `options.size` bytes in every shape; add a row with the worst shape
    of each field, by seconds and failures of /health and growth of memory.

    options.fields: names to which it is restricted; empty for all.
    """
    size = options.size
    for path, (model, base) in ENDPOINTS.items():
        for name in ("unknown", *model.model_fields):
            if options.fields and name not in options.fields:
                continue
            worst: tuple[float, str, int, Watched] | None = None
            for shape, make in (SHAPES | REFUSED if name == "unknown" else SHAPES).items():
                others = {key: value for key, value in base.items() if key != name}
                body = json.dumps(others)[:-1] + (", " if others else "") + f'"{name}": {make(size - 200)}}}'
                with watching(server) as watched:
                    status, _ = ask(server.base_url, path, body.encode(), 300.0)
                weight = watched.health + watched.failures + (watched.most - watched.before) / size
                if worst is None or weight > worst[0]:
                    worst = weight, shape, status, watched
            assert worst is not None
            _, shape, status, watched = worst
            tried = f"`{path}`, `{name}`: {size // 10**6} MB, worst as {shape}"
            table.add("fields", tried, str(status) if status else "no answer", watched, size=size)


def attack_connections(server: ServerProcess, table: Table, options: Namespace) -> None:
    """Open 2,000 connections that send nothing, 2,000 with half a header and 2,000 with half a body.

    Adds a row for each kind with the number that the server ended.
    """
    for tried, sent in (
        ("2,000 connections that say nothing", b""),
        ("2,000 half-sent headers", b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"),
        ("2,000 bodies that do not come", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"),
    ):
        with watching(server) as watched:
            opened = []
            for _ in range(2000):
                with contextlib.suppress(OSError):
                    opened.append(socket.create_connection(_address(server), 10))
                    opened[-1].sendall(sent)
            left, deadline = set(opened), time.monotonic() + 15 * _READ_TIMEOUT
            while left and time.monotonic() < deadline:
                time.sleep(0.5)
                left = {each for each in left if not _is_closed(each)}
            closed = len(opened) - len(left)
            for each in opened:
                each.close()
        table.add("connections", tried, f"{closed} of {len(opened)} ended by the server", watched)


def attack_watches(server: ServerProcess, table: Table, options: Namespace) -> None:
    """Open 300 streams of gRPC's Health.Watch, then 300 calls that send no message; add a row for each kind."""
    assert server.grpc_address is not None
    asked = health_pb2.HealthCheckRequest()
    channel = grpc.insecure_channel(server.grpc_address)
    stub: Any = health_pb2_grpc.HealthStub(channel)
    with watching(server) as watched:
        streams = [stub.Watch(asked) for _ in range(300)]
        served = sum(_first(stream) for stream in streams)
        status = stub.Check(asked, timeout=10).status
        for stream in streams:
            stream.cancel()
    table.add("watches", "300 streams of `Health.Watch`", f"{served} served, Check says {status}", watched)
    with watching(server) as watched:
        calls = [channel.stream_unary("/grpc.health.v1.Health/Check").future(_nothing()) for _ in range(300)]
        ended = sum(isinstance(call.exception(timeout=30), grpc.RpcError) for call in calls)
    table.add("watches", "300 calls whose message does not come", f"{ended} ended by the server", watched)
    channel.close()


def attack_processes(server: ServerProcess, table: Table, options: Namespace) -> None:
    """Kill the only API process four times; add a row with the longest time until another one answered."""
    worst = 0.0
    for _ in range(4):
        (pid,) = server.api_pids
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        while server.api_pids in ([], [pid]) or ask(server.base_url, "/health", timeout=2.0)[0] != 200:
            time.sleep(0.05)
        worst = max(worst, time.monotonic() - start)
    table.add("processes", "API process killed four times", f"answers again after {worst:.1f} s at most", Watched())


AREAS = {
    "fields": attack_fields,
    "connections": attack_connections,
    "watches": attack_watches,
    "processes": attack_processes,
}


def _address(server: ServerProcess) -> tuple[str, int]:
    """Return (host, port) of the server's base URL."""
    host, _, port = server.base_url.rpartition("//")[2].rpartition(":")
    return host, int(port)


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the server has closed a connection, or answered it with status 408. Reads what has arrived."""
    connection.settimeout(0.0)
    try:
        while part := connection.recv(4096):
            if b" 408 " in part:
                return True
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def _first(stream: Any) -> bool:
    """Return whether the stream yields a message. Returns False if the call fails."""
    try:
        next(stream)
        return True
    except grpc.RpcError:
        return False


def _nothing() -> Iterator[Any]:
    """Yield one empty message after 20 seconds."""
    time.sleep(20)
    yield b""


OPTIONS = {
    "only": Option(tuple(AREAS), choices=tuple(AREAS)),
    "fields": Option((), "no other fields", metavar="NAME"),
    "size": Option(31_000_000, "bytes of the largest bodies"),
    "markdown": Option(None, "where to write the table", kind=Path, metavar="FILE"),
}


def run(args: Namespace, recorder: Recorder) -> None:
    """Attack one server in each area of `args.only`, and write the table to `args.markdown` if it is given."""
    table = Table(recorder)
    with serving({**ENGINE, "grpc_port": 0, "read_timeout": _READ_TIMEOUT}, wait=900.0) as server:
        for area in args.only:
            AREAS[area](server, table, args)
    if args.markdown:
        args.markdown.write_text(table.markdown())
