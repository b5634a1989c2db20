"""Disk tier: content of pages in the files of a folder, by key, shared by all engines whose pages have the same content
under the same key.

A file is written under another name and then renamed, so that it is complete or absent. It begins with its key and a
checksum of the rest. A file with another key or checksum counts as a miss and is removed. Only `read`, the maintenance
functions and the thread that writes wait for the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np

from jaxengine.tiers.page_files import Changed, OtherModels, content, path_of, remove, size_of, write_whole
from jaxengine.tiers.shared_total import SharedTotal

logger = logging.getLogger(__name__)

_MAGIC = b"jaxengine kv 1\n\0"
_CHECKSUM_BYTES = 16
# Most bytes of a file in addition to its block, for keys of up to 64 bytes.
MAX_OVERHEAD_BYTES = len(_MAGIC) + _CHECKSUM_BYTES + 64
# Largest number of blocks that wait to be written; further ones are dropped.
_MAX_WAITING = 1024
# Period of scans for files that other engines have written, and the least one as a multiple of a scan's duration.
_SCAN_SECONDS, _SCAN_SHARE = 1.0, 20.0


class DiskTier:
    """Blocks u8[n] by key, in a folder. A thread writes; `read` may be called from any thread.

    Attributes:
      is_far: always False. address: always None.
      folder: the folder.
      num_bytes: total size of the files that this engine knows of.
      num_written: number of blocks written.
      num_bad: number of files with a wrong key or checksum.
      num_failed: number of blocks that could not be written.
    """

    is_far = False
    address: str | None = None

    def __init__(self, folder: Path, capacity: int | None = None, most_bytes: int | None = None):
        """Open a folder, which is created if it does not exist, scan it for blocks, and start the thread that writes.
        capacity: largest total size in bytes of its files and those of other models in the folders beside it, of which
        those used least recently are removed; most_bytes: largest size of a block; None for no limit. Raises OSError
        for a folder that cannot be created.
        """
        self.folder, self._capacity, self._most_bytes = folder, capacity, most_bytes
        self.num_bytes = self.num_written = self.num_bad = self.num_failed = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._changed, self._others = Changed(folder), OtherModels(folder)
        self._total = SharedTotal(folder.parent)  # of all engines that have a capacity, and without one unused
        # Bytes by key, least recently used first.
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._by_folder: list[set[bytes]] = [set() for _ in range(256)]  # the same keys by their first byte
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[tuple[bytes, np.ndarray] | None] = SimpleQueue()
        self._num_waiting = 0
        # Keys that were dropped while any block was waiting to be written.
        self._unwanted: set[bytes] = set()
        self._has_warned = self._has_warned_of_damage = False
        self._own_name = secrets.token_hex(8)
        self._next_scan = 0.0
        self._scan()
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    def __contains__(self, key: bytes) -> bool:
        """Return whether a file of this key is known. Does not access the disk."""
        return key in self._known

    def __len__(self) -> int:
        """Return the number of known files."""
        return len(self._known)

    def write(self, key: bytes, block: np.ndarray) -> bool:
        """Queue a block for writing. Returns True if it was queued or a file with its key is known, and False, dropping
        the block, if too many blocks are waiting. The caller must not change the block until it is written.
        """
        if key in self._known:
            return True
        if self._num_waiting >= _MAX_WAITING:
            return False
        with self._lock:
            self._num_waiting += 1
            self._unwanted.discard(key)
        self._waiting.put((key, block))
        return True

    def read(self, key: bytes) -> np.ndarray | None:
        """Return the block u8[n] of a key, read-only, and set the file's time to now. Returns None if there is no such
        file, or if its key or checksum is wrong; such a file is removed, counted in num_bad and logged.
        """
        path = path_of(self.folder, key)
        try:
            overhead = len(header := _MAGIC + key) + _CHECKSUM_BYTES
            raw = content(path, None if self._most_bytes is None else self._most_bytes + overhead)
        except OSError:
            self._forget(key)
            return None
        body = memoryview(raw)[len(header) + _CHECKSUM_BYTES :]
        if raw[: len(header)] != header or raw[len(header) : len(header) + _CHECKSUM_BYTES] != _checksum(key, body):
            self.num_bad += 1
            level = logging.DEBUG if self._has_warned_of_damage else logging.WARNING
            self._has_warned_of_damage = True
            logger.log(level, "%s is damaged, or its name is not its key: it is removed, as others will be", path)
            remove(path)
            self._forget(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # its time is that of its last use
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
        return np.frombuffer(body, np.uint8)

    def read_all(self, keys: Sequence[bytes], is_over: Callable[[], bool]) -> Iterator[tuple[bytes, np.ndarray]]:
        """Yield (key, block) for those of the keys whose block `read` returns, in order, until `is_over` returns
        True.
        """
        for key in keys:
            if is_over():
                return
            if (block := self.read(key)) is not None:
                yield key, block

    def touch(self, key: bytes) -> bool:
        """Set the time of a key's file to now. Returns whether there is such a file; if not, it is no longer known."""
        try:
            os.utime(path_of(self.folder, key))
        except OSError:
            self._forget(key)
            return False
        return True

    def remove_older(self, seconds: float) -> None:
        """Remove the known files that were last used or written more than `seconds` ago."""
        oldest = time.time() - seconds
        with self._lock:
            known = list(self._known)
        for key in known:
            path = path_of(self.folder, key)
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest:
                    remove(path)
                    self._forget(key)

    def drop(self, key: bytes) -> None:
        """Remove the file of a key, if any, and discard a block of this key that waits to be written."""
        with self._lock:
            if self._num_waiting:
                self._unwanted.add(key)
        remove(path_of(self.folder, key))
        self._forget(key)

    def flush(self, seconds: float) -> bool:
        """Wait until no block waits to be written, at most `seconds`, or until the thread ends. Returns whether none
        waits. A block that failed to be written, or was dropped, no longer waits.
        """
        end = time.monotonic() + seconds
        while self._num_waiting and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.002)
        return not self._num_waiting

    def shutdown(self, seconds: float = 10.0) -> None:
        """Order the thread to end once it has written all waiting blocks, and wait for it at most `seconds`."""
        self._waiting.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        """Write waiting blocks and scan the folder periodically, until None is taken from the queue. Counts blocks that
        cannot be written in num_failed, and logs a warning for the first.
        """
        while True:
            try:
                item = self._waiting.get(timeout=max(_SCAN_SECONDS, self._next_scan - time.monotonic()))
            except Empty:
                self._scan()
                continue
            if item is None:
                return
            try:
                self._write(*item)
            except OSError as error:
                self.num_failed += 1
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        "pages cannot be written to %s, and the engine goes on without: %s", self.folder, error
                    )
            with self._lock:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._unwanted.clear()
            if time.monotonic() > self._next_scan:
                self._scan()

    def _write(self, key: bytes, block: np.ndarray) -> None:
        """Write the file of a block and count it. Does nothing if the key's file is known, if the key was dropped, or
        if there is no room; with a capacity also if another engine has written the file.

        With a capacity, the lock of the shared total is held from before room is made until the file is written. Raises
        OSError if the file cannot be written, after removing what is incomplete, or if the lock cannot be had.
        """
        path = path_of(self.folder, key)
        if key in self._known or key in self._unwanted:
            return
        for folder in (self.folder, path.parent):  # the folder may have been deleted while engines run
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary, header = path.parent / f".{self._own_name}.tmp", _MAGIC + key + _checksum(key, block.data)
        size = len(header) + block.nbytes
        if self._capacity is None:
            write_whole(path, temporary, (header, block.data))
        else:
            with self._total.held():
                if (found := size_of(path)) is not None:  # another engine has written it
                    self._note(key, found)
                    return
                if size > self._capacity or (total := self._make_room(self._capacity - size)) is None:
                    return
                self._total.set(total + size)  # before there is a file, in case the engine is killed
                try:
                    write_whole(path, temporary, (header, block.data))
                except OSError:
                    self._total.set(total)
                    raise
        self.num_written += 1
        self._note(key, size)
        if key in self._unwanted:  # dropped while it was written
            remove(path)
            self._forget(key)

    def _make_room(self, most: int) -> int | None:
        """Remove the least recently used files, of other models too, until all files have at most `most` bytes. Returns
        how many they have then, which is stored in the shared total, or None if that is too many and no file is left to
        remove. The lock of the shared total must be held.

        The index of files is updated first if nobody has counted the files yet, and at the end if no file is left in
        it. Raises OSError if a file cannot be removed; the next call begins with another.
        """
        is_new = self._total.value is None
        if is_new:
            self._look()
        while (total := self._total.value) is not None and total > most:
            if (size := self._remove_oldest()) is not None:
                self._total.set(total - size)
            elif is_new:
                return None
            else:  # other engines have written files, or somebody has removed some
                self._look()
                is_new = True
        return total

    def _remove_oldest(self) -> int | None:
        """Remove the least recently used of the files that are known, of other models too. Returns its bytes, 0 if it
        is gone already, or None if no file is known. Raises OSError if it cannot be removed.
        """
        with self._lock:
            key = next(iter(self._known), None)
        oldest, own = self._others.oldest(), 0.0
        if key is not None and oldest is not None:
            with contextlib.suppress(OSError):
                own = path_of(self.folder, key).stat().st_mtime
        if oldest is not None and (key is None or oldest < own):
            return self._others.remove_oldest()
        if key is None:
            return None
        with self._lock:
            size = self._known.get(key, 0)
            if size:
                self._known.move_to_end(key)  # if it cannot be removed, others are tried first
        try:
            path_of(self.folder, key).unlink()
        except FileNotFoundError:  # another engine has removed it
            size = 0
        self._forget(key)
        return size

    def _scan(self) -> None:
        """Update the index of files (`_look`), remove files beyond the capacity, and set the time of the next scan.
        While other engines hold the lock of the shared total, or if it cannot be had, only the index is updated.
        Ignores errors.
        """
        start = self._next_scan = time.monotonic()
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            if self._capacity is None:
                self._look()
            else:
                try:
                    held.enter_context(self._total.held())
                except OSError:
                    self._look()
                else:
                    self._look()
                    self._make_room(self._capacity)
        now = time.monotonic()
        self._next_scan = now + max(_SCAN_SECONDS, _SCAN_SHARE * (now - start))

    def _look(self) -> None:
        """Update the index of files with those that other engines have written or removed, in subfolders that have
        changed since the last time. If the folder is gone, forget all files. If the lock of the shared total is held,
        set the total to the sum of all files. Raises OSError for a folder that cannot be read.
        """
        news: list[tuple[float, bytes, int]] = []
        for name, files in self._changed:
            news += self._updated(name, files)
        names = self._changed.names  # of the subfolders that there are
        with self._lock:
            gone = [key for own in self._by_folder if own and f"{next(iter(own))[0]:02x}" not in names for key in own]
        for key in gone:
            self._forget(key)
        for _, key, size in sorted(news):
            self._note(key, size)
        if self._capacity is not None:
            self._others.scan()
            if self._total.is_held:
                self._total.set(self.num_bytes + self._others.num_bytes)

    def _updated(self, name: str, files: Sequence[os.DirEntry[str]]) -> list[tuple[float, bytes, int]]:
        """Return (time of last use in seconds, key, bytes) for each of a subfolder's files that is not known yet and
        still exists, and forget keys of this subfolder whose files are gone. files: named by their keys in hexadecimal.
        """
        news, present = [], set[bytes]()
        for file in files:
            present.add(key := bytes.fromhex(file.name))
            if key not in self._known:
                with contextlib.suppress(OSError):  # it has just been removed
                    status = file.stat(follow_symlinks=False)
                    news.append((status.st_mtime, key, status.st_size))
        with self._lock:
            gone = self._by_folder[int(name, 16)] - present
        for key in gone:
            self._forget(key)
        return news

    def _note(self, key: bytes, size: int) -> None:
        """Add a key, whose file has `size` bytes, to the index as the most recently used. Does nothing if the key is
        known.
        """
        with self._lock:
            if key not in self._known:
                self._known[key] = size
                self._by_folder[key[0]].add(key)
                self.num_bytes += size

    def _forget(self, key: bytes) -> None:
        """Remove a key, whose file is gone, from the index. Does nothing if the key is unknown."""
        with self._lock:
            self.num_bytes -= self._known.pop(key, 0)
            self._by_folder[key[0]].discard(key)


def _checksum(key: bytes, body: memoryview) -> bytes:
    """Return the checksum of a file, _CHECKSUM_BYTES bytes, over its key and its block."""
    digest = hashlib.blake2b(key, digest_size=_CHECKSUM_BYTES)
    digest.update(body)
    return digest.digest()
