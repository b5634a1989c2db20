"""Prefixes that an engine has, for routers of requests to several engines."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxengine.engine.engine import Engine

_DIGEST_BYTES = 32
_NUMBER = np.dtype(">u8")


def known_prefixes(engine: Engine, most_bytes: int) -> dict[str, Any]:
    """Return the prefixes that requests find in an engine's pages, and what their digests depend on, in hexadecimal.

    "digests": the last 64 bits of each cached page's digest, big-endian, concatenated, ascending and distinct, in at
    most `most_bytes` bytes before the conversion. "weights": digest of the weights that compute pages. "adapters":
    digest of each adapter by name.

    If the digests of all pages take more than `most_bytes`, only those whose lowest k bits are 0 are returned, with the
    smallest k that makes them fit. So all engines leave out the same prefixes.
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
