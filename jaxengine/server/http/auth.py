"""Who may call: a key for every route but those that tell nothing of requests or of the engine.

Stands in front of the routes, so that a new one cannot forget it. Knows nothing of what they do.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxengine.server.http.errors import ApiError, error_response
from jaxengine.server.keys import Keys, bearer_key

# "/" and "/docs" are pages that hold no figures and ask for a key themselves: a browser sends none with an address.
OPEN_PATHS = frozenset({"/health", "/ping", "/", "/docs"})


class AuthMiddleware:
    """Lets nothing through without one of the keys, once there are any; `require_admin` asks for an operator's.

    `state["client"]` says whose request it is to the engine, by the key; None where that tells no clients apart.
    """

    def __init__(self, app: ASGIApp, keys: Keys, names_clients: bool):
        self._app = app
        self._keys = keys
        self._names_clients = names_clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        key = _key(scope)
        state = scope.setdefault("state", {})
        state["is_admin"] = self._keys.is_admin(key)
        state["client"] = self._keys.name_of(key) if self._names_clients else None
        if not self._keys.admits(key) and scope["path"].removeprefix(scope["root_path"]) not in OPEN_PATHS:
            await error_response(_unauthorized())(scope, receive, send)
            return
        await self._app(scope, receive, send)


def require_admin(request: Request) -> None:
    """A dependency of routes that change the server. Raises ApiError without an operator's key."""
    if request.scope["state"]["is_admin"]:
        return
    if _key(request.scope):
        raise ApiError(403, "this route needs an admin key")
    raise _unauthorized()


def _unauthorized() -> ApiError:
    return ApiError(401, "a valid key is needed: Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"})


def _key(scope: Scope) -> bytes:
    """As "Authorization: Bearer KEY", or as Anthropic's clients send it, as X-Api-Key."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    plain = [value for name, value in scope["headers"] if name == b"x-api-key"]
    return plain[0] if not given and len(plain) == 1 else bearer_key(given)
