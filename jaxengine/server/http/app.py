"""HTTP application: all routers and middleware."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxengine.api.engine_client import EngineClient
from jaxengine.engine.stats.server_stats import HttpCounts
from jaxengine.server.adapters.lora_routes import ROUTE_KEY, route_key
from jaxengine.server.adapters.owned_ids import owned
from jaxengine.server.base.given_middleware import given_middleware
from jaxengine.server.base.keys import Keys
from jaxengine.server.base.names import REQUEST_ID
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.base.workers import Workers
from jaxengine.server.http import (
    adapters,
    generate,
    invocations,
    models,
    operations,
    render,
    sessions,
    skyrl,
    tokenize,
    trainers,
    weights,
)
from jaxengine.server.http.answer import document
from jaxengine.server.http.audio import endpoint as audio
from jaxengine.server.http.batches import endpoint as batches
from jaxengine.server.http.batches import files
from jaxengine.server.http.chat import batch
from jaxengine.server.http.chat import cohere as cohere_chat
from jaxengine.server.http.chat import endpoint as chat
from jaxengine.server.http.chat.auto_parsers import without_auto
from jaxengine.server.http.chat.run import COUNT_PARSED
from jaxengine.server.http.completions import endpoint as completions
from jaxengine.server.http.completions import generative_scoring
from jaxengine.server.http.derender import endpoint as derender
from jaxengine.server.http.messages import endpoint as messages
from jaxengine.server.http.pooling import cohere, embeddings, scores
from jaxengine.server.http.request import errors
from jaxengine.server.http.request.arrival import LimitsMiddleware
from jaxengine.server.http.request.auth import AuthMiddleware
from jaxengine.server.http.request.errors import ApiError, as_api_error, error_response
from jaxengine.server.http.request.limits import JsonRoute
from jaxengine.server.http.responses import endpoint as responses
from jaxengine.server.observe import api_docs, prometheus, status
from jaxengine.server.observe.spans import CallerTraceMiddleware
from jaxengine.server.stored.records import Responses, StoreBounds
from jaxengine.server.stored.store import ResponseStore
from jaxengine.version import __version__

logger = logging.getLogger(__name__)

# Kinds of calls and HTTP methods that are counted separately; all others are counted together, as clients could
# invent any number of them.
_CALL_KINDS = {"/v1/chat/completions": "chat_completions", "/v1/responses": "responses"}
_METHODS = frozenset(("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"))

# Functions that each return one router. GENERATING is for generating models, POOLING for pooling models.
GENERATING: tuple[Callable[[EngineClient, ServerConfig], APIRouter], ...] = (
    chat.router,
    batch.router,
    cohere_chat.router,
    completions.router,
    generative_scoring.router,
    generate.router,
    skyrl.router,
    render.router,
    derender.router,
    responses.router,
    messages.router,
    audio.router,
)
POOLING = (embeddings.router, cohere.router, scores.router)
ROUTERS = (
    *GENERATING,
    *POOLING,
    files.router,
    batches.router,
    invocations.router,
    models.router,
    tokenize.router,
    operations.router,
    operations.admin_router,
    adapters.router,
    weights.router,
    trainers.router,
    sessions.router,
    prometheus.router,
    status.router,
    api_docs.router,
)


def create_app(
    engine: EngineClient, config: ServerConfig, store: Responses | None = None, process: str = "api"
) -> FastAPI:
    """Return the HTTP application for `engine`, which is wrapped by `owned`. Its `app.state` has `traffic`
    (TrafficState), `workers` (Workers) and `store`.

    config: parsers may be "auto". store: store of responses; None for a new one in this process, with the bounds of
    `config`. process: name of this process among the server's, for metrics. Raises ConfigError for an unknown parser,
    and for a middleware, key files, lora_dirs, lora_routes or a batch_storage_dir that cannot be used.
    """
    engine = owned(engine, config)
    traffic = TrafficState(process)
    config = without_auto(config, engine.inputs)
    names_clients = engine.inputs.config.scheduling_policy == "fair"
    middleware = [
        Middleware(TrafficMiddleware, traffic, config.root_path.rstrip("/")),
        Middleware(LimitsMiddleware, config.max_header_bytes, config.max_request_bytes, config.read_timeout),
        Middleware(AuthMiddleware, Keys(config.api_keys(), config.admin_keys()), names_clients),
    ]
    if config.otlp_traces_endpoint is not None:
        middleware.append(Middleware(CallerTraceMiddleware))
    if config.allowed_origins:
        # Outermost: a browser's preflight request has no key.
        middleware.insert(0, Middleware(CORSMiddleware, **cors(config.allowed_origins)))
    # Outside of everything, also of the check of keys, as in vLLM.
    middleware = [*given_middleware(config.middleware), *middleware]
    # FastAPI's documentation pages load scripts from other hosts; ours is api_docs.
    app = FastAPI(
        title="jaxengine",
        version=__version__,
        middleware=middleware,
        docs_url=None,
        redoc_url=None,
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",
    )
    app.state.traffic = traffic
    app.state.workers = Workers()
    app.state.store = store or ResponseStore(StoreBounds(**config.store_bounds()))
    all_routes: list[BaseRoute] = []
    errors.install(app, all_routes)
    for router in ROUTERS:
        routes = router(engine, config)
        _check(routes)
        app.include_router(routes, dependencies=_needs(router, engine))
        all_routes += routes.routes
    document.install(app, all_routes)
    return app


def cors(origins: Sequence[str]) -> dict[str, Any]:
    """Return keyword arguments of CORSMiddleware that allow calls from these origins with any method and header."""
    return {"allow_origins": [*origins], "allow_methods": ["*"], "allow_headers": ["*"]}


def create_metrics_app(engine: EngineClient, config: ServerConfig, traffic: TrafficState) -> FastAPI:
    """Return the application of metrics_port: /metrics and the routes of operations.router, open to everybody without a
    key. traffic: the whole server's.
    """
    limits = Middleware(LimitsMiddleware, config.max_header_bytes, config.max_request_bytes, config.read_timeout)
    app = FastAPI(middleware=[limits], docs_url=None, redoc_url=None, openapi_url=None)
    app.state.traffic = traffic
    all_routes: list[BaseRoute] = []
    errors.install(app, all_routes)
    for router in (operations.router, prometheus.router):
        routes = router(engine, config)
        app.include_router(routes)
        all_routes += routes.routes
    return app


def _needs(router: Any, engine: EngineClient) -> list[Any]:
    """Return the FastAPI dependencies of a router: for routers of GENERATING or POOLING, one that raises RequestError,
    before a request is read, if the model does not support these routes. [] for other routers.

    router: one of ROUTERS.
    """
    inputs = engine.inputs
    needed = inputs.refuse_generation if router in GENERATING else inputs.require_pooling if router in POOLING else None
    if needed is None:
        return []

    async def ask() -> None:  # async, as FastAPI runs other functions in a thread
        needed()

    return [Depends(ask)]


def _check(routes: APIRouter) -> None:
    """Raise TypeError for a route that is not an APIRoute, and for one that reads a body and is not a JsonRoute."""
    for route in routes.routes:
        if not isinstance(route, APIRoute):
            raise TypeError(f"{route} has no route; add its router to ROUTERS")
        if route.body_field is not None and not isinstance(route, JsonRoute):
            raise TypeError(f"{route.path} reads a body but its router has not route_class=JsonRoute")


class TrafficState:
    """Counts of the requests that an API process is answering.

    Attributes:
      num_running: number of POST requests that are being answered, and of responses generated in the background.
      has_served: whether any POST request has been answered with status 200.
      http: counts of all requests that have not been reported to the engine yet.
      process: name of this process among the server's.
    """

    def __init__(self, process: str = "api"):
        self.http, self.process = HttpCounts(), process
        self.num_running = 0
        self.has_served = False


class TrafficMiddleware:
    """Middleware that assigns every request its id and arrival time, counts requests, and answers failures.

    A client's X-Request-Id is used if it is 1 to 128 letters, digits, "-" and "_"; otherwise the id is random. It is in
    `state["request_id"]` and in the response's headers. `state["unique_id"]` is unique in the engine.
    `state["arrival"]`, in seconds of time.monotonic, keeps the value that the reader of the headers has set, if any.
    `state["priority"]`, the most urgent priority that the request may have, is None for no limit unless a caller in
    this process has set it. root_path: the server's, without "/" at its end.
    """

    def __init__(self, app: ASGIApp, traffic: TrafficState, root_path: str):
        self._app = app
        self._traffic = traffic
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI application, by the wrapped application. An exception before the response has
        begun becomes an error response; a later one is raised. Scopes other than HTTP are passed on unchanged.

        Sets scope["root_path"], in its state request_id (X-Request-Id, if it is valid), unique_id, arrival and
        priority, ROUTE_KEY (from X-Session-Id, else the request's id) and COUNT_PARSED. Logs exceptions other than
        ApiError. POST requests count as running until they end. Every request is counted in the metrics, except those
        of a batch, whose state already has a holder. Outputs that were parsed are counted for all requests.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A proxy may remove the root path or keep it.
        scope["root_path"] = self._root_path
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state.setdefault("arrival", time.monotonic())
        state.setdefault("priority", None)
        # Proxies may send the same id with several calls, so it is not unique.
        session = next((value for name, value in scope["headers"] if name == b"x-session-id"), b"")
        ROUTE_KEY.set(route_key(session.decode("latin-1"), request_id))
        kind = _CALL_KINDS.get(scope["path"].removeprefix(self._root_path), "other")
        COUNT_PARSED.set(lambda mode, outcome: self._traffic.http.parsed(mode, outcome, kind))
        state["unique_id"] = f"{given}-{secrets.token_hex(4)}" if request_id == given else request_id
        started, status = False, "none"
        # A request of a batch comes from a caller in this process, not over HTTP.
        is_http = "holder" not in state

        async def send_named(message: Message) -> None:
            """Send a message of the response. Headers of the response get the request's id and the names of its unknown
            and ignored fields; unknown fields are also logged.

            Records the status, and in TrafficState.has_served that a POST request has been answered with 200.
            """
            nonlocal started, status
            if message["type"] == "http.response.start":
                started, status = True, str(message["status"])
                self._traffic.has_served |= counts and message["status"] == 200
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if state.get("unknown_fields"):
                    headers.append((b"x-unknown-fields", _header_text(state["unknown_fields"])))
                    logger.warning("a request has unknown fields: %s", headers[-1][1].decode())
                if state.get("ignored_fields"):
                    headers.append((b"x-ignored-fields", _header_text(state["ignored_fields"])))
                message = {**message, "headers": headers}
            await send(message)

        counts = scope["method"] == "POST"
        self._traffic.num_running += counts
        try:
            await self._app(scope, receive, send_named)
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("request %s failed", request_id)
            if started:
                raise
            await error_response(as_api_error(error))(scope, receive, send_named)
        finally:
            self._traffic.num_running -= counts
            if is_http:
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._traffic.http.observe(method, route, status, time.monotonic() - state["arrival"])


def _header_text(names: list[str]) -> bytes:
    """Return field names, which a client has chosen, as the value of a header: the first 20, joined by ", ", each cut
    to 64 characters. Characters other than ASCII letters, digits, "_", "." and "-" become "?", and so does an empty
    name.
    """
    # A header's value must not end in white space, as it would with an empty name at the end.
    plain = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:64]) or "?" for name in names[:20]]
    return ", ".join(plain).encode()
