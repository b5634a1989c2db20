"""Sessions: conversations whose pages stay in the storage tiers while they are idle, and can be dropped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxengine.engine.extension import NO_EVENTS, Events, Loop, LoopExtension
from jaxengine.engine.extensions.offload.due_copies import DueCopies, KeptKeys, found_columns, is_here
from jaxengine.engine.extensions.offload.offload import Offload
from jaxengine.engine.stats.metric_types import Gauge, Metric
from jaxengine.scheduler.base.request import FinishReason, Request
from jaxengine.scheduler.pages.reach import state_key

# Share of host memory that sessions may pin, and largest number of sessions.
_SHARE, _MAX_SESSIONS = 0.5, 1 << 16
# Period at which an idle engine dispatches copies that are due.
_SOON_SECONDS = 0.005


class Sessions(LoopExtension):
    """Loop extension that copies a session's pages to host memory when a request of the session ends, and pins them
    there.

    Together sessions pin half of host memory at most. The pages of the least recently used sessions are unpinned first.

    Attributes:
      kept: keys of each session's pages, by session, the least recently used first.
    """

    def __init__(self, offload: Offload):
        """Begin without sessions. offload: host memory and its copies."""
        self.kept: OrderedDict[str, list[bytes]] = OrderedDict()
        self._offload, self._due = offload, DueCopies(offload)
        self._keys = KeptKeys(offload.tiers)
        size = offload.mover.block_bytes
        self._most = int(offload.tiers.host.capacity * _SHARE) // size

    def attach(self, loop: Loop) -> None:
        super().attach(loop)
        self._ranks = loop.scheduler.ranks

    def queued(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.session in self.kept:
                self.kept.move_to_end(request.session)

    def poll(self) -> Events:
        """Dispatch copies that are due, as far as there is room. Returns no events."""
        self._due.advance()
        return NO_EVENTS

    def ended(self, request: Request) -> None:
        """Pin the request's pages for its session, in place of the pages pinned before, and queue copies of those that
        host memory lacks; release the least recently used sessions beyond the limits. Pages beyond those that all
        sessions together may keep are left out, the last ones first.

        Does nothing for a request that has no session, failed, never ran, or has no pages left.
        """
        if not request.session or request.finish_reason is FinishReason.ERROR or request.rank < 0:
            return
        found = found_columns(self._ranks[request.rank].pages, request.page_hashes)
        there = {key: page for own in found for key, page in own.items() if page is not None}
        keys = [key for own in found for key in own if key in there or is_here(self._offload, key)][: self._most]
        if not keys:
            return
        self._keys.keep(keys)
        self._release(request.session)
        self.kept[request.session] = keys
        while len(self._keys) > self._most or len(self.kept) > _MAX_SESSIONS:
            self._release(next(iter(self.kept)))
        self._due.add(self._ranks[request.rank], keys, there)
        self._due.advance()

    def rest(self) -> float:
        """Dispatch copies that are due; return the number of seconds after which to call this again, inf if none are
        left.
        """
        self._due.advance()
        return _SOON_SECONDS if self._due else float("inf")

    def drop(self, session: str) -> bool:
        """Remove the pages that only this session keeps from the devices, host memory and the folder; return whether
        the session existed. Running requests go on, and their end begins the session anew.
        """
        keys = self.kept.get(session)
        if keys is None:
            return False
        alone = self._release(session)
        self._due.discard(set(alone))
        for key in alone:
            for rank in self._ranks:
                if not key.endswith(state_key(b"")):
                    rank.pool.forget(key)
                elif rank.pages.snapshots is not None:
                    rank.pages.snapshots.forget(key.removesuffix(state_key(b"")))
            self._offload.tiers.drop(key)
        return True

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        return {"drop_session": self.drop}

    def metrics(self) -> Iterator[Metric]:
        yield Gauge("jaxengine:kv_sessions", len(self.kept))
        yield Gauge("jaxengine:kv_session_pages", len(self._keys))

    def _release(self, session: str) -> list[bytes]:
        """Remove a session and unpin its pages; return the keys that no other session keeps. [] for an unknown
        session.
        """
        return self._keys.release(self.kept.pop(session, []))
