"""Transports of pages from engines that offer them to engines that read them.

A page is named by the key under which a tier has it. One that does not come, or has another key, is a miss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from jaxengine.tiers.disk import DiskTier

# Largest number of pages in one read.
MAX_KEYS = 32
# Time for which a reader waits for a page that was announced.
PATIENCE_SECONDS = 5.0
# Longest period at which a producer removes old files.
_SWEEP_SECONDS = 1.0


class Source(NamedTuple):
    """Engine that offers pages.

    Attributes:
      host, port: where it listens; None for a transport by a folder.
      lease: name of the lease under which it keeps them.
    """

    host: str | None
    port: int | None
    lease: str


class Reader(Protocol):
    """Reader of one source's pages. For one thread at a time."""

    def read(self, keys: Sequence[bytes]) -> Mapping[bytes, np.ndarray]:
        """Wait for the blocks u8[n] of at most MAX_KEYS keys, and return those that came, by key. Raises OSError if the
        source does not answer.
        """
        ...

    def close(self) -> None:
        """End the reading, and release the source's lease."""
        ...


class Transport(Protocol):
    """Transport of pages between engines. Any thread may call it.

    Attributes:
      address: host and port at which it listens; None for nowhere.
    """

    address: tuple[str, int] | None

    def offer(self, key: bytes, block: np.ndarray | None) -> None:
        """Let others read a block u8[n] until `withdraw`; None announces one that will come, so that readers wait."""
        ...

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Stop offering these keys."""
        ...

    def released(self) -> list[str]:
        """Return the leases that readers have ended since the last call."""
        ...

    def open(self, source: Source) -> Reader:
        """Return a reader of a source's pages, which it connects to when it first reads."""
        ...

    def shutdown(self) -> None:
        """End the transport's threads."""
        ...


class FolderTransport(Transport):
    """Transport by a folder that all engines share. A file stays for `seconds` after its last use; every producer
    removes older ones, so that those of a producer that was killed are removed, too.
    """

    def __init__(self, folder: Path, seconds: float, produces: bool, most_bytes: int | None = None):
        """Open the folder, of engines with equal weights and page layout. produces: whether it offers pages and removes
        old files. most_bytes: of a page; None for no limit.

        Raises OSError if it cannot be made.
        """
        self.address = None
        self._disk, self._seconds = DiskTier(folder, None, most_bytes), seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sweep, name="kv-sweep", daemon=True) if produces else None
        if self._thread is not None:
            self._thread.start()

    def offer(self, key: bytes, block: np.ndarray | None) -> None:
        """Write a block u8[n] to its file, on a thread, or record a use of the file that is there. Ignores None."""
        if block is not None and not self._disk.touch(key):
            self._disk.write(key, block)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        pass  # another producer may have a lease of the same file: only its age decides

    def released(self) -> list[str]:
        """Return []: readers of files end no leases."""
        return []

    def open(self, source: Source) -> Reader:
        """Return a reader of the folder, whichever the source."""
        return _FolderReader(self._disk)

    def shutdown(self) -> None:
        """End the threads, after blocks that wait to be written, for ten seconds at most."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        self._disk.shutdown()

    def _sweep(self) -> None:
        """Remove old files now and then, until the transport ends."""
        while not self._end.wait(min(_SWEEP_SECONDS, self._seconds / 4)):
            self._disk.remove_older(self._seconds)


class _FolderReader(Reader):
    """Reader of files, each of which is written some time after its page was announced."""

    def __init__(self, disk: DiskTier):
        """Wait for all reads together PATIENCE_SECONDS from now at most."""
        self._disk, self._deadline = disk, time.monotonic() + PATIENCE_SECONDS

    def read(self, keys: Sequence[bytes]) -> Mapping[bytes, np.ndarray]:
        """Wait for the files of all keys, and return their blocks by key. Raises TimeoutError if some are not there by
        the deadline.
        """
        found: dict[bytes, np.ndarray] = {}
        for key in keys:
            while (block := self._disk.read(key)) is None:
                if time.monotonic() > self._deadline:
                    raise TimeoutError("the pages that were announced are not in the folder")
                time.sleep(0.01)
            found[key] = block
        return found

    def close(self) -> None:
        pass
