"""Choice of a replica among a list of them: by the index that serves, and in its plain form, replica by replica."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from jaxengine.server.base.routing import Replicas

_SESSION = 2.0
_BITS = (1 << 64) - 1


@dataclass(frozen=True)
class ReplicaState:
    """State of a replica, as it was published last.

    Attributes:
      name: unique among the replicas, and the same for everybody who routes.
      queue: its requests, running and waiting.
      digests: short digests of the pages that it has, or of some of them.
      adapters: digest of each adapter that it has loaded, by name.
      draining: it is to get no further requests.
    """

    name: str
    queue: int = 0
    digests: Set[int] = frozenset()
    adapters: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    draining: bool = False


def plain_choice(
    request_digests: Sequence[int],
    session: str | None,
    adapter: str | None,
    replicas: Sequence[ReplicaState],
    *,
    key: str = "",
    imbalance: float = 8.0,
) -> int:
    """The index of the replica that costs the least: `Replicas.choose`, replica by replica."""
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


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _rank(what: str, replica: ReplicaState) -> int:
    """A hash of a replica's name and `what`, splitmix64 of both: the highest one decides."""
    mixed = _hash(replica.name) ^ _hash(what)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> shift) * factor & _BITS
    return mixed ^ mixed >> 31


def index_of(replicas: Sequence[ReplicaState]) -> Replicas:
    """The index of these replicas, whose numbers are their places in the list."""
    index = Replicas()
    for each in replicas:
        index.add(each.name)
        index.set_queue(each.name, each.queue)
        index.set_draining(each.name, each.draining)
        index.set_adapters(each.name, each.adapters)
        index.learn(each.name, each.digests)
    return index


def choose(
    digests: Sequence[int], session: str | None, adapter: str | None, replicas: Sequence[ReplicaState], **options
) -> int:
    """The place of the replica that the index chooses."""
    return index_of(replicas).choose(digests, session, adapter, **options)
