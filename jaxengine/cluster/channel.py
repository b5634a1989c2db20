"""Messages between the processes of one engine: framed, authenticated, encrypted, and decoded as data only.

Both ends share a key from a file. For each connection they agree on a secret (X25519), and each proves that it has the
key by an HMAC-SHA256 over both public values, the secret and its role. Messages are encrypted with ChaCha20-Poly1305,
by a key for the connection and direction and with their number as nonce, so nobody else can read, change, repeat, drop
or reflect one unnoticed. Someone who learns the shared key later still cannot read a recorded connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from jaxengine.config.base.key_file import HOW_TO_MAKE, read_key
from jaxengine.config.engine_config import ConfigError

# Operation -> its fields and their types.
OPERATIONS: Mapping[str, Mapping[str, type]] = {
    # The first message of a worker, and that of a worker's second connection, which carries jax's start-up traffic.
    "hello": {"node_rank": int, "host": str, "versions": str},
    "coordinator": {},
    # Start-up. options: EngineConfig's fields.
    "refused": {"reason": str},
    "start": {"options": dict},
    "plan": {"num_pages": int, "programs": str},
    "ready": {},
    # Serving: what every process executes, in the same order.
    "forward": {"num_tokens": int, "num_seqs": int},
    "sample": {},
    "score": {},
    "pool": {},
    "pool_tokens": {},
    "change": {"name": str},
    "expert load": {},
    # Between steps: orders of jaxengine.cluster.orders, and the workers' replies. number: of the order.
    "order": {"number": int, "name": str, "arguments": dict},
    "answer": {"number": int, "content": dict},
    # A part of jax's start-up traffic, one array of uint8, on a connection that began with "coordinator".
    "bytes": {},
    # Any time.
    "alive": {},
    "failed": {"reason": str},
    "end": {},
    "bye": {},
}
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("int32", "float32", "uint8")}
MAX_MESSAGE_BYTES = 64 << 20
_MAX_HEADER_BYTES = 1 << 20  # options may hold a chat template and a whole config.json
_GREETING = b"jaxengine cluster 2\n"
_PUBLIC_BYTES = _PROOF_BYTES = 32
_TAG_BYTES = 16
_HANDSHAKE_SECONDS = 10.0
# Time without acknowledgement after which the system ends a connection, because the other machine is gone.
_UNACKNOWLEDGED_MS = 6000
# Time without a message after which a machine that still acknowledges counts as lost. It is long, because loading and
# compiling keep a process busy.
SILENCE_SECONDS = 60.0
_ALIVE_SECONDS = 1.0


class ClusterError(RuntimeError):
    """A process of the engine did not join or was lost, or a message is invalid."""


@dataclass(frozen=True)
class Message:
    """Message between two processes of an engine.

    Attributes:
      op: operation, a key of OPERATIONS.
      fields: values by name, as OPERATIONS declares them.
      arrays: arrays with dtypes in DTYPES.
    """

    op: str
    fields: Mapping[str, Any]
    arrays: Sequence[np.ndarray] = ()


def encode(message: Message) -> bytes:
    """Encode a message: length of the header (u32, little-endian), header as JSON with spaces up to a multiple of 16
    bytes, bytes of the arrays in order.

    Raises KeyError for an array with a dtype that is not in DTYPES, ClusterError for fields that are too large.
    """
    arrays = [np.ascontiguousarray(array).reshape(array.shape) for array in message.arrays]
    listed = [[array.dtype.name, list(array.shape)] for array in arrays]
    header = json.dumps([message.op, dict(message.fields), listed]).encode()
    header += b" " * (-(len(header) + 4) % 16)  # the reader's arrays are views, which should be aligned
    if len(header) > _MAX_HEADER_BYTES:
        text = f"the fields of a message {message.op!r} have {len(header)} bytes; allowed: {_MAX_HEADER_BYTES}"
        raise ClusterError(text)
    data = (array.astype(DTYPES[array.dtype.name], copy=False).tobytes() for array in arrays)
    return b"".join((len(header).to_bytes(4, "little"), header, *data))


def decode(payload: bytes) -> Message:
    """Return the message that `encode` encoded in `payload`; its arrays are read-only views of the payload.

    Raises ClusterError, with the reason, for a payload without a header of 2 to _MAX_HEADER_BYTES bytes, for a header
    that is not [operation, fields, arrays] as JSON, for an operation or fields that OPERATIONS does not declare, and
    for arrays other than those that the header lists.
    """
    length = int.from_bytes(payload[:4], "little")
    if len(payload) < 4 or not 2 <= length <= min(len(payload) - 4, _MAX_HEADER_BYTES):
        raise ClusterError(f"a message of {len(payload)} bytes cannot have a header of {length}")
    try:
        header = json.loads(payload[4 : 4 + length])
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"a message's header is not JSON: {error}") from None
    if not (isinstance(header, list) and len(header) == 3 and isinstance(header[0], str)):
        raise ClusterError("a message's header is not [operation, fields, arrays]")
    op, fields, listed = header
    if op not in OPERATIONS:
        raise ClusterError(f"a message's operation is {op[:40]!r}; allowed: {', '.join(OPERATIONS)}")
    expected = OPERATIONS[op]
    if not isinstance(fields, dict) or {name: type(value) for name, value in fields.items()} != dict(expected):
        raise ClusterError(f"a message {op!r} must have the fields {', '.join(expected) or 'none'}, of their types")
    return Message(op, fields, _decode_arrays(op, listed, payload, 4 + length))


def _decode_arrays(op: str, listed: Any, payload: bytes, start: int) -> list[np.ndarray]:
    """Return the arrays of a message, which begin at byte `start` of its payload, as views.

    listed: list of the [dtype, shape] of each array, not yet checked. Raises ClusterError if the list is invalid, or if
    the arrays do not end where the payload does.
    """
    arrays = []
    for entry in listed if isinstance(listed, list) else [None]:
        dtype, shape = entry if isinstance(entry, list) and len(entry) == 2 else ("", [])
        valid = isinstance(dtype, str) and dtype in DTYPES and isinstance(shape, list) and len(shape) <= 4
        if not valid or not all(type(size) is int and 0 <= size < 2**31 for size in shape):
            raise ClusterError(f"a message {op!r} lacks the dtypes and shapes of its arrays")
        count = math.prod(shape)
        num_bytes = count * DTYPES[dtype].itemsize
        if num_bytes > len(payload) - start:
            raise ClusterError(f"a message {op!r} ends in the middle of an array")
        arrays.append(np.frombuffer(payload, DTYPES[dtype], count, start).reshape(shape))
        start += num_bytes
    if start != len(payload):
        raise ClusterError(f"a message {op!r} has {len(payload) - start} bytes more than its header lists")
    return arrays


def read_cluster_key(file: str | None) -> bytes:
    """Return the key that all processes of an engine share, from a file.

    Raises ConfigError for None, and for a file that cannot be read, is not private, or has no valid key.
    """
    if file is None:
        problem = "nnodes above 1 needs cluster_key_file, a secret of all processes"
        raise ConfigError.because("cluster_key_file", problem, f"{HOW_TO_MAKE}, the same on every host")
    return read_key("cluster_key_file", file)


class Channel:
    """Authenticated and encrypted connection. Any thread may send; only one thread receives.

    Attributes:
      connection: its socket.
    """

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes):
        """Take over a connection after its handshake, and set its timeout to SILENCE_SECONDS.

        send_key, receive_key: 32 bytes, one for each direction.
        """
        self.connection = connection
        self._ciphers = ChaCha20Poly1305(send_key), ChaCha20Poly1305(receive_key)
        self._numbers = [0, 0]
        self._sending = threading.Lock()
        connection.settimeout(SILENCE_SECONDS)

    def send(self, op: str, arrays: Sequence[np.ndarray] = (), **fields: Any) -> None:
        """Send a message of the operation `op` with these fields; return when the system has accepted all of it.

        arrays: arrays with dtypes in DTYPES; KeyError for others. Raises ClusterError for a message that is too large,
        OSError if the connection has ended.
        """
        payload = encode(Message(op, fields, arrays))
        if len(payload) > MAX_MESSAGE_BYTES:
            raise ClusterError(f"a message {op!r} has {len(payload)} bytes; allowed: {MAX_MESSAGE_BYTES}")
        length = len(payload).to_bytes(8, "little")
        with self._sending:
            self.connection.sendall(length + self._ciphers[0].encrypt(self._nonce(0), payload, length))

    def receive(self) -> Message:
        """Wait for the next message, which may be a heartbeat, and return it.

        Raises ConnectionError at the end of the connection, TimeoutError after SILENCE_SECONDS without a byte,
        ClusterError for an invalid message.
        """
        head = _receive_exactly(self.connection, 8)
        length = int.from_bytes(head, "little")
        if length > MAX_MESSAGE_BYTES:
            raise ClusterError(f"a message claims {length} bytes; allowed: {MAX_MESSAGE_BYTES}")
        sealed = _receive_exactly(self.connection, length + _TAG_BYTES)
        try:
            return decode(self._ciphers[1].decrypt(self._nonce(1), sealed, head))
        except InvalidTag:
            raise ClusterError("a message was not sent by the other end") from None

    def receive_bytes(self) -> memoryview:
        """Wait for the next message, which must be "bytes", and return its content.

        Raises ClusterError for another or an invalid message, ConnectionError at the end of the connection,
        TimeoutError after SILENCE_SECONDS without a byte.
        """
        message = self.receive()
        if message.op != "bytes" or [array.dtype.name for array in message.arrays] != ["uint8"]:
            raise ClusterError(f"a connection of jax's start-up sent {message.op!r}")
        return message.arrays[0].data

    def follow(self, handle: Callable[[Message], bool]) -> None:
        """Receive messages on this thread and pass them to `handle`, except heartbeats, until it returns False. Sends a
        heartbeat every _ALIVE_SECONDS.

        Raises OSError or ClusterError once the other end is gone, has sent an invalid message, or has been silent for
        SILENCE_SECONDS.
        """
        received = sent = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            while True:
                if time.monotonic() - sent >= _ALIVE_SECONDS:
                    self.send("alive")
                    sent = time.monotonic()
                if selector.select(_ALIVE_SECONDS):
                    message = self.receive()
                    received = time.monotonic()
                    if message.op != "alive" and not handle(message):
                        return
                elif time.monotonic() - received > SILENCE_SECONDS:
                    raise ClusterError(f"nothing was received for {SILENCE_SECONDS:.0f} s")

    def close(self) -> None:
        """Close the connection, and wake a thread that is receiving."""
        close_connection(self.connection)

    def _nonce(self, direction: int) -> bytes:
        """Count a message, and return its number as 12 little-endian bytes. direction: 0 for sent, 1 for received."""
        self._numbers[direction] += 1
        return self._numbers[direction].to_bytes(12, "little")


def connect_channel(host: str, port: int, key: bytes) -> Channel:
    """Connect to host 0, do a worker's part of the handshake, within _HANDSHAKE_SECONDS each, and return the channel.

    Raises ClusterError if the other end has another key or is not a host 0 of this version, OSError if nothing answers.
    """
    connection = socket.create_connection((host, port), _HANDSHAKE_SECONDS)
    try:
        return _prove_as_worker(connection, key)
    except BaseException:
        connection.close()
        raise


def _prove_as_worker(connection: socket.socket, key: bytes) -> Channel:
    """Do a worker's part of the handshake on a connection to host 0, and return its channel.

    key: the key that all processes share. Raises ClusterError if the peer has another key or version, OSError if it
    does not answer in time; the caller then closes the connection.
    """
    deadline = _prepare(connection)
    own = X25519PrivateKey.generate()
    public = own.public_key().public_bytes_raw()
    connection.sendall(_GREETING + public)
    answer = _receive_exactly(connection, len(_GREETING) + _PUBLIC_BYTES, deadline)
    if answer[: len(_GREETING)] != _GREETING:
        raise ClusterError("the peer is not an engine of this version")
    theirs = answer[len(_GREETING) :]
    shared = public + theirs + _secret(own, theirs)
    connection.sendall(_keyed(key, b"worker", shared))
    try:
        proof = _receive_exactly(connection, _PROOF_BYTES, deadline)
    except ConnectionError:
        raise ClusterError("host 0 has another cluster key") from None
    if not hmac.compare_digest(proof, _keyed(key, b"host 0", shared)):
        raise ClusterError("host 0 has another cluster key")
    return Channel(connection, _keyed(key, b"to host 0", shared), _keyed(key, b"to worker", shared))


def accept_channel(connection: socket.socket, key: bytes) -> Channel:
    """Do host 0's part of the handshake on a new connection, and return its channel.

    Raises ClusterError or OSError if the peer does not prove in time that it has the key; the caller then closes the
    connection.
    """
    deadline = _prepare(connection)
    greeting = _receive_exactly(connection, len(_GREETING) + _PUBLIC_BYTES, deadline)
    if greeting[: len(_GREETING)] != _GREETING:
        raise ClusterError("it is not a worker of this version")
    own, theirs = X25519PrivateKey.generate(), greeting[len(_GREETING) :]
    public = own.public_key().public_bytes_raw()
    shared = theirs + public + _secret(own, theirs)
    connection.sendall(_GREETING + public)
    if not hmac.compare_digest(_receive_exactly(connection, _PROOF_BYTES, deadline), _keyed(key, b"worker", shared)):
        raise ClusterError("it has another cluster key")
    connection.sendall(_keyed(key, b"host 0", shared))
    return Channel(connection, _keyed(key, b"to worker", shared), _keyed(key, b"to host 0", shared))


def close_connection(connection: socket.socket) -> None:
    """Shut a connection down in both directions, which wakes every thread that waits on it, and close it."""
    with contextlib.suppress(OSError):  # the other end has already closed it
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _prepare(connection: socket.socket) -> float:
    """Set the connection's timeouts and disable Nagle's algorithm; return the deadline of the handshake, in seconds of
    time.monotonic.
    """
    connection.settimeout(_HANDSHAKE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    return time.monotonic() + _HANDSHAKE_SECONDS


def _secret(own: X25519PrivateKey, theirs: bytes) -> bytes:
    """Return the shared secret of a connection, 32 bytes. own: private key of this end. theirs: the other's public key.

    Raises ClusterError for a public key that would give everybody the same secret.
    """
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError:
        raise ClusterError("the peer's public value is of a small group") from None


def _keyed(key: bytes, role: bytes, shared: bytes) -> bytes:
    """Return the HMAC-SHA256, 32 bytes, of `role`, a zero byte and `shared` under `key`.

    It proves that an end has the key, or it is the key of one direction. shared: both public values and the secret.
    """
    return hmac.new(key, role + b"\0" + shared, hashlib.sha256).digest()


def _receive_exactly(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """Receive exactly `count` bytes and return them.

    deadline: in seconds of time.monotonic; None to use the connection's timeout for each part. Raises
    ConnectionResetError if the connection ends before, TimeoutError if it takes too long.
    """
    content = bytearray()
    while len(content) < count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the handshake took too long")
            connection.settimeout(left)
        part = connection.recv(min(count - len(content), 1 << 20))
        if not part:
            raise ConnectionResetError("the connection was closed")
        content += part
    return bytes(content)
