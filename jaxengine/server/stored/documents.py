"""JSON values in stored form: long texts, such as images in base64, are replaced by their SHA-256 digests.

Values that share long texts can then be stored, sent and held with one copy of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

# Texts of at least this many characters are stored separately; a shorter one is not worth its digest.
LONG_TEXT = 1024
# Types of MessagePack extensions: a digest, and an integer of more than 64 bits in decimal.
_DIGEST, _INTEGER = 1, 2
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1


class Document(msgspec.Struct, array_like=True, frozen=True):
    """JSON value in encoded form, without its long texts.

    Attributes:
      data: the value as MessagePack, with digests in place of long texts.
      digests: SHA-256 digests of its long texts, one for each occurrence, in order.
      num_bytes: size of `data` and of each occurrence of a long text, in bytes.
    """

    data: bytes = msgspec.msgpack.encode(None)
    digests: tuple[bytes, ...] = ()
    num_bytes: int = 0


class _Splitter:
    """Encoder that replaces the long texts in one JSON value by their digests.

    Attributes:
      texts: UTF-8 bytes of long texts by digest; may be shared with other values.
      digests: one for each occurrence, in order.
    """

    def __init__(self, texts: dict[bytes, bytes]):
        self.texts = texts
        self.digests: list[bytes] = []
        # The same string object need not be hashed twice.
        self._known: dict[int, bytes] = {}

    def short(self, value: Any) -> Any:
        """Return a copy of a JSON value with MessagePack extensions in place of long texts and of integers beyond 64
        bits. Appends the digest of each occurrence of a long text to `digests`, and adds the texts to `texts`.
        """
        match value:
            case str():
                return value if len(value) < LONG_TEXT else msgspec.msgpack.Ext(_DIGEST, self._digest(value))
            case dict():
                return {name: self.short(each) for name, each in value.items()}
            case list() | tuple():
                return [self.short(each) for each in value]
            case int() if not _SMALLEST <= value <= _LARGEST:
                return msgspec.msgpack.Ext(_INTEGER, msgspec.json.encode(value))
        return value

    def _digest(self, text: str) -> bytes:
        """Return the SHA-256 digest of a long text, append it to `digests`, and add the text to `texts`."""
        digest = self._known.get(id(text))
        if digest is None:
            data = text.encode()
            digest = self._known[id(text)] = hashlib.sha256(data).digest()
            self.texts[digest] = data
        self.digests.append(digest)
        return digest


def split(value: Any, texts: dict[bytes, bytes]) -> Document:
    """Return a JSON value as a Document, and add its long texts, as UTF-8, to `texts` by their digests."""
    splitter = _Splitter(texts)
    data = msgspec.msgpack.encode(splitter.short(value))
    return Document(data, tuple(splitter.digests), len(data) + sum(len(texts[each]) for each in splitter.digests))


class Joiner:
    """Decoder that restores JSON values from documents. Equal long texts become one string object.

    texts: UTF-8 bytes of the long texts of all documents by digest.
    """

    def __init__(self, texts: Mapping[bytes, bytes]):
        self._texts = texts
        self._read: dict[bytes, str] = {}

    def join(self, document: Document) -> Any:
        """Return the JSON value of a document. Raises KeyError for a long text that is not among `texts`."""
        return msgspec.msgpack.decode(document.data, ext_hook=self._restore)

    def _restore(self, kind: int, data: memoryview) -> Any:
        """Return the value of a MessagePack extension: an integer beyond 64 bits, or the long text with a digest."""
        if kind == _INTEGER:
            return msgspec.json.decode(data)
        digest = bytes(data)
        text = self._read.get(digest)
        if text is None:
            text = self._read[digest] = self._texts[digest].decode()
        return text
