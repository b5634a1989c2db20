"""Events of a replica's pages: which can be found under their digests from now on, and which no longer."""

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
    """Options of events in the scheduler: there are none."""

    def extension(self) -> KVEvents:
        """Make the scheduler extension."""
        return KVEvents()


class Stored(NamedTuple):
    """Pages of consecutive columns of a sequence that can be found from now on.

    Attributes:
      group: cache group of the pages.
      digests: of the pages; parent: of the page before the first, None for none.
      token_ids: of all these pages.
      lora: name of the adapter that computes them; None for none.
      extra_keys: what the digest of each page covers besides tokens and adapter: the first page's cache salt, marks of
        media, vectors; None for nothing.
    """

    group: int
    digests: list[bytes]
    parent: bytes | None
    token_ids: list[int]
    lora: str | None
    extra_keys: list[tuple[Any, ...] | None]


class Removed(NamedTuple):
    """Pages of a group that can no longer be found."""

    group: int
    digests: list[bytes]


class Cleared(NamedTuple):
    """All pages of the replica can no longer be found."""


class KVEvents(SchedulerExtension):
    """Scheduler extension with the events of each replica."""

    name: ClassVar[str] = NAME
    ranks: Sequence[RankEvents] = ()

    def start(self, ranks: Sequence[Rank]) -> None:
        """Make `ranks`, which listen to the replicas' pools from then on."""
        self.ranks = [RankEvents(rank) for rank in ranks]


class RankEvents(RankExtension):
    """Listener of one replica's pages. A page's tokens are known once the request that has it is registered or ends.

    Attributes:
      events: what has happened, in order; those who publish it empty the list.
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
        """Note a new page by its key `digest`; its event is made when its request's tokens are known."""
        self._new[digest] = None

    def dropped(self, digest: bytes) -> None:
        """Append a Removed event for the page with the key `digest`, unless its own event has not been made yet."""
        self.evicted([digest], [])

    def evicted(self, digests: Sequence[bytes], pages: Sequence[int]) -> None:
        """Append a Removed event for each group with pages among the keys `digests`; a page without an event yet gets
        none. `pages` is not used.
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
        """Append a Cleared event; new pages get no event any more."""
        self._new.clear()
        self.events.append(Cleared())

    def admit(self, request: Request, num_known: int, hits: Hits) -> None:
        """Note whose slot it is."""
        self._requests[request.slot] = request

    def register(self, request: Request, num_computed: int, count: int) -> None:
        """Make events of new pages from the column on in which the chunk began."""
        self._name(request, (num_computed - count) // self._tables.page_size)

    def release(self, slot: int) -> None:
        """Make events of all new pages of the slot's request, and forget whose slot it was."""
        self._name(self._requests.pop(slot), 0)

    def _name(self, request: Request, begin: int) -> None:
        """Append a Stored event for each run of a request's consecutive pages, from column `begin` on, that are new, in
        every group; they are then no longer new.
        """
        if not self._new:
            return
        token_ids = request.known_token_ids()  # of a running request those that its digests are of
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
        """Return the event of a request's pages in columns [first, end) of a group. token_ids: i32[n], its tokens."""
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
