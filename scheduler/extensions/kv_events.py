"""Events of a replica's pages: which can be found by their digests from now on, and which no longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.extension import RankExtension
from jaxengine.scheduler.pages.groups import page_key
from jaxengine.scheduler.pages.snapshots import Hits
from jaxengine.scheduler.rank import Rank
from jaxengine.scheduler.scheduler_extension import SchedulerExtension

NAME = "kv_events"
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class KVEventOptions:
    """Options of page events in the scheduler: there are none."""

    def extension(self) -> KVEvents:
        """Return a new scheduler extension."""
        return KVEvents()


class Stored(NamedTuple):
    """Event: pages of consecutive columns of a sequence can be found from now on.

    Attributes:
      group: cache group of the pages.
      digests: digests of the pages. parent: digest of the page before the first, None for none.
      token_ids: token ids of all these pages.
      lora: name of the adapter that computes them; None for none.
      extra_keys: for each page what its digest covers besides tokens: adapter, marks of media, cache salt (in the first
        page), digest of steering vectors; None for nothing.
    """

    group: int
    digests: list[bytes]
    parent: bytes | None
    token_ids: list[int]
    lora: str | None
    extra_keys: list[tuple[Any, ...] | None]


class Removed(NamedTuple):
    """Event: these pages of a group can no longer be found."""

    group: int
    digests: list[bytes]


class Cleared(NamedTuple):
    """Event: none of the replica's pages can be found any more."""


class KVEvents(SchedulerExtension):
    """Scheduler extension that collects the page events of each replica."""

    name: ClassVar[str] = NAME
    ranks: Sequence[RankEvents] = ()

    def start(self, ranks: Sequence[Rank]) -> None:
        """Create `ranks`, which listen to the replicas' pools from then on."""
        self.ranks = [RankEvents(rank) for rank in ranks]


class RankEvents(RankExtension):
    """Listener of one replica's page pool. A page's tokens are known once its request registers the chunk or loses its
    slot.

    Attributes:
      events: the events so far, in order; the code that publishes them empties the list.
    """

    def __init__(self, rank: Rank):
        """Start without events, and listen to the pool of this replica."""
        self.events: list[Stored | Removed | Cleared] = []
        self._tables = rank.pages
        # Keys of pages whose tokens are not known yet.
        self._new: dict[bytes, None] = {}
        self._requests: dict[int, Request] = {}
        rank.pool.listeners.append(self)

    def registered(self, digest: bytes, page: int) -> None:
        """Record a new page by its key `digest`; its Stored event is appended when the tokens of its request are
        known.
        """
        self._new[digest] = None

    def dropped(self, digest: bytes) -> None:
        """Append a Removed event for the page with the key `digest`. If the page has no Stored event yet, it will not
        get one, and no event is appended.
        """
        self.evicted([digest], [])

    def evicted(self, digests: Sequence[bytes], pages: Sequence[int]) -> None:
        """Append a Removed event for each cache group that has pages among the keys `digests`. A page without a Stored
        event yet is left out and will not get one. `pages` is not used.
        """
        by_group: dict[int, list[bytes]] = {}
        for key in digests:
            if key in self._new:
                del self._new[key]
            else:
                group = key[_DIGEST_BYTES] if len(key) > _DIGEST_BYTES else 0
                by_group.setdefault(group, []).append(key[:_DIGEST_BYTES])
        self.events += [Removed(group, own) for group, own in by_group.items()]

    def forgotten(self) -> None:
        """Append a Cleared event. Pages without an event yet will not get one."""
        self._new.clear()
        self.events.append(Cleared())

    def admit(self, request: Request, num_known: int, hits: Hits) -> None:
        """Record the request as the owner of its slot."""
        self._requests[request.slot] = request

    def register(self, request: Request, num_computed: int, count: int) -> None:
        """Append Stored events of new pages from the column in which the chunk began on."""
        self._name(request, (num_computed - count) // self._tables.page_size)

    def release(self, slot: int) -> None:
        """Append Stored events of all new pages of the slot's request, and forget the slot's owner."""
        self._name(self._requests.pop(slot), 0)

    def _name(self, request: Request, begin: int) -> None:
        """Append a Stored event for each run of consecutive new pages of a request, from column `begin` on, in every
        group. The pages are no longer new afterwards.
        """
        if not self._new:
            return
        token_ids = request.known_token_ids()  # for a running request, the tokens that its digests cover
        for group in range(self._tables.num_groups):
            first: int | None = None
            for column, digest in enumerate([*request.page_hashes[begin:], None], begin):
                is_new = digest is not None and page_key(digest, group) in self._new
                if digest is not None and is_new:
                    del self._new[page_key(digest, group)]
                    first = column if first is None else first
                elif first is not None:
                    self.events.append(self._stored(request, token_ids, group, first, column))
                    first = None

    def _stored(self, request: Request, token_ids: Any, group: int, first: int, end: int) -> Stored:
        """Return the Stored event of a request's pages in columns [first, end) of a group. Each page's extra keys are
        the adapter's name, its media marks in hex, in column 0 the cache salt, and the steering vectors' digest in hex,
        as far as there are any; None without any. token_ids: i32 [n], the request's tokens.
        """
        size, digests = self._tables.page_size, request.page_hashes
        marks = {} if request.media is None else request.media.marks(size)
        steer = (request.params.steer_digest.hex(),) if request.params.steer else ()
        keys: list[tuple[Any, ...] | None] = []
        for column in range(first, end):
            salt = (request.cache_salt,) if request.cache_salt and not column else ()
            own = (marks[column].hex(),) if column in marks else ()
            lora = (request.lora,) if request.lora else ()
            keys.append((*lora, *own, *salt, *steer) or None)
        parent = digests[first - 1] if first else None
        tokens = token_ids[first * size : end * size].tolist()
        return Stored(group, digests[first:end], parent, tokens, request.lora, keys)
