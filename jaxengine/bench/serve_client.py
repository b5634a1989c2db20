"""A minimal HTTP/1.1 client for load generation: one request at a time on a connection, and timing of a streamed
completion.

Supports OpenAI's completion and chat endpoints.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

READ_BYTES = 1 << 16
# Most bytes of an error text that are kept.
ERROR_BYTES = 4096


class BadUrlError(ValueError):
    """Error of a URL that does not name an HTTP server."""


@dataclass(frozen=True)
class Server:
    """Address of a server, and headers to send.

    Attributes:
      host, port: address.
      path: prefix of all routes, such as /v1.
      tls: settings of TLS; None for plain HTTP.
      headers: sent with every request.
    """

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def at(cls, url: str, api_key: str | None = None, ca_file: str | None = None, *, insecure: bool = False) -> Server:
        """Return the Server of a base URL such as http://127.0.0.1:8000/v1.

        api_key: sent as a bearer token; None or "" for none. ca_file: PEM file of certificates to trust instead of the
        system's; None for the system's. insecure: accept every certificate. Raises BadUrlError for a URL of another
        form, and OSError for a `ca_file` that cannot be read.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise BadUrlError(f"url is {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise BadUrlError(f"url is {url!r}; allowed: http://HOST:PORT/PATH or https://HOST:PORT/PATH")
        tls = ssl.create_default_context(cafile=ca_file) if parts.scheme == "https" else None
        if tls is not None and insecure:
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        netloc = parts.netloc.rpartition("@")[2]
        headers = [("Host", netloc), ("User-Agent", "jaxengine-bench"), ("Accept-Encoding", "identity")]
        if api_key:
            headers.append(("Authorization", f"Bearer {api_key}"))
        return cls(host, port or (443 if tls else 80), parts.path.rstrip("/"), tls, tuple(headers))


class Connection:
    """HTTP/1.1 connection to a server, for one request at a time.

    Call `send` and read `body` to its end. For a further request call `restart` first, which needs a `reusable`
    connection.
    """

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        """Wrap an open connection. `used` is False until `restart` marks that a request was completed."""
        self._server, self._reader, self._writer = server, reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self.used = False

    @classmethod
    async def open(cls, server: Server) -> Connection:
        """Open a connection. Raises OSError if the server cannot be reached."""
        try:
            return cls(server, *await asyncio.open_connection(server.host, server.port, ssl=server.tls))
        except OSError as error:
            problem = f"no server answers at {server.host}:{server.port} ({error})"
            raise OSError(f"{problem}; start one with `jaxengine serve`, or give its --url") from None

    async def send(self, method: str, path: str, body: bytes = b"") -> h11.Response:
        """Send a request and wait for the response; return its status and headers.

        path: after the server's own path. body: JSON, b"" for none. The body of the response remains to be read
        (`body`). Raises OSError if the connection fails, h11.RemoteProtocolError if the server closes it early or
        violates the protocol, and h11.LocalProtocolError if the last request is not complete.
        """
        self.post(method, path, body)
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                return event

    def post(self, method: str, path: str, body: bytes = b"") -> None:
        """Write a request without waiting for the response.

        path: after the server's own path. body: JSON, b"" for none. Raises h11.LocalProtocolError if the last request
        is not complete.
        """
        headers = [*self._server.headers, ("Content-Length", str(len(body)))]
        if body:
            headers.append(("Content-Type", "application/json"))
        request = h11.Request(method=method, target=self._server.path + path, headers=headers)
        parts = [self._http.send(request), self._http.send(h11.Data(body)) if body else b""]
        parts.append(self._http.send(h11.EndOfMessage()))
        self._writer.write(b"".join(part for part in parts if part))

    async def body(self) -> AsyncIterator[bytes]:
        """Yield pieces of the response body as they arrive, until its end.

        Raises OSError if the connection fails, h11.RemoteProtocolError if the server closes it early or violates the
        protocol.
        """
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    @property
    def reusable(self) -> bool:
        """Whether a request and its response are complete, and the server keeps the connection open."""
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    def restart(self) -> None:
        """Prepare the connection for the next request, and set `used`. Raises h11.LocalProtocolError unless it is
        reusable.
        """
        self._http.start_next_cycle()
        self.used = True

    def close(self) -> None:
        """Close the socket at once, without reading the rest of a response."""
        self._writer.transport.abort()

    async def _next(self) -> Any:
        """Wait for the next event of h11 and return it.

        Raises OSError, or h11.RemoteProtocolError if the server closes the connection early or violates the protocol.
        """
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(READ_BYTES))
        return event


class Connections:
    """Pool of reusable connections to one server."""

    def __init__(self, server: Server):
        """Start without a connection."""
        self.server = server
        self._idle: deque[Connection] = deque()

    async def take(self) -> Connection:
        """Remove an idle connection from the pool and return it; without one, open and return a new connection.

        Raises OSError if a new connection is needed and the server cannot be reached.
        """
        return self._idle.pop() if self._idle else await Connection.open(self.server)

    async def fresh(self) -> Connection:
        """Open a new connection, even if the pool has idle ones, and return it.

        Raises OSError if the server cannot be reached.
        """
        return await Connection.open(self.server)

    def give_back(self, connection: Connection) -> None:
        """Add a connection to the pool if it is reusable, else close it."""
        if connection.reusable:
            connection.restart()
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()


@dataclass
class Sample:
    """Client-side measurements of one request. Times are seconds of `time.perf_counter`.

    Attributes:
      sent: when the request was written to the socket.
      ended: when the response had ended, or failed.
      chunk_times: when each piece of output arrived.
      prompt_tokens, output_tokens: the server's counts; without them, output_tokens is the number of pieces.
      counted: whether the server reported its counts.
      finish_reason: the last one received.
      error: kind of failure; None for success.
      message: the server's or system's error text.
      retry_after: the Retry-After header of a response with an error status.
    """

    sent: float = 0.0
    ended: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    finish_reason: str | None = None
    error: str | None = None
    message: str = ""
    retry_after: str | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the whole request."""
        return self.ended - self.sent

    @property
    def first_token_seconds(self) -> float:
        """Seconds until the first piece of output. Raises IndexError if there is none."""
        return self.chunk_times[0] - self.sent

    @property
    def per_token_seconds(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive pieces of output, [] with fewer than two pieces."""
        return [late - early for early, late in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


async def stream(connections: Connections, path: str, body: dict[str, Any], timeout: float | None) -> Sample:
    """Send a streaming request and read its response to the end; return a sample, which also records any failure.

    path: route of the server. body: fields of the request. timeout: seconds after which the request is given up; None
    for no limit. After a response of any status the connection is given back for reuse; after a failure it is closed.
    Raises only asyncio.CancelledError.
    """
    sample, payload = Sample(), json.dumps(body, separators=(",", ":")).encode()
    connection = None
    try:
        async with asyncio.timeout(timeout):
            connection = await _stream(connections, path, payload, sample)
    except TimeoutError as error:
        sample.error, sample.message = "timeout", str(error) or f"no end after {timeout} s"
    except OSError as error:
        sample.error, sample.message = "connection", str(error)
    except (h11.RemoteProtocolError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        sample.error, sample.message = "protocol", str(error)
    sample.ended = time.perf_counter()
    if connection is not None:
        connections.give_back(connection)
    return sample


async def _stream(connections: Connections, path: str, payload: bytes, sample: Sample) -> Connection:
    """POST `payload` to the route `path`, read the response, of any status, into `sample`, and return the open
    connection.

    If a reused connection turns out to be closed, the request is sent again on another one. On any error the connection
    is closed. Raises OSError or h11.RemoteProtocolError; AttributeError, KeyError, TypeError, ValueError or
    RecursionError for events of another form.
    """
    while True:
        sample.sent = time.perf_counter()
        connection = await connections.take()
        try:
            response = await connection.send("POST", path, payload)
            break
        except (OSError, h11.RemoteProtocolError):
            connection.close()
            # A server may close an idle connection at any time; the request is sent again on another one.
            if not connection.used:
                raise
        except BaseException:
            connection.close()
            raise
    try:
        if response.status_code != 200:
            sample.error = f"http {response.status_code}"
            sample.retry_after = next(
                (value.decode() for name, value in response.headers if name == b"retry-after"), None
            )
            sample.message = await _read_text(connection)
        else:
            await _follow(connection, sample)
    except BaseException:
        connection.close()
        raise
    return connection


async def _follow(connection: Connection, sample: Sample) -> None:
    """Read a response's server-sent events into `sample`, to the end.

    Without usage in the events, the output tokens are the number of events with output. Sets the error "cut" without
    [DONE], and "empty" without output, unless an event had an error. Raises OSError or h11.RemoteProtocolError;
    AttributeError, KeyError, TypeError, ValueError or RecursionError for events of another form.
    """
    rest, done = b"", False
    async for piece in connection.body():
        now = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
            else:
                _take(json.loads(data), sample, now)
    if not sample.counted:
        sample.output_tokens = len(sample.chunk_times)
    if sample.error is None:
        if not done:
            sample.error, sample.message = "cut", "the stream ended without [DONE]"
        elif not sample.chunk_times:
            sample.error, sample.message = "empty", "the stream had no output"


def _take(chunk: dict[str, Any], sample: Sample, now: float) -> None:
    """Read one chunk of a completion or chat into `sample`: its error, usage, finish_reason, and its time if it has
    output.

    now: when it arrived. Raises AttributeError, KeyError or TypeError for a chunk of another form.
    """
    if "error" in chunk:
        sample.error, sample.message = "stream error", json.dumps(chunk["error"])[:ERROR_BYTES]
        return
    if usage := chunk.get("usage"):
        sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        sample.counted = True
    choices = chunk.get("choices") or ()
    for choice in choices:
        sample.finish_reason = choice.get("finish_reason") or sample.finish_reason
    # Several outputs in one event arrived at one time.
    if any(map(_brings_output, choices)):
        sample.chunk_times.append(now)


def _brings_output(choice: dict[str, Any]) -> bool:
    """Return whether a choice in a chunk carries output: text, reasoning, tool calls, or a token whose character is
    still incomplete.

    Such a token is a chunk with none of the others. It is recognised by exclusion: the chunk that opens a chat has a
    role, and the one that closes an output a finish_reason.
    """
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    if any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls")):
        return True
    return "role" not in delta and choice.get("finish_reason") is None


async def get_json(server: Server, path: str) -> Any:
    """Fetch JSON from a route of the server on a new connection.

    Raises OSError, or ValueError for invalid JSON, a status other than 200, or a body over 1 MiB that is cut.
    """
    connection = await Connection.open(server)
    try:
        response = await connection.send("GET", path)
        text = await _read_text(connection, limit=READ_BYTES * 16)
    except h11.RemoteProtocolError as error:
        raise OSError(f"{server.host}:{server.port} does not speak HTTP: {error}") from None
    finally:
        connection.close()
    if response.status_code != 200:
        raise ValueError(f"GET {server.path}{path} gave status {response.status_code}: {text[:ERROR_BYTES]}")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"GET {server.path}{path} gave JSON that is nested too deeply") from None


async def _read_text(connection: Connection, limit: int = ERROR_BYTES) -> str:
    """Read a response body to its end; return its first `limit` bytes as text, invalid UTF-8 replaced.

    Raises OSError or h11.RemoteProtocolError if the response cannot be read to its end.
    """
    text = b""
    async for piece in connection.body():
        if len(text) < limit:
            text += piece
    return text[:limit].decode(errors="replace")
