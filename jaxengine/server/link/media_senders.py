"""The pictures of requests on their way to the engine: what of them is sent, and what an API process keeps for that.

A `MediaSender` sends all pixels each time. `KeySender` keeps the keys of what the engine's `MediaReceiver` keeps: both
do the same with the same `LeastRecent` in the order of the messages, so that the second use of a picture sends its
digest. Should the engine be without one all the same, it refuses the request, which is then sent again with its pixels.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxengine.requests.media_cache import LeastRecent, MediaCache, PreparedItem, prepared_item
from jaxengine.requests.prepared import PreparedRequest
from jaxengine.server.link.media_messages import Item, MediaMessage, media_message, message_item, pixels_of
from scheduler.media import Media, MediaItem

if TYPE_CHECKING:
    from jaxengine.media.processor import Processed


class MediaSender:
    """Makes the messages of a connection's pictures, each with all pixels.

    Attributes:
      cache: what the preparation of prompts is to ask; None leaves it its own.
    """

    cache: MediaCache | None = None

    def knows(self, digest: bytes) -> bool:
        """Whether a message may leave out these pixels."""
        return False

    def message(self, number: int, media: Media, *, whole: bool = False) -> MediaMessage:
        """What the Submit of that number has of pictures. Messages are to be sent in the order they are made.

        whole: with all pixels, whatever the engine has. Items without pixels must be known, or whole: see `complete`.
        """
        return media_message(media, [message_item(item, sent_pixels(item)) for item in media.items])

    def has_read(self, number: int) -> None:
        """The engine has read all Submits up to this number."""

    def refused(self) -> None:
        """The engine was without pixels that a message counted on."""
        self.reset()

    def reset(self) -> None:
        """Nothing of what was sent counts as kept: another engine, or one that has forgotten."""

    def lost(self) -> None:
        """The connection has ended; what comes next goes over another."""
        self.reset()

    def close(self) -> None:
        """There will be no other connection."""

    async def complete(self, prepared: PreparedRequest, *, whole: bool = False) -> None:
        """Sees to it that `message` can be made of a request at once: what is not known is made again on a thread."""
        while (media := prepared.requests[0].media) is not None:
            wanted = {
                index: item
                for index, item in enumerate(media.items)
                if isinstance(item, PreparedItem) and item.make is not None and (whole or not self.knows(item.digest))
            }
            if not wanted:
                return
            made = dict(zip(wanted, await asyncio.to_thread(_made_whole, list(wanted.values())), strict=True))
            media = replace(media, items=tuple(made.get(index, item) for index, item in enumerate(media.items)))
            for request in prepared.requests:
                request.media = media


class KeepingSender(MediaSender):
    """One that knows what it has sent, and is the MediaCache of that: what is sent is kept, and nothing else."""

    def put(self, digest: bytes, item: Processed) -> None:
        """Nothing: it is kept when it is sent."""

    def item(self, item: MediaItem, made: Processed, make: Callable[[], Processed]) -> MediaItem:
        return prepared_item(item, made, make)

    def clear(self) -> None:
        self.reset()


class KeySender(KeepingSender):
    """Keeps the keys of what the engine keeps. `cache` is this itself."""

    def __init__(self, max_bytes: int):
        self.cache = self
        self._epoch = 0
        self._keys: LeastRecent[Processed] = LeastRecent(max_bytes)
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """That the engine keeps for this connection."""
        return self._keys.num_bytes

    def get(self, digest: bytes) -> Processed | None:
        # Only what is sent changes the order: threads ask in any.
        with self._lock:
            return self._keys.peek(digest)

    def knows(self, digest: bytes) -> bool:
        return digest in self._keys

    def message(self, number: int, media: Media, *, whole: bool = False) -> MediaMessage:
        with self._lock:
            # As the receiver does: first what is kept, so that nothing new takes its place before it is read.
            known = [not whole and self._keys.get(item.digest) is not None for item in media.items]
            items: list[Item] = []
            sent: set[bytes] = set()
            for item, is_known in zip(media.items, known, strict=True):
                if is_known or (item.digest in sent and not whole):
                    items.append(message_item(item, None))
                    continue
                sent.add(item.digest)
                pixels, keep = sent_pixels(item), isinstance(item, PreparedItem)
                if isinstance(item, PreparedItem):
                    self._keys.put(item.digest, item.made, sum(map(len, pixels)))
                items.append(message_item(item, pixels, keep=keep))
            return media_message(media, items, self._epoch)

    def reset(self) -> None:
        with self._lock:
            self._epoch += 1
            self._keys.clear()


def sent_pixels(item: MediaItem) -> tuple[bytes, bytes, bytes]:
    """Those that go into a message."""
    if isinstance(item, PreparedItem) and item.make is not None:
        raise RuntimeError("the pixels of a picture are to be sent, but they were not made again")
    return pixels_of(item)


def _made_whole(items: list[PreparedItem]) -> list[PreparedItem]:
    return [item.whole() for item in items]
