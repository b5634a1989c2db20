"""Storage tiers outside of the devices, and copies of pages and states on their way there.

A thread waits for copies to the host; the engine's thread dispatches them and stores those that have arrived.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax
import numpy as np

from jaxengine.engine.extensions.offload.page_loads import Block, Place
from jaxengine.engine.stats.stats import Histogram
from jaxengine.runner.extensions.offload import MAX_LEAVING, SIZES, Leaving, PageMover
from jaxengine.tiers.disk import DiskTier
from jaxengine.tiers.host import HostTier

logger = logging.getLogger(__name__)

# Upper bounds of the bytes of a transfer, the same as vLLM's.
_SIZE_BOUNDS = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
# Weight of a new measurement in the mean of a rate.
_WEIGHT = 0.2


class Rate:
    """Exponentially weighted mean of measured rates: a new measurement has the weight _WEIGHT.

    Attributes:
      value: amount per second; None before the first measurement.
    """

    def __init__(self) -> None:
        """Begin without measurements."""
        self.value: float | None = None

    def observe(self, amount: float, seconds: float) -> None:
        """Add a measurement, `amount` in `seconds`, to the moving average `value`; one of 0 seconds is ignored."""
        if seconds > 0:
            new = amount / seconds
            self.value = new if self.value is None else (1 - _WEIGHT) * self.value + _WEIGHT * new


class Tiers:
    """Host memory and a folder as one store (jaxengine.scheduler.extensions.offload.Store). For the engine's thread.

    Attributes:
      host: host memory.
      disk: folder; None without one, or once the engine's weights are no longer those in the folder's name.
      arriving: keys on their way to the host, with the copy that will bring them.
      elsewhere: keys that other engines have, with the stores to read them from.
      loading, computing: rates of stored pages loaded and of tokens computed.
    """

    def __init__(self, host: HostTier, disk: DiskTier | None):
        """Begin without keys on their way. disk: None for no folder."""
        self.host, self.disk = host, disk
        self.arriving: dict[bytes, Future[dict[bytes, np.ndarray]]] = {}
        self.elsewhere: dict[bytes, list[Place]] = {}
        self.loading, self.computing = Rate(), Rate()

    def has(self, key: bytes) -> bool:
        """Return whether a key is stored, on its way to host memory, or at another engine."""
        return self._is_here(key) or key in self.elsewhere

    def is_far(self, key: bytes) -> bool:
        """Return whether only another engine has a key."""
        return key in self.elsewhere and not self._is_here(key)

    def pin(self, keys: Sequence[bytes]) -> None:
        """Prevent the eviction of what host memory has, or will get, under these keys, until `unpin`; calls are
        counted.
        """
        self.host.pin(keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Undo one `pin` of these keys."""
        self.host.unpin(keys)

    def drop(self, key: bytes) -> None:
        """Remove a key from host memory and the folder; a copy of it that is on its way is not stored."""
        self.arriving.pop(key, None)
        self.host.drop(key)
        if self.disk is not None:
            self.disk.drop(key)

    def pays(self, num_stored: int, num_tokens: int) -> bool:
        """Return whether loading num_stored pages takes less time than computing num_tokens tokens, by the rates
        measured so far; True while a rate has not been measured.
        """
        loading, computing = self.loading.value, self.computing.value
        return loading is None or computing is None or num_stored / loading < num_tokens / computing

    def find(self, key: bytes) -> Block:
        """Return a key's content if host memory has it, else the copy that will bring it there, else a store to read it
        from: another engine that has what the folder lacks, or the folder, which may lack it. None without a store.
        """
        found = self.host.get(key)
        if found is not None or (found := self.arriving.get(key)) is not None:
            return found
        is_elsewhere = key in self.elsewhere and (self.disk is None or key not in self.disk)
        return self.elsewhere[key][-1] if is_elsewhere else self.disk

    def _is_here(self, key: bytes) -> bool:
        """Return whether a key is stored here, or on its way to host memory."""
        return key in self.host or key in self.arriving or (self.disk is not None and key in self.disk)


class OffloadStats:
    """Counts of moved pages and states.

    Attributes:
      counts, bytes, seconds: number, size and time of moved pages and states, by direction: "load" or "store".
      sizes: histograms of the bytes of one transfer, by direction.
      num_dropped: number of pages and states that were not copied because there was no room or the copy failed.
    """

    def __init__(self) -> None:
        """Set all counts to 0."""
        self.counts = {"load": 0, "store": 0}
        self.bytes = {"load": 0, "store": 0}
        self.seconds = {"load": 0.0, "store": 0.0}
        self.sizes = {"load": Histogram(_SIZE_BOUNDS), "store": Histogram(_SIZE_BOUNDS)}
        self.num_dropped = 0

    def count(self, way: str, number: int, size: int, seconds: float) -> None:
        """Count one transfer. way: "load" or "store". number: pages and states moved. size: their bytes. seconds: its
        duration.
        """
        self.counts[way] += number
        self.bytes[way] += size
        self.sizes[way].observe(size)
        self.seconds[way] += seconds


class PageStores:
    """Copies to the host in progress. Public methods are for the engine's thread."""

    def __init__(
        self, mover: PageMover, tiers: Tiers, stats: OffloadStats, something: threading.Event, *, is_bounded: bool
    ):
        """Start the thread. something: event to set when a copy has arrived. is_bounded: copies occupy device memory,
        so at most MAX_LEAVING * SIZES[-1] pages may be on their way.
        """
        self._mover, self._tiers, self._stats, self._something = mover, tiers, stats, something
        self._copies = ThreadPoolExecutor(1, "kv-copies")
        self._leaving: deque[tuple[Leaving, Future[dict[bytes, np.ndarray]], float]] = deque()
        self._max_leaving = MAX_LEAVING * SIZES[-1] if is_bounded else 1 << 30

    @property
    def is_busy(self) -> bool:
        """Whether a copy is on its way."""
        return bool(self._leaving)

    @property
    def room(self) -> int:
        """Number of further pages and states that may be on their way to the host now."""
        return max(0, self._max_leaving - sum(len(leaving.entries) for leaving, _, _ in self._leaving))

    def send(self, ranks: list[list[tuple[bytes, int]]], states: bool) -> None:
        """Dispatch copies of pages, or of snapshots if `states`; those beyond `room` are dropped and counted.

        ranks: pairs (key, page id or snapshot) of each replica, in lists that are replaced in place by what is copied.
        A key that several replicas have is copied from the first. Adds the keys to the tiers' `arriving`.
        """
        room, taken = self.room, set[bytes]()
        for index, every in enumerate(ranks):
            own = [each for each in every if each[0] not in taken]
            taken.update(key for key, _ in own)
            ranks[index] = own[:room]
            self._stats.num_dropped += len(own) - len(ranks[index])
            room -= len(ranks[index])
        for leaving in self._mover.save_states(ranks) if states else self._mover.save(ranks):
            future = self._copies.submit(_arrived, leaving)
            future.add_done_callback(lambda _: self._something.set())
            self._leaving.append((leaving, future, time.monotonic()))
            self._tiers.arriving |= dict.fromkeys((key for key, _ in leaving.entries), future)

    def keep(self) -> None:
        """Store the copies that have arrived in host memory and the folder, in the order of their dispatch, and count
        them. Stops at the first that has not arrived. Keys dropped in the meantime are left out; keys whose copy failed
        are counted as dropped.
        """
        while self._leaving and self._leaving[0][1].done():
            leaving, future, start = self._leaving.popleft()
            # Keys dropped in the meantime are left out, but not removed from the result, which a load may be about to
            # read.
            own = [key for key, _ in leaving.entries if self._tiers.arriving.get(key) is future]
            for key in own:
                del self._tiers.arriving[key]
            came = future.result()
            blocks = {key: came[key] for key in own if key in came}
            self._stats.num_dropped += len(own) - len(blocks)
            size = sum(block.nbytes for block in blocks.values())
            self._stats.count("store", len(blocks), size, time.monotonic() - start)
            for key, block in blocks.items():
                self._tiers.host.put(key, block)
                if self._tiers.disk is not None:
                    self._tiers.disk.write(key, block)

    def flush(self, end: float) -> None:
        """Wait for the copies so far, until `end` in time.monotonic seconds at most, and store those that have
        arrived.
        """
        while self._leaving and time.monotonic() < end:
            wait([self._leaving[0][1]], max(0.0, end - time.monotonic()))
            self.keep()

    def shutdown(self) -> None:
        """Wait for the copies so far, and end the thread."""
        self._copies.shutdown()


@jax.transfer_guard("allow")
def _arrived(leaving: Leaving) -> dict[bytes, np.ndarray]:
    """Wait for a copy, and return its blocks u8[n] by key. If the copy failed, the error is logged and {} is returned;
    the requests that need these pages then compute them.
    """
    try:
        return leaving.blocks()
    except Exception as error:  # such as too little memory of the host
        logger.error("%d pages are not stored, as their copy to the host failed: %s", len(leaving.entries), error)
        return {}
