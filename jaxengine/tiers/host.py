"""Host tier: content of pages in host memory, by key, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

LRU, ARC = POLICIES = ("lru", "arc")


class HostTier:
    """Blocks u8[n] by key. For one thread.

    A new block replaces the least recently used ones that are not pinned. Under "arc" (Megiddo and Modha, "ARC: A
    Self-Tuning, Low Overhead Replacement Cache", FAST 2003) blocks used once and blocks used again have lists of their
    own, so that many new blocks do not replace those that are used often. The share of the first list follows the keys
    that come back after they were evicted from either.

    Attributes:
      capacity: in bytes; num_bytes: in use.
      num_evicted: blocks that were replaced by others.
    """

    def __init__(self, capacity: int, policy: str = LRU):
        """Begin without blocks. capacity: bytes; policy: of POLICIES."""
        self.capacity, self.num_bytes, self.num_evicted = capacity, 0, 0
        self._is_arc = policy == ARC
        self._once: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._again: OrderedDict[bytes, np.ndarray] = OrderedDict()
        # Keys of evicted blocks of either list, and the number of blocks that the first list should have.
        self._once_gone: OrderedDict[bytes, None] = OrderedDict()
        self._again_gone: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0
        self._pins: dict[bytes, int] = {}

    def __contains__(self, key: bytes) -> bool:
        """Return whether a key has a block; not a use of it."""
        return key in self._once or key in self._again

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._once) + len(self._again)

    def get(self, key: bytes) -> np.ndarray | None:
        """Return the block of a key, which counts as a use; None if there is none. It is not to be changed."""
        if (block := self._once.pop(key, None)) is None:
            block = self._again.pop(key, None)
        if block is not None:
            (self._again if self._is_arc else self._once)[key] = block
        return block

    def put(self, key: bytes, block: np.ndarray) -> bool:
        """Store a block under a key, unless the key has one; return whether the key has one then. It has none if there
        is no room for the block in addition to the pinned ones.
        """
        if key in self:
            return True
        is_again = self._adapt(key)
        if not self._make_room(block.nbytes):
            return False
        (self._again if is_again else self._once)[key] = block
        self.num_bytes += block.nbytes
        return True

    def drop(self, key: bytes) -> None:
        """Forget the block of a key, if there is one; pins stay."""
        block = self._once.pop(key, None)
        if block is None:
            block = self._again.pop(key, None)
        if block is not None:
            self.num_bytes -= block.nbytes

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keep the blocks of these keys, whether they are here or come later, until as many calls of `unpin`."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[bytes]) -> None:
        """End one `pin` of each of these keys. Raises KeyError for one that is not pinned."""
        for key in keys:
            if (count := self._pins.pop(key) - 1) > 0:
                self._pins[key] = count

    def clear(self) -> None:
        """Forget all blocks, and which were evicted; pins stay."""
        for each in (self._once, self._again, self._once_gone, self._again_gone):
            each.clear()
        self.num_bytes = self._target = 0

    def _adapt(self, key: bytes) -> bool:
        """Return whether a new block's key was evicted not long ago, so that it counts as used again; if so, let the
        list that evicted it grow. False under "lru".
        """
        if not self._is_arc:
            return False
        once, again = len(self._once_gone), len(self._again_gone)
        if key in self._once_gone:
            del self._once_gone[key]
            self._target = min(len(self), self._target + max(1, again // max(1, once)))
            return True
        if key in self._again_gone:
            del self._again_gone[key]
            self._target = max(0, self._target - max(1, once // max(1, again)))
            return True
        return False

    def _make_room(self, size: int) -> bool:
        """Evict blocks until `size` bytes are free; return False if that is impossible."""
        if size > self.capacity:
            return False
        while self.num_bytes + size > self.capacity:
            once_first = not self._again or len(self._once) > self._target
            lists = [(self._once, self._once_gone), (self._again, self._again_gone)]
            if not any(self._evict(*own) for own in (lists if once_first else lists[::-1])):
                return False
        return True

    def _evict(self, blocks: OrderedDict[bytes, np.ndarray], gone: OrderedDict[bytes, None]) -> bool:
        """Evict the least recently used block of a list that is not pinned; return False if there is none. Under "arc"
        its key is added to `gone`, the evicted keys of the list.
        """
        key = next((key for key in blocks if key not in self._pins), None)
        if key is None:
            return False
        block = blocks.pop(key)
        self.num_bytes -= block.nbytes
        self.num_evicted += 1
        if self._is_arc:
            gone[key] = None
            if len(gone) > len(self) + 1:  # as many as there are blocks
                gone.popitem(last=False)
        return True
