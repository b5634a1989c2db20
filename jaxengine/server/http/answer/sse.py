"""Answers as server-sent events, sent while they are generated, and work that is cancelled when its client leaves or
stops reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.request.errors import ApiError, as_api_error, error_body

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
# A comment, which clients skip.
_KEEP_ALIVE = b": keep-alive\n\n"
T = TypeVar("T")

encode_json = msgspec.json.Encoder().encode


class ClientLeft(Exception):
    """Exception for a client that has disconnected, or does not read the answer."""


def event(value: Any) -> bytes:
    """Return a JSON value encoded as one server-sent event."""
    return b"data: %b\n\n" % encode_json(value)


def typed_event(value: dict[str, Any]) -> bytes:
    """Return a JSON object encoded as one server-sent event, which is named as the object's `type`."""
    return b"event: %b\n%b" % (value["type"].encode(), event(value))


def failed_event(error: ApiError) -> bytes:
    """Return the error that ends a stream encoded as a server-sent event."""
    return event(error_body(error))


def json_response(value: Any) -> Response:
    """Return the complete response whose body is the JSON of `value`. Numbers must be finite."""
    return Response(encode_json(value), media_type="application/json")


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`, or raise its exception. If the client leaves first, cancel `work` and raise
    ClientLeft.

    receive: the request's ASGI channel. The request's body must have been read before, as other messages than the
    disconnection are dropped.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    """Wait until the client has left; drop all messages before that."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def answer(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Run `work` and return its response or raise its exception. If the client leaves before that, cancel `work` and
    return an empty response with status 499.
    """
    try:
        return await while_connected(request.receive, work)
    except ClientLeft:
        return Response(status_code=499)  # nginx's status for a closed connection; nobody reads it


async def stream_events(
    request: Request,
    events: AsyncGenerator[bytes, None],
    config: ServerConfig,
    done: bytes = DONE,
    failed: Callable[[ApiError], bytes] = failed_event,
) -> Response:
    """Return the response that streams `events`, each of which is one or more encoded server-sent events, then `done`.
    If the client leaves before the first one, return an empty response with status 499.

    The first event is awaited here, before anything is sent, so that an exception until then is raised here and gets an
    HTTP status: a generator should submit to the engine before it yields. A later exception ends the stream with the
    event `failed(error)`, then `done`. `events` is closed in every case. config: stream_write_timeout, seconds after
    which a stream that its client does not read is ended, and sse_keep_alive_interval (see `_kept_alive`): the first
    comment counts as an event, so that later exceptions get no status.
    """
    if config.sse_keep_alive_interval:
        events = _kept_alive(events, config.sse_keep_alive_interval)
    try:
        first = await while_connected(request.receive, anext(events, b""))
    except ClientLeft:
        await events.aclose()
        return Response(status_code=499)
    except BaseException:
        await events.aclose()
        raise
    return _EventStream(first, events, config.stream_write_timeout, done, failed)


async def _kept_alive(events: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """Yield the events, and a comment each time that none has come for `seconds`. Closes the events, and raises their
    error.
    """
    coming: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(events, None))
            while not (await asyncio.wait({coming}, timeout=seconds))[0]:
                yield _KEEP_ALIVE
            if (chunk := coming.result()) is None:
                return
            yield chunk
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()


class _EventStream(Response):
    """Response that sends server-sent events as they are generated.

    first: the first event, which has been generated already. write_timeout: seconds after which a stream that is not
    read is ended. The other arguments are those of `stream_events`.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        write_timeout: float,
        done: bytes,
        failed: Callable[[ApiError], bytes],
    ):
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        # Content-Length 0 of the empty body is wrong for a stream; proxies must not buffer it.
        del self.headers["content-length"]
        self.headers["X-Accel-Buffering"] = "no"
        self._first = first
        self._events = events
        self._write_timeout = write_timeout
        self._done = done
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, as an ASGI application. If the client leaves or stops reading, the work is cancelled and
        that is logged; nothing is raised.
        """
        try:
            await while_connected(receive, self._send(send))
        except ClientLeft as error:
            # The server closes the connection, since an incomplete stream makes it unusable.
            logger.info("a stream was ended: %s", str(error) or "its client left")

    async def _send(self, send: Send) -> None:
        """Send the events, then `done`. An exception that ends the events is sent as an event before `done`, and is
        logged if it is unexpected. Closes the events. Raises ClientLeft.
        """
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events):
            await self._write(send, self._first)
            try:
                async for chunk in self._events:
                    await self._write(send, chunk)
            except ClientLeft:
                raise
            except Exception as error:
                shown = as_api_error(error)
                if shown.status_code == 500:
                    logger.exception("a stream failed")
                await self._write(send, self._failed(shown))
            await self._write(send, self._done)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, body: bytes) -> None:
        """Send bytes; do nothing for b"". Raises ClientLeft if the client does not read them within the write timeout
        or the connection fails.
        """
        if not body:
            return
        try:
            async with asyncio.timeout(self._write_timeout):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError:
            raise ClientLeft(f"its client did not read for {self._write_timeout:g} s") from None
        except OSError:
            raise ClientLeft from None
