"""Prefixes that an engine has, for routers of requests to several engines."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxengine.engine.engine import Engine

_DIGEST_BYTES = 32
_NUMBER = np.dtype(">u8")


def known_prefixes(engine: Engine, most_bytes: int) -> dict[str, Any]:
    """Return what requests find here: "digests", numbers of 64 bits in at most `most_bytes` bytes, big-endian, in
    hexadecimal; "weights", the digest of the weights that compute pages, in hexadecimal too; and "adapters", the digest
    of each by name.

    The digests are of pages on the devices. If they take more bytes, only those are there whose lowest k bits are 0,
    with the least k by which they do not. So every engine leaves out the same prefixes, and of a long prefix some page
    is always there.
    """
    keys = [key for rank in engine.scheduler.ranks for key in rank.pool.digests]
    digests = b"".join(keys)
    if len(digests) != len(keys) * _DIGEST_BYTES:  # some have the number of a cache group
        digests = b"".join(key[:_DIGEST_BYTES] for key in keys)
    # Replicas and cache groups may have the same page.
    numbers = np.unique(np.frombuffer(digests, _NUMBER).reshape(-1, _DIGEST_BYTES // _NUMBER.itemsize)[:, -1])
    mask = 0
    while len(numbers) * _NUMBER.itemsize > most_bytes:
        mask = 2 * mask + 1
        numbers = numbers[(numbers & np.uint64(mask)) == 0]
    adapters = engine.extensions.adapter_store().adapters if "adapters" in engine.extensions.by_name else ()
    return {
        "digests": numbers.tobytes().hex(),
        "weights": engine.scheduler.ranks[0].weights_digest.hex(),
        "adapters": {each.adapter.name: each.adapter.digest.hex() for each in adapters},
    }
