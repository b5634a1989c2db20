"""Limit of the fields of a message, counted before it is parsed."""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor

from jaxengine.scheduler.base.errors import RequestError

# Fields of a message and of all messages within it, an entry of a map being one: enough for a bias for each id of the
# largest vocabularies, and for the names and shapes of 100,000 tensors. Nobody else is served while they are parsed.
MAX_FIELDS = 500_000
# A message that is not longer has fewer, as each takes two bytes at least.
SHORT_BYTES = 2 * MAX_FIELDS
_LENGTH_DELIMITED, _FIXED_BYTES = 2, {1: 8, 5: 4}


def refuse_many_fields(data: bytes, kind: Any) -> None:
    """Raise RequestError if an encoded message of `kind`, a Descriptor, has more than MAX_FIELDS fields. Bytes that are
    no such message are left to the parser.
    """
    count, pending = 0, [(0, len(data), kind)]
    while pending:
        at, end, kind = pending.pop()
        inner = _inner(kind)
        while at < end:
            if (count := count + 1) > MAX_FIELDS:
                raise RequestError(f"the message has more than {MAX_FIELDS} fields, those of inner messages included")
            tag, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at)
            wire_type = tag & 7
            if wire_type == 0:
                at = at + 1 if data[at : at + 1] < b"\x80" else _varint(data, at)[1]
            elif wire_type == _LENGTH_DELIMITED:
                size, at = (data[at], at + 1) if data[at : at + 1] < b"\x80" and at < end else _varint(data, at)
                if size and (found := inner.get(tag >> 3)):
                    pending.append((at, min(at + size, end), found))
                at += size
            else:  # the beginning or end of a group has only a tag
                at += _FIXED_BYTES.get(wire_type, 0)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (number, index after it) of the varint at an index of a message. One that is cut short or longer than ten
    bytes counts as the last.
    """
    value = 0
    for number in range(10):
        if at + number >= len(data):
            break
        value |= (data[at + number] & 127) << 7 * number
        if data[at + number] < 128:
            return value, at + number + 1
    return value, len(data)


@cache
def _inner(kind: Descriptor) -> dict[int, Descriptor]:
    """Return the fields of a message that hold messages, by number, without maps from scalars to scalars."""
    found = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
    return {
        number: inner
        for number, inner in found.items()
        if not (inner.GetOptions().map_entry and inner.fields_by_name["value"].message_type is None)
    }
