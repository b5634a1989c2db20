"""Host tier: content of pages in host memory, by key, with a limited total size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

LRU, ARC = POLICIES = ("lru", "arc")


class HostTier:
    """Blocks u8[n] by key. Must be used by one thread.

    A new block replaces the least recently used ones that are not pinned. Under "arc" (Megiddo and Modha, "ARC: A
    Self-Tuning, Low Overhead Replacement Cache", FAST 2003) blocks used once and blocks used repeatedly have separate
    lists. The target size of the first list grows when a key returns that was evicted from it, and shrinks when one
    returns that was evicted from the second.

    Attributes:
      capacity: largest total size in bytes.
      num_bytes: present total size in bytes.
      num_evicted: number of blocks that were replaced by others.
    """

    def __init__(self, capacity: int, policy: str = LRU):
        """Create an empty tier. capacity: bytes. policy: one of POLICIES."""
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
        """Return whether there is a block for a key. This does not count as a use."""
        return key in self._once or key in self._again

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._once) + len(self._again)

    def get(self, key: bytes) -> np.ndarray | None:
        """Return the block of a key, and count that as a use; None if there is none. The caller must not change the
        block.
        """
        if (block := self._once.pop(key, None)) is None:
            block = self._again.pop(key, None)
        if block is not None:
            (self._again if self._is_arc else self._once)[key] = block
        return block

    def put(self, key: bytes, block: np.ndarray) -> bool:
        """Store a block, the array itself, under a key, evicting others if necessary. Does nothing if the key has a
        block already, which is no use of it.

        Returns whether the key has a block afterwards. It has none if the block exceeds the capacity, for which nothing
        is evicted, or does not fit in addition to the pinned ones, for which the others are evicted in vain.
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
        """Remove the block of a key, if there is one. Its pins stay."""
        block = self._once.pop(key, None)
        if block is None:
            block = self._again.pop(key, None)
        if block is not None:
            self.num_bytes -= block.nbytes

    def pin(self, keys: Iterable[bytes]) -> None:
        """Protect the blocks of these keys from eviction, also blocks that are stored later, until `unpin` has been
        called as often.
        """
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Undo one `pin` of each of these keys. Raises KeyError for a key that is not pinned."""
        for key in keys:
            if (count := self._pins.pop(key) - 1) > 0:
                self._pins[key] = count

    def clear(self) -> None:
        """Remove all blocks, and forget which keys were evicted. Pins stay."""
        for each in (self._once, self._again, self._once_gone, self._again_gone):
            each.clear()
        self.num_bytes = self._target = 0

    def _adapt(self, key: bytes) -> bool:
        """Return whether a new block's key was evicted recently, so that it counts as used repeatedly. If so, adjust
        the target size of the first list in favour of the list that evicted the key, and forget the eviction. Always
        returns False under "lru".
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
        """Evict blocks until `size` bytes are free. Returns False without evicting any if `size` exceeds the capacity.
        Returns False also if pinned blocks leave no room; all others have then been evicted.
        """
        if size > self.capacity:
            return False
        while self.num_bytes + size > self.capacity:
            once_first = not self._again or len(self._once) > self._target
            lists = [(self._once, self._once_gone), (self._again, self._again_gone)]
            if not any(self._evict(*own) for own in (lists if once_first else lists[::-1])):
                return False
        return True

    def _evict(self, blocks: OrderedDict[bytes, np.ndarray], gone: OrderedDict[bytes, None]) -> bool:
        """Evict the least recently used block in a list that is not pinned, and count it. Returns False if there is
        none. Under "arc" its key is added to `gone`, the evicted keys of the list.
        """
        key = next((key for key in blocks if key not in self._pins), None)
        if key is None:
            return False
        block = blocks.pop(key)
        self.num_bytes -= block.nbytes
        self.num_evicted += 1
        if self._is_arc:
            gone[key] = None
            if len(gone) > len(self) + 1:  # remember about as many evicted keys as there are blocks
                gone.popitem(last=False)
        return True
