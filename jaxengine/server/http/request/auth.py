"""HTTP authentication: every route needs a key, except those that reveal nothing about requests or the engine.

It is middleware, so that no route can omit it.
"""

from __future__ import annotations

from fastapi import Depends
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.base.keys import NO_KEY, Keys, bearer_key, digest_of, owner_tag
from jaxengine.server.http.request.errors import ApiError, error_response
from jaxengine.turns import OWNER

# "/" and "/docs" are pages without data that prompt for a key themselves, as browsers send none with an address.
OPEN_PATHS = frozenset({"/health", "/live", "/livez", "/ping", "/", "/docs"})


class AuthMiddleware:
    """Middleware that refuses requests without a valid key, if there are keys. Routes for operators also depend on
    `require_admin`.

    `state["holder"]` is the digest of the key; a caller in this process that acts for a client, such as a batch, has
    set it before. `state["client"]` names the client for the engine, by the key; None if the scheduling policy does not
    distinguish clients. `state["owner"]` is the digest in hex, which owns what the request creates;
    `state["owner_tag"]` is a short form for ids, and `state["sees"]` the owner whose ids the client may see, None for
    all ids. `state["is_admin"]` is whether the key is an operator's. OWNER names the client among whom image reading is
    shared fairly.
    """

    def __init__(self, app: ASGIApp, keys: Keys, names_clients: bool):
        self._app = app
        self._keys = keys
        self._names_clients = names_clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set the client's fields in a request's state, and pass the request on if its key is admitted or its path is
        one of OPEN_PATHS; answer others with 401. WebSockets are closed, as no route accepts any. A lifespan scope is
        passed on unchanged.
        """
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        state = scope.setdefault("state", {})
        holder = state.setdefault("holder", digest_of(given_key(scope)))
        state["owner"] = holder.hex()
        state["owner_tag"] = owner_tag(holder)
        state["is_admin"] = self._keys.is_admin(holder)
        state["sees"] = state["owner_tag"] if self._keys.are_needed and not state["is_admin"] else None
        OWNER.set(self._keys.turn_of(holder))
        state["client"] = self._keys.name_of(holder) if self._names_clients else None
        if not self._keys.admits(holder) and scope["path"].removeprefix(scope["root_path"]) not in OPEN_PATHS:
            await error_response(_unauthorized())(scope, receive, send)
            return
        await self._app(scope, receive, send)


def require_admin(request: Request) -> None:
    """Dependency of routes that change the server. Raises ApiError unless the key is an operator's: 403 for another
    key, 401 without one.
    """
    if request.scope["state"]["is_admin"]:
        return
    if request.scope["state"]["holder"] != NO_KEY:
        raise ApiError(403, "this route needs an admin key")
    raise _unauthorized()


def check_query(request: Request) -> None:
    """Dependency of routes that use all their query parameters. Raises RequestError for a parameter that the route does
    not have.
    """
    known = sorted(each.alias for each in request.scope["route"].dependant.query_params)
    for name in request.query_params:
        if name not in known:
            allowed = ", ".join(known) or "none"
            problem = f"{show_value(name)} is not a parameter of {request.url.path}; allowed: {allowed}"
            raise RequestError(problem, param=name[:64])


# Dependencies of routes for operators.
ADMIN = [Depends(require_admin), Depends(check_query)]


def _unauthorized() -> ApiError:
    """Return the error 401, whose response has the header WWW-Authenticate."""
    return ApiError(401, "a valid key is needed: Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"})


def given_key(scope: Scope) -> bytes:
    """Return the request's key, b"" for none: from "Authorization: Bearer KEY" or, without that header, from X-Api-Key,
    which Anthropic's clients send. Several different X-Api-Key values count as none.
    """
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    plain = {value.strip() for name, value in scope["headers"] if name == b"x-api-key"}
    return plain.pop() if not given and len(plain) == 1 else bearer_key(given)
