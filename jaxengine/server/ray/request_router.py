"""Ray Serve's request router with the policy of jaxengine.server.base.routing, in each process that calls replicas."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from jaxengine.server.base.routing import Replicas
from jaxengine.server.ray.messages import Hint

# Largest number of pages that a replica is assumed to have before it has published them. It bounds memory.
_MOST_RECENT = 1 << 17


class _Known:
    """State of one replica as this process knows it. Its pages are recorded in `index`, under `name`.

    Attributes:
      adapters: adapter name -> digest, as last published.
      weights: digest of the weights, as last published.
      page_size: tokens of a page, as last published; 0 before that.
    """

    def __init__(self, index: Replicas, name: str):
        self.index, self.name = index, name
        self._stats: dict[str, Any] = {}
        self._published: set[int] = set()
        # Prompts that were sent to the replica: (time at which they expire, digests). _counts: number of these prompts
        # by digest. _num_recent: number of digests of all these prompts together.
        self._recent: deque[tuple[float, list[int]]] = deque()
        self._counts: Counter[int] = Counter()
        self._num_recent = 0
        self.adapters: dict[str, bytes] = {}
        self.weights, self.page_size = b"", 0
        index.add(name)

    def read(self, stats: dict[str, Any]) -> None:
        """Copy what a replica has published (the result of Replica.record_routing_stats) into the index and the
        attributes. Does nothing with `stats` that are empty or unchanged. Always forgets expired prompts first.
        """
        self._forget()
        if not stats or stats == self._stats:  # Ray sends the statistics of all replicas when any publishes
            return
        self._stats = stats
        before, self._published = self._published, set(np.frombuffer(stats["digests"], ">u8").tolist())
        self.index.learn(self.name, self._published - before)
        self.index.forget(self.name, [digest for digest in before - self._published if digest not in self._counts])
        self.adapters = {name: bytes.fromhex(digest) for name, digest in stats["adapters"].items()}
        self.weights, self.page_size = bytes.fromhex(stats["weights"]), stats["page_size"]
        self.index.set_adapters(self.name, self.adapters)
        self.index.set_draining(self.name, stats["draining"])

    def sent(self, digests: list[int], seconds: float) -> None:
        """Record that a prompt was sent to the replica: for `seconds` from now the index lists the prompt's pages as
        the replica's. digests: short digests of the prompt's pages.
        """
        self._recent.append((time.monotonic() + seconds, digests))
        self._counts.update(digests)
        self._num_recent += len(digests)
        self.index.learn(self.name, digests)
        self._forget()  # `read` is never called for a replica that is the only one

    def _forget(self) -> None:
        """Forget prompts that have expired, and the oldest ones while all prompts together have more than _MOST_RECENT
        digests. Their pages leave the index unless another remembered prompt has them or the replica has published
        them.
        """
        while self._recent and (self._recent[0][0] < time.monotonic() or self._num_recent > _MOST_RECENT):
            digests = self._recent.popleft()[1]
            self._num_recent -= len(digests)
            for digest in digests:
                self._counts[digest] -= 1
                if not self._counts[digest]:
                    del self._counts[digest]
            gone = [each for each in digests if each not in self._counts and each not in self._published]
            self.index.forget(self.name, gone)


class Router(RequestRouter):  # pyright: ignore[reportUntypedBaseClass]
    """Policy that chooses a replica for each call. Calls without a Hint go to the replica with the shortest queue."""

    def initialize_state(self, *, imbalance: float = 8.0, period: float = 1.0) -> None:
        """Store the settings and start without replicas. Ray calls this in place of a constructor. imbalance: see
        `Replicas.choose`. period: seconds between a replica's publications.
        """
        self._imbalance = imbalance
        # A prompt that was sent has been computed and published by then, or its pages are gone.
        self._recent_seconds = 10.0 + 3.0 * period
        self._known: dict[Any, _Known] = {}
        self._index = Replicas()
        self._candidates: list[RunningReplica] = []
        self._by_number: dict[int, RunningReplica] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return lists of replicas to try in order: [[chosen], all others]. Returns all candidates in one list for a
        call without a Hint or with fewer than two candidates. Ray calls this for each call. Sets the call's
        routing_context.should_backoff.
        """
        hint = _hint(pending_request)
        if pending_request is not None:  # if all are full, wait before the next attempt
            pending_request.routing_context.should_backoff = True
        if hint is None or len(candidate_replicas) < 2:
            return [candidate_replicas]
        self._update(candidate_replicas)
        digests = self._digests(hint, self._known.values())
        number = self._index.choose(digests, hint.session, hint.adapter, key=hint.key, imbalance=self._imbalance)
        chosen = self._by_number[number]
        return [[chosen], [each for each in candidate_replicas if each is not chosen]]

    def _update(self, candidates: list[RunningReplica]) -> None:
        """Make the index contain exactly the replicas in `candidates`, with what they have published, and set their
        queue lengths. A length that Ray does not know counts as 0.
        """
        # Ray makes another list when replicas come, go or publish.
        if candidates is not self._candidates:
            names = {each.replica_id: each.replica_id.unique_id for each in candidates}
            for gone in self._known.keys() - names.keys():
                self._index.remove(self._known.pop(gone).name)
            for new in names.keys() - self._known.keys():
                self._known[new] = _Known(self._index, names[new])
            for each in candidates:
                self._known[each.replica_id].read(each.routing_stats)
            self._candidates = candidates
            self._by_number = {self._index.number(names[each.replica_id]): each for each in candidates}
        # Ray forgets lengths after a while; it asks a chosen replica whose length it does not know.
        length = self.replica_queue_len_cache.get
        self._index.set_queues(list(self._by_number), [length(each.replica_id) or 0 for each in candidates])

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record that a replica has the pages of a call's prompt from now on, for 10 s plus three publication periods,
        if the prompt's digests can be computed. Ray calls this after a replica has taken the call. result: not used.
        """
        hint, known = _hint(pending_request), self._known.get(replica_id)
        if hint is not None and known is not None and (digests := self._digests(hint, [known])):
            known.sent(digests, self._recent_seconds)

    def _digests(self, hint: Hint, known: Iterable[_Known]) -> list[int]:
        """Return a prompt's digests, computed with the page size, weights and adapter of the first replica in `known`
        that has the request's adapter and has published its page size. Returns [] if there is none, or if the hint has
        no token ids.
        """
        for each in known if len(hint.token_ids) else ():
            adapter = b"" if hint.adapter is None else each.adapters.get(hint.adapter)
            if adapter is not None and each.page_size:
                return hint.digests(each.page_size, adapter, each.weights)
        return []


def _hint(pending: PendingRequest | None) -> Hint | None:
    """Return the Hint among a call's positional arguments; None if there is none, or without a call."""
    return None if pending is None else next((each for each in pending.args if isinstance(each, Hint)), None)
