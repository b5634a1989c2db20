"""Transport of pages by TCP. ZeroMQ's CURVE authenticates both ends by a key that all engines share, and encrypts
messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from jaxengine.tiers.transport import MAX_KEYS, PATIENCE_SECONDS, Reader, Source, Transport, never

_READ, _RELEASE = b"read", b"release"
# First frame of an answer: whether the source's pages are of the reader's kind.
_SAME, _OTHER = b"same", b"other"
_MAX_FRAME_BYTES = 1024  # largest frame that a reader may send
_LINGER_MS = 1000
# Time for which no request is sent to a source that did not answer.
_REST_SECONDS = 10.0
# Time in which a source must prove that it has the key. A live engine needs the network's round trips only, and those
# of a lost packet; an address that says nothing must not hold a reader's thread as long as pages may take.
_CONNECT_SECONDS = 2.0
# Period in milliseconds of checks whether announced pages that requests wait for have come.
_LOOK_MS = 2
# Period in milliseconds of a reader's checks whether its pages are still needed.
_NEED_MS = 100
# Events of a connection to a source that is gone or has another key.
_GONE = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class _Waiting(NamedTuple):
    """Request of a reader that waits for announced pages.

    Attributes:
      reader: ZeroMQ's identity of the reader's connection.
      keys: keys of the pages, in the order of the answer.
      until: time.monotonic() at which it is answered without the pages that are still missing.
      kind: first frame of the answer.
    """

    reader: bytes
    keys: list[bytes]
    until: float
    kind: bytes = _SAME


class TcpTransport(Transport):
    """Transport by TCP. One thread answers readers, which wait in their own threads.

    Attributes:
      patience: seconds that an answer waits for announced pages; a reader waits half as long again for the answer.
    """

    patience = PATIENCE_SECONDS

    def __init__(self, key: bytes, identity: str, listen: tuple[str, int] | None = None):
        """Start listening, and the thread that answers, if the engine offers pages.

        key: secret shared by all engines. identity: identity of the pages' content (`Offload.identity`); readers with
        another one get no pages. listen: host and port, 0 for any free port; None for an engine that offers no pages.
        Raises OSError if it cannot listen there.
        """
        self.address = None
        self._identity = identity.encode()
        self._server_keys, self._reader_keys = _key_pair(key, b"kv offer"), _key_pair(key, b"kv read")
        self._context = zmq.Context()
        self._pages: dict[bytes, np.ndarray | None] = {}
        self._released: deque[str] = deque()
        self._resting: dict[tuple[str | None, int | None], float] = {}
        self._is_closing = False
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        if listen is None:
            return
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback("*", _Allowed(self._reader_keys[0]))
        self._socket = _socket(self._context, zmq.ROUTER, self._server_keys, listen[0])
        self._socket.curve_server = True
        self._socket.set(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        try:
            self._socket.bind(_address(address_of(listen[0]), listen[1]))
        except (zmq.ZMQError, OSError, UnicodeError) as error:  # the last: a part of the name is too long
            self.shutdown()
            raise OSError(f"{listen[0]}:{listen[1]}: {error}") from None
        port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.address = listen[0], port
        self._thread = threading.Thread(target=self._answer_all, name="kv-offers", daemon=True)
        self._thread.start()

    def offer(self, key: bytes, block: np.ndarray | None) -> None:
        """Offer a block u8[n] to readers under a key. None announces a block that will come later; it does not replace
        one that is offered.
        """
        if block is not None or key not in self._pages:
            self._pages[key] = block

    def withdraw(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._pages.pop(key, None)

    def released(self) -> list[str]:
        return [self._released.popleft() for _ in range(len(self._released))]

    def open(self, source: Source) -> Reader:
        return _TcpReader(self, source)

    def shutdown(self) -> None:
        """Stop the threads and close all sockets. Waits at most _LINGER_MS for messages that are being sent."""
        self._is_closing = True
        if self._thread is not None:
            self._thread.join()
        if hasattr(self, "_auth"):
            self._socket.close(0)
            self._auth.stop()
        self._context.destroy(linger=_LINGER_MS)

    def connect(self, source: Source, is_over: Callable[[], bool]) -> zmq.Socket[bytes] | None:
        """Return a new socket that is connected to a source; None if `is_over` returned True first. Raises
        ConnectionError if the source failed to answer within the last _REST_SECONDS, or does not prove within
        _CONNECT_SECONDS that it has the key, which is recorded as a failure; zmq.ZMQError if its address cannot be
        used.
        """
        if time.monotonic() < self._resting.get((source.host, source.port), 0.0):
            raise ConnectionError(f"{source.host}:{source.port} has failed to answer not long ago")
        assert source.host is not None and source.port is not None
        socket = _socket(self._context, zmq.DEALER, self._reader_keys, source.host)
        socket.curve_serverkey = self._server_keys[0]
        socket.set(zmq.LINGER, _LINGER_MS)
        # A unique name, because pyzmq would reuse the name of an earlier monitor before libzmq has freed it.
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | _GONE
        monitor = socket.get_monitor_socket(events, f"inproc://kv-{next(self._numbers)}")
        with contextlib.ExitStack() as unless_connected:
            unless_connected.callback(close, socket, linger=0)
            socket.connect(_address(source.host, source.port))
            events = _events([monitor], _CONNECT_SECONDS, is_over)
            if events is None:
                return None
            if not events or recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                raise self._failed(source)
            unless_connected.pop_all()
        return socket

    def ask(
        self, socket: zmq.Socket[bytes], source: Source, keys: Sequence[bytes], is_over: Callable[[], bool]
    ) -> list[Any] | None:
        """Request at most MAX_KEYS pages from a source, and return the frames of its answer: one for each key, empty if
        the source lacks the page; None if `is_over` returned True first. If there is no answer in time
        (1.5 * patience), the connection fails, or the source's pages have another identity, records that the source
        failed and raises ConnectionError.
        """
        socket.send_multipart([_READ, self._identity, *keys])
        monitor = socket.get_monitor_socket()  # that of `connect`
        events = _events([socket, monitor], 1.5 * self.patience, is_over)
        if events is None:
            return None
        if socket not in events:
            raise self._failed(source)
        kind, *frames = socket.recv_multipart(copy=False)
        if kind.bytes != _SAME:
            self.rest(source)
            text = "has pages of other weights, another page size, dtype, split of heads or draft model, or transport"
            raise ConnectionError(f"{source.host}:{source.port} {text}")
        return frames

    def _failed(self, source: Source) -> ConnectionError:
        """Record that a source has failed, and return the error that says so."""
        self.rest(source)
        return ConnectionError(f"{source.host}:{source.port} does not answer, or has another key")

    def rest(self, source: Source) -> None:
        """Record that a source has failed, so that `connect` refuses it for _REST_SECONDS. Thread-safe."""
        now, known = time.monotonic(), dict(self._resting)  # a copy: several readers may be here at once
        rests = {address: until for address, until in known.items() if until > now}
        self._resting = {**rests, (source.host, source.port): now + _REST_SECONDS}

    def frames(self, blocks: Sequence[np.ndarray | None]) -> list[Any]:
        """Return the frames of an answer: the content of each block u8[n], empty for None. Runs on the transport's
        thread.
        """
        return [b"" if block is None else block.data for block in blocks]

    def blocks(
        self, keys: Sequence[bytes], frames: Sequence[zmq.Frame], source: Source, is_over: Callable[[], bool]
    ) -> dict[bytes, np.ndarray]:
        """Return the blocks in an answer of `source`, by key: read-only views u8[n] of its frames. Keys whose frame is
        empty or missing are left out. is_over: not used.
        """
        found = [np.frombuffer(frame.buffer, np.uint8) for frame in frames]
        return {key: block for key, block in zip(keys, found, strict=False) if len(block)}

    def _answer_all(self) -> None:
        """Answer readers until the transport is closing. Runs on the transport's thread. A request is answered once
        none of its keys is only announced, or when its time is up, with an empty frame for each page that is missing.
        """
        waiting: list[_Waiting] = []
        while not self._is_closing:
            if self._socket.poll(_LOOK_MS if waiting else 100):
                frames = self._socket.recv_multipart()
                if (request := self._read(frames)) is not None:
                    waiting.append(request)
            now = time.monotonic()
            due = [each for each in waiting if now > each.until or not any(map(self._is_announced, each.keys))]
            waiting = [each for each in waiting if each not in due]
            for each in due:
                frames = self.frames([self._pages.get(key) for key in each.keys])
                self._socket.send_multipart([each.reader, each.kind, *frames], copy=False)

    def _read(self, frames: Sequence[bytes]) -> _Waiting | None:
        """Return the request in a message of a reader; None if no answer is needed. A released lease is recorded, and
        an invalid message ignored. A request with another identity is answered at once, and without pages.

        frames: the reader's connection, the kind, and then either the identity and the keys of 1 to MAX_KEYS pages, or
        b"" and a lease.
        """
        if len(frames) < 3:
            return None
        reader, kind, identity, *keys = frames
        if kind == _RELEASE and len(keys) == 1:
            self._released.append(keys[0].decode(errors="replace"))
        if kind != _READ or not 1 <= len(keys) <= MAX_KEYS:
            return None
        if identity != self._identity:
            return _Waiting(reader, [], 0.0, _OTHER)
        return _Waiting(reader, keys, time.monotonic() + self.patience)

    def _is_announced(self, key: bytes) -> bool:
        """Whether a key is announced but its block has not come yet."""
        return key in self._pages and self._pages[key] is None


class _TcpReader(Reader):
    """Reader of one source."""

    def __init__(self, transport: TcpTransport, source: Source):
        """Store the transport and the source. `read` connects."""
        self._transport, self._source = transport, source
        self._socket: zmq.Socket[bytes] | None = None

    def read(self, keys: Sequence[bytes], is_over: Callable[[], bool] = never) -> Mapping[bytes, np.ndarray]:
        """Wait for the blocks of at most MAX_KEYS keys, and return those that the source has, by key; {} if `is_over`
        returned True before they came. Connects in the first call. Raises ConnectionError if the source does not
        answer in time, failed to answer recently, or has an unusable address.
        """
        try:
            if self._socket is None:
                self._socket = self._transport.connect(self._source, is_over)
            if self._socket is None:
                return {}
            frames = self._transport.ask(self._socket, self._source, keys, is_over)
        except zmq.ZMQError as error:  # such as a host without an address
            raise ConnectionError(f"{self._source.host}:{self._source.port}: {error}") from None
        return {} if frames is None else self._transport.blocks(keys, frames, self._source, is_over)

    def close(self) -> None:
        """Release the source's lease and close the connection. Does nothing if `read` has not connected."""
        if self._socket is not None:
            self._socket.send_multipart([_RELEASE, b"", self._source.lease.encode()])
            close(self._socket)


class _Allowed:
    """Check of readers for pyzmq's authenticator. Only readers with the shared key may connect."""

    def __init__(self, key: bytes):
        """Store the public key of the readers that may connect."""
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a reader with this public key, as Z85 text, may connect. domain: not used."""
        return key == self._key


def _key_pair(secret: bytes, person: bytes) -> tuple[bytes, bytes]:
    """Return (public key, secret key) of one end, as Z85 text, derived from the secret that all engines share. person:
    name of the end, at most 16 bytes.
    """
    own = z85.encode(hashlib.blake2b(secret, digest_size=32, person=person).digest())
    return zmq.curve_public(own), own


def _socket(context: zmq.Context[Any], kind: int, keys: tuple[bytes, bytes], host: str) -> zmq.Socket[bytes]:
    """Return a new socket of the given kind with its public and secret key. IPv6 is enabled if `host` contains a
    colon.
    """
    socket = context.socket(kind)
    socket.curve_publickey, socket.curve_secretkey = keys
    socket.set(zmq.IPV6, ":" in host)
    return socket


def _events(
    sockets: Sequence[zmq.Socket[bytes]], seconds: float, is_over: Callable[[], bool]
) -> dict[zmq.Socket[bytes], int] | None:
    """Wait for messages, and return the sockets that have one; {} after `seconds`, None soon after `is_over` has begun
    to return True.
    """
    poller, end = zmq.Poller(), time.monotonic() + seconds
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    while not (found := dict(poller.poll(_NEED_MS))) and time.monotonic() < end:
        if is_over():
            return None
    return found


def close(socket: zmq.Socket[bytes], linger: int | None = None) -> None:
    """Close a socket of `TcpTransport.connect` with its monitor. linger: milliseconds for which messages may still be
    sent; None for the socket's own number.
    """
    monitor = socket.get_monitor_socket()
    socket.disable_monitor()
    monitor.close(0)
    socket.close(linger)


def address_of(host: str) -> str:
    """Return the first IP address of a host, which may be a name or an IPv6 address with or without brackets. Raises
    OSError if it has none, UnicodeError if a part of the name is too long.
    """
    return str(sockets.getaddrinfo(host.strip("[]"), None, type=sockets.SOCK_STREAM)[0][4][0])


def _address(host: str, port: int) -> str:
    """Return ZeroMQ's address of a host, which may be an IPv6 address with or without brackets."""
    plain = host.strip("[]")
    return f"tcp://[{plain}]:{port}" if ":" in plain else f"tcp://{plain}:{port}"
