"""Store of the batch API: files and batches of every client in a folder, which outlive the server.

Besides records (jaxengine.server.batch.folder), an owner's folder has ID.data, the content of a file, and
ID.results.partial, the results so far of a batch. FOLDER/live has an entry for each batch that has not ended. Several
processes may use a folder; only one at a time runs its batches.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.files import named_path
from jaxengine.scheduler.base.errors import OverloadedError, RequestError, show_value
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.batch.folder import ID, Record, RecordFolder, age_of, size_of, write_whole

_LIVE = ("validating", "in_progress", "finalizing", "cancelling")
# Uploads and live entries without a record were left by a killed process once they are this many seconds old.
_STALE_SECONDS = 3600.0
_RETRY_SECONDS = 60.0


class TooLargeError(RequestError):
    """Error of a file with more bytes than a file may have."""


@dataclass(frozen=True)
class Bounds:
    """Limits of the store.

    Attributes:
      file_bytes: largest size of one file.
      client_bytes, client_files, client_batches: of one client: bytes of all files and results, number of files, and
        number of batches.
      retention: seconds after which files and ended batches are removed.
    """

    file_bytes: int
    client_bytes: int
    client_files: int
    client_batches: int
    retention: float


class BatchStore:
    """Files and batches in a folder.

    Methods block on the disk; they may be called from any thread and process. Owners are digests of keys in
    hexadecimal. Methods treat another owner's id like an unknown one. All may raise OSError.
    """

    def __init__(self, folder: str, bounds: Bounds):
        """Create the folder, its subfolders and its lock if missing. Raises ConfigError if it cannot be used."""
        self.bounds = bounds
        path = named_path("batch_storage_dir", folder)
        self._records = RecordFolder(path)
        self._live = path / "live"
        try:
            self._records.make()
            self._live.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            problem = f"batch_storage_dir {folder!r} cannot be used ({error.strerror})"
            raise ConfigError.because("batch_storage_dir", problem, "name a folder that can be written") from None

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        """Return the store in the folder batch_storage_dir of a server's options, which must have it; the folder is
        created if it is missing. Raises ConfigError if it cannot be used.
        """
        assert config.batch_storage_dir is not None
        bounds = Bounds(
            config.max_batch_file_bytes,
            config.max_batch_bytes_per_client,
            config.max_batch_files_per_client,
            config.max_batches_per_client,
            config.batch_retention_hours * 3600,
        )
        return cls(config.batch_storage_dir, bounds)

    def upload(self, owner: str) -> Upload:
        """Create and return an Upload with an empty temporary file in the owner's folder, which is created if it is
        missing. Raises OverloadedError for an owner with `client_files` files or more than `client_bytes` bytes.
        """
        folder = self._records.folder_of(owner)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._check_quota(folder)
        return Upload(self, folder)

    def file(self, owner: str, file_id: str) -> Record | None:
        """Return the record of an owner's file; None if there is none or it has expired."""
        record = self._records.read(owner, file_id, "file-")
        return record if record is None or record["expires_at"] > time.time() else None

    def files(self, owner: str) -> Iterator[Record]:
        """Return an iterator over the records of an owner's files that have not expired, the newest first."""
        found = (self.file(owner, each) for each in self._records.ids(owner, "file-"))
        return (record for record in found if record is not None)

    def content(self, owner: str, file_id: str) -> Path:
        """Return the path of a file's content, ID.data. file_id: an existing record's, which is not checked."""
        return self._records.folder_of(owner) / f"{file_id}.data"

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Remove a file. Return False, without removing anything, if it does not exist or has expired, else True.
        Raises RequestError if it is the input of a batch that has not ended.
        """
        with self._records.locked():
            if self.file(owner, file_id) is None:
                return False
            if reader := self._reader(owner, file_id):
                raise RequestError(f"the file is the input of {reader}, which has not ended", param="file_id")
            self._records.remove(owner, file_id)
        return True

    def create(self, owner: str, fields: Record) -> Record:
        """Store a new batch with a new id and the `fields` of its record, and add its entry to FOLDER/live; return the
        record.

        If the owner has `client_batches` batches, the oldest one that has ended is removed. Raises OverloadedError if
        none of them has ended, and OSError for a full disk; neither changes anything.
        """
        batch_id = f"batch_{_new_id()}"
        record = {"id": batch_id, **fields}
        with self._records.locked():
            known = list(self.batches(owner))
            ended = [each["id"] for each in known if each["status"] not in _LIVE]
            if len(known) >= self.bounds.client_batches:
                if not ended:
                    problem = f"{len(known)} batches of yours have not ended (max_batches_per_client)"
                    raise OverloadedError(problem, retry_after=_RETRY_SECONDS)
            try:
                # The live entry first: a record without one would never run.
                (self._live / batch_id).write_text(owner)
                self._records.write(owner, record)
            except OSError:
                (self._live / batch_id).unlink(missing_ok=True)
                raise
            if len(known) >= self.bounds.client_batches:
                self._records.remove(owner, ended[-1])
        return record

    def batch(self, owner: str, batch_id: str) -> Record | None:
        """Return the record of a batch; None if its owner has none with this id."""
        return self._records.read(owner, batch_id, "batch_")

    def batches(self, owner: str) -> Iterator[Record]:
        """Return an iterator over the records of an owner's batches, the newest first."""
        found = (self.batch(owner, each) for each in self._records.ids(owner, "batch_"))
        return (record for record in found if record is not None)

    def change(self, owner: str, batch_id: str, edit: Callable[[Record], Any]) -> Record | None:
        """Call `edit` with the record of a batch, which it may change in place, under the folder's lock, and store the
        record if it was changed. Return the record; None if there is no such batch, in which case `edit` is not called.
        Raises the errors of `edit`, with nothing stored.
        """
        with self._records.locked():
            record = self.batch(owner, batch_id)
            if record is not None:
                before = json.dumps(record)
                edit(record)
                if json.dumps(record) != before:
                    self._records.write(owner, record)
        return record

    def live(self) -> list[tuple[str, str]]:
        """Return (owner, id) of the batches that have not ended, the oldest first. Removes from FOLDER/live the entries
        of batches that have ended, with their partial results, and those without a record once they are an hour old.
        """
        found: list[tuple[str, str]] = []
        for batch_id in sorted(name for name in os.listdir(self._live) if ID.fullmatch(name)):
            entry = self._live / batch_id
            try:
                owner, age = entry.read_text(), time.time() - entry.stat().st_mtime
            except FileNotFoundError:  # it has ended meanwhile
                continue
            record = self.batch(owner, batch_id)
            if record is not None and record["status"] in _LIVE:
                found.append((owner, batch_id))
            elif record is not None or age > _STALE_SECONDS:
                Path(f"{self.results_path(owner, batch_id)}.partial").unlink(missing_ok=True)
                entry.unlink(missing_ok=True)
        return found

    def results_path(self, owner: str, batch_id: str) -> str:
        """Return the path to be given to `Results` for a batch, which stores them at PATH.partial. Creates nothing."""
        return str(self._records.folder_of(owner) / f"{batch_id}.results")

    def finish(self, owner: str, batch_id: str, output: Iterable[bytes], errors: Iterable[bytes], end: Record) -> None:
        """Store a batch's output and error files, each only if it has lines, then its final state: the fields `end`,
        with the ids of these files as output_file_id and error_file_id. Then remove its live entry and its partial
        results.

        The files expire after the record's output_expires_after.seconds, or else after `retention` seconds. The call
        may be repeated for a batch whose process was killed in the middle of it.
        """
        number = batch_id.removeprefix("batch_")
        record = self.batch(owner, batch_id) or {}
        lifetime = (record.get("output_expires_after") or {}).get("seconds", self.bounds.retention)
        for name, lines in (("output", output), ("errors", errors)):
            file_id = f"file-{number}-{name}"
            content = self.content(owner, file_id)
            size = write_whole(content, lines)
            if not size:
                content.unlink()
                continue
            made = _file_record(file_id, size, f"{batch_id}_{name}.jsonl", "batch_output", lifetime)
            with self._records.locked():
                self._records.write(owner, made)
            end = {**end, f"{name.removesuffix('s')}_file_id": file_id}
        self.change(owner, batch_id, lambda record: record.update(end))
        Path(f"{self.results_path(owner, batch_id)}.partial").unlink(missing_ok=True)
        (self._live / batch_id).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove files that have expired or whose record is damaged, except inputs of batches that have not ended.
        Remove batches that have ended and were created `retention` seconds ago or earlier, and those whose record is
        damaged. Remove what killed processes left, once it is an hour old.
        """
        now = time.time()
        for folder in self._records.owners():
            owner = folder.name
            with self._records.locked():
                for file_id in self._records.ids(owner, "file-"):
                    record = self._records.read(owner, file_id, "file-")
                    if (record is None or record["expires_at"] <= now) and not self._reader(owner, file_id):
                        self._records.remove(owner, file_id)
                for batch_id in self._records.ids(owner, "batch_"):
                    record = self.batch(owner, batch_id)
                    if record is None or (
                        record["status"] not in _LIVE and record["created_at"] + self.bounds.retention <= now
                    ):
                        self._records.remove(owner, batch_id)
                lone = (each for each in folder.glob("*.data") if not each.with_suffix(".json").exists())
                for left in [*folder.glob("upload-*"), *folder.glob("*.whole"), *lone]:
                    if age_of(left) > _STALE_SECONDS:  # an upload may end meanwhile
                        left.unlink(missing_ok=True)

    @contextlib.contextmanager
    def only_runner(self) -> Iterator[None]:
        """Context manager for the one process that runs the batches. It holds a lock, without waiting for it. Raises
        BlockingIOError if another process, or another call in this one, holds the lock.
        """
        with open(self._live / "lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    def keep(self, folder: Path, path: str, size: int, filename: str, purpose: str, lifetime: float | None) -> Record:
        """Store a received file under a new id, and return its record.

        folder: folder of its owner. path: file with its content, which is moved. size: size in bytes. lifetime: seconds
        until it expires; `retention` in place of None and of more. Raises OverloadedError if the owner has no room for
        the file, with nothing moved; OSError if its record cannot be stored, with the content removed.
        """
        lifetime = min(self.bounds.retention, lifetime or self.bounds.retention)
        record = _file_record(f"file-{_new_id()}", size, filename, purpose, lifetime)
        with self._records.locked():
            self._check_quota(folder)
            os.replace(path, folder / f"{record['id']}.data")
            try:
                self._records.write(folder.name, record)
            except OSError:  # content without a record could not be deleted by its owner
                self._records.remove(folder.name, record["id"])
                raise
        return record

    def _check_quota(self, folder: Path) -> None:
        """Raise OverloadedError if the owner of a folder has `client_files` files or more, or more than `client_bytes`
        bytes. Results and files that are being received count as bytes.
        """
        names = [name for name in os.listdir(folder) if not name.endswith(".json")]
        num_files, kept = sum(name.endswith(".data") for name in names), sum(size_of(folder / name) for name in names)
        if num_files >= self.bounds.client_files:
            problem = f"{num_files} files of yours are kept (max_batch_files_per_client); delete some"
            raise OverloadedError(problem, retry_after=_RETRY_SECONDS)
        if kept > self.bounds.client_bytes:
            problem = f"your files and results have {kept} bytes; allowed: {self.bounds.client_bytes}"
            raise OverloadedError(f"{problem} (max_batch_bytes_per_client); delete some", retry_after=_RETRY_SECONDS)

    def _reader(self, owner: str, file_id: str) -> str | None:
        """Return the id of a batch that has not ended and whose input is this file; None if there is none."""
        return next((name for at, name in self.live() if at == owner and self._input(owner, name) == file_id), None)

    def _input(self, owner: str, batch_id: str) -> str | None:
        """Return the id of a batch's input file; None if there is no such batch."""
        return (self.batch(owner, batch_id) or {}).get("input_file_id")


class Upload:
    """File that is being received: call `write` with its content, then `keep` to store it, and `discard` at the end in
    any case.
    """

    def __init__(self, store: BatchStore, folder: Path):
        self._store, self._folder = store, folder
        descriptor, self._path = tempfile.mkstemp(prefix="upload-", dir=folder)
        self._file = os.fdopen(descriptor, "wb")
        self._size = 0

    def write(self, piece: bytes) -> None:
        """Append to the content. Raises TooLargeError, without writing, if the file would have more than `file_bytes`
        bytes; OSError.
        """
        self._size += len(piece)
        if self._size > self._store.bounds.file_bytes:
            problem = f"file has more than {self._store.bounds.file_bytes} bytes, which are allowed"
            raise TooLargeError(f"{problem} (max_batch_file_bytes)", param="file")
        self._file.write(piece)

    def keep(self, filename: str, purpose: str, lifetime: float | None) -> Record:
        """Sync the content to disk, and store the file as `BatchStore.keep` does; return its record."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._store.keep(self._folder, self._path, self._size, filename, purpose, lifetime)

    def discard(self) -> None:
        """Close the temporary file and remove it; a file that `keep` has stored stays."""
        with contextlib.suppress(OSError):  # the disk may be full, which has been reported already
            self._file.close()
        Path(self._path).unlink(missing_ok=True)


def check_lifetime(seconds: int | None, name: str) -> int | None:
    """Return `seconds`, the time after which a file expires, unchanged; None if the request sets no limit. Raises
    RequestError, with the field `name`, unless it is None or from 3600 to 2592000.
    """
    if seconds is not None and not 3600 <= seconds <= 2592000:
        raise RequestError(f"{name} is {show_value(seconds)}; allowed: 3600 to 2592000", param=name)
    return seconds


def _new_id() -> str:
    """Return 32 hexadecimal digits: 16 of the time in nanoseconds, so that ids sort by time, then 16 random ones."""
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


def _file_record(file_id: str, size: int, filename: str, purpose: str, lifetime: float) -> Record:
    """Return OpenAI's object for a file of `size` bytes that is created now and expires after `lifetime` seconds."""
    now = int(time.time())
    about = {"filename": filename, "purpose": purpose, "status": "processed", "status_details": None}
    return {
        "id": file_id,
        "object": "file",
        "bytes": size,
        "created_at": now,
        "expires_at": int(now + lifetime),
        **about,
    }
