"""The HTTP application: every router, and what stands in front of all of them."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxengine.api.engine_client import EngineClient
from jaxengine.server.http import adapters, document, errors, invocations, models, operations, tokenize
from jaxengine.server.http.arrival import LimitsMiddleware
from jaxengine.server.http.auth import AuthMiddleware
from jaxengine.server.http.chat import endpoint as chat
from jaxengine.server.http.chat.auto_parsers import without_auto
from jaxengine.server.http.completions import endpoint as completions
from jaxengine.server.http.errors import ApiError, as_api_error, error_response
from jaxengine.server.http.limits import JsonRoute
from jaxengine.server.http.messages import endpoint as messages
from jaxengine.server.http.pooling import embeddings, scores
from jaxengine.server.http.responses import endpoint as responses
from jaxengine.server.keys import Keys
from jaxengine.server.names import REQUEST_ID
from jaxengine.server.observe import api_docs, prometheus, status
from jaxengine.server.observe.spans import CallerTraceMiddleware
from jaxengine.server.options import ServerConfig
from jaxengine.server.stored.store import Responses, ResponseStore
from jaxengine.server.workers import Workers
from jaxengine.version import __version__

logger = logging.getLogger(__name__)

# Each gives the routes of one part; a new part is a new line. Those of GENERATING are for models that generate, of
# POOLING for those that pool.
GENERATING: tuple[Callable[[EngineClient, ServerConfig], APIRouter], ...] = (
    chat.router,
    completions.router,
    responses.router,
    messages.router,
)
POOLING = (embeddings.router, scores.router)
ROUTERS = (
    *GENERATING,
    *POOLING,
    invocations.router,
    models.router,
    tokenize.router,
    operations.router,
    operations.admin_router,
    adapters.router,
    prometheus.router,
    status.router,
    api_docs.router,
)


def create_app(engine: EngineClient, config: ServerConfig, store: Responses | None = None) -> FastAPI:
    """The application over `engine`. `app.state.traffic` is its TrafficState.

    store: of responses; by default one of this application's own.

    Raises ConfigError for key files that cannot be used.
    """
    traffic = TrafficState()
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
        # Outermost: a browser asks before it sends the key.
        origins = list(config.allowed_origins)
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, cors)
    # FastAPI's pages that show the document load scripts from elsewhere; ours is api_docs.
    app = FastAPI(
        title="jaxengine",
        version=__version__,
        middleware=middleware,
        docs_url=None,
        redoc_url=None,
    )
    app.state.traffic = traffic
    app.state.workers = Workers()
    app.state.store = store or ResponseStore()
    all_routes: list[BaseRoute] = []
    errors.install(app, all_routes)
    for router in ROUTERS:
        routes = router(engine, config)
        _check(routes)
        app.include_router(routes, dependencies=_needs(router, engine))
        all_routes += routes.routes
    document.install(app, all_routes)
    return app


def _needs(router: Any, engine: EngineClient) -> list[Any]:
    """What is asked before a request of these routes is looked at: whether the model does such things."""
    inputs = engine.inputs
    needed = inputs.refuse_generation if router in GENERATING else inputs.require_pooling if router in POOLING else None
    if needed is None:
        return []

    async def ask() -> None:  # not to be run in a thread of its own, as functions that do not wait are
        needed()

    return [Depends(ask)]


def _check(routes: APIRouter) -> None:
    """Raises TypeError for a route whose bodies would be read by other rules than JsonRoute's."""
    for route in routes.routes:
        if not isinstance(route, APIRoute):
            raise TypeError(f"{route} is no route of its own; give a router a line in ROUTERS")
        if route.body_field is not None and not isinstance(route, JsonRoute):
            raise TypeError(f"{route.path} reads a body but its router has not route_class=JsonRoute")


class TrafficState:
    """What is going on.

    Attributes:
      num_running: requests that are being answered, those for the server's own state not counted.
      has_served: whether one of these was answered as it asked.
    """

    def __init__(self):
        self.num_running = 0
        self.has_served = False


class TrafficMiddleware:
    """Gives every request its id and the time of its arrival, counts those that run and answers what fails.

    A client's X-Request-Id is kept when it is 1 to 128 letters, digits, "-" and "_"; it is in `state["request_id"]` and
    in the answer. `state["unique_id"]` is good for naming the request in the engine. `state["arrival"]`, in seconds of
    time.monotonic, is left as it is where what reads the headers has set it.
    """

    def __init__(self, app: ASGIApp, traffic: TrafficState, root_path: str):
        self._app = app
        self._traffic = traffic
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A proxy may take it away from the path or leave it there.
        scope["root_path"] = self._root_path
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state.setdefault("arrival", time.monotonic())
        # Proxies send one id with several calls, so it alone is not enough to tell requests apart.
        state["unique_id"] = f"{given}-{secrets.token_hex(4)}" if request_id == given else request_id
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._traffic.has_served |= counts and message["status"] == 200
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if state.get("unknown_fields"):
                    headers.append((b"x-unknown-fields", _header_text(state["unknown_fields"])))
                    logger.warning("a request has fields that are not known: %s", headers[-1][1].decode())
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


def _header_text(names: list[str]) -> bytes:
    """Names of fields that a client made up, as a header may carry them: at most 20, nothing but plain characters."""
    # A header's value must not end in white space, as it would behind an empty name.
    plain = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:64]) or "?" for name in names[:20]]
    return ", ".join(plain).encode()
