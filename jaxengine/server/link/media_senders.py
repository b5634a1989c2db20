"""Transfer of requests' images to the engine: what is sent of them, and what an API process caches for that.

A `MediaSender` sends all pixels each time. `KeySender` mirrors the keys of the engine's `MediaReceiver` cache: both
update the same `LeastRecent` in the order of the messages, so that an image's second use sends its digest only. If
pixels are missing all the same, the engine refuses the request, which is then resent with all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxengine.requests.media.cache import LeastRecent, MediaCache, PreparedItem, prepared_item
from jaxengine.requests.params.prepared import PreparedRequest
from jaxengine.scheduler.base.media import Media, MediaItem
from jaxengine.server.link.media_messages import Item, MediaMessage, media_message, message_item, pixels_of

if TYPE_CHECKING:
    from jaxengine.media.base.processor import Processed


class MediaSender:
    """Maker of a connection's media messages, each with all pixels.

    Attributes:
      cache: cache for the preprocessing of prompts; None keeps the preprocessor's own.
    """

    cache: MediaCache | None = None

    def knows(self, digest: bytes) -> bool:
        """Whether a message may omit these pixels; never here."""
        return False

    def message(self, number: int, media: Media, *, whole: bool = False) -> MediaMessage:
        """Make the media part of Submit `number`. Messages must be sent in the order in which they are made.

        whole: include all pixels, as this class does anyway. Raises RuntimeError for pixels that must be sent and were
        dropped: see `complete`.
        """
        return media_message(media, [message_item(item, sent_pixels(item)) for item in media.items])

    def has_read(self, number: int) -> None:
        """Record that the engine has read all Submits up to this number. Does nothing here."""

    def refused(self) -> None:
        """Count nothing sent so far as cached, as `reset`: the engine lacked pixels that a message had omitted."""
        self.reset()

    def reset(self) -> None:
        """Count nothing sent so far as cached, since the engine is another one or has cleared its cache. Does nothing
        here.
        """

    def lost(self) -> None:
        """Count nothing sent so far as cached, as `reset`: a connection has ended, and another one will follow."""
        self.reset()

    def close(self) -> None:
        """Release what is held for messages: no further connection follows. Does nothing here."""

    async def complete(self, prepared: PreparedRequest, *, whole: bool = False) -> None:
        """Recompute, on a thread, the pixels that `message` needs and the request no longer has; its requests then have
        them. Errors of preprocessing are raised.

        whole: recompute all pixels that it lacks, because a message with `whole` follows.
        """
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
    """Sender that records what it has sent, and is the MediaCache of exactly these items."""

    def put(self, digest: bytes, item: Processed) -> None:
        """Do nothing: an item is cached when it is sent."""

    def item(self, item: MediaItem, made: Processed, make: Callable[[], Processed]) -> MediaItem:
        """Return the item for a request, as MediaCache.item."""
        return prepared_item(item, made, make)

    def clear(self) -> None:
        """Count nothing as cached, as `reset`."""
        self.reset()


class KeySender(KeepingSender):
    """Sender that mirrors the keys of the engine's cache. `cache` is this object."""

    def __init__(self, max_bytes: int):
        """Begin with nothing cached. max_bytes: size of the engine's cache for this connection."""
        self.cache = self
        self._epoch = 0
        self._keys: LeastRecent[Processed] = LeastRecent(max_bytes)
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the engine caches for this connection."""
        return self._keys.num_bytes

    def get(self, digest: bytes) -> Processed | None:
        """Return the item without pixels that the engine has cached, else None."""
        # Only sending changes the LRU order: threads look up in any order.
        with self._lock:
            return self._keys.peek(digest)

    def knows(self, digest: bytes) -> bool:
        """Whether the engine has cached these pixels."""
        return digest in self._keys

    def message(self, number: int, media: Media, *, whole: bool = False) -> MediaMessage:
        """Make a message that omits cached pixels, and record the others as cached. Arguments and
        errors as of MediaSender.message.
        """
        with self._lock:
            # As in the receiver: cached items first, so that new ones do not evict them before they are read.
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
        """Begin a new epoch, with nothing cached; its first message makes the engine clear its cache, too."""
        with self._lock:
            self._epoch += 1
            self._keys.clear()


def sent_pixels(item: MediaItem) -> tuple[bytes, bytes, bytes]:
    """Return the pixels of an item for a message, as `pixels_of` does. Raises RuntimeError if they were dropped."""
    if isinstance(item, PreparedItem) and item.make is not None:
        raise RuntimeError("the pixels of an image must be sent, but were not recomputed")
    return pixels_of(item)


def _made_whole(items: list[PreparedItem]) -> list[PreparedItem]:
    """Return the items with their pixels, computed again one after the other; raises the preprocessing's errors."""
    return [item.whole() for item in items]
