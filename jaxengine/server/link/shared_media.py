"""Shared memory for images: an API process writes each image once, and every later request of the engine finds it
there.

The memory is an unnamed file (memfd_create(2)) that the engine opens by its descriptor: nothing remains of it once both
processes have ended.
"""

from __future__ import annotations

import bisect
import logging
import mmap
import os
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxengine.config.inputs.encoder import KEY_REPLICATED, SHARED_MEMORY, EncoderOptions
from jaxengine.requests.media.cache import PreparedItem
from jaxengine.scheduler.base.media import Media, MediaItem
from jaxengine.server.link.media_messages import Item, MediaMessage, Place, media_message, message_item
from jaxengine.server.link.media_senders import KeepingSender, KeySender, MediaSender, sent_pixels

if TYPE_CHECKING:
    from jaxengine.media.base.processor import Processed

logger = logging.getLogger(__name__)

# Offsets are multiples of this number, the size of a cache line.
_ALIGNMENT = 64


class Arena:
    """Allocator of a shared memory.

    Attributes:
      path: path by which another process of this user opens the memory.
      num_bytes: number of allocated bytes.
    """

    def __init__(self, size: int):
        """Create the memory. size: capacity in bytes, more than 0; pages that are never written take no memory. Only on
        Linux.
        """
        self._descriptor = os.memfd_create("jaxengine-pictures", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, size)
        self._memory = mmap.mmap(self._descriptor, size)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.num_bytes = 0
        # Free parts as (offset, size), ascending; no two touch.
        self._free = [(0, size)]

    def take(self, size: int) -> int | None:
        """Allocate at least `size` bytes, first fit. Return their offset, a multiple of 64, or None if no free part is
        large enough.
        """
        size = _rounded(size)
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[index : index + 1] = [(offset + size, free - size)] if free > size else []
                self.num_bytes += size
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Free the part at `offset`, and join it with free neighbours. `take` must have returned this offset for this
        size, which is not checked.
        """
        size = _rounded(size)
        self.num_bytes -= size
        index = bisect.bisect_left(self._free, (offset, 0))
        first, last, end = index, index, offset + size
        if index and sum(self._free[index - 1]) == offset:
            first, offset = index - 1, self._free[index - 1][0]
        if index < len(self._free) and self._free[index][0] == end:
            last, end = index + 1, sum(self._free[index])
        self._free[first:last] = [(offset, end - offset)]

    def write(self, offset: int, parts: tuple[bytes, ...]) -> None:
        """Write `parts` contiguously from `offset`. `take` must have returned this offset for their total size, which
        is not checked.
        """
        for part in parts:
            self._memory[offset : offset + len(part)] = part
            offset += len(part)

    def close(self) -> None:
        """Close the memory. A process that has opened it can still use it; no other can open it."""
        self._memory.close()
        os.close(self._descriptor)


@dataclass(eq=False)
class _Entry:
    """A cached item.

    Attributes:
      made: the item without pixels.
      place: location of its pixels in shared memory.
      num_unread: number of messages that refer to it and that the engine is not known to have read.
    """

    made: Processed
    place: Place
    num_unread: int = 0

    @property
    def size(self) -> int:
        """Size of the item's pixels in bytes."""
        return sum(self.place.sizes)


class SharedSender(KeepingSender):
    """Sender with the keys in this process and the pixels in shared memory, where they stay until the engine has read
    the messages that refer to them.

    Each epoch has its own memory, so that an abandoned connection never finds other data.
    """

    def __init__(self, max_bytes: int, max_item_bytes: int):
        """Create the shared memory of the first epoch.

        max_bytes: its size, more than 0. max_item_bytes: size of the largest item that is put into it; a larger one is
        sent in the message, and not cached.
        """
        self.cache = self
        self._max_bytes, self._max_item_bytes = max_bytes, max_item_bytes
        self._epoch = 1
        self._arena: Arena | None = Arena(max_bytes)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._unread: deque[tuple[int, list[_Entry]]] = deque()
        self._last_number = 0
        # (last message that refers to it, memory) of earlier epochs.
        self._old: list[tuple[int, Arena]] = []
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Number of allocated bytes in this epoch's shared memory; 0 without a memory."""
        return 0 if self._arena is None else self._arena.num_bytes

    def get(self, digest: bytes) -> Processed | None:
        """Return the item with this digest, without its pixels, if it is cached, else None. Does not count as a use.
        Thread-safe.
        """
        with self._lock:
            found = self._entries.get(digest)
            return None if found is None else found.made

    def knows(self, digest: bytes) -> bool:
        return digest in self._entries

    def message(self, number: int, media: Media, *, whole: bool = False) -> MediaMessage:
        """Return a message that refers to cached items by their location, after caching the other items for which there
        is room.

        number: the Submit's number; the items that the message refers to stay until `has_read(number)`. whole: include
        all pixels, and refer to nothing and cache nothing. Messages must be sent in the order in which they are made.
        Raises RuntimeError for pixels that must be sent and were dropped.
        """
        with self._lock:
            self._last_number = number
            referred: list[_Entry] = []
            # Cached items first, so that new ones do not evict them.
            for item in media.items:
                if not whole and (entry := self._entries.get(item.digest)) is not None:
                    self._entries.move_to_end(item.digest)
                    self._refer(entry, referred)
            items = [self._item(item, referred, whole) for item in media.items]
            if referred:
                self._unread.append((number, referred))
            memory = self._arena.path if referred and self._arena is not None else ""
            return media_message(media, items, self._epoch, memory)

    def has_read(self, number: int) -> None:
        """Record that the engine has read all Submits up to this number: items to which only these refer may be
        evicted, and memory of earlier epochs to which only these refer is closed.
        """
        with self._lock:
            while self._unread and self._unread[0][0] <= number:
                for entry in self._unread.popleft()[1]:
                    entry.num_unread -= 1
            while self._old and self._old[0][0] <= number:
                self._old.pop(0)[1].close()

    def refused(self) -> None:
        """Handle an engine that cannot open the memory: log an error, forget all items, and send pixels in messages
        from now on, permanently.
        """
        if self._arena is not None:
            logger.error("the engine cannot read shared memory; mm_processor_cache_type shm keeps nothing from now on")
        with self._lock:
            self._begin_epoch(None)

    def reset(self) -> None:
        """Begin a new epoch, with nothing cached and a new memory; without a memory if there was none."""
        with self._lock:
            self._begin_epoch(None if self._arena is None else Arena(self._max_bytes))

    def lost(self) -> None:
        """Begin a new epoch for the next connection, with nothing cached and a new memory (without one if there was
        none). All earlier memory is closed, as the messages of the old connection will not be read.
        """
        with self._lock:
            # Messages of the old connection will not be read.
            self._unread.clear()
            self._forget_old()
            self._begin_epoch(None if self._arena is None else Arena(self._max_bytes))

    def close(self) -> None:
        """Close all memory, and forget all items."""
        with self._lock:
            self._unread.clear()
            self._forget_old()
            self._begin_epoch(None)

    def _forget_old(self) -> None:
        """Close the memory of earlier epochs."""
        while self._old:
            self._old.pop()[1].close()

    def _begin_epoch(self, arena: Arena | None) -> None:
        """Forget all items and use this memory from now on, or no memory for None. The old memory is closed, or, if
        unread messages refer to it, kept in `_old` until the engine has read them.
        """
        if self._arena is not None:
            if self._unread:
                self._old.append((self._last_number, self._arena))
            else:
                self._arena.close()
        self._arena = arena
        self._epoch += 1
        self._entries.clear()
        self._unread.clear()

    def _item(self, item: MediaItem, referred: list[_Entry], whole: bool) -> Item:
        """Return an item in the form of a message: by its location if it is cached, else with its pixels.

        A PreparedItem that is not cached is first written to the memory, cached, and added to `referred`, unless
        `whole` is set, it is too large, or there is no memory or no room in it. Raises RuntimeError for pixels that are
        needed and were dropped.
        """
        entry = None if whole else self._entries.get(item.digest)
        if entry is not None:
            return message_item(item, None, entry.place)
        pixels = sent_pixels(item)
        sizes = len(pixels[0]), len(pixels[1]), len(pixels[2])
        arena = self._arena
        if whole or arena is None or not isinstance(item, PreparedItem) or sum(sizes) > self._max_item_bytes:
            return message_item(item, pixels)
        offset = self._room(arena, sum(sizes))
        if offset is None:
            return message_item(item, pixels)
        arena.write(offset, pixels)
        entry = self._entries[item.digest] = _Entry(item.made, Place(offset, sizes))
        self._refer(entry, referred)
        return message_item(item, None, entry.place)

    def _refer(self, entry: _Entry, referred: list[_Entry]) -> None:
        """Record that a message refers to an entry, which must not be evicted then: increase its count, and append it
        to the message's list `referred`.
        """
        entry.num_unread += 1
        referred.append(entry)

    def _room(self, arena: Arena, size: int) -> int | None:
        """Allocate `size` bytes for an item; return their offset, or None if there is no room.

        Evicts the least recently used items to which no unread messages refer, until there is room. If the free parts
        stay too small, these items are evicted in vain. Nothing is evicted for a size above the arena's maximum.
        """
        if size > self._max_bytes:
            return None
        offset = arena.take(size)
        idle = [digest for digest, entry in self._entries.items() if not entry.num_unread] if offset is None else []
        for digest in idle:
            entry = self._entries.pop(digest)
            arena.give(entry.place.offset, entry.size)
            if (offset := arena.take(size)) is not None:
                break
        return offset


def media_sender(kind: str, config: EncoderOptions) -> MediaSender:
    """Return a new sender for a kind of cache, which Welcome names: SharedSender for SHARED_MEMORY, KeySender for
    KEY_REPLICATED, else a MediaSender, which caches nothing. config: options with the sizes of caches.
    """
    size = config.mm_processor_cache_bytes
    if kind == SHARED_MEMORY:
        return SharedSender(size, config.mm_shm_cache_max_object_size_mb << 20)
    return KeySender(size) if kind == KEY_REPLICATED else MediaSender()


def _rounded(size: int) -> int:
    """Return the least multiple of _ALIGNMENT that is not less than `size`."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
