"""API keys of clients and operators, as the "authorization" header or metadata carries them; for HTTP and gRPC."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence


class Keys:
    """Digests of the valid keys. Comparison takes the same time whatever key is given, and however nearly it is right.

    Methods take the digest of a key, as `digest_of` makes it.

    Args:
      client_keys: none: the server is open to everyone who reaches it.
      admin_keys: valid also wherever clients' keys are.
    """

    def __init__(self, client_keys: Iterable[str], admin_keys: Iterable[str]):
        self._clients = [digest_of(key.encode()) for key in client_keys]
        self._admins = [digest_of(key.encode()) for key in admin_keys]

    def is_admin(self, digest: bytes) -> bool:
        """Whether a key is an operator's."""
        return _among(digest, self._admins)

    def is_client(self, digest: bytes) -> bool:
        """Whether a key is a client's; an operator's is not."""
        return _among(digest, self._clients)

    def name_of(self, digest: bytes) -> str | None:
        """Return "key-N" for a client's key and "admin-key-N" for an operator's, where N is its index among those
        given; None for an unknown key.

        The name reveals nothing about the key, and is the same in every process of a server.
        """
        for name, digests in (("key", self._clients), ("admin-key", self._admins)):
            if (number := _index(digest, digests)) is not None:
                return f"{name}-{number}"
        return None

    @property
    def are_needed(self) -> bool:
        """Whether clients need a key."""
        return bool(self._clients)

    def turn_of(self, digest: bytes) -> str | None:
        """Return the `name_of` the holder of a key, who takes turns with other holders; None for an unknown key, and if
        there is only one key, clients' and operators' together.
        """
        return self.name_of(digest) if len(self._clients) + len(self._admins) > 1 else None

    def admits(self, digest: bytes) -> bool:
        """Whether the holder of a key, NO_KEY for none, may use the server: a client or operator, or anybody if there
        are no client keys.
        """
        known = self.is_client(digest) | self.is_admin(digest)
        return known or not self._clients


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 of a key, 32 bytes: a name of its holder that does not reveal it.

    key: b"" for a caller without one, whose digest is NO_KEY.
    """
    # Digests have equal lengths, so that the comparison time does not depend on the key's.
    return hashlib.sha256(key).digest()


NO_KEY = digest_of(b"")


def bearer_key(values: Sequence[bytes]) -> bytes:
    """Return the KEY of headers "authorization: Bearer KEY", however they are spelled; b"" for anything else, and for
    headers with different keys. values: of all headers of that name.
    """
    keys = {_bearer(value) for value in values}
    return keys.pop() if len(keys) == 1 else b""


def owner_tag(digest: bytes) -> str:
    """Return a short name of a key's holder, for ids in the engine: 12 hex digits of its digest; "" for NO_KEY."""
    return "" if digest == NO_KEY else digest.hex()[:12]


def _bearer(value: bytes) -> bytes:
    """Return the key in one header's value; b"" for another scheme."""
    scheme, _, key = value.strip().replace(b"\t", b" ").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _among(digest: bytes, digests: Iterable[bytes]) -> bool:
    """Whether a digest is one of these."""
    return _index(digest, digests) is not None


def _index(digest: bytes, digests: Iterable[bytes]) -> int | None:
    """Return the index of the first digest that matches, None if none does. Compares all of them."""
    found = [hmac.compare_digest(digest, each) for each in digests]
    return found.index(True) if True in found else None
