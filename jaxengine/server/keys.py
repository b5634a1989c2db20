"""API keys of clients and operators, as the "authorization" header or metadata carries them; for HTTP and gRPC."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence


class Keys:
    """Digests of the valid keys. Comparison takes the same time whatever key is given, and however nearly it is right.

    Args:
      client_keys: none: the server is open to everyone who reaches it.
      admin_keys: valid also wherever clients' keys are.
    """

    def __init__(self, client_keys: Iterable[str], admin_keys: Iterable[str]):
        self._clients = [_digest(key.encode()) for key in client_keys]
        self._admins = [_digest(key.encode()) for key in admin_keys]

    def is_admin(self, key: bytes) -> bool:
        return _among(key, self._admins)

    def is_client(self, key: bytes) -> bool:
        """Whether `key` is a client's; an operator's is not."""
        return _among(key, self._clients)

    def name_of(self, key: bytes) -> str | None:
        """Returns "key-N" for a client's `key` and "admin-key-N" for an operator's, where N is its index among those
        given; None for an unknown key.

        The name reveals nothing about the key, and is the same in every process of a server.
        """
        for name, digests in (("key", self._clients), ("admin-key", self._admins)):
            if (number := _index(key, digests)) is not None:
                return f"{name}-{number}"
        return None

    @property
    def are_needed(self) -> bool:
        """Whether clients need a key."""
        return bool(self._clients)

    def turn_of(self, key: bytes) -> str | None:
        """Return the `name_of` the holder of `key`, who takes turns with other holders; None if there
        is only one key.
        """
        return self.name_of(key) if len(self._clients) + len(self._admins) > 1 else None

    def admits(self, key: bytes) -> bool:
        """Whether the holder of `key`, b"" for none, may use the server."""
        known = self.is_client(key) | self.is_admin(key)
        return known or not self._clients


def bearer_key(values: Sequence[bytes]) -> bytes:
    """Returns the KEY of headers "authorization: Bearer KEY", however they are spelled; b"" for anything else, and for
    headers with different keys. values: of all headers of that name.
    """
    keys = {_bearer(value) for value in values}
    return keys.pop() if len(keys) == 1 else b""


def owner_of(key: bytes) -> str:
    """Returns a name of the holder of `key`, which does not reveal it; b"" stands for everybody without one."""
    return hashlib.sha256(key).hexdigest()


def owner_tag(key: bytes) -> str:
    """Returns a short name of the holder of `key`, for ids in the engine; empty for b""."""
    return owner_of(key)[:12] if key else ""


def _bearer(value: bytes) -> bytes:
    scheme, _, key = value.strip().replace(b"\t", b" ").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    # Digests have equal lengths, so that the comparison time does not depend on the key's.
    return hashlib.sha256(key).digest()


def _among(key: bytes, digests: Iterable[bytes]) -> bool:
    return _index(key, digests) is not None


def _index(key: bytes, digests: Iterable[bytes]) -> int | None:
    """Returns the index of the first digest that matches. Compares all of them."""
    offered = _digest(key)
    found = [hmac.compare_digest(offered, digest) for digest in digests]
    return found.index(True) if True in found else None
