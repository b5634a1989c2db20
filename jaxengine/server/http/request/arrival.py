"""Limits of incoming requests: size of headers and body, time to receive them, and total size of all bodies."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxengine.scheduler.base.errors import OverloadedError
from jaxengine.server.http.request.errors import ApiError, error_response

# Minimum rate of a body: in addition to read_timeout it may take the time that this rate implies.
LEAST_BYTES_PER_SECOND = 256 << 10
# Limit of the total size of bodies in memory, as a multiple of the largest allowed body.
_MOST_BODIES = 8
_CLOSE = {"Connection": "close"}  # the rest of the body is not read
# Refusals after which the rest of a body is read and dropped: many clients read no answer before they have sent the
# whole body, and closing a connection with unread bytes resets it.
_DRAINED = (413, 429, 431)
# Paths and content types of bodies that are not held in memory; the code that reads them limits their size.
STREAMED = {"/update_weights": b"application/octet-stream", "/v1/files": b"multipart/form-data"}
# Limits of the bytes that are dropped of one body, as a multiple of the largest allowed body, and of bodies that are
# dropped at a time.
_MOST_DROPPED, _MOST_DRAINS = 2, 64
# Largest number of simultaneous uploads to one process, and of one client.
_MAX_UPLOADS, _MAX_OWN_UPLOADS = 32, 8


class LimitsMiddleware:
    """Middleware that refuses headers and bodies that are too large, bodies that arrive too slowly, and too many large
    bodies at once.

    A body is measured while it arrives. It counts towards the total size from its first byte until its response begins.
    A streamed body (STREAMED) need only arrive in time.
    """

    def __init__(self, app: ASGIApp, max_header_bytes: int, max_request_bytes: int, read_timeout: float):
        """Store the limits.

        max_header_bytes: largest size in bytes of a request's headers, path and query included. max_request_bytes:
        largest size of its body; all bodies together may have _MOST_BODIES times as much. read_timeout: seconds to
        receive a body, in addition to the time that LEAST_BYTES_PER_SECOND allows.
        """
        self._app = app
        self._max_header_bytes = max_header_bytes
        self._max_request_bytes = max_request_bytes
        self._read_timeout = read_timeout
        self._num_held = 0
        self._num_drains = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as an ASGI application; scopes other than HTTP are passed on unchanged.

        Headers beyond a limit are refused with a response 400, 413 or 431. The wrapped application receives the body
        through a function that raises ApiError beyond a limit (408, 413 or 429), to be answered by that application.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        streamed = is_streamed(scope)
        num_read = num_held = 0
        whole = drains = False
        deadline: float | None = None

        async def counted() -> Message:
            """Receive a part of the body. Raises ApiError: 408 for a late one; unless the body is streamed, 413 if it
            exceeds max_request_bytes, and 429 if all bodies that are held exceed _MOST_BODIES times that.
            """
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
                raise ApiError(
                    408, f"the body did not arrive within {self._read_timeout:g} s", headers=_CLOSE
                ) from None
            size = len(message.get("body", b""))
            num_read += size
            whole = not message.get("more_body", False)
            if streamed:
                return message
            if num_read > self._max_request_bytes:
                raise self._too_large()
            if self._num_held + size > _MOST_BODIES * self._max_request_bytes:
                again = {"Retry-After": "1", **_CLOSE}
                raise ApiError(429, "too many large bodies are being read at the moment", headers=again)
            num_held += size
            self._num_held += size
            return message

        async def released(message: Message) -> None:
            """Send a message of the response, and count the request's body no longer as held. Before the end of a
            response with a status in _DRAINED, drop the rest of a body that is still arriving (`_drain`).
            """
            nonlocal num_held, drains
            self._num_held -= num_held
            num_held = 0
            if message["type"] == "http.response.start":
                # With "Expect: 100-continue" the client sends no body before the server has agreed.
                waits = any(name == b"expect" for name, _ in scope["headers"])
                drains = message["status"] in _DRAINED and not whole and not waits
            elif drains and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await self._drain(receive)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        try:
            try:
                self._check_headers(scope)
            except ApiError as error:
                await error_response(error)(scope, receive, released)
                return
            await self._app(scope, counted, released)
        finally:
            self._num_held -= num_held

    async def _drain(self, receive: Receive) -> None:
        """Read and drop the rest of a body: at most _MOST_DROPPED times the largest body, and for at most read_timeout
        seconds. Does nothing if _MOST_DRAINS other bodies are being dropped.
        """
        if self._num_drains >= _MOST_DRAINS:
            return
        self._num_drains += 1
        left = _MOST_DROPPED * self._max_request_bytes
        try:
            async with asyncio.timeout(self._read_timeout):
                while left > 0:
                    message = await receive()
                    if not message.get("more_body", False):  # its end, or the client has left
                        return
                    left -= len(message.get("body", b""))
        except TimeoutError:
            return
        finally:
            self._num_drains -= 1

    def _check_headers(self, scope: Scope) -> None:
        """Check the size of the headers, path and query included, and the Content-Length, both in bytes.

        Raises ApiError: 431 for headers that are too large, 413 for a body that is too large, unless it is one of
        STREAMED, and 400 for a Content-Length that is not a number or comes with Transfer-Encoding.
        """
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self._max_header_bytes:
            raise ApiError(431, f"the headers have {size} bytes; allowed: {self._max_header_bytes}", headers=_CLOSE)
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            # Request smuggling: a proxy may use one of them and the server the other.
            text = "Content-Length and Transfer-Encoding are both given; allowed: one of them"
            raise ApiError(400, text, headers=_CLOSE)
        for name, value in scope["headers"]:
            if name == b"content-length":
                if not value.isdigit():
                    raise ApiError(400, "Content-Length is not a number", headers=_CLOSE)
                # The length of the text is checked first: parsing many digits is slow.
                if len(value.lstrip(b"0")) > 20 or (int(value) > self._max_request_bytes and not is_streamed(scope)):
                    raise self._too_large()

    def _too_large(self) -> ApiError:
        """Return the error 413, whose response closes the connection."""
        return ApiError(413, f"the body has more than {self._max_request_bytes} bytes", headers=_CLOSE)


class Uploads:
    """Counter of the streamed bodies that this process is receiving: at most _MAX_UPLOADS, of one client at most
    _MAX_OWN_UPLOADS.
    """

    def __init__(self):
        self._running: Counter[str] = Counter()

    @contextmanager
    def one_of(self, owner: str) -> Iterator[None]:
        """Context manager that counts an upload of a client while it is received. Raises OverloadedError if
        _MAX_UPLOADS are being received, or _MAX_OWN_UPLOADS of this client.
        """
        running = self._running
        if running.total() >= _MAX_UPLOADS or running[owner] >= _MAX_OWN_UPLOADS:
            problem = f"{running.total()} files are being received, {running[owner]} of them of yours"
            raise OverloadedError(f"{problem}; allowed: {_MAX_UPLOADS} and {_MAX_OWN_UPLOADS}")
        running[owner] += 1
        try:
            yield
        finally:
            running[owner] -= 1
            if not running[owner]:
                del running[owner]


def is_streamed(scope: Scope) -> bool:
    """Whether a request's body is one of STREAMED, by its path without the root path and its Content-Type."""
    kind = STREAMED.get(scope["path"].removeprefix(scope.get("root_path", "")))
    given = (value.partition(b";")[0].strip().lower() for name, value in scope["headers"] if name == b"content-type")
    return kind is not None and kind in given
