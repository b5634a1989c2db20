"""Choice of a replica for each request, where several replicas serve one model: by prefix, load, session and adapter.

Pure functions over what replicas say of themselves, for whatever routes: Ray Serve, or a simulation. Costs are in
requests. The replica that would serve a request best may have `imbalance` more requests than another one, not more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxengine.scheduler.pages.groups import short_digest
from jaxengine.scheduler.request import Adapter, Request
from jaxengine.scheduler.token_params import TokenParams

# A conversation stays where it is unless that costs twice what a whole prefix is worth.
_SESSION = 2.0


@dataclass(frozen=True)
class ReplicaState:
    """State of a replica, as it was published last.

    Attributes:
      name: unique among the replicas, and the same for everybody who routes.
      queue: its requests, running and waiting.
      digests: short digests of the pages that it has, or of some of them (`prefixes.known_prefixes`).
      adapters: digest of each adapter that it has loaded, by name.
      draining: it is to get no further requests.
    """

    name: str
    queue: int = 0
    digests: Container[int] = frozenset()
    adapters: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    draining: bool = False


def choose(
    request_digests: Sequence[int],
    session: str | None,
    adapter: str | None,
    replicas: Sequence[ReplicaState],
    *,
    key: str = "",
    imbalance: float = 8.0,
) -> int:
    """Return the index of the replica that should get a request.

    A replica costs its queue, `imbalance` times the share of the prompt that it would have to compute, `imbalance` more
    if it would have to load the adapter, and twice that if it is not the session's own. Ties, and the session's own
    replica, are decided by a hash of names, so that all who route decide alike.

    Args:
      request_digests: short digests of the prompt's full pages, in order; none if they are not known.
      session: conversation that the request continues; None for none.
      adapter: name of the adapter; None for none.
      replicas: at least one; ValueError for none. Draining ones are chosen only if all are.
      key: decides ties of requests without digests, such as the request's id.
      imbalance: requests that a whole prompt in the cache is worth, at least 0.
    """
    open_ones = [index for index, each in enumerate(replicas) if not each.draining] or list(range(len(replicas)))
    if not open_ones:
        raise ValueError("there are no replicas")
    own = None if session is None else max(open_ones, key=lambda index: _rank(session, replicas[index]))
    # A digest names the whole prefix, and replicas may publish some of theirs only: the last one that is known counts.
    # The request could not cost less anywhere than the shortest queue less what a prefix so long is worth.
    worth = imbalance / max(len(request_digests), 1)
    costs = {
        index: replicas[index].queue
        + imbalance * (adapter is not None and adapter not in replicas[index].adapters)
        + imbalance * _SESSION * (own is not None and index != own)
        for index in open_ones
    }
    floor, least, best = min(costs.values()), float("inf"), list[int]()
    for number in range(len(request_digests), -1, -1):
        if floor - number * worth > least:
            break
        digest = request_digests[number - 1] if number else None
        found = [index for index in costs if digest is None or digest in replicas[index].digests]
        for index in found:
            cost = costs.pop(index) - number * worth
            if cost <= least:
                best = [index] if cost < least else [*best, index]
                least = cost
        if not costs:
            break
    if len(best) == 1:
        return best[0]
    tie = adapter or (str(request_digests[0]) if request_digests else key)
    return max(best, key=lambda index: _rank(tie, replicas[index]))


def prompt_digests(
    token_ids: Sequence[int],
    page_size: int,
    *,
    cache_salt: str | None = None,
    adapter: bytes = b"",
    weights: bytes = b"",
    most: int = 1 << 13,
) -> list[int]:
    """Return the short digests of a prompt's full pages, at most the first `most` of them, as the engine names them.

    adapter, weights: digests of the adapter and of the weights that compute them, as replicas publish them; b"" for
    none, and for those that the engine was started with.
    """
    prompt = np.array(token_ids[: most * page_size], np.int32)
    request = Request("", prompt, TokenParams(), 0, cache_salt=cache_salt)
    request.adapter = Adapter("", adapter) if adapter else None
    request.compute_with(weights)
    return [short_digest(each) for each in request.extend_page_hashes(prompt, page_size)]


def _rank(what: str, replica: ReplicaState) -> int:
    """Return a hash of a replica's name and `what`: the replica with the highest keeps it while others come or go."""
    return int.from_bytes(hashlib.sha256(f"{replica.name}\0{what}".encode()).digest()[:8], "big")
