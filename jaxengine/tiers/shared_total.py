"""Total size of the files in a folder to which several engines write, kept in a file beside them under a lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

# Name of the file, in the folder above those of the models.
NAME = ".total"
_NUM_BYTES = 8
# Longest wait for the lock, which an engine holds while it writes, removes or looks for files.
_LOCK_SECONDS, _POLL_SECONDS = 5.0, 0.001


class SharedTotal:
    """Number of bytes that all engines of a folder have counted, in a file of 8 bytes, little-endian.

    An engine holds the lock of this file from before it counts a file until the file is written: the total is never too
    low.

    Attributes:
      value: the number of bytes, valid while the lock is held; None if the file is new or damaged.
    """

    def __init__(self, folder: Path):
        """Store the path of the file in `folder`; it is made when the lock is first taken."""
        self._path = folder / NAME
        self.value: int | None = None
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this engine holds the lock."""
        return self._file is not None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Context in which this engine holds the lock, with `value` as in the file. For one thread at a time.

        Raises TimeoutError if others hold the lock for _LOCK_SECONDS, and OSError if the file cannot be opened, made or
        locked.
        """
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _lock(file, self._path)
            stored = os.pread(file, _NUM_BYTES + 1, 0)
            self.value = int.from_bytes(stored, "little") if len(stored) == _NUM_BYTES else None
            self._file = file
            yield
        finally:
            self._file = self.value = None
            os.close(file)

    def set(self, value: int) -> None:
        """Store a number of bytes, 0 for a negative one, in `value` and the file. The lock must be held. Raises OSError
        if it cannot be written.
        """
        assert self._file is not None
        self.value = max(0, value)
        os.pwrite(self._file, self.value.to_bytes(_NUM_BYTES, "little"), 0)


def _lock(file: int, path: Path) -> None:
    """Lock an open file for this engine alone. Raises TimeoutError after _LOCK_SECONDS; OSError if locks fail."""
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(f"another engine has held {path} for {_LOCK_SECONDS:.0f} seconds") from None
        time.sleep(_POLL_SECONDS)
