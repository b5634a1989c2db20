"""Who may call: keys as "authorization: Bearer ..." on every method but those of grpc.health.v1."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

HEALTH = "/grpc.health.v1.Health/"
ADMIN = "/jaxengine.v1.Admin/"
SCHEME = "bearer"


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls without a right key before their message is read; methods that do not exist, too.

    Args:
      keys: of clients; none: whoever reaches the server may use it.
      admin_keys: of operators, good for all that clients' are good for; the Admin service takes no others.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str]):
        self._keys = tuple(map(_digest, keys))
        self._admin_keys = tuple(map(_digest, admin_keys))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method = str(handler_call_details.method)
        refused = self._refusal(method, handler_call_details.invocation_metadata)
        return await continuation(handler_call_details) if refused is None else _refusing(*refused)

    def _refusal(self, method: str, metadata: Any) -> tuple[grpc.StatusCode, str] | None:
        if method.startswith(HEALTH):
            return None
        presented = _presented(metadata)
        is_admin, is_client = _known(presented, self._admin_keys), _known(presented, self._keys)
        if is_admin or (not method.startswith(ADMIN) and (is_client or not self._keys)):
            return None
        if is_client:
            return grpc.StatusCode.PERMISSION_DENIED, "this service needs an operator's key"
        return grpc.StatusCode.UNAUTHENTICATED, "a valid key is needed: metadata 'authorization: Bearer KEY'"


def _presented(metadata: Any) -> bytes:
    """Digest of the key in a call's metadata, that of "" when there is none, or more than one."""
    values = [value for name, value in metadata or () if name.lower() == "authorization"]
    value = values[0] if len(values) == 1 else ""
    scheme, _, key = (value.decode("latin-1") if isinstance(value, bytes) else value).partition(" ")
    return _digest(key.strip() if scheme.lower() == SCHEME else "")


def _digest(key: str) -> bytes:
    # Keys of one length: a comparison then takes as long for one that is too short.
    return hashlib.sha256(key.encode()).digest()


def _known(presented: bytes, digests: Sequence[bytes]) -> bool:
    """Compares with every key, each in constant time, so that time tells nothing about any."""
    found = False
    for digest in digests:
        found |= hmac.compare_digest(presented, digest)
    return found


def _refusing(code: grpc.StatusCode, details: str) -> grpc.RpcMethodHandler:
    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(code, details)

    # As a stream of messages, none of which is waited for.
    return grpc.stream_stream_rpc_method_handler(refuse)
