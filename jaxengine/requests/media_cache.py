"""Pictures and videos that have been made ready, kept by digest up to a number of bytes.

Whoever uses `LeastRecent` in the same order with the same sizes keeps the same: so two processes can agree on what one
of them has, without asking. Knows nothing of processes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from jaxengine.media.processor import Processed
from scheduler.media import MediaItem

T = TypeVar("T")


class LeastRecent(Generic[T]):
    """Values by digest; the least recently used go first when they take more than max_bytes. For one thread at a time.

    Attributes:
      num_bytes: what they take, as whoever put them said.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._values: OrderedDict[bytes, tuple[T, int]] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._values

    def __len__(self) -> int:
        return len(self._values)

    def peek(self, digest: bytes) -> T | None:
        """The value, or None; what goes next stays the same."""
        found = self._values.get(digest)
        return None if found is None else found[0]

    def get(self, digest: bytes) -> T | None:
        """The value, or None; it is the last to go now."""
        found = self._values.get(digest)
        if found is None:
            return None
        self._values.move_to_end(digest)
        return found[0]

    def put(self, digest: bytes, value: T, size: int) -> None:
        """Keeps a value as the last to go, in the place of an earlier one, unless it alone is too large."""
        if digest in self._values:
            self.num_bytes -= self._values.pop(digest)[1]
        if size > self.max_bytes:
            return
        self._values[digest] = value, size
        self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._values.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forgets all."""
        self._values.clear()
        self.num_bytes = 0


class MediaCache(Protocol):
    """What the preparation of prompts asks before it has a picture processed. Any thread may use it."""

    @property
    def num_bytes(self) -> int:
        """Of the pixels that are kept, wherever they are."""
        ...

    def get(self, digest: bytes) -> Processed | None:
        """The item, with or without its pixels (`without_pixels`), or None where it has to be made."""
        ...

    def put(self, digest: bytes, item: Processed) -> None:
        """An item has been made."""
        ...

    def item(self, item: MediaItem, made: Processed, make: Callable[[], Processed]) -> MediaItem:
        """What goes into the request. made: what `get` or the processor gave; make: makes it once more."""
        ...

    def clear(self) -> None:
        """Forgets all."""
        ...


class ProcessorCache:
    """Keys and values in the process that prepares prompts: `get` gives whole items, which need nothing else."""

    def __init__(self, max_bytes: int):
        self._items: LeastRecent[Processed] = LeastRecent(max_bytes)
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Of all arrays that are kept."""
        return self._items.num_bytes

    def get(self, digest: bytes) -> Processed | None:
        with self._lock:
            return self._items.get(digest)

    def put(self, digest: bytes, item: Processed) -> None:
        with self._lock:
            self._items.put(digest, item, item.patches.nbytes + item.columns.nbytes + item.rows.nbytes)

    def item(self, item: MediaItem, made: Processed, make: Callable[[], Processed]) -> MediaItem:
        return item

    def clear(self) -> None:
        with self._lock:
            self._items.clear()


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PreparedItem(MediaItem):
    """An item on its way to an engine in another process, which may have its pixels already.

    Attributes:
      made: what a prompt's placeholders are made of, without pixels.
      make: makes it once more with them; None where they are here.
    """

    made: Processed
    make: Callable[[], Processed] | None

    def whole(self) -> PreparedItem:
        """The same with its pixels, which are made where they are not here."""
        if self.make is None:
            return self
        found = self.make()
        return PreparedItem(
            *(self.modality, self.digest, self.positions, found.patches, found.columns, found.rows, self.cached),
            made=self.made,
            make=None,
        )


def prepared_item(item: MediaItem, made: Processed, make: Callable[[], Processed]) -> PreparedItem:
    """The item as MediaCache.item gives it where another process keeps the pixels."""
    has_pixels = made.patches.shape[1] > 0
    return PreparedItem(
        *(item.modality, item.digest, item.positions, made.patches, made.columns, made.rows, item.cached),
        made=without_pixels(made) if has_pixels else made,
        make=None if has_pixels else make,
    )


def without_pixels(item: Processed) -> Processed:
    """As many patches and columns of nothing: a key, with what `MediaProcessor.expand` and limits need."""
    count = len(item.patches)
    return item._replace(patches=np.empty((count, 0), np.float32), columns=np.empty((0, count), np.int32))
