"""Who may call: a key for every route but those that tell nothing of requests or of the engine.

Stands in front of the routes, so that a new one cannot forget it. Knows nothing of what they do.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxengine.server.http.errors import ApiError, error_response

# "/" is the status page, which holds no figures and asks for a key itself: a browser sends none with an address.
OPEN_PATHS = frozenset({"/health", "/ping", "/"})


def _digest(key: bytes) -> bytes:
    # Keys of one length: a comparison then takes as long for one that is too short.
    return hashlib.sha256(key).digest()


def known(given: bytes, digests: Iterable[bytes]) -> bool:
    """Whether `given` is one of the keys, in a time that does not depend on which or how nearly."""
    offered, found = _digest(given), False
    for digest in digests:
        found |= hmac.compare_digest(offered, digest)
    return found


class AuthMiddleware:
    """Lets nothing through without one of the keys, once there are any.

    Args:
      api_keys: of clients; none: whoever reaches the server may use it.
      admin_keys: of operators, good for all that clients' are good for; `require_admin` asks for one of them.
    """

    def __init__(self, app: ASGIApp, api_keys: Iterable[str], admin_keys: Iterable[str]):
        self._app = app
        self._clients = [_digest(key.encode()) for key in api_keys]
        self._admins = [_digest(key.encode()) for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        key = _bearer(scope)
        is_admin = known(key, self._admins)
        is_client = known(key, self._clients) or is_admin
        scope.setdefault("state", {})["is_admin"] = is_admin
        if self._clients and not is_client and scope["path"].removeprefix(scope["root_path"]) not in OPEN_PATHS:
            await error_response(_unauthorized())(scope, receive, send)
            return
        await self._app(scope, receive, send)


def require_admin(request: Request) -> None:
    """A dependency of routes that change the server. Raises ApiError without an operator's key."""
    if request.scope["state"]["is_admin"]:
        return
    if _bearer(request.scope):
        raise ApiError(403, "this route needs an admin key")
    raise _unauthorized()


def _unauthorized() -> ApiError:
    return ApiError(401, "a valid key is needed: Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"})


def _bearer(scope: Scope) -> bytes:
    """The key that a request brings; b"" for none."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
