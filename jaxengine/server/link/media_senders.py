"""Transfer of requests' images to the engine: the messages, and the bookkeeping of what the engine has cached.

A `MediaSender` sends all pixels each time. `KeySender` mirrors the keys of the engine's `MediaReceiver` cache: both
update the same `LeastRecent` in the order of the messages, so that an image's second use sends its digest only. If the
engine still lacks pixels, it refuses the request, which is then resent with all of them.
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
    """Writer of a connection's media messages, each with all pixels.

    Attributes:
      cache: cache for the preprocessing of prompts; None for the preprocessor's own cache.
    """

    cache: MediaCache | None = None

    def knows(self, digest: bytes) -> bool:
        """Whether a message may omit the pixels with this digest; always False here."""
        return False

    def message(self, number: int, media: Media, *, whole: bool = False) -> MediaMessage:
        """Return the media part of Submit `number`. Messages must be sent in the order in which they are made.

        whole: include all pixels, as this class always does. Raises RuntimeError for pixels that must be sent and were
        dropped; `complete` restores them.
        """
        return media_message(media, [message_item(item, sent_pixels(item)) for item in media.items])

    def has_read(self, number: int) -> None:
        """Record that the engine has read all Submits up to this number. Does nothing here."""

    def refused(self) -> None:
        """Forget everything sent so far, because the engine lacked pixels that a message had omitted: nothing counts as
        cached.
        """
        self.reset()

    def reset(self) -> None:
        """Forget everything sent so far, because the engine was replaced or has cleared its cache: nothing counts as
        cached. Does nothing here.
        """

    def lost(self) -> None:
        """Forget everything sent so far, because a connection has ended and another one will follow: nothing counts as
        cached.
        """
        self.reset()

    def close(self) -> None:
        """Release the memory of messages, as no further connection follows. Does nothing here."""

    async def complete(self, prepared: PreparedRequest, *, whole: bool = False) -> None:
        """Recompute, on a thread, the pixels that `message` needs and that the request has dropped, and put them into
        all its requests. Errors of preprocessing are raised.

        whole: recompute all dropped pixels.
        """
        while (media := prepared.requests[0].media) is not None:
            wanted = {
                index: item
                for index, item in enumerate(media.items)
                if isinstance(item, PreparedItem) and item.make is not None and (whole or not self.knows(item.digest))
            }
            if not wanted:
                return
            made = await asyncio.to_thread(_made_whole, wanted)
            media = replace(media, items=tuple(made.get(index, item) for index, item in enumerate(media.items)))
            for request in prepared.requests:
                request.media = media


class KeepingSender(MediaSender):
    """Sender that records what it has sent, and is the MediaCache that contains exactly these items."""

    def put(self, digest: bytes, item: Processed) -> None:
        """Do nothing."""

    def item(self, item: MediaItem, made: Processed, make: Callable[[], Processed]) -> MediaItem:
        """Return `prepared_item` of the arguments, the item for a request; implements MediaCache.item."""
        return prepared_item(item, made, make)

    def clear(self) -> None:
        """Forget everything sent so far: nothing counts as cached."""
        self.reset()


class KeySender(KeepingSender):
    """Sender that mirrors the keys of the engine's cache. Its `cache` is the sender itself."""

    def __init__(self, max_bytes: int):
        """Start with nothing cached. max_bytes: size of the engine's cache for this connection."""
        self.cache = self
        self._epoch = 0
        self._keys: LeastRecent[Processed] = LeastRecent(max_bytes)
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes that the engine has cached for this connection."""
        return self._keys.num_bytes

    def get(self, digest: bytes) -> Processed | None:
        """Return the item with this digest, without its pixels, if the engine has cached it, else None. Does not count
        as a use. Thread-safe.
        """
        # Only sending may change the LRU order, as lookups from threads come in any order.
        with self._lock:
            return self._keys.peek(digest)

    def knows(self, digest: bytes) -> bool:
        return digest in self._keys

    def message(self, number: int, media: Media, *, whole: bool = False) -> MediaMessage:
        """Return a message that omits cached pixels, and record the pixels in it as cached, as far as they belong to
        items of class PreparedItem, which the engine then caches.

        whole: include all pixels. Messages must be sent in the order in which they are made. Raises RuntimeError for
        pixels that must be sent and were dropped.
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
        """Begin a new epoch, with nothing cached. Its first message makes the engine clear its cache too."""
        with self._lock:
            self._epoch += 1
            self._keys.clear()


def sent_pixels(item: MediaItem) -> tuple[bytes, bytes, bytes]:
    """Return an item's pixels as raw bytes, in the form of `pixels_of`. Raises RuntimeError if they were dropped."""
    if isinstance(item, PreparedItem) and item.make is not None:
        raise RuntimeError("the pixels of an image must be sent, but were not recomputed")
    return pixels_of(item)


def _made_whole(items: dict[int, PreparedItem]) -> dict[int, PreparedItem]:
    """Return the items with their pixels, recomputed one item after the other. Raises errors of preprocessing."""
    return {index: item.whole() for index, item in items.items()}
