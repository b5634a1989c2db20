"""Transports of pages from engines that offer them to engines that read them.

A page is named by its key in a tier. A page that does not come, or comes with another key, is a miss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from jaxengine.tiers.disk import DiskTier

# Largest number of pages in one read.
MAX_KEYS = 32
# Time in seconds for which a reader waits for a page that was announced.
PATIENCE_SECONDS = 5.0
# Longest period at which a producer removes old files.
_SWEEP_SECONDS = 1.0
# Period of checks whether an announced file has come.
_POLL_SECONDS = 0.01


def never() -> bool:
    """Return False."""
    return False


class Source(NamedTuple):
    """Engine that offers pages.

    Attributes:
      host, port: address at which it listens; None for a transport by a folder.
      lease: name of the lease under which it keeps the pages.
    """

    host: str | None
    port: int | None
    lease: str


class Reader(Protocol):
    """Interface of a reader of one source's pages. Must be used by one thread at a time."""

    def read(self, keys: Sequence[bytes], is_over: Callable[[], bool] = never) -> Mapping[bytes, np.ndarray]:
        """Wait for the blocks u8[n] of at most MAX_KEYS keys, and return those that came, by key: in time,
        or until `is_over` returned True. Raises OSError if the source does not answer in time.
        """
        ...

    def close(self) -> None:
        """Stop reading, and release the source's lease."""
        ...


class Transport(Protocol):
    """Interface of a transport of pages between engines. Any thread may call it.

    Attributes:
      address: host and port at which it listens; None if it does not listen.
    """

    address: tuple[str, int] | None

    def offer(self, key: bytes, block: np.ndarray | None) -> None:
        """Offer a block u8[n] to other engines until `withdraw`. None announces a block that will come, so that readers
        wait for it.
        """
        ...

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Stop offering these keys."""
        ...

    def released(self) -> list[str]:
        """Return the leases that readers have released since the last call."""
        ...

    def open(self, source: Source) -> Reader:
        """Return a reader of a source's pages. It connects to the source when it first reads."""
        ...

    def shutdown(self) -> None:
        """Stop the transport's threads and close its connections."""
        ...


class FolderTransport(Transport):
    """Transport by a folder that all engines share. Files are removed `seconds` after their last use. Every producer
    removes old files of all producers, including those of producers that were killed.
    """

    def __init__(self, folder: Path, seconds: float, produces: bool, most_bytes: int | None = None):
        """Open the folder, which must belong to engines with equal weights and page layout, and start the threads.
        produces: whether this engine offers pages and removes old files. most_bytes: largest size of a page; None for
        no limit. Raises OSError if the folder cannot be created.
        """
        self.address = None
        self._disk, self._seconds = DiskTier(folder, None, most_bytes), seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sweep, name="kv-sweep", daemon=True) if produces else None
        if self._thread is not None:
            self._thread.start()

    def offer(self, key: bytes, block: np.ndarray | None) -> None:
        """Queue a block u8[n] to be written to its file by a thread, or, if the file exists, set its time of last use.
        A block is dropped if too many wait (DiskTier.write). None is ignored.
        """
        if block is not None and not self._disk.touch(key):
            self._disk.write(key, block)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Do nothing. Another producer may have a lease of the same file, so only its age decides about its removal."""

    def released(self) -> list[str]:
        """Return [], since readers of files do not release leases."""
        return []

    def open(self, source: Source) -> Reader:
        return _FolderReader(self._disk)

    def shutdown(self) -> None:
        """Stop the threads. Waits at most ten seconds for waiting blocks to be written."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        self._disk.shutdown()

    def _sweep(self) -> None:
        """Remove old files every _SWEEP_SECONDS, or each quarter of their lifetime if that is shorter, until the
        transport is shut down. Runs on a thread.
        """
        while not self._end.wait(min(_SWEEP_SECONDS, self._seconds / 4)):
            self._disk.remove_older(self._seconds)


class _FolderReader(Reader):
    """Reader of files. A file may appear some time after its page was announced."""

    def __init__(self, disk: DiskTier):
        """Set the deadline for all reads together to PATIENCE_SECONDS from now."""
        self._disk, self._deadline = disk, time.monotonic() + PATIENCE_SECONDS

    def read(self, keys: Sequence[bytes], is_over: Callable[[], bool] = never) -> Mapping[bytes, np.ndarray]:
        """Wait for the files of all keys, and return the blocks of those that exist at the deadline, or when `is_over`
        returns True, by key. Raises TimeoutError if there is none at the deadline.
        """
        found: dict[bytes, np.ndarray] = {}
        for key in keys:
            while (block := self._disk.read(key)) is None and time.monotonic() < self._deadline:
                if is_over():
                    return found
                time.sleep(_POLL_SECONDS)
            if block is not None:
                found[key] = block
        if not found:
            raise TimeoutError("the pages that were announced are not in the folder")
        return found

    def close(self) -> None:
        """Do nothing."""
