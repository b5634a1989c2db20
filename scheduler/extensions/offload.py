"""Pages and states stored outside of the devices: which to store, and which to load before a request runs.

Pages and snapshots are stored under their digests when they are about to be overwritten, or as soon as they are filled.
A request that could reuse a longer prefix with stored ones waits, outside the queue, while they are loaded. They become
cached pages that no request holds, so its admission finds them like any others. No request waits twice for the same
pages: if they were overwritten in the meantime, its tokens are computed. Only as many are loaded at once as there are
free pages and slots for, so that pages do not overwrite each other before their requests run. A request whose pages
must wait for room stays first in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from jaxengine.scheduler.base.request import Request, RequestStatus
from jaxengine.scheduler.extension import RankExtension
from jaxengine.scheduler.extensions.load_room import Load, LoadRoom
from jaxengine.scheduler.pages.groups import most_pages_of, page_key
from jaxengine.scheduler.pages.reach import reach, state_key
from jaxengine.scheduler.pages.snapshots import Hits
from jaxengine.scheduler.rank import Offer, Rank
from jaxengine.scheduler.scheduler_extension import SchedulerExtension

NAME = "offload"
RECOMPUTE, SWAP, AUTO = PREEMPTION_MODES = ("recompute", "swap", "auto")
# The number of digests whose lookups are counted.
_MAX_COUNTED = 1 << 20


@dataclass(frozen=True)
class OffloadOptions:
    """Options of stored pages in the scheduler.

    Attributes:
      at_once: store a page as soon as it is filled, not only when it is about to be overwritten.
      preemption_mode: one of PREEMPTION_MODES.
      store_threshold: how often requests must have looked for a page before it is stored; 0 and 1 store every page.
    """

    at_once: bool = False
    preemption_mode: str = AUTO
    store_threshold: int = 0

    def extension(self) -> Offload:
        """Return a new scheduler extension with these options."""
        return Offload(self)


class Store(Protocol):
    """The content of pages and states, stored by key outside of the devices."""

    def has(self, key: bytes) -> bool:
        """Return whether a key is stored, or being stored."""
        ...

    def is_far(self, key: bytes) -> bool:
        """Return whether only another engine has a key, from which it may come late, or not at all."""
        ...

    def pin(self, keys: Sequence[bytes]) -> None:
        """Keep the content of these keys, stored now or later, until `unpin` is called with them."""
        ...

    def unpin(self, keys: Sequence[bytes]) -> None:
        """End one `pin` of these keys."""
        ...

    def pays(self, num_stored: int, num_tokens: int) -> bool:
        """Return whether loading `num_stored` pages or states takes less time than computing `num_tokens` tokens."""
        ...


class NoStore(Store):
    """A store that is always empty."""

    def has(self, key: bytes) -> bool:
        return False

    def is_far(self, key: bytes) -> bool:
        """Return False: no engine has a key."""
        return False

    def pin(self, keys: Sequence[bytes]) -> None:
        """Do nothing."""

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Do nothing."""

    def pays(self, num_stored: int, num_tokens: int) -> bool:
        """Return False: there is nothing to load."""
        return False


@dataclass(eq=False)
class Orders:
    """Pages or snapshots of one replica that are to be stored: dicts from the key to the page or snapshot.

    Attributes:
      leaving: those to copy before the next step is dispatched, which overwrites them.
      filled: those to copy after the next step is dispatched, which may be the one that fills them, and before another
        one is scheduled.
    """

    leaving: dict[bytes, int] = field(default_factory=dict)
    filled: dict[bytes, int] = field(default_factory=dict)


class Offload(SchedulerExtension):
    """Scheduler extension that decides which pages to store, and which requests wait for stored ones.

    Attributes:
      options: the options that it was created with.
      store: the stored content; a NoStore until the engine's extension sets it.
      loads: loads to start, for which requests wait; the engine's extension starts them and empties the list.
      rooms: the LoadRoom of each replica.
      num_queries, num_hits: tokens that requests looked for in the store, and tokens that were loaded for them.
      num_by_mode: number of preempted requests by how they get their pages back.
      num_forgotten: how often the pools have dropped all their pages.
      is_due: whether there is something to store; the code that stores pages clears it.
      is_own: False once requests may have continued with other weights than those that their digests stand for.
    """

    name: ClassVar[str] = NAME
    ranks: Sequence[RankOffload] = ()

    def __init__(self, options: OffloadOptions):
        """Start with an empty store and no waiting request."""
        self.options = options
        self.store: Store = NoStore()
        self.loads: list[Load] = []
        self.num_queries = self.num_hits = self.num_forgotten = 0
        self.num_by_mode = {RECOMPUTE: 0, SWAP: 0}
        self.is_own, self.is_due = True, False
        # Requests that `admits` has checked, with the number of their tokens that were cached then.
        self._checked: dict[Request, int] = {}
        self._followers: dict[Request, Load] = {}  # requests that wait for the load of another one
        # The first request in the queue if there is no room for its load, and the least number of pages that it takes.
        self._blocked: tuple[Request, int] | None = None
        self._pinned: dict[Request, list[bytes]] = {}
        self._num_lookups: dict[bytes, int] = {}  # by digest

    def start(self, ranks: Sequence[Rank]) -> None:
        """Create `ranks`, which listen to the replicas' pools and snapshots from then on."""
        self._ranks, self.ranks = ranks, [RankOffload(self, rank) for rank in ranks]
        self.rooms = [LoadRoom(rank) for rank in ranks]

    def admits(self, request: Request) -> bool:
        """Return whether a request can be admitted without waiting for stored pages. If it must wait, append a Load to
        `loads`, for the replica with the least work (tokens held or being loaded there, minus those that would be
        loaded) among those with room, or have it wait for another load (`LoadRoom.leader`).

        It need not wait if it was checked before, if no replica has room for it now, if nothing useful is stored, or if
        it was preempted and is to be recomputed. If its load has no room, it stays in the queue: see `defers`. Once it
        is decided, also counts the tokens looked for in the store.
        """
        if request in self._checked or self._is_still_blocked(request):
            return True
        self._blocked = None
        offers = [(rank, offer) for rank in self._ranks if rank.is_open and (offer := rank.offer(request)) is not None]
        if not offers:
            return True  # the request stays in the queue until there is room, and is checked again
        found = [(self._load(request, *each), *each) for each in offers]
        found.sort(key=lambda each: each[1].num_tokens + self.rooms[each[0].rank].num_tokens - each[0].num_tokens)
        for load, rank, offer in found:
            if not load.keys or not self._is_wanted(request, load):
                self._count_lookups(request, rank, offer)
                self._checked[request] = rank.config.max_model_len
                return True
            room = self.rooms[load.rank]
            if (leader := room.leader(load)) is not None:
                self._followers[request] = leader
                return False
            if room.fits(room.num_pages(load), load.is_far):
                room.begin(load)
                self._count_lookups(request, rank, offer)
                self._checked[request] = offer.num_cached
                self.loads.append(load)
                return False
        self._blocked = request, min(self.rooms[load.rank].num_pages(load) for load, *_ in found)
        return True

    def defers(self, request: Request) -> bool:
        """Return whether a request must stay in the queue, and with it all later ones, until there is room for its
        load.
        """
        return self._blocked is not None and self._blocked[0] is request

    def ready(self) -> Iterable[Request]:
        """Return the requests that waited for loads of other requests which are no longer in progress."""
        followers = self._followers
        if not followers:
            return ()
        ready = [each for each, load in followers.items() if not self.rooms[load.rank].is_in_progress(load)]
        for request in ready:
            del followers[request]
        return ready

    def preempted(self, request: Request) -> str | None:
        """Count a preempted request by its mode, and return the mode in capitals: "SWAP" or "RECOMPUTE".

        With preemption_mode "auto" it is the faster one (`Store.pays`). With SWAP the keys of its pages and of its last
        two states are pinned in the store.
        """
        mode = self.options.preemption_mode
        if mode == AUTO:
            mode = SWAP if self.store.pays(len(request.page_hashes), len(request.known_token_ids())) else RECOMPUTE
        self.num_by_mode[mode] += 1
        if mode == SWAP and request not in self._pinned:
            groups = range(self._ranks[request.rank].pages.num_groups)
            digests = request.page_hashes
            self._pinned[request] = [page_key(each, group) for each in digests for group in groups]
            self._pinned[request] += [state_key(each) for each in digests[-2:]]
            self.store.pin(self._pinned[request])
        return mode.upper()

    def weights_replaced(self) -> None:
        """Set `is_own` to False and `is_due` to True."""
        self.is_own, self.is_due = False, True

    def ended(self, request: Request) -> None:
        """Forget everything about a request that got a slot or has ended: its load, whose room becomes free, its pinned
        content, which is unpinned, and that it was checked or must stay in the queue.
        """
        for room in self.rooms:
            room.remove(request)
        if request in self._pinned:
            self.store.unpin(self._pinned.pop(request))
        self._checked.pop(request, None)
        self._followers.pop(request, None)
        if self.defers(request):
            self._blocked = None

    def admitted(self, request: Request, num_cached: int) -> None:
        """Count the tokens that were loaded for a request (at its first admission also in Request.num_external_tokens),
        and release what was kept for it (`ended`).

        num_cached: number of its tokens found in the prefix cache.
        """
        hits = max(0, num_cached - self._checked.get(request, num_cached))
        self.num_hits += hits
        if request.num_cached_tokens < 0:  # its first admission
            request.num_external_tokens = hits
        self.ended(request)

    def is_wanted(self, key: bytes) -> bool:
        """Return whether the page or state of a key (`page_key`, `state_key`) is to be stored: it is not stored yet,
        and requests have looked for it at least store_threshold times. A threshold below 2 needs no look-up.
        """
        least = self.options.store_threshold
        return not self.store.has(key) and (least < 2 or self._num_lookups.get(key[:32], 0) >= least)

    def _is_still_blocked(self, request: Request) -> bool:
        """Return whether a request's load had no room when last looked for, and still has none on any replica."""
        if self._blocked is None or self._blocked[0] is not request:
            return False
        return not any(room.rank.is_open and room.fits(self._blocked[1]) for room in self.rooms)

    def _load(self, request: Request, rank: Rank, offer: Offer) -> Load:
        """Return the Load that would extend the prefix of a request that the replica has cached, according to its
        `offer`. If none would, its `keys` are empty and `num_tokens` is 0.
        """
        digests = rank.findable(request, offer.known)
        found = reach(rank.pages, digests, self.store.has)
        gain = found.num_columns - offer.hits.num_columns
        keys = found.missing if gain > 0 else []
        num_more = max(0, most_pages_of(rank.config, len(offer.known)) - len(found.pages))
        num_tokens, is_far = max(0, gain) * rank.config.page_size, any(map(self.store.is_far, keys))
        return Load(request, rank.index, found.pages, keys, num_tokens, num_more, is_far)

    def _is_wanted(self, request: Request, load: Load) -> bool:
        """Return whether a request should wait for `load`. A preempted one should only in mode "swap", or in mode
        "auto" if loading takes less time than computing (`Store.pays`).
        """
        if request.status is not RequestStatus.PREEMPTED:
            return True
        mode = self.options.preemption_mode
        return mode == SWAP or (mode == AUTO and self.store.pays(len(load.keys), load.num_tokens))

    def _count_lookups(self, request: Request, rank: Rank, offer: Offer) -> None:
        """Add the number of tokens that a request looks for in the store to `num_queries`. With a store_threshold above
        1, also count the lookups of each digest of its prefix; counts of the last _MAX_COUNTED digests are kept.
        """
        self.num_queries += len(offer.known) - offer.num_cached
        if self.options.store_threshold > 1:
            for digest in rank.findable(request, offer.known):
                self._num_lookups[digest] = self._num_lookups.pop(digest, 0) + 1
            while len(self._num_lookups) > _MAX_COUNTED:
                del self._num_lookups[next(iter(self._num_lookups))]


class RankOffload(RankExtension):
    """Offloading of one replica: listens to its pages and snapshots, and registers pages that are loaded.

    Attributes:
      pages, states: the pages and snapshots to store; the code that stores them empties these.
    """

    def __init__(self, offload: Offload, rank: Rank):
        """Start without orders, and listen to the pool and the snapshots of this replica."""
        self._offload = offload
        self.pages, self.states = Orders(), Orders()
        rank.pool.listeners.append(_Listener(offload, self.pages, bytes))
        self._tables = rank.pages
        if rank.pages.snapshots is not None:
            rank.pages.snapshots.listener = _Listener(offload, self.states, state_key)

    def chunk(self, request: Request, start: int, count: int, hits: Hits | None = None) -> int:
        """Return `count`, or 0 for a request that waits for room (`Offload.defers`)."""
        return 0 if self._offload.defers(request) else count

    def admit(self, request: Request, num_known: int, hits: Hits) -> None:
        """Report the request's cached tokens to `Offload.admitted`."""
        self._offload.admitted(request, hits.num_columns * self._tables.page_size)

    def take(self, keys: Sequence[bytes], prefix: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Allocate pages for these keys, register them under the keys, and return (key, page) of each.

        Nothing holds them: their content must be written before the next step is scheduled. Keys that the pool already
        has are left out, and so are the last ones if too few pages are free. prefix: all keys of the prefix that they
        are part of; its pages are not reused for the new ones, and count as the most recently used.
        """
        pool = self._tables.pool
        cached = [page for key in prefix if (page := pool.find(key)) is not None]
        pool.acquire(np.array(cached, np.int32))
        keys = [key for key in keys if pool.find(key) is None][: pool.num_free]
        pages = pool.allocate(len(keys)).tolist()
        for key, page in zip(keys, pages, strict=True):
            pool.register(page, key)
        pool.free(np.array([page for key in prefix if (page := pool.find(key)) is not None], np.int32))
        return list(zip(keys, pages, strict=True))

    def take_state(self, key: bytes) -> int | None:
        """Return the snapshot to which the state of a key (`state_key`) is to be written; it is registered at once.

        None if the state is there already, if every snapshot is used by the newest step or was taken since, or if the
        model has no states.
        """
        snapshots = self._tables.snapshots
        return None if snapshots is None else snapshots.put(key[: -len(state_key(b""))])

    def clear(self) -> None:
        """Drop all orders to store."""
        for orders in (self.pages, self.states):
            orders.leaving.clear()
            orders.filled.clear()


class _Listener:
    """Listener of a pool or of snapshots that orders their content to be stored, by adding to an Orders."""

    def __init__(self, offload: Offload, orders: Orders, key: Callable[[bytes], bytes]):
        """Store the extension, the orders to fill, and the function from a digest to its key."""
        self._offload, self._orders, self._key = offload, orders, key

    def registered(self, digest: bytes, page: int) -> None:
        """If `at_once` is set and the new page is wanted, order it to be stored once it is filled."""
        if self._offload.options.at_once and self._offload.is_wanted(key := self._key(digest)):
            self._orders.filled[key], self._offload.is_due = page, True

    def dropped(self, digest: bytes) -> None:
        """Remove the orders to store the page with this digest, if there are any."""
        for due in (self._orders.filled, self._orders.leaving):
            due.pop(self._key(digest), None)

    def evicted(self, digests: Sequence[bytes], pages: Sequence[int]) -> None:
        """Order those of the pages that are wanted to be stored before they are overwritten."""
        for digest, page in zip(digests, pages, strict=True):
            key = self._key(digest)
            self._orders.filled.pop(key, None)
            if self._offload.is_wanted(key):
                self._orders.leaving[key], self._offload.is_due = page, True

    def forgotten(self) -> None:
        """Count in num_forgotten that the pools have dropped all pages, and drop all orders of all replicas."""
        self._offload.num_forgotten += 1
        for rank in self._offload.ranks:
            rank.clear()
