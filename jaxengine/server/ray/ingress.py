"""Ingress of Ray Serve: reads a request, chooses a replica by its prompt, and passes the replica's response on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError, RayTaskError  # pyright: ignore[reportMissingImports]
from ray.serve.exceptions import BackPressureError, RayServeException  # pyright: ignore[reportMissingImports]
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.checkpoint.plugins import load_plugins
from jaxengine.config.engine_config import EngineConfig, ResolvedConfig
from jaxengine.requests.inputs import InputProcessor, input_processor
from jaxengine.requests.params.options import SESSION, session_key
from jaxengine.scheduler.base.errors import OverloadedError
from jaxengine.server.adapters.lora_routes import LoraRoutes, route_key
from jaxengine.server.base.keys import Keys, digest_of
from jaxengine.server.base.names import names_of
from jaxengine.server.base.options import MIB, ServerConfig
from jaxengine.server.http.answer.sse import ClientLeft, failed_event, while_connected
from jaxengine.server.http.app import TrafficMiddleware, TrafficState, cors
from jaxengine.server.http.request.arrival import LimitsMiddleware, Uploads, is_streamed
from jaxengine.server.http.request.auth import given_key
from jaxengine.server.http.request.errors import ApiError, as_api_error
from jaxengine.server.link.open_inputs import inputs_of
from jaxengine.server.link.records import unpacked
from jaxengine.server.ray.messages import Hint, HttpCall, decode_description, decode_piece, encode
from jaxengine.server.ray.options import RayConfig
from jaxengine.server.ray.prompts import PATHS, PromptReader
from jaxengine.server.ray.store import RayStore

logger = logging.getLogger(__name__)

# Bodies that are not held in memory are cut into parts of so many bytes, which Ray stores.
_PART_BYTES = 8 * MIB
# A POST to these paths creates something each time, so that it must not be sent again to another replica.
_CREATES = ("/v1/files", "/v1/batches")
_SESSIONS = "/v1/sessions/"


class _Body(msgspec.Struct):
    """Fields of a request's body by which it is routed. Fields with other names or types are skipped without building
    values, since a body may contain millions of lists.
    """

    model: str | None = None
    background: bool | None = None


_decode_body = msgspec.json.Decoder(_Body).decode


@serve.ingress()
class Ingress:
    """HTTP deployment of Ray Serve that passes requests on to replicas. It gets the served model's config from a
    replica.
    """

    async def __init__(
        self, replicas: Any, options: dict[str, Any], server: ServerConfig, ray_config: RayConfig, store: Any = None
    ):
        """Get the engine's config from a replica, waiting for one, and create the application. Opens the model's
        tokenizer, to route by the tokens of prompts, if there may be several replicas, they publish digests, and prefix
        caching is on; the model's weights are neither downloaded nor opened. See `_inputs`.

        replicas, store: handles of the deployments of engines and of stored responses; store may be None. options:
        options of EngineConfig.
        """
        described = decode_description(await replicas.describe.remote())
        config = ResolvedConfig(**described["config"])
        reader = None
        if ray_config.max_replicas > 1 and ray_config.routing_digest_bytes and config.enable_prefix_caching:
            inputs = _inputs(described["source"], config, options)
            reader = PromptReader(inputs, server, None if store is None else RayStore(store))
        self._app = Front(replicas, names_of(config.model, server), server, ray_config.num_attempts, reader).app

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application. Ray Serve calls this."""
        return self._app


def _inputs(source: Any, config: ResolvedConfig, options: dict[str, Any]) -> InputProcessor:
    """Return an input processor equal to the replicas'.

    source: a replica's opened model, which is used as it is if its files are on this machine too; otherwise the model
    that the engine's `options` name is opened again, without its weights, which imports jax. Raises ConfigError for a
    plugin that cannot be imported, and the errors of `open_model`.
    """
    load_plugins(config.plugins)  # a source may have records of theirs
    opened = unpacked(source)
    if all(path is None or path.exists() for path in (opened.path, opened.tokenizer_path)):
        return inputs_of(source, config)
    from jaxengine.checkpoint.model_source import open_model

    without_weights = EngineConfig.from_options(**options | {"load_format": "dummy"})
    return input_processor(open_model(without_weights), config)


class Front:
    """ASGI application of an ingress, in the attribute `app`, with its limits, traffic counters and CORS headers.

    Args:
      replicas: handle of the engines' deployment.
      names: names of the served model.
      server: options of the server.
      num_attempts: number of replicas on which a request is tried that has no output yet.
      reader: reader of prompts, whose tokens serve to choose a replica; None: replicas are chosen without tokens.
    """

    def __init__(
        self,
        replicas: Any,
        names: Sequence[str],
        server: ServerConfig,
        num_attempts: int,
        reader: PromptReader | None = None,
    ):
        """Create the application, with its limits, keys and traffic counters. Contacts no replica yet. See the class
        for the arguments. Raises ConfigError for a key file or lora_routes that cannot be used.
        """
        self._replicas, self._names = replicas.options(stream=True), names
        self._server, self._num_attempts, self._reader = server, num_attempts, reader
        self._keys = Keys(server.api_keys(), server.admin_keys())
        self._routes, self._uploads = LoraRoutes.of(server), Uploads()
        limits = server.max_header_bytes, server.max_request_bytes, server.read_timeout
        inner = LimitsMiddleware(self._serve, *limits)
        self.app: ASGIApp = TrafficMiddleware(inner, TrafficState("ingress"), server.root_path.rstrip("/"))
        if server.allowed_origins:
            self.app = CORSMiddleware(self.app, **cors(server.allowed_origins))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward an HTTP request to a replica and send the replica's response (an ASGI application).

        Requests without a valid key are forwarded without their body, as the replica answers with the error. POST
        requests for files and batches, requests with an admin key, and those whose large body is in parts are tried on
        one replica only. Answers lifespan events, and closes websockets with code 1008. Returns without an error when
        the client leaves. Raises ApiError if no replica can answer, if too many requests wait or upload, or for a body
        that is too large, and RayTaskError for other errors in the replica.
        """
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        holder = digest_of(given_key(scope))
        admitted, request_id = self._keys.admits(holder), scope["state"]["request_id"]
        headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        client = scope.get("client")
        call = HttpCall(
            scope["method"],
            scope["path"],
            scope.get("raw_path") or scope["path"].encode(),
            scope["query_string"],
            [*headers, (b"x-request-id", request_id.encode())],
            scope["scheme"],
            None if client is None else (client[0], client[1]),
        )
        try:
            if not admitted:  # the replica says why; the body is not read
                await self._answer(call, (), Hint(request_id), send, self._num_attempts)
                return
            is_admin = self._keys.is_admin(holder)
            # Ray keeps the parts of a large body until its response ends.
            with self._uploads.one_of(holder.hex()) if is_streamed(scope) else nullcontext():
                parts = await self._read(scope, receive, call, is_admin)
                hint = await self._hint(scope, call, request_id)
                call.age = time.monotonic() - scope["state"]["arrival"]
                once = parts or is_admin or (call.method == "POST" and _path(scope).startswith(_CREATES))
                work = self._answer(call, parts, hint, send, 1 if once else self._num_attempts)
                await while_connected(receive, work)
        except (EngineDeadError, OverloadedError) as error:
            raise as_api_error(error) from error
        except ClientLeft:
            logger.debug("the client of request %s has left", request_id)

    async def _read(self, scope: Scope, receive: Receive, call: HttpCall, is_admin: bool) -> Sequence[Any]:
        """Read a request's body and return references to its parts in Ray's object store.

        A body of the kind that `is_streamed` names is put into the store in parts of 8 MiB if it reaches that size. Any
        other body is stored whole in `call.body`, and the result is empty. A streamed body that no replica would accept
        is not read, and the result is empty. Raises ApiError (413) for a streamed batch file that is too large,
        ClientLeft if the client leaves.
        """
        streamed, most = is_streamed(scope), float("inf") if is_admin else 0
        if _path(scope) == "/v1/files":
            most = self._server.max_batch_file_bytes + MIB if self._server.enable_batch_api else 0
        if streamed and not most:  # the replica refuses it
            return ()
        chunks, parts, size, num_stored = list[bytes](), list[Any](), 0, 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if streamed:
                if size > most:
                    raise ApiError(413, f"the body has more than {most} bytes", headers={"Connection": "close"})
                if size - num_stored >= _PART_BYTES:
                    parts.append(await asyncio.to_thread(ray.put, b"".join(chunks)))
                    chunks, num_stored = [], size
            if not message.get("more_body", False):
                break
        if parts:
            parts.append(ray.put(b"".join(chunks)))
        else:
            call.body = b"".join(chunks)
        return parts

    async def _hint(self, scope: Scope, call: HttpCall, request_id: str) -> Hint:
        """Return the Hint by which a request's replica is chosen: request id, session, adapter, prompt tokens and cache
        salt, as far as the headers, the path and the JSON body contain them. The session's name includes a digest of
        the client's key. The adapter is the one that lora_routes choose. There are tokens only with a reader, for
        PATHS, and for no background response. A body that is not JSON or not valid contributes nothing.
        """
        # Of several headers of a name the first counts, as for the replica.
        headers, path = dict(reversed(call.headers)), _path(scope)
        given = headers.get(b"x-session-id", b"").decode("latin-1")
        # The pages of a session are where its requests went.
        session = path.removeprefix(_SESSIONS) if path.startswith(_SESSIONS) else given
        # It is its key's own.
        own = session_key(digest_of(given_key(scope)).hex(), session) if SESSION.fullmatch(session) else None
        hint = Hint(request_id, own)
        if not headers.get(b"content-type", b"").startswith(b"application/json"):
            return hint
        try:
            body = _decode_body(call.body)
        except (msgspec.MsgspecError, ValueError, RecursionError):  # the replica says what is wrong
            return hint
        if body.model:  # "" stands for the model, as for the replica
            model = self._routes.pick(body.model, route_key(given, request_id))
            hint.adapter = None if model in self._names else model
        if self._reader is not None and path in PATHS and not body.background:
            scope = {**scope, "headers": call.headers}
            hint.token_ids, hint.cache_salt = await self._reader.read(scope, call.body, hint.adapter)
        return hint

    async def _answer(self, call: HttpCall, parts: Sequence[Any], hint: Hint, send: Send, num_attempts: int) -> None:
        """Send a replica's response to the client. While no part of the response has been sent, a request that fails
        because its replica is lost is tried again, up to num_attempts times in all, each with a warning in the log.

        An event stream that ends early gets a last event with the error. Raises EngineDeadError if all attempts fail or
        another kind of response ends early, OverloadedError if too many requests wait, and RayTaskError for other
        errors in the replica. If it is cancelled, the replica's work is cancelled too. Once the response begins,
        `call.body` is cleared to free memory.

        parts: references to the parts of a large body. hint: facts for Router.
        """
        encoded, started, is_stream, ended = encode(call), False, False, False
        for attempt in range(1, num_attempts + 1):
            stream = None
            try:
                stream = self._replicas.respond.remote(hint, encoded, parts)
                async for data in stream:
                    piece = decode_piece(data)
                    if piece.status is not None:
                        # The middleware names the request, as the replica did.
                        headers = [each for each in piece.headers if each[0] != b"x-request-id"]
                        is_stream = any(value.startswith(b"text/event-stream") for _, value in headers)
                        await send({"type": "http.response.start", "status": piece.status, "headers": headers})
                        # It is not asked for again: a long answer is not to hold a large question in memory.
                        started, encoded, call.body = True, b"", b""
                    ended = piece.last
                    await send({"type": "http.response.body", "body": piece.body, "more_body": not ended})
                return
            except asyncio.CancelledError:
                if stream is not None:
                    stream.cancel()
                raise
            except BackPressureError as error:
                raise OverloadedError("too many requests wait for a replica", retry_after=1.0) from error
            except (RayError, RayServeException) as error:
                if ended:
                    return
                if isinstance(error, RayTaskError) and not isinstance(error.cause, EngineDeadError):
                    raise  # a fault of ours, which another replica would have, too
                lost = EngineDeadError("the replica was lost")
                if started and is_stream:
                    await send({"type": "http.response.body", "body": failed_event(as_api_error(lost))})
                    return
                if started or attempt == num_attempts:
                    raise lost from error
                logger.warning("attempt %d of request %s has failed: %s", attempt, hint.key, error)


def _path(scope: Scope) -> str:
    """Return a request's path without the server's root path."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


async def _lifespan(receive: Receive, send: Send) -> None:
    """Answer each of ASGI's lifespan events with "complete", and return after the shutdown. Nothing is started or
    ended.
    """
    while True:
        message: Message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
