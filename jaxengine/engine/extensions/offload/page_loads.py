"""Loads of stored pages: threads read the pages that host memory lacks, and send all of them to the devices.

The engine's thread processes the parts that have reached the devices; at most MAX_COMING parts are on the devices at
once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Protocol

import numpy as np

from jaxengine.runner.extensions.offload import MAX_COMING, SIZES, Coming, PageMover
from jaxengine.scheduler.extensions.load_room import Load


class Place(Protocol):
    """Protocol of a store of pages outside of host memory.

    Attributes:
      is_far: whether reading may wait for another machine; such reads have their own threads so that they do not delay
        local ones.
    """

    is_far: bool

    def read_all(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, np.ndarray]]:
        """Yield those of the keys that the store has, with their blocks u8[n]."""
        ...


# Content of a key in host memory, a copy that will bring it there, a store to read it from, or None if none has it.
Block = np.ndarray | Future[dict[bytes, np.ndarray]] | Place | None
# Threads that read from other machines.
_NUM_FAR = 4
# Longest key of a page: a digest, and the number of a group. Keys of states are longer.
_PAGE_KEY_BYTES = 33


class Loading:
    """Load of pages to the devices for one request.

    Attributes:
      load: the scheduler's order.
      generation: number of times that the pools had forgotten their pages when the load began.
      start: time.monotonic seconds at which it began.
      num_found: pages and states that were given a page or snapshot in the pools.
      num_taken: parts that the engine's thread has processed.
      num_parts: number of all parts; None until the last one is sent.
      error: exception that ended the load early; None for none.
    """

    def __init__(self, load: Load, generation: int):
        """Set the start time to now, with no parts."""
        self.load, self.generation, self.start = load, generation, time.monotonic()
        self.num_found = self.num_taken = 0
        self.num_parts: int | None = None
        self.error: BaseException | None = None


class PageLoads:
    """Loads in progress, and the threads that run them. Public methods are for the engine's thread."""

    def __init__(self, mover: PageMover, something: threading.Event):
        """Start the threads. mover: sends pages to the devices. something: event to set whenever a part arrives or a
        load ends.
        """
        self._mover, self._something = mover, something
        self._threads = ThreadPoolExecutor(1, "kv-loads"), ThreadPoolExecutor(_NUM_FAR, "kv-far-loads")
        self._loading: list[Loading] = []
        self._come: deque[tuple[Loading, Coming, int]] = deque()
        self._room = threading.Semaphore(MAX_COMING)
        self._is_closing = False

    @property
    def is_busy(self) -> bool:
        """Whether a load has begun and `take_done` has not returned it yet."""
        return bool(self._loading)

    def start(self, load: Load, found: Mapping[bytes, Block], generation: int) -> None:
        """Begin a load on a thread. found: for each key, in order, what `Tiers.find` returned for it. generation: value
        of Loading.generation.
        """
        self._loading.append(loading := Loading(load, generation))
        is_far = any(getattr(each, "is_far", False) for each in found.values())
        self._threads[is_far].submit(self._run, loading, found)

    def take_parts(self) -> Iterator[tuple[Loading, Coming, int]]:
        """Yield and remove each part that is on the devices, as (its load, the part, its number of bytes). Each makes
        room for another part.
        """
        while self._come:
            loading, coming, size = self._come.popleft()
            self._room.release()
            loading.num_taken += 1
            yield loading, coming, size

    def take_done(self) -> list[Loading]:
        """Return the loads whose parts have all been taken, and remove them."""
        done = [each for each in self._loading if each.num_parts == each.num_taken]
        if done:
            self._loading = [each for each in self._loading if each not in done]
        return done

    def shutdown(self) -> None:
        """End the threads and wait for them; loads that are not done by then never complete."""
        self._is_closing = True
        for each in self._threads:
            each.shutdown(cancel_futures=True)

    def _run(self, loading: Loading, found: Mapping[bytes, Block]) -> None:
        """Read and send all parts of a load, on one of the threads; an exception ends the load and is stored in its
        `error`. When the engine or the process is ending, the load ends without the remaining parts.

        found: argument of `start`.
        """
        parts = 0
        try:
            for size, send in self._parts(loading.load.rank, found):
                if not self._make_room():
                    break
                self._come.append((loading, self._sent(send), size))
                parts += 1
                self._something.set()
        except Exception as error:  # such as too little memory on the devices
            loading.error = error
        loading.num_parts = parts
        self._something.set()

    def _parts(self, rank: int, found: Mapping[bytes, Block]) -> Iterator[tuple[int, Callable[[], Coming]]]:
        """Yield, for each part of a load, its number of bytes and the function that sends it to the devices of replica
        `rank`.

        A part has up to SIZES[-1] pages, or one state. Blocks whose size is not the model's are left out. found:
        argument of `start`.
        """
        mover = self._mover
        pages: list[tuple[bytes, np.ndarray]] = []
        for key, block in _read(found):
            is_state = len(key) > _PAGE_KEY_BYTES
            if block.nbytes != (mover.state_bytes if is_state else mover.page_bytes):
                continue
            if is_state:
                yield block.nbytes, partial(mover.send_state, rank, key, block)
                continue
            pages.append((key, block))
            if len(pages) == SIZES[-1]:
                yield len(pages) * mover.page_bytes, partial(mover.send, rank, pages)
                pages = []
        if pages:
            yield len(pages) * mover.page_bytes, partial(mover.send, rank, pages)

    def _sent(self, send: Callable[[], Coming]) -> Coming:
        """Call `send` and return the part that it sends. An exception of `send` is passed on after the part's room has
        been released.
        """
        try:
            return send()
        except Exception:
            self._room.release()
            raise

    def _make_room(self) -> bool:
        """Wait until another part may be on the devices, and reserve its room; return True, or False, with nothing
        reserved, if the engine or the process is ending.
        """
        while not self._is_closing and threading.main_thread().is_alive():
            if self._room.acquire(timeout=0.1):
                return True
        return False


def _read(found: Mapping[bytes, Block]) -> Iterator[tuple[bytes, np.ndarray]]:
    """Yield the keys that have content, with their blocks, in the order of `found`. Waits for copies to host memory,
    and reads the stores.
    """
    for _, group in groupby(found, key=lambda key: id(found[key])):
        keys = list(group)
        block = found[keys[0]]
        if isinstance(block, np.ndarray):
            yield keys[0], block
        elif isinstance(block, Future):
            arrived = block.result()
            yield from ((key, arrived[key]) for key in keys if key in arrived)
        elif block is not None:
            yield from block.read_all(keys)
