"""Framing of messages on a socket: four bytes of length, then the message as MessagePack; never pickle."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

_LENGTH = struct.Struct("<I")


class Frames:
    """Decoder that splits a stream of bytes into messages."""

    def __init__(self, kind: Any):
        """Start without bytes. kind: type of the messages, a tagged union of msgspec.Structs."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add received bytes, and yield the messages that are complete now. Incomplete bytes are kept for the next
        call. Raises msgspec.MsgspecError for invalid bytes.

        The iterator must be read to its end: bytes are added at its first item, and removed after its last.
        """
        self._bytes += data
        first = 0
        while len(self._bytes) - first >= _LENGTH.size:
            start = first + _LENGTH.size
            end = start + _LENGTH.unpack_from(self._bytes, first)[0]
            if len(self._bytes) < end:
                break
            yield self._decoder.decode(bytes(self._bytes[start:end]))
            first = end
        del self._bytes[:first]


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as MessagePack with its length before it, so that `Frames` can decode it."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data
