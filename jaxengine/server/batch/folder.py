"""Records of several owners in a folder: a JSON file for each, FOLDER/owners/OWNER/ID.json.

A record is written whole or not at all: a line of JSON, then the SHA-256 of that line in hexadecimal, without which a
flipped bit could go unnoticed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Record = dict[str, Any]
# Ids begin with the time of their creation, so sorting them sorts by time.
ID = re.compile(r"(?:file-[0-9a-f]{32}(?:-output|-errors)?|batch_[0-9a-f]{32})")


class RecordFolder:
    """Records, each a JSON object with its `id`, stored by owner. All methods block on the disk and may raise OSError.

    It logs each damaged record once.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._damaged: set[Path] = set()  # damaged files that have been logged

    def make(self) -> None:
        """Create the folder and its subfolder "owners", accessible to this user alone, unless they exist; an existing
        one keeps its mode. Take the folder's lock for a moment, which raises OSError if the folder cannot be written.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._folder / "owners").mkdir(mode=0o700, exist_ok=True)
        with self.locked():
            pass

    def owners(self) -> list[Path]:
        """Return the folders of all owners; the name of each folder is the owner's."""
        return list((self._folder / "owners").iterdir())

    def folder_of(self, owner: str) -> Path:
        """Return the path of an owner's folder, which may not exist."""
        return self._folder / "owners" / owner

    def ids(self, owner: str, kind: str) -> list[str]:
        """Return the ids of an owner's records that begin with `kind`, the newest first; [] for an owner without a
        folder.
        """
        folder = self.folder_of(owner)
        names = os.listdir(folder) if folder.is_dir() else []
        stems = (name.removesuffix(".json") for name in names if name.startswith(kind) and name.endswith(".json"))
        return sorted((stem for stem in stems if ID.fullmatch(stem)), reverse=True)

    def read(self, owner: str, record_id: str, kind: str) -> Record | None:
        """Return a record; None if its owner has none of this id, if the id does not begin with `kind` or is malformed,
        or if the record is damaged, which is logged once. A record without a digest is accepted.
        """
        if not (ID.fullmatch(record_id) and record_id.startswith(kind)):
            return None
        path = self.folder_of(owner) / f"{record_id}.json"
        try:
            content, _, digest = path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        is_sound = isinstance(found, dict) and found.get("id") == record_id
        if is_sound and digest in (b"", _digest(content)):
            return found
        if path not in self._damaged:  # the disk must have damaged it, as records are written whole
            self._damaged.add(path)
            logger.error("%s is damaged and left out", path)
        return None

    def write(self, owner: str, record: Record) -> None:
        """Write a record under its `id`, replacing an earlier one. The owner's folder must exist."""
        content = json.dumps(record).encode()
        write_whole(self.folder_of(owner) / f"{record['id']}.json", [content, b"\n", _digest(content)])

    def remove(self, owner: str, record_id: str) -> None:
        """Remove a record with its .data and .results.partial files. Files that do not exist are ignored."""
        for end in ("json", "data", "results.partial"):
            (self.folder_of(owner) / f"{record_id}.{end}").unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context manager that holds the folder's lock, which every change of records takes. Blocks while another
        thread or process holds it; it cannot be nested, not even in one thread.
        """
        with open(self._folder / "lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _digest(content: bytes) -> bytes:
    """Return the SHA-256 of a record's line as hexadecimal bytes."""
    return hashlib.sha256(content).hexdigest().encode()


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def age_of(path: Path) -> float:
    """Return the seconds since a file was last modified; 0 if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0


def write_whole(path: Path, lines: Iterable[bytes]) -> int:
    """Write a file that appears complete or not at all, replacing an earlier one, and return its size in bytes.

    lines: written one after the other, unchanged. The file is written and synced to disk as PATH.whole, then renamed;
    PATH.whole is removed after an error. Raises OSError if writing fails, and any error of `lines`.
    """
    whole = path.with_name(f"{path.name}.whole")
    try:
        with open(whole, "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(whole, path)
    finally:
        whole.unlink(missing_ok=True)
    return size
