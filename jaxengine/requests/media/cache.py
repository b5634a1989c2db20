"""Caches of preprocessed images and videos by digest, up to a number of bytes.

Two `LeastRecent` caches used in the same order with the same sizes hold the same keys, so two processes agree on it
without messages.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.scheduler.base.media import MediaItem

T = TypeVar("T")


class LeastRecent(Generic[T]):
    """An LRU cache by digest that holds at most max_bytes. For one thread at a time.

    Attributes:
      num_bytes: sum of the sizes given to `put`.
    """

    def __init__(self, max_bytes: int):
        """Begin empty. max_bytes: limit of the sum of sizes."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._values: OrderedDict[bytes, tuple[T, int]] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._values

    def __len__(self) -> int:
        return len(self._values)

    def peek(self, digest: bytes) -> T | None:
        """Return the value or None, without affecting the order of eviction."""
        found = self._values.get(digest)
        return None if found is None else found[0]

    def get(self, digest: bytes) -> T | None:
        """Return the value or None, and make it the most recently used."""
        found = self._values.get(digest)
        if found is None:
            return None
        self._values.move_to_end(digest)
        return found[0]

    def put(self, digest: bytes, value: T, size: int) -> None:
        """Store a value of `size` bytes as the most recently used, in place of an earlier value of the digest. Then
        drop the least recently used values until at most max_bytes are kept.

        A value larger than max_bytes is not stored; the earlier value of its digest is dropped all the same.
        """
        if digest in self._values:
            self.num_bytes -= self._values.pop(digest)[1]
        if size > self.max_bytes:
            return
        self._values[digest] = value, size
        self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._values.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Remove all values."""
        self._values.clear()
        self.num_bytes = 0


class MediaCache(Protocol):
    """Interface of the cache that is consulted before an image or video is preprocessed. Thread-safe."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached pixels, in this process or another."""
        ...

    def get(self, digest: bytes) -> Processed | None:
        """Return the item stored under `digest`, with or without pixels (`without_pixels`), or None if it must be
        preprocessed.
        """
        ...

    def put(self, digest: bytes, item: Processed) -> None:
        """Store a preprocessed item under a digest; the cache may evict other items."""
        ...

    def item(self, item: MediaItem, made: Processed, make: Callable[[], Processed]) -> MediaItem:
        """Return the item to put into the request: `item` itself if the cache has its pixels in this process, else a
        PreparedItem for the engine's process.

        item: MediaItem with the arrays of `made`. made: result of `get` or of the processor, with or without pixels.
        make: function that preprocesses the item again, with pixels.
        """
        ...

    def clear(self) -> None:
        """Remove all items."""
        ...


class ProcessorCache:
    """Cache in the process that prepares prompts, which holds complete items; implements MediaCache."""

    def __init__(self, max_bytes: int):
        self._items: LeastRecent[Processed] = LeastRecent(max_bytes)
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all cached arrays."""
        return self._items.num_bytes

    def get(self, digest: bytes) -> Processed | None:
        with self._lock:
            return self._items.get(digest)

    def put(self, digest: bytes, item: Processed) -> None:
        with self._lock:
            self._items.put(digest, item, item.patches.nbytes + item.columns.nbytes + item.rows.nbytes)

    def item(self, item: MediaItem, made: Processed, make: Callable[[], Processed]) -> MediaItem:
        """Return `item` unchanged: its pixels are in this process."""
        return item

    def clear(self) -> None:
        with self._lock:
            self._items.clear()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PreparedItem(MediaItem):
    """An item to send to an engine in another process, which may have its pixels already.

    Attributes:
      made: the item without pixels, for the expansion of placeholders.
      make: function that preprocesses the item again, with pixels; None if they are present.
    """

    made: Processed
    make: Callable[[], Processed] | None

    def whole(self) -> PreparedItem:
        """Return the item with pixels: itself if it has them, else a copy that `make` preprocesses again, which is
        slow.
        """
        if self.make is None:
            return self
        found = self.make()
        return PreparedItem(
            *(self.modality, self.digest, self.positions, found.patches, found.columns, found.rows, self.cached),
            made=self.made,
            make=None,
        )


def prepared_item(item: MediaItem, made: Processed, make: Callable[[], Processed]) -> PreparedItem:
    """Return the PreparedItem for a request, for caches whose pixels are in another process (`MediaCache.item`).

    It has the arrays of `made`. It stores `make` only if `made` has no pixels.
    """
    has_pixels = made.patches.shape[1] > 0
    return PreparedItem(
        *(item.modality, item.digest, item.positions, made.patches, made.columns, made.rows, item.cached),
        made=without_pixels(made) if has_pixels else made,
        make=None if has_pixels else make,
    )


def without_pixels(item: Processed) -> Processed:
    """Return a copy with patches [n, 0] and columns [0, n] for its n patches, which suffices for
    `MediaProcessor.expand` and for checks of limits.
    """
    count = len(item.patches)
    return item._replace(patches=np.empty((count, 0), np.float32), columns=np.empty((0, count), np.int32))
