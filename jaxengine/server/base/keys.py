"""API keys of clients and operators, as the "authorization" header or metadata carries them; for HTTP and gRPC."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence


class Keys:
    """Digests of the valid API keys. A comparison takes the same time whatever key is given and however much of it is
    right.

    Methods take the digest of a key, as `digest_of` returns it.

    Args:
      client_keys: keys of clients; if empty, the server is open to everyone who reaches it.
      admin_keys: keys of operators, which are valid wherever clients' keys are.
    """

    def __init__(self, client_keys: Iterable[str], admin_keys: Iterable[str]):
        self._clients = [digest_of(key.encode()) for key in client_keys]
        self._admins = [digest_of(key.encode()) for key in admin_keys]

    def is_admin(self, digest: bytes) -> bool:
        """Whether a digest is that of an operator's key."""
        return _index(digest, self._admins) is not None

    def is_client(self, digest: bytes) -> bool:
        """Whether a digest is that of a client's key; False for an operator's."""
        return _index(digest, self._clients) is not None

    def name_of(self, digest: bytes) -> str | None:
        """Return "key-N" for a client's key and "admin-key-N" for an operator's, where N is its index, from 0, among
        the keys given; None for an unknown key. The name reveals nothing about the key.
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
        """Return the name by which work is shared fairly among the holders of keys: `name_of` the key. None for an
        unknown key, and if there is only one key, clients' and operators' keys together.
        """
        return self.name_of(digest) if len(self._clients) + len(self._admins) > 1 else None

    def admits(self, digest: bytes) -> bool:
        """Whether a caller may use the server: the holder of a client's or an operator's key, or anybody if there are
        no client keys. digest: NO_KEY for a caller without a key.
        """
        known = self.is_client(digest) | self.is_admin(digest)
        return known or not self._clients


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 of a key, 32 bytes, which identifies the key's holder without revealing the key.

    key: b"" for a caller without one; the result is then NO_KEY.
    """
    # Digests have equal lengths, so that the comparison time does not depend on the key's.
    return hashlib.sha256(key).digest()


NO_KEY = digest_of(b"")


def bearer_key(values: Sequence[bytes]) -> bytes:
    """Return KEY of the headers "authorization: Bearer KEY", without white space around it; b"" for other values, for
    no header, and for headers with different keys. "Bearer" may have any case.

    values: the values of all headers of that name.
    """
    keys = {_bearer(value) for value in values}
    return keys.pop() if len(keys) == 1 else b""


def owner_tag(digest: bytes) -> str:
    """Return a short name of a key's holder, for ids in the engine: 12 hex digits of its digest; "" for NO_KEY."""
    return "" if digest == NO_KEY else digest.hex()[:12]


def _bearer(value: bytes) -> bytes:
    """Return the key in one header's value; b"" for another scheme than Bearer."""
    scheme, _, key = value.strip().replace(b"\t", b" ").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _index(digest: bytes, digests: Iterable[bytes]) -> int | None:
    """Return the index of the first of `digests` that equals `digest`; None if none does. Compares all of them, so that
    the time does not depend on the result.
    """
    found = [hmac.compare_digest(digest, each) for each in digests]
    return found.index(True) if True in found else None
