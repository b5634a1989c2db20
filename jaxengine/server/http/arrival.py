"""How a request may arrive: how large its headers and its body are, how long they take, how much is held of all bodies.

Owns what is settled before a body is looked into. Knows nothing of JSON or fields.
"""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxengine.server.http.errors import ApiError, error_response

# Beyond its read_timeout a body may take as long as it does at this rate: a large one from far away is no attack.
LEAST_BYTES_PER_SECOND = 256 << 10
# Bodies that are held at once, in largest ones.
_MOST_BODIES = 8
_CLOSE = {"Connection": "close"}  # what is left of a body is not waited for


class LimitsMiddleware:
    """Refuses headers and bodies that are too large, and bodies that come too slowly or too many at once.

    A body is counted while it comes. It counts among those that are held from its first byte until its answer begins.
    """

    def __init__(self, app: ASGIApp, max_header_bytes: int, max_request_bytes: int, read_timeout: float):
        """read_timeout: seconds that a body may take to come, beside what LEAST_BYTES_PER_SECOND gives it."""
        self._app = app
        self._max_header_bytes = max_header_bytes
        self._max_request_bytes = max_request_bytes
        self._read_timeout = read_timeout
        self._num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_headers(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        num_read = num_held = 0
        whole = False
        deadline: float | None = None

        async def counted() -> Message:
            nonlocal num_read, num_held, whole, deadline
            if whole:
                return await receive()
            if deadline is None:
                deadline = time.monotonic() + self._read_timeout
            left = deadline + num_read / LEAST_BYTES_PER_SECOND - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not come within {self._read_timeout:g} s", headers=_CLOSE) from None
            size = len(message.get("body", b""))
            num_read += size
            whole = not message.get("more_body", False)
            if num_read > self._max_request_bytes:
                raise self._too_large()
            if self._num_held + size > _MOST_BODIES * self._max_request_bytes:
                again = {"Retry-After": "1", **_CLOSE}
                raise ApiError(429, "too many large bodies are being read at the moment", headers=again)
            num_held += size
            self._num_held += size
            return message

        async def released(message: Message) -> None:
            nonlocal num_held
            self._num_held -= num_held
            num_held = 0
            await send(message)

        try:
            await self._app(scope, counted, released)
        finally:
            self._num_held -= num_held

    def _check_headers(self, scope: Scope) -> None:
        """Raises ApiError."""
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self._max_header_bytes:
            raise ApiError(431, f"the headers have {size} bytes; allowed are {self._max_header_bytes}", headers=_CLOSE)
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            # Where a proxy goes by the one and the server by the other, a request can hide in another's body.
            text = "Content-Length and Transfer-Encoding are both there; allowed is one of them"
            raise ApiError(400, text, headers=_CLOSE)
        for name, value in scope["headers"]:
            if name == b"content-length":
                if not value.isdigit():
                    raise ApiError(400, "Content-Length is not a number", headers=_CLOSE)
                # Compared as text first: a number of many digits is slow to read.
                if len(value.lstrip(b"0")) > 20 or int(value) > self._max_request_bytes:
                    raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_request_bytes} bytes", headers=_CLOSE)
