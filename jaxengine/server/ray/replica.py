"""Replica of Ray Serve: one engine and the whole HTTP application over it. It starts the engine's other hosts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]
from starlette.types import ASGIApp, Message

from jaxengine.api.adapters import load_adapter
from jaxengine.api.async_llm import AsyncLLM
from jaxengine.api.engine_client import EngineClient, EngineDeadError
from jaxengine.server.adapters.lora import read_modules, refuse_models_name
from jaxengine.server.adapters.owned_ids import owned
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.batch.service import BatchService
from jaxengine.server.http.app import create_app
from jaxengine.server.link.open_inputs import packed_source
from jaxengine.server.observe.spans import traced
from jaxengine.server.ray.messages import Headers, Hint, Piece, decode_call, encode
from jaxengine.server.ray.store import RayStore

# Largest number of a response's messages that its reader has not taken yet.
_MOST_MESSAGES = 64


class Responder:
    """Server of requests from ingresses, by an HTTP application over an engine."""

    def __init__(self, engine: EngineClient, app: ASGIApp):
        self._engine, self._app = engine, app
        self._running = set[asyncio.Task[None]]()

    async def respond(self, hint: Hint, call: bytes, parts: Sequence[Any] = ()) -> AsyncIterator[bytes]:
        """Yield the pieces of the response to a request, each a Piece encoded as msgpack.

        hint: used by Router only. call: an HttpCall encoded as msgpack. parts: references to the parts of a large body,
        which follow the call's own body. Raises EngineDeadError before the first piece if the engine has failed. If the
        caller stops reading, the application sees a disconnected client: it aborts the generation, and other work runs
        to its end.
        """
        asked = decode_call(call)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "root_path": "",
            "server": None,
            "state": {"arrival": time.monotonic() - asked.age},
            **{name: getattr(asked, name) for name in asked.__struct_fields__ if name not in ("body", "age")},
        }
        bodies = _bodies(asked.body, parts)
        # Full: the application waits, and ends a stream that is not read for `stream_write_timeout`.
        said, left = asyncio.Queue[Message | None](_MOST_MESSAGES), asyncio.Event()

        async def receive() -> Message:
            """Return the next message of the body. After the last one, wait until the caller leaves, and return
            http.disconnect.
            """
            if (message := await anext(bodies, None)) is not None:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            """Queue a message of the response, unless the caller has left."""
            if not left.is_set():
                await said.put(message)

        async def run() -> None:
            """Run the application, then queue None to mark the end of the response, unless the caller has left."""
            try:
                await self._app(scope, receive, send)
            finally:
                if not left.is_set():
                    await said.put(None)

        work = asyncio.create_task(run())
        self._running.add(work)
        work.add_done_callback(self._ended)
        try:
            async for piece in _pieces(said):
                if piece.status == 503 and self._engine.errored:
                    raise EngineDeadError("the engine has failed")
                yield encode(piece)
            await work
        finally:
            # The task is not cancelled: it may have stored a background response that it has yet to begin, or may be
            # loading an adapter.
            left.set()
            while not said.empty():  # those who wait for room go on
                said.get_nowait()

    def _ended(self, work: asyncio.Task[None]) -> None:
        """Remove a finished task from the set of running ones, and retrieve its exception, which asyncio would log."""
        self._running.discard(work)
        if not work.cancelled():
            work.exception()  # mark as retrieved: the caller may have left


class Replica(Responder):
    """Ray Serve replica with one engine."""

    async def __init__(self, options: dict[str, Any], server: ServerConfig, digest_bytes: int, store: Any = None):
        """Start the engine, load the adapters of lora_modules, create the HTTP application, and start the batch API if
        it is enabled. With nnodes > 1 also starts the engine's other hosts.

        options: options of EngineConfig. digest_bytes: see RayConfig.routing_digest_bytes. store: handle of the
        deployment that stores responses; None: they are stored in this process. Raises ConfigError for invalid options,
        RequestError for an adapter that cannot be loaded, and whatever loading a model raises.
        """
        options = dict(options)
        self._digest_bytes = digest_bytes
        self._nodes, self._folder = [], None
        if options.get("nnodes", 1) > 1:
            self._folder = tempfile.TemporaryDirectory()
            key = secrets.token_hex(32)
            options["master_addr"] = ray.util.get_node_ip_address()
            options.setdefault("master_port", _free_port())
            options["cluster_key_file"] = _write_key(self._folder.name, key)
            self._nodes = [_start_node(rank, options, key) for rank in range(1, options["nnodes"])]
        engine = self._llm = await asyncio.to_thread(AsyncLLM, **options)
        for name, path in read_modules(server.lora_modules):
            refuse_models_name(name, served_names(engine, server))
            await load_adapter(engine.utility, name, path)
        client = owned(traced(engine, server), server)
        apart = dataclasses.replace(server, allowed_origins=())  # the ingress tells browsers
        super().__init__(client, create_app(client, apart, None if store is None else RayStore(store)))
        batches = BatchService(self._app, client, server).run() if server.enable_batch_api else None
        self._batches = None if batches is None else asyncio.create_task(batches)

    async def describe(self) -> bytes:
        """Return a map encoded as msgpack: "config", the engine's resolved config; "source", the opened model as
        `packed_source` makes it; and "pid", this process's id.
        """
        config, source = dataclasses.asdict(self._engine.inputs.config), packed_source(self._llm.core.source)
        return encode({"config": config, "source": source, "pid": os.getpid()})

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return what Ray passes on to all routers: "digests", at most `digest_bytes` bytes of 8-byte big-endian
        numbers, one for each cached page; "page_size"; "weights" and "adapters", digests in hex; and "draining",
        whether requests should go to other replicas.

        If digest_bytes is 0, digests are empty and page_size is 0. If the engine is dead, draining is true, and
        digests, weights and adapters are empty.
        """
        digests = b""
        known: dict[str, Any] = {"weights": "", "adapters": {}}
        with contextlib.suppress(EngineDeadError):  # that is what `draining` says
            known = await self._engine.utility("prefixes", self._digest_bytes or 8)
            digests = bytes.fromhex(known["digests"]) if self._digest_bytes else b""
        page_size = self._engine.inputs.config.block_size if self._digest_bytes else 0
        return {**known, "digests": digests, "page_size": page_size, "draining": self._engine.errored}

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is unhealthy. Ray calls this and replaces an unhealthy replica."""
        await self._engine.check_health()

    def __del__(self):
        if engine := getattr(self, "_llm", None):
            engine.shutdown()


async def _bodies(first: bytes, parts: Sequence[Any]) -> AsyncIterator[Message]:
    """Yield ASGI's messages of a request's body: `first`, then each of `parts`, awaited only when the message is
    requested. parts: references to parts in Ray's object store. Raises Ray's error for a part that is lost.
    """
    yield {"type": "http.request", "body": first, "more_body": bool(parts)}
    for index, part in enumerate(parts, 1):
        yield {"type": "http.request", "body": await part, "more_body": index < len(parts)}


async def _pieces(said: asyncio.Queue[Message | None]) -> AsyncIterator[Piece]:
    """Take the application's messages from the queue and yield them as pieces, joining all body messages that are
    queued already into one. The first piece has the status and the headers. Ends at None in the queue.
    """
    status, headers = None, Headers()
    while (message := await said.get()) is not None:
        body, last = [message.get("body", b"")], not message.get("more_body", False)
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
            continue
        while not said.empty() and (message := said.get_nowait()) is not None:
            body.append(message.get("body", b""))
            last = not message.get("more_body", False)
        yield Piece(b"".join(body), last, status, headers)
        status, headers = None, Headers()
        if message is None:
            return


class Node:
    """Ray actor that runs another host of a replica's engine, as a `jaxengine worker` process.

    words: the command's arguments. key: the cluster's secret, which is written to a private file.
    """

    def __init__(self, words: list[str], key: str):
        self._folder = tempfile.TemporaryDirectory()
        words = [*words, "--cluster-key-file", _write_key(self._folder.name, key)]
        # A separate process, since it ends with the engine.
        self._process = subprocess.Popen([sys.executable, "-m", "jaxengine", "worker", *words])

    def __del__(self):
        if process := getattr(self, "_process", None):  # none if its start has failed
            process.kill()


def _start_node(rank: int, options: Mapping[str, Any], key: str) -> Any:
    """Start host `rank` of the engine in bundle `rank` of this replica's placement group, and return its actor handle
    without waiting for the host. The actor gets all resources of its bundle.

    options: options of EngineConfig, of which the host gets those of the cluster: nnodes, master_addr, master_port and
    cluster_timeout. key: the cluster's secret. An assertion fails if the replica has no placement group.
    """
    words = ["--node-rank", str(rank)]
    for name in ("nnodes", "master_addr", "master_port", "cluster_timeout"):
        if name in options:
            words += ["--" + name.replace("_", "-"), str(options[name])]
    group = ray.util.get_current_placement_group()
    assert group is not None, "a replica of several hosts has a placement group"
    bundle = group.bundle_specs[rank]
    known = {"CPU": "num_cpus", "GPU": "num_gpus"}
    return (
        ray.remote(Node)
        .options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            resources={name: count for name, count in bundle.items() if name not in known},
            **{known[name]: count for name, count in bundle.items() if name in known},
        )
        .remote(words, key)
    )


def _free_port() -> int:
    """Return a port on which no process of this machine listens now. The port is not reserved."""
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def _write_key(folder: str, key: str) -> str:
    """Write the cluster's secret to the file "key" in `folder`, readable by this user only, and return its path. Raises
    FileExistsError if the file exists.
    """
    path = os.path.join(folder, "key")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    return path
