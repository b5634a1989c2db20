"""Writes small GGUF files for tests, valid or wrong in one chosen place. No dependency on the reader under test."""

from __future__ import annotations

import struct
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
PACKED = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}

# A metadata value: (type, value); an array is (ARRAY, (element type, values)).
Value = tuple[int, Any]
# A tensor: (name, dimensions with the fastest first, GGML type number, data).
Tensor = tuple[str, tuple[int, ...], int, bytes]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def payload(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        element, values = value
        return struct.pack("<IQ", element, len(values)) + b"".join(payload(element, item) for item in values)
    return struct.pack("<" + PACKED[kind], value)


def key_value(key: str | bytes, kind: int, value: Any) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload(kind, value)


def tensor_entry(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def padded(raw: bytes, alignment: int) -> bytes:
    return raw + bytes(-len(raw) % alignment)


def gguf_bytes(
    metadata: dict[str, Value],
    tensors: list[Tensor],
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    offsets: list[int] | None = None,
) -> bytes:
    """A whole file. The last arguments say something else than the truth where a test wants that."""
    places, data = [], b""
    for *_, raw in tensors:
        places.append(len(data))
        data = padded(data + raw, alignment)
    places = places if offsets is None else offsets
    counts = (len(tensors) if num_tensors is None else num_tensors, len(metadata) if num_keys is None else num_keys)
    head = magic + struct.pack("<IQQ", version, *counts)
    head += b"".join(key_value(key, *value) for key, value in metadata.items())
    head += b"".join(
        tensor_entry(name, dims, kind, place) for (name, dims, kind, _), place in zip(tensors, places, strict=True)
    )
    return padded(head, alignment) + data


def llama_metadata(**more: Value) -> dict[str, Value]:
    """What a llama file with four query heads and two key heads says of itself."""
    base: dict[str, Value] = {
        "general.architecture": (STRING, "llama"),
        "llama.attention.head_count": (U32, 4),
        "llama.attention.head_count_kv": (U32, 2),
    }
    return base | more
