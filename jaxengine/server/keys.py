"""Keys of clients and of operators, as HTTP's and gRPC's "authorization" carries them. Knows neither."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence


class Keys:
    """Who holds which key; a comparison takes as long whichever key is given, and however nearly it is right.

    Args:
      client_keys: none: whoever reaches the server may use it.
      admin_keys: good for all that clients' are good for.
    """

    def __init__(self, client_keys: Iterable[str], admin_keys: Iterable[str]):
        self._clients = [_digest(key.encode()) for key in client_keys]
        self._admins = [_digest(key.encode()) for key in admin_keys]

    def is_admin(self, key: bytes) -> bool:
        return _among(key, self._admins)

    def is_client(self, key: bytes) -> bool:
        """Whether it is one of the clients' keys; operators' are not."""
        return _among(key, self._clients)

    def name_of(self, key: bytes) -> str | None:
        """What the holder of `key` is called among clients: by its number, which tells nothing of it.

        The same in every process of a server. None for whoever has none of the keys.
        """
        for name, digests in (("key", self._clients), ("admin-key", self._admins)):
            if (number := _index(key, digests)) is not None:
                return f"{name}-{number}"
        return None

    def admits(self, key: bytes) -> bool:
        """Whether the holder of `key`, b"" for none, may use the server."""
        known = self.is_client(key) | self.is_admin(key)
        return known or not self._clients


def bearer_key(values: Sequence[bytes]) -> bytes:
    """The KEY of the one "authorization: Bearer KEY" among a request's headers of that name; b"" for anything else."""
    scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    # Keys of one length: a comparison then takes as long for one that is too short.
    return hashlib.sha256(key).digest()


def _among(key: bytes, digests: Iterable[bytes]) -> bool:
    return _index(key, digests) is not None


def _index(key: bytes, digests: Iterable[bytes]) -> int | None:
    """The first that is the key's; all are looked at."""
    offered = _digest(key)
    found = [hmac.compare_digest(offered, digest) for digest in digests]
    return found.index(True) if True in found else None
