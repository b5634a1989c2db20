"""Store of responses, in memory and of bounded size, shared fairly by its owners.

An owner beyond its own bounds evicts its own oldest responses. If all owners together are beyond the store's bounds,
the oldest responses of the owner with the most are evicted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from jaxengine.scheduler.base.errors import OverloadedError
from jaxengine.server.stored.documents import Document
from jaxengine.server.stored.events import EventLog, NumberedEvent, Told
from jaxengine.server.stored.records import Found, Needs, Part, Reading, StoreBounds, StoredResponse, Worker
from jaxengine.server.stored.share import Kept, Share

_LOST = {"code": "server_error", "message": "the process that worked on the response has ended"}
_RETRY_SECONDS = 5.0


class ResponseStore:
    """Store of responses in this process; implements `Responses`."""

    def __init__(self, bounds: StoreBounds):
        self._bounds = bounds
        self._shares: dict[str, Share] = {}
        # By (owner, id).
        self._workers: dict[tuple[str, str], Worker] = {}
        self._at_rest: dict[tuple[str, str], asyncio.Event] = {}
        self._logs: dict[tuple[str, str], EventLog] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of everything stored, in bytes."""
        return sum(share.num_bytes for share in self._shares.values())

    async def put(
        self, stored: StoredResponse, worker: Worker, texts: dict[bytes, bytes] | None = None
    ) -> Needs | None:
        """Store a response, replacing its earlier state, and return None, or what is missing to store it, in which case
        nothing has changed. Then evicts finished responses while bounds are exceeded, and, for a finished response,
        wakes the calls of `stop` that wait for it. worker: process that generates a running response. texts: long texts
        by digest. Raises OverloadedError for a new response for which evictions could not make room (`_check_room`).
        """
        texts = texts or {}
        share = self._shares.get(stored.owner) or Share()
        if (needs := share.missing(stored, texts)) is not None:
            return needs
        if stored.id not in share.responses:
            self._check_room(share, stored, texts)
        share.put(stored, texts)
        self._shares[stored.owner] = share
        key = stored.owner, stored.id
        if stored.is_running:
            self._workers[key] = worker
        else:
            self._rest(key)
        if stored.is_streamed:
            self._log(key, stored.events, ends=not stored.is_running)
            stored.events = []
        self._make_room(share, stored.id)
        return None

    async def find(self, response_id: str, owner: str) -> Found | None:
        """Return a stored response's state and sizes; None for an unknown one or another owner's."""
        kept = self._kept(response_id, owner)
        return None if kept is None else _found(kept)

    async def read(self, response_id: str, owner: str, part: Part) -> Reading | None:
        """Return a part of a stored response with its long texts: "response", "input", or "conversation", which
        includes all earlier turns; None for an unknown one or another owner's.
        """
        kept = self._kept(response_id, owner)
        if kept is None:
            return None
        match part:
            case "response":
                documents = [kept.stored.response]
            case "input":
                documents = [kept.stored.input]
            case "conversation":
                documents = [each for turn in kept.turn.chain() for each in turn.messages]
        return Reading(documents, self._shares[owner].texts_of(documents))

    async def append_events(self, response_id: str, owner: str, events: list[NumberedEvent]) -> None:
        """Store further events of a streamed response, and evict finished ones while bounds are exceeded. Does nothing
        for a response without stored events.
        """
        if (owner, response_id) in self._logs:
            self._log((owner, response_id), events)
            self._make_room(self._shares[owner], response_id)

    async def events_after(self, response_id: str, owner: str, number: int) -> Told | None:
        """Return events of a streamed response with numbers above `number`; waits until there are some, or until the
        response has ended. None for an unknown one or another owner's, and for one that is not streamed.
        """
        log = self._logs.get((owner, response_id))
        return None if log is None else await log.after(number)

    async def stop(self, response_id: str, owner: str) -> Found | None:
        """Order the worker of a running response to cancel it, wait until it no longer runs, and return its state and
        sizes; None for an unknown one or another owner's.
        """
        kept = self._kept(response_id, owner)
        if kept is None:
            return None
        if kept.stored.is_running:
            key = owner, response_id
            at_rest = self._at_rest.setdefault(key, asyncio.Event())
            self._workers[key].cancel(response_id, owner)
            await at_rest.wait()
        return await self.find(response_id, owner)

    async def delete(self, response_id: str, owner: str) -> Found | None:
        """Stop a response, wait until it no longer runs, remove it, and return its state and sizes before removal; None
        for an unknown one or another owner's.
        """
        found = await self.stop(response_id, owner)
        if found is not None:
            self._drop(owner, response_id)
        return found

    def lose(self, worker: Worker) -> None:
        """Mark the running responses of a lost worker as failed, with an error, wake the calls of `stop` that wait for
        them, and end the logs of those that are streamed.
        """
        for key in [key for key, each in self._workers.items() if each is worker]:
            owner, response_id = key
            share = self._shares[owner]
            stored = share.responses[response_id].stored
            # Digests of long texts are decoded as extensions, and encoded as they were.
            shown = {**msgspec.msgpack.decode(stored.response.data), "status": "failed", "error": _LOST}
            data = msgspec.msgpack.encode(shown)
            num_bytes = stored.response.num_bytes + len(data) - len(stored.response.data)
            share.replace_response(response_id, Document(data, stored.response.digests, num_bytes))
            stored.is_running = False
            self._rest(key)
            if stored.is_streamed:
                self._log(key, [], ends=True)

    def _kept(self, response_id: str, owner: str) -> Kept | None:
        """Return an owner's stored response; None if there is none with this id."""
        share = self._shares.get(owner)
        return None if share is None else share.responses.get(response_id)

    def _rest(self, key: tuple[str, str]) -> None:
        """Forget the worker of a response that no longer runs, and wake the calls of `stop` that wait for it. key:
        (owner, id).
        """
        self._workers.pop(key, None)
        if (at_rest := self._at_rest.pop(key, None)) is not None:
            at_rest.set()

    def _log(self, key: tuple[str, str], events: Sequence[NumberedEvent], *, ends: bool = False) -> None:
        """Add events to the log of a stored response, and their size to its owner's share. key: (owner, id). ends:
        whether they are the last ones.
        """
        log = self._logs.setdefault(key, EventLog())
        before = log.num_bytes
        log.append(events, ends=ends)
        self._shares[key[0]].num_bytes += log.num_bytes - before

    def _check_room(self, share: Share, stored: StoredResponse, texts: dict[bytes, bytes]) -> None:
        """Raise OverloadedError for a new response for which evictions could not make room: the conversation or the
        response is too large, or running responses, which are never evicted, leave no room. Changes nothing. Nothing
        may be missing in `share`.
        """
        bounds = self._bounds
        # The answer is short, and the request that it answers was checked.
        size = share.conversation_bytes(stored) - stored.answer.num_bytes
        if size > bounds.conversation_bytes:
            text = f"its conversation has {size} bytes; allowed: {bounds.conversation_bytes}"
            raise OverloadedError(f"{text} (max_stored_conversation_bytes)", retry_after=_RETRY_SECONDS)
        size, most = share.added_bytes(stored, texts), min(bounds.client_bytes, bounds.num_bytes)
        if size > most:
            text = f"it has {size} bytes with its conversation; allowed: {most} (max_stored_bytes_per_client)"
            raise OverloadedError(text, retry_after=_RETRY_SECONDS)
        running = [kept for kept in share.responses.values() if kept.stored.is_running]
        everyone = [self._shares[owner].responses[name] for owner, name in self._workers]
        for kept, responses, num_bytes in (
            (running, bounds.client_responses, most),
            (everyone, bounds.responses, bounds.num_bytes),
        ):
            if len(kept) >= responses or size + sum(map(self._most_bytes, kept)) > num_bytes:
                text = f"{len(running)} responses of yours and {len(everyone)} in all run in the background already"
                raise OverloadedError(text, retry_after=_RETRY_SECONDS)

    def _most_bytes(self, kept: Kept) -> int:
        """Return the size in bytes of a response, its events, its input and its whole conversation, with every
        occurrence of long texts.
        """
        log = self._logs.get((kept.stored.owner, kept.stored.id))
        return sum(_found(kept).num_bytes.values()) + (0 if log is None else log.num_bytes)

    def _make_room(self, share: Share, newest: str) -> None:
        """Evict finished responses, oldest first, while bounds are exceeded and there is one to evict: those in `share`
        beyond its owner's bounds, then those of the owner with the most beyond the store's bounds. newest: id of a
        response in `share` that is not evicted.
        """
        bounds = self._bounds

        def evict_from(other: Share) -> bool:
            """Evict the oldest finished response of an owner other than `newest`; return whether there was one."""
            oldest = next(other.finished(but=newest if other is share else None), None)
            if oldest is not None:
                self._drop(other.responses[oldest].stored.owner, oldest)
            return oldest is not None

        def evict(measure: Callable[[Share], int]) -> bool:
            """Evict one response: the oldest finished one of the owner with the largest `measure` that has any. Returns
            whether there was one.
            """
            return any(map(evict_from, sorted(self._shares.values(), key=measure, reverse=True)))

        while len(share.responses) > bounds.client_responses or share.num_bytes > bounds.client_bytes:
            if not evict_from(share):
                break
        while sum(map(_num_responses, self._shares.values())) > bounds.responses and evict(_num_responses):
            continue
        while self.num_bytes > bounds.num_bytes and evict(_num_bytes):
            continue

    def _drop(self, owner: str, response_id: str) -> None:
        """Remove a response, end its log of events, and remove the owner's share if that is then empty. Does nothing
        for an unknown response.
        """
        share = self._shares.get(owner)
        if share is not None and response_id in share.responses:
            share.drop(response_id)
            if (log := self._logs.pop((owner, response_id), None)) is not None:
                share.num_bytes -= log.num_bytes
                log.append([], ends=True)
            if not share.responses:
                del self._shares[owner]


def _num_responses(share: Share) -> int:
    """Return the number of responses in a share. Serves as a measure for eviction."""
    return len(share.responses)


def _num_bytes(share: Share) -> int:
    """Return the memory of a share in bytes. Serves as a measure for eviction."""
    return share.num_bytes


def _found(kept: Kept) -> Found:
    """Return a stored response's state and the sizes in bytes of its parts."""
    stored = kept.stored
    sizes: dict[Part, int] = {
        "response": stored.response.num_bytes,
        "input": stored.input.num_bytes,
        "conversation": kept.turn.num_bytes,
    }
    return Found(stored.background, stored.is_running, sizes, stored.is_streamed)
