"""Choice of a replica for each request, where several replicas serve one model: by prefix, load, session and adapter.

An index of the state that replicas publish, for any router: Ray Serve, or a simulation. Costs are in requests. The
replica that would serve a request best may have up to `imbalance` more requests than another one and is still chosen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from jaxengine.scheduler.base.request import Adapter, Request
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.scheduler.pages.groups import short_digest

# Cost, in units of `imbalance`, of moving a session: twice what a whole cached prompt is worth.
_SESSION = 2.0
_U64 = np.uint64


class Replicas:
    """Index of the replicas that serve a model, with the requests, adapters and pages of each.

    A replica has a number from `add` to `remove`: the lowest that is free. For each page digest the index stores which
    replicas have the page: the number of a single replica, or minus a bit mask of several. Methods raise KeyError for
    the name of a replica that has not been added.
    """

    def __init__(self):
        self._number_of: dict[str, int] = {}
        # Requests by replica number. Infinite where there is no replica and, in the second row, where it is draining.
        self._queues = np.full((2, 0), np.inf)
        self._seeds = np.zeros(0, _U64)
        self._adapters: dict[str, int] = {}
        self._holders: dict[int, int] = {}
        self._digests: list[set[int]] = []

    def __len__(self) -> int:
        """Return the number of replicas, draining ones included."""
        return len(self._number_of)

    @property
    def num_open(self) -> int:
        """Number of replicas that are not draining."""
        return int(np.isfinite(self._queues[1]).sum())

    def add(self, name: str) -> int:
        """Add a replica without requests, adapters and pages, and return its number, the lowest that is free.

        name: unique name, the same in all routers, because ties are decided by a hash of it. Raises ValueError if a
        replica of this name has been added already.
        """
        if name in self._number_of:
            raise ValueError(f"name is {name!r}; a replica of this name is there already")
        absent = np.flatnonzero(np.isinf(self._queues[0]))
        if not len(absent):
            more = max(8, len(self._digests))
            absent = [len(self._digests)]
            self._queues = np.concatenate([self._queues, np.full((2, more), np.inf)], axis=1)
            self._seeds = np.concatenate([self._seeds, np.zeros(more, _U64)])
            self._digests += [set[int]() for _ in range(more)]
        number = self._number_of[name] = int(absent[0])
        self._queues[:, number], self._seeds[number] = 0.0, _seed(name)
        return number

    def remove(self, name: str) -> None:
        """Remove a replica with its requests, adapters and pages. Its number becomes free. Raises KeyError for an
        unknown name.
        """
        number = self._number_of[name]
        self.forget(name, list(self._digests[number]))
        self.set_adapters(name, ())
        self._queues[:, number] = np.inf
        del self._number_of[name]

    def set_queue(self, name: str, queue: int) -> None:
        """Set the number of a replica's requests, running and waiting together. A draining replica stays so. Raises
        KeyError for an unknown name.
        """
        number = self._number_of[name]
        self._queues[0, number] = queue
        if np.isfinite(self._queues[1, number]):
            self._queues[1, number] = queue

    def set_queues(self, numbers: Sequence[int], queues: Sequence[int]) -> None:
        """Set the number of requests of several replicas: `queues[i]` for the replica with number `numbers[i]`, which
        must be that of an added replica (not checked). Draining replicas stay so.
        """
        self._queues[0, numbers] = queues
        self._queues[1, numbers] = np.where(np.isfinite(self._queues[1, numbers]), queues, np.inf)

    def set_draining(self, name: str, draining: bool) -> None:
        """Set whether a replica is draining: it then gets no further requests unless all replicas are draining. Raises
        KeyError for an unknown name.
        """
        number = self._number_of[name]
        self._queues[1, number] = np.inf if draining else self._queues[0, number]

    def set_adapters(self, name: str, adapters: Iterable[str]) -> None:
        """Set the names of all adapters that a replica has loaded; they replace those set before. Raises KeyError for
        an unknown name.
        """
        bit, loaded = 1 << self._number_of[name], set(adapters)
        for each in loaded | self._adapters.keys():
            mask = self._adapters.get(each, 0)
            self._adapters[each] = mask | bit if each in loaded else mask & ~bit
            if not self._adapters[each]:
                del self._adapters[each]

    def learn(self, name: str, digests: Iterable[int]) -> None:
        """Add pages, given by their short digests, to those that a replica has. Digests that are known already change
        nothing. Raises KeyError for an unknown name.
        """
        number = self._number_of[name]
        new = set(digests) - self._digests[number]
        self._digests[number] |= new
        for digest in new:
            holders = self._holders.get(digest)
            self._holders[digest] = number if holders is None else -(_mask(holders) | 1 << number)

    def forget(self, name: str, digests: Iterable[int]) -> None:
        """Remove pages, given by their short digests, from those that a replica has. Unknown digests are ignored.
        Raises KeyError for an unknown name.
        """
        number = self._number_of[name]
        gone = self._digests[number].intersection(digests)
        self._digests[number] -= gone
        for digest in gone:
            if left := _mask(self._holders[digest]) & ~(1 << number):
                self._holders[digest] = -left if left & left - 1 else left.bit_length() - 1
            else:
                del self._holders[digest]

    def number(self, name: str) -> int:
        """Return a replica's number. Raises KeyError for an unknown name."""
        return self._number_of[name]

    def known(self, name: str) -> set[int]:
        """Return the short digests of the pages that a replica has. It is the index's internal set, which the caller
        must not change. Raises KeyError for an unknown name.
        """
        return self._digests[self._number_of[name]]

    def least_loaded(self, last: int = -1) -> int:
        """Return the number of a replica with the fewest requests. Of several, it is the one with the lowest number
        above `last`, or the lowest number if there is none above. Draining replicas count only if all are draining.
        Raises ValueError if there are no replicas.
        """
        queues = self._open_queues()
        found = np.flatnonzero(queues == queues.min())
        return int(found[np.searchsorted(found, last + 1) % len(found)])

    def in_turn(self, last: int = -1) -> int:
        """Return the lowest replica number above `last`, or the lowest of all if there is none above. Draining replicas
        count only if all are draining. Raises ValueError if there are no replicas.
        """
        found = np.flatnonzero(np.isfinite(self._open_queues()))
        return int(found[np.searchsorted(found, last + 1) % len(found)])

    def choose(
        self,
        request_digests: Sequence[int],
        session: str | None,
        adapter: str | None,
        *,
        key: str = "",
        imbalance: float = 8.0,
    ) -> int:
        """Return the number of the replica with the lowest cost for a request.

        A replica's cost is its number of requests, plus `imbalance` times the share of the prompt that it would have to
        compute, plus `imbalance` if it would have to load the adapter, plus twice `imbalance` if another replica is the
        session's. The session's replica, and ties, are decided by a hash of names, in all routers alike. Draining
        replicas are chosen only if all are draining. Raises ValueError if there are no replicas.

        Args:
          request_digests: short digests of the prompt's full pages, in order; empty if they are not known.
          session: id of the conversation that the request continues; None if it continues none.
          adapter: name of the adapter; None if the request uses none.
          key: decides ties of requests without adapter and digests, such as the request's id.
          imbalance: number of requests that a whole prompt in the cache is worth, at least 0.
        """
        costs = self._open_queues().copy()
        if adapter is not None:
            costs += imbalance * ~self._are(self._adapters.get(adapter, 0))
        if session is not None:
            others = np.ones(len(costs), np.bool_)
            others[self._first(session, np.flatnonzero(np.isfinite(costs)))] = False
            costs += imbalance * _SESSION * others
        self._credit(costs, request_digests, imbalance / max(len(request_digests), 1))
        best = np.flatnonzero(costs == costs.min())
        tie = adapter or (str(request_digests[0]) if request_digests else key)
        return int(best[0]) if len(best) == 1 else self._first(tie, best)

    def _credit(self, costs: np.ndarray, digests: Sequence[int], worth: float) -> None:
        """Subtract from the costs f64[numbers], in place, `worth` for each page of the prompt that a replica has
        cached.

        A digest identifies the whole prefix up to its page, and replicas may publish only some, so the last digest that
        a replica has counts for all pages up to it. It stops early once no shorter prefix can make any replica the
        cheapest.
        """
        floor, least, holders, seen = costs.min(), np.inf, self._holders, 0
        for number in range(len(digests), 0, -1):
            if (found := holders.get(digests[number - 1])) is None:
                continue
            if floor - number * worth > least:
                return
            if new := _mask(found) & ~seen:
                seen |= new
                which = new.bit_length() - 1 if not new & new - 1 else self._are(new)
                costs[which] -= number * worth
                least = min(least, costs[which].min())

    def _open_queues(self) -> np.ndarray:
        """Return the number of requests f64[numbers] of the replicas that may be chosen: those that are not draining,
        or all if all are draining. It is infinite at other numbers. The result is a view of the index. Raises
        ValueError if there are no replicas.
        """
        if not self._number_of:
            raise ValueError("there are no replicas")
        return self._queues[1] if np.isfinite(self._queues[1]).any() else self._queues[0]

    def _are(self, mask: int) -> np.ndarray:
        """Return bool[numbers]: for each replica number, whether its bit is set in `mask`."""
        count = len(self._digests)
        bits = np.frombuffer(mask.to_bytes(-(-count // 8), "little"), np.uint8)
        return np.unpackbits(bits, count=count, bitorder="little").view(np.bool_)

    def _first(self, what: str, numbers: np.ndarray) -> int:
        """Return the one of the numbers whose replica has the highest hash of its name and `what` (rendezvous hashing):
        the result changes little when replicas come or go.
        """
        mixed = self._seeds[numbers] ^ _U64(_seed(what))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> _U64(shift))) * _U64(factor)
        return int(numbers[np.argmax(mixed ^ (mixed >> _U64(31)))])


def _mask(holders: int) -> int:
    """Return the bit mask of replicas in an entry of `Replicas._holders`: a number, or minus a mask of several."""
    return 1 << holders if holders >= 0 else -holders


def _seed(name: str) -> int:
    """Return the first 64 bits of a name's SHA-256, as an unsigned integer."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def prompt_digests(
    token_ids: Sequence[int],
    page_size: int,
    *,
    cache_salt: str | None = None,
    adapter: bytes = b"",
    weights: bytes = b"",
    most: int = 1 << 13,
) -> list[int]:
    """Return the short digests of the first `most` full pages of a prompt, equal to those that replicas publish for the
    same pages.

    page_size: tokens in a page. cache_salt: the request's; None for none. adapter, weights: digests of the adapter and
    of the weights with which the pages are computed, as replicas publish them; b"" for no adapter, and for the weights
    that the engine was started with.
    """
    prompt = np.array(token_ids[: most * page_size], np.int32)
    request = Request("", prompt, TokenParams(), 0, cache_salt=cache_salt)
    request.adapter = Adapter("", adapter) if adapter else None
    request.compute_with(weights)
    return [short_digest(each) for each in request.extend_page_hashes(prompt, page_size)]
