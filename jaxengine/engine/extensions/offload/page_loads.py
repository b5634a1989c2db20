"""Loads of stored pages: threads read those that host memory lacks, and send all to the devices.

The engine's thread takes them from there part by part; at most MAX_COMING parts are on the devices at once.
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
from jaxengine.scheduler.extensions.offload import Load


class Place(Protocol):
    """Store of pages outside of host memory.

    Attributes:
      is_far: reading may wait for another machine, and has threads of its own so that it delays no local reads.
    """

    is_far: bool

    def read_all(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, np.ndarray]]:
        """Yield the keys that the store has, with their blocks u8[n]."""
        ...


# Content of a key in host memory, a copy that brings it there, the store to read it from, or None if there is none.
Block = np.ndarray | Future[dict[bytes, np.ndarray]] | Place | None
# Threads that read from afar.
_NUM_FAR = 4
# Length of a page's key at most: a digest, and the number of a group. Keys of states are longer.
_PAGE_KEY_BYTES = 33


class Loading:
    """Pages on their way to the devices for one request.

    Attributes:
      load: the scheduler's order.
      generation: number of times that pages had been forgotten when it began; start: time.monotonic seconds.
      num_found: pages and states that were given a page or snapshot.
      num_taken: parts that the engine's thread has taken; num_parts: all of them, None until the last is sent.
      error: what ended it early; None for nothing.
    """

    def __init__(self, load: Load, generation: int):
        """Begin now."""
        self.load, self.generation, self.start = load, generation, time.monotonic()
        self.num_found = self.num_taken = 0
        self.num_parts: int | None = None
        self.error: BaseException | None = None


class PageLoads:
    """Loads that have begun. Public methods are for the engine's thread."""

    def __init__(self, mover: PageMover, something: threading.Event):
        """Start the threads. mover: sends pages; something: an event to set whenever there is something to take."""
        self._mover, self._something = mover, something
        self._threads = ThreadPoolExecutor(1, "kv-loads"), ThreadPoolExecutor(_NUM_FAR, "kv-far-loads")
        self._loading: list[Loading] = []
        self._come: deque[tuple[Loading, Coming, int]] = deque()
        self._room = threading.Semaphore(MAX_COMING)
        self._is_closing = False

    @property
    def is_busy(self) -> bool:
        """Whether a load has begun and was not taken as done."""
        return bool(self._loading)

    def start(self, load: Load, found: Mapping[bytes, Block], generation: int) -> None:
        """Begin a load. found: its keys, each with its content or a store that has it. generation: as of Loading."""
        self._loading.append(loading := Loading(load, generation))
        is_far = any(getattr(each, "is_far", False) for each in found.values())
        self._threads[is_far].submit(self._run, loading, found)

    def take_parts(self) -> Iterator[tuple[Loading, Coming, int]]:
        """Yield each part that is on the devices: its load, the part, and its bytes. This makes room for another."""
        while self._come:
            loading, coming, size = self._come.popleft()
            self._room.release()
            loading.num_taken += 1
            yield loading, coming, size

    def take_done(self) -> list[Loading]:
        """Return the loads whose parts have all been taken, and forget them."""
        done = [each for each in self._loading if each.num_parts == each.num_taken]
        if done:
            self._loading = [each for each in self._loading if each not in done]
        return done

    def shutdown(self) -> None:
        """End the threads, and wait for them; loads that are not done by then never will be."""
        self._is_closing = True
        for each in self._threads:
            each.shutdown(cancel_futures=True)

    def _run(self, loading: Loading, found: Mapping[bytes, Block]) -> None:
        """Read and send all parts of a load, on one of the threads; an error ends it and is recorded there. found: as
        of `start`.
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
        """Yield, for each part, its number of bytes and the function that sends it to the devices of replica `rank`.

        A part has up to SIZES[-1] pages, or one state. Blocks whose size is not the model's are left out. found: as of
        `start`.
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
        """Return the part that `send` sends; its room is given up if that raises."""
        try:
            return send()
        except Exception:
            self._room.release()
            raise

    def _make_room(self) -> bool:
        """Wait until another part may be on the devices; return True, or False if the engine or the process ends."""
        while not self._is_closing and threading.main_thread().is_alive():
            if self._room.acquire(timeout=0.1):
                return True
        return False


def _read(found: Mapping[bytes, Block]) -> Iterator[tuple[bytes, np.ndarray]]:
    """Yield the keys whose content there is, with their blocks, in order; waits for copies, and reads the stores."""
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
