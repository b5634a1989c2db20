"""gRPC authentication: keys as "authorization: Bearer ..." for all methods except those of grpc.health.v1."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from jaxengine.server.base.keys import Keys, bearer_key, digest_of
from jaxengine.server.grpc.status import end_call
from jaxengine.turns import OWNER

HEALTH = "/grpc.health.v1.Health/"
ADMIN = "/jaxengine.v1.Admin/"


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that ends calls without a valid key, those of unknown methods included, before their message is read.

    The Admin service accepts only operators' keys; the health service needs none. OWNER is set for the call, so that
    clients share image reading fairly.
    """

    def __init__(self, keys: Keys):
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return the handler that `continuation` returns, or one that ends the call as `_refusal` says. grpc calls this
        for each call, before its message is read. Sets the context variable OWNER to Keys.turn_of the call's key, also
        for a call that is refused.
        """
        method = str(handler_call_details.method)
        # The call runs in this task, so its images are read in this key's share.
        OWNER.set(self._keys.turn_of(holder_of(handler_call_details.invocation_metadata)))
        refused = self._refusal(method, handler_call_details.invocation_metadata)
        return await continuation(handler_call_details) if refused is None else _refusing(*refused)

    def _refusal(self, method: str, metadata: Any) -> tuple[grpc.StatusCode, str] | None:
        """Return the status and the message with which a call is refused; None if it is allowed.

        Health checks are allowed without a key, all methods with an operator's key, and those of other services than
        Admin to callers that Keys.admits. Others get PERMISSION_DENIED with a client's key, UNAUTHENTICATED without a
        valid one. method: full name, "/package.Service/Method". metadata: the call's pairs of name and value, or None.
        """
        if method.startswith(HEALTH):
            return None
        holder = holder_of(metadata)
        if self._keys.is_admin(holder) or (not method.startswith(ADMIN) and self._keys.admits(holder)):
            return None
        if self._keys.is_client(holder):
            return grpc.StatusCode.PERMISSION_DENIED, "this service needs an operator's key"
        return grpc.StatusCode.UNAUTHENTICATED, "a valid key is needed: metadata 'authorization: Bearer KEY'"


def holder_of(metadata: Any) -> bytes:
    """Return the digest of the key in a call's metadata (pairs of name and value, or None); NO_KEY if there is no key,
    or there are several different ones.
    """
    values = [value for name, value in metadata or () if name.lower() == "authorization"]
    return digest_of(bearer_key([value if isinstance(value, bytes) else value.encode() for value in values]))


def _refusing(code: grpc.StatusCode, details: str) -> grpc.RpcMethodHandler:
    """Return a handler that ends a call with this status and message, without reading its message."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await end_call(context, code, details)

    # A stream handler does not wait for a message.
    return grpc.stream_stream_rpc_method_handler(refuse)
