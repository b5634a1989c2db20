"""The pictures of an API process's requests as the engine's process gets them, and what it keeps of them."""

from __future__ import annotations

import mmap
import os
import re
from typing import TYPE_CHECKING

from jaxengine.requests.media_cache import LeastRecent
from jaxengine.server.link.media_messages import (
    Item,
    MediaMessage,
    MissingMediaError,
    Place,
    read_item,
    read_media,
)
from scheduler.media import Media, MediaItem

if TYPE_CHECKING:
    from jaxengine.engine.extensions.pictures import MediaStats

Pixels = tuple[bytes, bytes, bytes]
# A file without a name, by the descriptor of the process that made it.
_MEMORY = re.compile(r"/proc/[1-9][0-9]{0,9}/fd/[0-9]{1,9}")


class MediaReceiver:
    """Reads the messages of one connection, in their order.

    What has come whole is kept as `KeySender` assumes. What lies in shared memory is copied when its message is read:
    its sender may put something else there as soon as it hears that the message was.
    """

    def __init__(self, max_bytes: int, stats: MediaStats | None):
        """max_bytes: of what is kept, 0 unless the sender counts on it. stats: None for an engine that sees nothing."""
        self._kept: LeastRecent[Pixels] = LeastRecent(max_bytes)
        self._stats = stats
        self._epoch = 0
        self._memory: mmap.mmap | None = None

    @property
    def num_bytes(self) -> int:
        """Of the pixels that are kept."""
        return self._kept.num_bytes

    def read(self, message: MediaMessage) -> Media:
        """The pictures of a message. Raises MissingMediaError, and ValueError for one that makes no sense."""
        if message.epoch != self._epoch:
            self.clear()
            self._epoch = message.epoch
        if message.memory and self._memory is None:
            self._memory = _open(message.memory)
        # As the sender does: what is kept before what is new.
        kept = [self._kept.get(item.digest) if _is_kept(item) else None for item in message.items]
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
                pixels = came.get(item.digest)  # a picture that a prompt has twice
            if pixels is None:
                is_missing = True  # the others are taken all the same, or sender and receiver would part
            else:
                items.append(read_item(item, pixels))
        if is_missing:
            raise MissingMediaError("pixels of a picture are not here")
        return read_media(message, items)

    def clear(self) -> None:
        """Forgets what is kept, and the shared memory of this epoch."""
        self._kept.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _copy(self, place: Place) -> Pixels | None:
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


def _is_kept(item: Item) -> bool:
    """Whether its sender says that it is kept here."""
    return item.pixels is None and item.place is None


def _open(path: str) -> mmap.mmap | None:
    """The memory, to be read only; None if it cannot be had, as when its maker has just ended."""
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
