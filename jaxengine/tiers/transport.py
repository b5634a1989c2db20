"""Ways of pages from engines that offer them to engines that read them.

A page goes by the key under which a tier has it. What does not come, or is not what its key says, is a miss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from jaxengine.tiers.disk import DiskTier

# Pages that are read at once.
MAX_KEYS = 32
# How long a reader waits for a page that was promised.
PATIENCE_SECONDS = 5.0
_SWEEP_SECONDS = 1.0


class Source(NamedTuple):
    """Engine that offers pages: where it listens, None for nowhere, and the name of the lease under which it keeps
    them.
    """

    host: str | None
    port: int | None
    lease: str


class Reader(Protocol):
    """Reader of one source's pages. For one thread at a time."""

    def read(self, keys: Sequence[bytes]) -> Mapping[bytes, np.ndarray]:
        """Wait for the blocks u8[n] of at most MAX_KEYS keys, and return those that came. Raises OSError if the source
        does not answer.
        """
        ...

    def close(self) -> None:
        """End the reading: the source need not keep the pages any longer."""
        ...


class Transport(Protocol):
    """Way of pages between engines. Any thread may call it.

    Attributes:
      address: host and port at which it listens; None for nowhere.
    """

    address: tuple[str, int] | None

    def offer(self, key: bytes, block: np.ndarray | None) -> None:
        """Let others read a block u8[n] until `withdraw`; None promises one."""
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
    """Transport by a folder that all engines share. What is offered stays for `seconds` after it was last read or
    written; every producer removes what is older, so that nothing stays of one that was killed.
    """

    def __init__(self, folder: Path, seconds: float, produces: bool):
        """Open the folder of pages that mean the same. Raises OSError if it cannot be made."""
        self.address = None
        self._disk, self._seconds = DiskTier(folder), seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sweep, name="kv-sweep", daemon=True) if produces else None
        if self._thread is not None:
            self._thread.start()

    def offer(self, key: bytes, block: np.ndarray | None) -> None:
        if block is not None and not self._disk.touch(key):
            self._disk.write(key, block)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        pass  # another producer may have a lease of the same file: it goes by its age

    def released(self) -> list[str]:
        return []

    def open(self, source: Source) -> Reader:
        return _FolderReader(self._disk)

    def shutdown(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        self._disk.shutdown()

    def _sweep(self) -> None:
        while not self._end.wait(min(_SWEEP_SECONDS, self._seconds / 4)):
            self._disk.remove_older(self._seconds)


class _FolderReader(Reader):
    """Reader of files, which are there some time after they were promised."""

    def __init__(self, disk: DiskTier):
        self._disk, self._deadline = disk, time.monotonic() + PATIENCE_SECONDS

    def read(self, keys: Sequence[bytes]) -> Mapping[bytes, np.ndarray]:
        found: dict[bytes, np.ndarray] = {}
        for key in keys:
            while (block := self._disk.read(key)) is None:
                if time.monotonic() > self._deadline:
                    raise TimeoutError("the pages that were promised are not in the folder")
                time.sleep(0.01)
            found[key] = block
        return found

    def close(self) -> None:
        pass
