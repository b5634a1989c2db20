"""Engine's end of the transfer of images from an API process, with its cache of their pixels."""

from __future__ import annotations

import mmap
import os
import re
from typing import TYPE_CHECKING

from jaxengine.requests.media.cache import LeastRecent
from jaxengine.scheduler.base.media import Media, MediaItem
from jaxengine.server.link.media_messages import (
    MediaMessage,
    MissingMediaError,
    Place,
    read_item,
    read_media,
)

if TYPE_CHECKING:
    from jaxengine.engine.extensions.pictures import MediaStats

Pixels = tuple[bytes, bytes, bytes]
# An unnamed file, by a descriptor of the process that created it.
_MEMORY = re.compile(r"/proc/[1-9][0-9]{0,9}/fd/[0-9]{1,9}")


class MediaReceiver:
    """Reader of one connection's messages, which must be read in their order.

    Pixels that arrive in a message are cached as the sender's `KeySender` assumes. Pixels in shared memory are copied
    when the message is read, since the sender may overwrite them afterwards.
    """

    def __init__(self, max_bytes: int, stats: MediaStats | None):
        """Start with an empty cache. max_bytes: size of the cache; 0 if the sender does not rely on one. stats:
        counters of transferred bytes; None for a text-only engine.
        """
        self._kept: LeastRecent[Pixels] = LeastRecent(max_bytes)
        self._stats = stats
        self._epoch = 0
        self._memory: mmap.mmap | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the cached pixels in bytes."""
        return self._kept.num_bytes

    def read(self, message: MediaMessage) -> Media:
        """Return the images and videos of a message. The first message of a new epoch clears the cache first. Counts
        the bytes received by socket and by shared memory.

        Raises MissingMediaError for pixels that are neither in the message, in the cache, nor in readable shared
        memory; the pixels that have arrived are cached even then. Raises ValueError for malformed data.
        """
        if message.epoch != self._epoch:
            self.clear()
            self._epoch = message.epoch
        if message.memory and self._memory is None:
            self._memory = _open(message.memory)
        # As in the sender: items whose pixels it assumes to be cached here come before new ones.
        kept = [
            self._kept.get(item.digest) if item.pixels is None and item.place is None else None
            for item in message.items
        ]
        items: list[MediaItem] = []
        is_missing, came = False, dict[bytes, Pixels]()
        for item, pixels in zip(message.items, kept, strict=True):
            if item.pixels is not None:
                pixels = came[item.digest] = item.pixels
                size = sum(map(len, pixels))
                if item.keep:
                    self._kept.put(item.digest, pixels, size)
                if self._stats is not None:
                    self._stats.socket_bytes += size
            elif item.place is not None:
                pixels = self._copy(item.place)
            elif pixels is None:
                pixels = came.get(item.digest)  # an image that occurs twice in a prompt
            if pixels is None:
                is_missing = True  # the others are still cached, as the sender assumes
            else:
                items.append(read_item(item, pixels))
        if is_missing:
            raise MissingMediaError("pixels of an image are not here")
        return read_media(message, items)

    def clear(self) -> None:
        """Clear the cache, and close the shared memory of this epoch if it is open."""
        self._kept.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _copy(self, place: Place) -> Pixels | None:
        """Return a copy of the pixels at a location in shared memory, and count its bytes; None if no memory is open,
        or the location is not within it.
        """
        memory, first = self._memory, place.offset
        if memory is None or first < 0 or min(place.sizes) < 0 or first + sum(place.sizes) > len(memory):
            return None
        parts: list[bytes] = []
        for size in place.sizes:
            parts.append(memory[first : first + size])
            first += size
        if self._stats is not None:
            self._stats.shared_bytes += sum(place.sizes)
        patches, columns, rows = parts
        return patches, columns, rows


def _open(path: str) -> mmap.mmap | None:
    """Map a sender's shared memory read-only. Return None if that is impossible, as when the process that created it
    has just ended.

    path: /proc/PID/fd/NUMBER; any other path returns None.
    """
    if not _MEMORY.fullmatch(path):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
