"""Loads of stored pages: threads read the pages that host memory lacks, and send all of them to the devices.

The engine's thread processes the parts that have reached the devices; at most MAX_COMING parts are on the devices at
once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import groupby
from typing import Protocol, cast

import numpy as np

from jaxengine.runner.extensions.offload import MAX_COMING, SIZES, Coming, PageMover
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.extensions.load_room import Load
from jaxengine.tiers.transport import PATIENCE_SECONDS
from jaxengine.turns import FairThreads


class Place(Protocol):
    """Protocol of a store of pages outside of host memory.

    Attributes:
      is_far: whether reading may wait for another machine; such reads have their own threads so that they do not delay
        local ones.
      address: the other machine, if it is known. Reads from one address may use half of these threads, and so may the
        reads of one client; clients take turns, and so do the addresses of a client.
    """

    is_far: bool
    address: str | None

    def read_all(self, keys: Sequence[bytes], is_over: Callable[[], bool]) -> Iterator[tuple[bytes, np.ndarray]]:
        """Yield those of the keys that the store has, with their blocks u8[n]. Stops soon after `is_over` has begun to
        return True.
        """
        ...


# Content of a key in host memory, a copy that will bring it there, a store to read it from, or None if none has it.
Block = np.ndarray | Future[dict[bytes, np.ndarray]] | Place | None
# Threads that read from other machines.
_NUM_FAR = 8
# A load from another machine that has waited for a thread for so many seconds ends without pages.
_QUEUE_SECONDS = PATIENCE_SECONDS
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
      is_given_up: whether nobody needs the remaining parts any more.
      future: future of the call that runs the load; set when it is submitted.
    """

    future: Future[None]

    def __init__(self, load: Load, generation: int):
        """Start the clock of a load of which no part has been sent. load, generation: the attributes."""
        self.load, self.generation, self.start = load, generation, time.monotonic()
        self.num_found = self.num_taken = 0
        self.num_parts: int | None = None
        self.error: BaseException | None = None
        self.is_given_up = False


class PageLoads:
    """Loads in progress, and the threads that run them. Public methods are for the engine's thread."""

    def __init__(self, mover: PageMover, something: threading.Event):
        """Begin without loads. mover: sends pages to the devices. something: event to set whenever a part arrives or a
        load ends.
        """
        self._mover, self._something = mover, something
        self._near, self._far = FairThreads(1, "kv-loads"), FairThreads(_NUM_FAR, "kv-far-loads")
        self._loading: list[Loading] = []
        self._come: deque[tuple[Loading, Coming, int]] = deque()
        self._room = threading.Semaphore(MAX_COMING)
        self._is_closing = False

    @property
    def is_busy(self) -> bool:
        """Whether a load has begun and `take_done` has not returned it yet."""
        return bool(self._loading)

    def start(self, load: Load, found: Mapping[bytes, Block], generation: int) -> None:
        """Begin a load on a thread: the one for what is here, or, if it needs another engine, one of _NUM_FAR, if one
        is free within _QUEUE_SECONDS. found: for each key, in order, what `Tiers.find` returned for it. generation:
        value of Loading.generation.
        """
        self._loading.append(loading := Loading(load, generation))
        far = next((each for each in found.values() if getattr(each, "is_far", False)), None)
        if far is None:
            loading.future = self._near.submit_for(None, self._run, loading, found, float("inf"))
        else:
            owner, end = (load.request.client or None, cast(Place, far).address), loading.start + _QUEUE_SECONDS
            loading.future = self._far.submit_for(owner, self._run, loading, found, end)
        loading.future.add_done_callback(partial(self._end_unless_run, loading))

    def give_up(self, request: Request) -> None:
        """End the loads of a request that no longer needs them: at once if they have not begun, else soon."""
        for loading in self._loading:
            if loading.load.request is request:
                loading.is_given_up = True
                loading.future.cancel()

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
        """End the loads, and wait for those that have begun; none completes any more."""
        self._is_closing = True
        wait([each.future for each in self._loading if not each.future.cancel()])

    def _end_unless_run(self, loading: Loading, call: Future[None]) -> None:
        """End a load without parts if its call, which has ended, was cancelled or got no thread; `_run` ends others."""
        if call.cancelled() or call.exception() is not None:
            loading.error, loading.num_parts = None if call.cancelled() else call.exception(), 0
            self._something.set()

    def _run(self, loading: Loading, found: Mapping[bytes, Block], begin: float) -> None:
        """Read and send all parts of a load, on one of the threads; an exception ends the load and is stored in its
        `error`. When it is given up, or the engine or the process is ending, the load ends without the remaining parts.

        found: argument of `start`. begin: latest time.monotonic() at which the load may begin; a later one has no
        parts.
        """

        def is_over() -> bool:
            return loading.is_given_up or self._is_closing or not threading.main_thread().is_alive()

        parts = 0
        try:
            found = found if time.monotonic() < begin else {}
            for size, send in self._parts(loading.load.rank, found, is_over):
                if not self._make_room(is_over):
                    break
                self._come.append((loading, self._sent(send), size))
                parts += 1
                self._something.set()
        except Exception as error:  # such as too little memory on the devices
            loading.error = error
        loading.num_parts = parts
        self._something.set()

    def _parts(
        self, rank: int, found: Mapping[bytes, Block], is_over: Callable[[], bool]
    ) -> Iterator[tuple[int, Callable[[], Coming]]]:
        """Yield, for each part of a load, its number of bytes and the function that sends it to the devices of replica
        `rank`.

        A part has up to SIZES[-1] pages, or one state. Blocks whose size is not the model's are left out. found:
        argument of `start`. is_over: as for Place.read_all.
        """
        mover = self._mover
        pages: list[tuple[bytes, np.ndarray]] = []
        for key, block in _read(found, is_over):
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

    def _make_room(self, is_over: Callable[[], bool]) -> bool:
        """Wait until another part may be on the devices, and reserve its room; return True, or False, with nothing
        reserved, once `is_over` returns True.
        """
        while not is_over():
            if self._room.acquire(timeout=0.1):
                return True
        return False


def _read(found: Mapping[bytes, Block], is_over: Callable[[], bool]) -> Iterator[tuple[bytes, np.ndarray]]:
    """Yield the keys that have content, with their blocks, in the order of `found`. Waits for copies to host memory,
    and reads the stores until `is_over` returns True.
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
            yield from block.read_all(keys, is_over)
