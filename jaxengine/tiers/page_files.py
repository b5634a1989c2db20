"""Files of KV pages in a folder: their names, reading and removing them, and those of other models beside them."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

# Pattern of the names of subfolders: the first byte of their files' keys, in hex.
SUBFOLDER = re.compile("[0-9a-f]{2}")
_KEY = re.compile("([0-9a-f]{2})+")
# Pattern of the name of a folder with the pages of one model.
_MODEL = re.compile("[0-9a-f]{32}")
# Age from which a folder's modification time distinguishes later changes: clocks of file systems advance in steps.
_SETTLED_NS = 1_000_000_000
# Age from which an unfinished file counts as left over by an engine that was killed; writing one takes less.
REST_SECONDS = 600.0


class Changed:
    """Subfolders of a folder of pages that may have changed since they were last read.

    Attributes:
      names: names of the subfolders that the last iteration has found.
    """

    def __init__(self, folder: Path):
        """Start with no subfolder read."""
        self._folder = folder
        self._times: dict[str, int] = {}
        self.names: set[str] = set()

    def __iter__(self) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
        """Yield (name, page files) of each changed subfolder, and remove unfinished files that are left over in it.

        Ignores links, pipes and folders under the names of keys, other names, and subfolders that cannot be read.
        Without the folder there are no subfolders. Raises OSError if the folder cannot be read for another reason.
        """
        self.names = set()
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as found:
            own = [each for each in found if SUBFOLDER.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
            self.names = {each.name for each in own}
        self._times = {name: changed for name, changed in self._times.items() if name in self.names}
        for name in sorted(self.names):
            try:
                path = self._folder / name
                changed = path.stat().st_mtime_ns
                if self._times.get(name) == changed:
                    continue
                is_settled = not 0 <= time.time_ns() - changed < _SETTLED_NS
                files, has_unfinished = _page_files(path)
                if is_settled and not has_unfinished:  # an unfinished file is to be looked at again when it is old
                    self._times[name] = changed
            except OSError:
                continue
            yield name, files


class OtherModels:
    """Files of pages of other models, in the folders beside that of one's own.

    Attributes:
      num_bytes: their total size.
    """

    def __init__(self, own: Path):
        """Start without files. own: folder of one's own pages."""
        self._own, self.num_bytes = own, 0
        self._folders: dict[str, Changed] = {}
        self._files: dict[str, dict[str, int]] = {}  # bytes by path, by subfolder
        # (time of last use in seconds, subfolder, path): the time may be an earlier one, and the file may be gone.
        self._by_time: list[tuple[float, str, str]] = []

    def scan(self) -> None:
        """Update the index from the folders, as far as they have changed and can be read; it becomes empty if the
        folder above them cannot be read. Unfinished files that are left over in changed folders are removed.
        """
        try:
            with os.scandir(self._own.parent) as found:
                models = {each.path for each in found if _MODEL.fullmatch(each.name) and each.name != self._own.name}
        except OSError:
            models = set()
        self._folders = {path: self._folders.get(path) or Changed(Path(path)) for path in sorted(models)}
        present: set[str] = set()
        for model, changed in self._folders.items():
            with contextlib.suppress(OSError):
                for name, files in changed:
                    self._update(os.path.join(model, name), files)
                present |= {os.path.join(model, name) for name in changed.names}
        for gone in self._files.keys() - present:
            self._update(gone, [])
        self.num_bytes = sum(size for files in self._files.values() for size in files.values())

    def oldest(self) -> float | None:
        """Return the time of last use, in seconds, of the file that was used least recently; None without files. Files
        that are gone are removed from the index.
        """
        while self._by_time:
            known, subfolder, path = self._by_time[0]
            if path in self._files.get(subfolder, ()):
                with contextlib.suppress(OSError):
                    if (used := os.stat(path, follow_symlinks=False).st_mtime) == known:
                        return used
                    heapq.heapreplace(self._by_time, (used, subfolder, path))
                    continue
                self.num_bytes -= self._files[subfolder].pop(path)
            heapq.heappop(self._by_time)
        return None

    def remove_oldest(self) -> int:
        """Remove the file for which `oldest` has just returned a time, and return its bytes; 0 if it is gone already.
        Raises OSError if it cannot be removed; it is then left out of the index until its subfolder changes.
        """
        _, subfolder, path = heapq.heappop(self._by_time)
        self.num_bytes -= (size := self._files[subfolder].pop(path))
        try:
            os.unlink(path)
        except FileNotFoundError:
            return 0
        return size

    def _update(self, subfolder: str, files: list[os.DirEntry[str]]) -> None:
        """Replace the files that are known of a subfolder by `files`, [] for a subfolder that is gone. Files that were
        known before keep their size. num_bytes is left to the caller.
        """
        before, own = self._files.pop(subfolder, {}), dict[str, int]()
        for file in files:
            if file.path in before:
                own[file.path] = before[file.path]
                continue
            with contextlib.suppress(OSError):  # it has just been removed
                status = file.stat(follow_symlinks=False)
                own[file.path] = status.st_size
                heapq.heappush(self._by_time, (status.st_mtime, subfolder, file.path))
        if own:
            self._files[subfolder] = own


def path_of(folder: Path, key: bytes) -> Path:
    """Return the path of a key's file, which is named by the key in hexadecimal, in a subfolder named by the key's
    first byte.
    """
    name = key.hex()
    return folder / name[:2] / name


def write_whole(path: Path, temporary: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write the parts to a temporary file in the same folder, and rename it to `path`, which may exist. Raises OSError
    if that fails, after removing the temporary file.
    """
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
        os.replace(temporary, path)
    except OSError:
        remove(temporary)
        raise


def content(path: Path, most: int | None) -> bytes:
    """Return the bytes of a file. Returns b"" if the file has more than `most` bytes (None: no limit), even if it grew
    while it was read, or is not a regular file. Raises OSError, also for a symbolic link.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)  # does not block if it is a pipe
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or (most is not None and status.st_size > most):
            return b""
        with open(number, "rb", closefd=False) as file:
            read = file.read(-1 if most is None else most + 1)
        return read if most is None or len(read) <= most else b""
    finally:
        os.close(number)


def size_of(path: Path) -> int | None:
    """Return the number of bytes of a regular file; None if there is none, or if it cannot be looked at."""
    with contextlib.suppress(OSError):
        status = os.stat(path, follow_symlinks=False)
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def remove(path: Path) -> None:
    """Remove a file if it exists. Ignores errors."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _page_files(folder: Path) -> tuple[list[os.DirEntry[str]], bool]:
    """Return the page files of a subfolder, and whether it has unfinished files that may still be written; older ones
    are removed. Raises OSError for a subfolder that cannot be read.
    """
    files, has_unfinished = [], False
    with os.scandir(folder) as found:
        for file in found:
            if _KEY.fullmatch(file.name) and file.name.startswith(folder.name):
                if file.is_file(follow_symlinks=False):
                    files.append(file)
            elif file.name.endswith(".tmp"):
                has_unfinished |= not _removed_rest(file)
    return files, has_unfinished


def _removed_rest(file: os.DirEntry[str]) -> bool:
    """Remove an unfinished file that is older than REST_SECONDS. A younger one may still be written. Returns whether it
    was old; ignores errors.
    """
    with contextlib.suppress(OSError):
        if time.time() - file.stat(follow_symlinks=False).st_mtime > REST_SECONDS:
            remove(Path(file.path))
            return True
    return False
