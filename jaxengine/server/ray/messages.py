"""Messages between an ingress and a replica: an HTTP request, and the pieces of its response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxengine.server.base.routing import prompt_digests

Headers = list[tuple[bytes, bytes]]


class HttpCall(msgspec.Struct):
    """Request of HTTP.

    Attributes:
      method, path, raw_path, query_string, headers, client, scheme: values in ASGI's scope.
      body: the whole body; empty if it was large and is sent in parts.
      age: seconds since the request arrived. Clocks differ between machines.
    """

    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: Headers
    scheme: str = "http"
    client: tuple[str, int] | None = None
    body: bytes = b""
    age: float = 0.0


class Piece(msgspec.Struct, omit_defaults=True):
    """Part of a response.

    Attributes:
      body: bytes of the body.
      last: whether this is the response's last piece.
      status, headers: the response's status and headers in its first piece; None and empty in others.
    """

    body: bytes = b""
    last: bool = False
    status: int | None = None
    headers: Headers = []


encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(HttpCall).decode
decode_piece = msgspec.msgpack.Decoder(Piece).decode
decode_description = msgspec.msgpack.Decoder(dict[str, Any]).decode


class Hint:
    """Facts of a request by which its replica is chosen. They stay in the process: pickled, a hint is empty.

    Attributes:
      token_ids: those of the prompt, none if they are not known; cache_salt: the request's.
      session, adapter: names, or None.
      key: decides between equally good replicas; the request's id.
    """

    def __init__(
        self,
        key: str = "",
        session: str | None = None,
        adapter: str | None = None,
        token_ids: Sequence[int] = (),
        cache_salt: str | None = None,
    ):
        self.key, self.session, self.adapter = key, session, adapter
        self.token_ids, self.cache_salt = token_ids, cache_salt
        self._digests: dict[tuple[int, bytes, bytes], list[int]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty Hint."""
        return Hint, ()

    def digests(self, page_size: int, adapter: bytes, weights: bytes) -> list[int]:
        """Return the short digests of the prompt's full pages, [] without token ids. page_size: tokens of a page.
        adapter, weights: digests of the adapter and of the model's weights, as for `prompt_digests`. Results are cached
        for each combination of the arguments.
        """
        found = self._digests.get((page_size, adapter, weights))
        if found is None:
            salt = self.cache_salt
            found = prompt_digests(self.token_ids, page_size, cache_salt=salt, adapter=adapter, weights=weights)
            self._digests[page_size, adapter, weights] = found
        return found
