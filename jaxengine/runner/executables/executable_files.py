"""Files whose content will be executed: their folders, the check of who may have written them, reading and writing.

A file is accepted only if nobody but this user, or root, can have written it. Files in the user's own folder carry an
authentication code made with a key that is stored there and that only the user can read. In a folder of root's, the
owner of the file and of every folder above is checked. Everything in a folder is opened relative to its descriptor, so
that the file that was checked is the file that is read. This module handles bytes and owners, no programs;
docs/containers.md is about images.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.stores import is_url
from jaxengine.runner.executables.bucket import Bucket

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32  # of a SHA-256, an authentication code and a key
ROOT = 0
_KEY = "key"
_SUFFIX = ".xla"
_TEMPORARY = "tmp"
_UNUSED_SECONDS = 30 * 24 * 3600
# Longer than any file takes to be written: older temporary files are of processes that were killed.
_ABANDONED_SECONDS = 24 * 3600
_MAX_LINKS = 40
# Errors of file systems without hard links, such as FUSE's of object stores.
_NO_LINKS = errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class NotTrusted(Exception):
    """Raised for a file or folder that other users may have written."""


class ExecutableFiles:
    """Storage of a user's executables: the folder to which they are written, and optionally a folder of root's that is
    only read.
    """

    def __init__(self, directory: str | None):
        """Open the folders, and delete old files in the user's own.

        directory: None for the folder in JAXENGINE_CACHE_DIR or, if that is not set, the user's cache folder; "", in
        either, stores and finds nothing. A URL names a Bucket, which is then the only folder; file:// and an absolute
        path name that folder. If the named folder belongs to root, it is only read, and new files go to the user's
        cache folder. A folder that cannot be opened or made is not an error: nothing is stored then (`can_keep`).

        Raises:
          ConfigError: others may write to the named folder, the path after file:// is relative, or Bucket refuses the
            URL.
        """
        named = os.environ.get("JAXENGINE_CACHE_DIR") if directory is None else directory
        self._folders: list[_Folder | Bucket] = []
        self._own: _Folder | Bucket | None = None
        # Why nothing can be stored; None if it can, or if storing is switched off.
        self._why_not: str | None = None
        if named == "":
            return
        if named is not None and named.lower().startswith("file://"):
            url, named = named, named[len("file://") :]
            if not named.startswith("/"):
                raise ConfigError("compile_cache_dir", url, "file:// with the absolute path of a folder")
        if is_url(named):
            assert named is not None
            self._own = Bucket(named)
            self._folders.append(self._own)
            return
        try:
            if named is not None:
                self._use(Path(named).expanduser())
            if self._own is None:
                self._use(_default_folder())
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: the user has no home; ValueError: a NUL
            self._why_not = str(error)
        except NotTrusted as error:
            if named is not None and not self._folders:
                raise ConfigError("compile_cache_dir", named, f"a folder of your own, or of root's: {error}") from None
            self._why_not = str(error)

    def read(self, name: str) -> bytes | None:
        """Return the payload stored under a name; None if there is none, if it is damaged, or if another user may have
        written it (with a warning).
        """
        for folder in self._folders:
            if (payload := folder.read(name)) is not None:
                return payload
        return None

    def names(self, prefix: str) -> list[str]:
        """Return the names of files with this prefix in all folders, sorted, each once. The files are not verified."""
        found = (name for folder in self._folders for name in folder.names())
        return sorted({name for name in found if name.startswith(prefix)})

    def can_keep(self) -> bool:
        """Whether `write` stores anything. If not, and storing is not switched off, a warning is logged once that the
        next start compiles again.
        """
        if self._own is None and self._why_not is not None:
            _warn_once(
                f"compiled steps are not kept, so the next start compiles again: {self._why_not}. Name a folder of "
                "your own with compile_cache_dir or JAXENGINE_CACHE_DIR"
            )
        return self._own is not None

    def write(self, name: str, payload: bytes) -> None:
        """Store a payload under a name if possible. Never raises: warns once if it cannot, and stores nothing more
        after a failed write.
        """
        if not self.can_keep():
            return
        assert self._own is not None
        try:
            self._own.write(name, payload)
        except OSError as error:
            # Nothing more is written to a full disk.
            self._own, self._why_not = None, f"{self._own.path}: {error}"
            self.can_keep()

    def _use(self, path: Path) -> None:
        """Open a folder for reading, and create it if it is missing. If it belongs to this user, it is also used for
        writing, and its old files are deleted.

        Raises OSError if it cannot be opened or made, NotTrusted if others may have written to it.
        """
        folder = _open_folder(path.absolute())
        self._folders.append(folder)
        weakref.finalize(self, os.close, folder.descriptor)
        if folder.key is not None:
            self._own = folder
            folder.prune()


class ShippedFiles:
    """Folder of files that another machine has written; this class only reads them."""

    def __init__(self, path: Path, *, by_owner: bool):
        """Open the folder.

        by_owner: accept files only if nobody but this user or root can have written them. False: the caller verifies
        their content. Raises OSError if there is no such folder, and with by_owner NotTrusted if others may have
        written to it.
        """
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))  # raises for a missing folder, which the walk would make
        self._by_owner, self._folder = by_owner, _opened(path, by_owner=by_owner)
        weakref.finalize(self, os.close, self._folder.descriptor)

    def read(self, name: str, most: int) -> bytes:
        """Return the bytes of a file. Raises OSError, also for a file of more than `most` bytes, and NotTrusted if it
        is not a regular file or, with by_owner, others may have written it.
        """
        return self._folder.content(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, most, self._by_owner)


def file_name(key: str) -> str:
    """Return the file name for a key: its SHA-256 in hex with the suffix of executables."""
    return f"{hashlib.sha256(key.encode()).hexdigest()}{_SUFFIX}"


class _Folder(NamedTuple):
    """Open folder of executables.

    Attributes:
      path: path, for messages.
      descriptor: file descriptor.
      owner: uid that its files must have.
      key: secret of its files' authentication codes; None for a folder of root's, which is only read.
    """

    path: Path
    descriptor: int
    owner: int
    key: bytes | None

    def read(self, name: str) -> bytes | None:
        """Return the payload of a file that `write` wrote; None for a missing file, and, with a warning, for one that
        is damaged, has another owner or lacks the key's authentication code. With a key, reading sets the file's
        modification time, by which `prune` recognises files in use.
        """
        try:
            content = self.content(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except (OSError, NotTrusted) as error:
            logger.warning("%s is ignored: %s", self.path / name, error)
            return None
        digest, payload = content[:_DIGEST_BYTES], content[2 * _DIGEST_BYTES :]
        if not hmac.compare_digest(hashlib.sha256(payload).digest(), digest):
            logger.warning("%s is damaged and is made again", self.path / name)
            return None
        if self.key is not None:
            code = content[_DIGEST_BYTES : 2 * _DIGEST_BYTES]
            if not hmac.compare_digest(_code(self.key, name, digest), code):
                logger.warning("%s was not written with this folder's key and is made again", self.path / name)
                return None
        return payload

    def write(self, name: str, payload: bytes) -> None:
        """Write a file: the payload's digest, the authentication code, and the payload; it replaces an earlier file
        atomically.

        No reader sees half of it, and a failed write leaves nothing. Needs `key`. Raises OSError if it cannot be
        written.
        """
        assert self.key is not None
        digest = hashlib.sha256(payload).digest()
        temporary = self._write_temporary(digest + _code(self.key, name, digest) + payload, 0o644)
        with self._removing(temporary):
            os.replace(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def names(self) -> list[str]:
        """Return the names of the folder's files, in any order."""
        return os.listdir(self.descriptor)

    def make_key(self) -> bytes:
        """Return the folder's key, 32 bytes. A key that is missing, has a wrong length, or that others may read is
        replaced by a new random one.

        Raises OSError if that fails, or has not succeeded after three attempts.
        """
        for _ in range(3):
            try:
                key = self.content(_KEY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, forbidden=_OTHERS)
                if len(key) == _DIGEST_BYTES:
                    return key
            except FileNotFoundError:
                pass
            except NotTrusted:
                os.unlink(_KEY, dir_fd=self.descriptor)
            else:
                os.unlink(_KEY, dir_fd=self.descriptor)
            temporary = self._write_temporary(secrets.token_bytes(_DIGEST_BYTES), 0o600)
            # A link, unlike a replacement, leaves alone what another process has put there in the meantime.
            at = self.descriptor
            with self._removing(temporary, always=True), contextlib.suppress(FileExistsError):
                try:
                    os.link(temporary, _KEY, src_dir_fd=at, dst_dir_fd=at)
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    os.replace(temporary, _KEY, src_dir_fd=at, dst_dir_fd=at)
        raise OSError(f"{self.path / _KEY} is not a key, and none can be made there")

    def prune(self) -> None:
        """Delete executables that no start has used for 30 days and temporary files older than a day. Other files stay,
        and files that cannot be deleted are ignored.
        """
        now = time.time()
        for name in os.listdir(self.descriptor):
            age = _UNUSED_SECONDS if name.endswith(_SUFFIX) else _ABANDONED_SECONDS
            if name.endswith(_SUFFIX) or name.startswith(_TEMPORARY):
                with contextlib.suppress(OSError):  # another process may be pruning too
                    if os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mtime < now - age:
                        os.unlink(name, dir_fd=self.descriptor)

    def content(
        self,
        name: str,
        flags: int,
        most: int | None = None,
        by_owner: bool = True,
        forbidden: int = _OTHERS_WRITE,
    ) -> bytes:
        """Return the bytes of a file in this folder; with a key, also set its modification time to now.

        flags: flags of os.open. most: largest allowed size in bytes; None for any. forbidden: permission bits that it
        must not have. Raises OSError if it cannot be read or is larger, and NotTrusted if it is not a regular file or,
        with by_owner, has another owner or forbidden permissions.
        """
        with open(os.open(name, flags, dir_fd=self.descriptor), "rb") as file:
            status = os.fstat(file.fileno())
            is_owners = not by_owner or (status.st_uid == self.owner and not status.st_mode & forbidden)
            if not stat.S_ISREG(status.st_mode) or not is_owners:
                raise NotTrusted(f"it is {_described(status)}, not a file of uid {self.owner} alone")
            if most is not None and status.st_size > most:
                raise OSError(f"it has {status.st_size:,} bytes, and {most:,} were expected")
            if self.key is not None:
                with contextlib.suppress(OSError):
                    os.utime(file.fileno())
            return file.read() if most is None else file.read(most)

    def _write_temporary(self, content: bytes, mode: int) -> str:
        """Write a new file of this folder with permissions `mode`; return its name. A failed write leaves nothing."""
        name = f"{_TEMPORARY}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(name, flags, mode, dir_fd=self.descriptor), "wb") as file, self._removing(name):
            file.write(content)
            file.flush()
        return name

    @contextlib.contextmanager
    def _removing(self, name: str, *, always: bool = False):
        """Delete a file of this folder at the end of the block if the block fails, or in any case with `always`;
        OSError is ignored. A context manager.
        """
        done = False
        try:
            yield
            done = True
        finally:
            if always or not done:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self.descriptor)


def _open_folder(path: Path) -> _Folder:
    """Open a folder, and create it if it is missing: the user's own, with its key read or made, or root's, without a
    key.

    The caller closes its descriptor. Raises OSError if the folder cannot be opened or made, or its key cannot be read
    or made, and NotTrusted if others may have written to it.
    """
    folder = _opened(path, by_owner=True)
    if folder.owner != os.geteuid():
        return folder
    try:
        return folder._replace(key=folder.make_key())
    except BaseException:
        os.close(folder.descriptor)
        raise


def _opened(path: Path, *, by_owner: bool) -> _Folder:
    """Open a folder, and create it if it is missing; return it without a key. The caller closes its descriptor.

    Raises OSError if it cannot be opened or made, and with by_owner NotTrusted if others may have written to it.
    """
    user = os.geteuid()
    at, sealed = _walk(path.absolute(), user)
    try:
        status = os.fstat(at)
        if by_owner and (status.st_mode & _OTHERS_WRITE or status.st_uid not in (user, ROOT)):
            raise NotTrusted(f"{path} is {_described(status)}")
        if by_owner and status.st_uid != user and not sealed:
            raise NotTrusted(f"{path} is root's, but others than root may write to a folder above it")
        return _Folder(path, os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=at), status.st_uid, None)
    finally:
        os.close(at)


def _walk(path: Path, user: int) -> tuple[int, bool]:
    """Return (descriptor, opened with O_PATH, of a folder, which is made if it is missing; whether only root and this
    user could replace the folder). user: this user's uid. The caller closes the descriptor.

    The path is walked step by step from the root, so that nothing can be exchanged between a check and the next step. A
    link is followed only if this user or root owns it: another user's could lead to a folder of theirs with this user's
    files. Folders above the user's own are not checked for writers, who could only put files there that are not the
    user's or lack the key. Raises OSError if the folder can be neither opened nor made, or for more than 40 links, and
    NotTrusted for another user's link.
    """
    rest, links, sealed = list(reversed(path.parts[1:])), 0, True
    at = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        while rest:
            part = rest.pop()
            next_at = _step(at, part)
            try:
                status = os.fstat(next_at)
                target = Path(os.readlink("", dir_fd=next_at)) if stat.S_ISLNK(status.st_mode) else None
            except BaseException:
                os.close(next_at)
                raise
            if target is not None:
                os.close(next_at)
                links += 1
                if status.st_uid not in (user, ROOT):
                    raise NotTrusted(f"{part!r} in {path} is a link of uid {status.st_uid}'s")
                if links > _MAX_LINKS:
                    raise OSError(f"{path} has too many links")
                rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
                if target.is_absolute():
                    before, at = at, os.open("/", os.O_PATH | os.O_DIRECTORY)
                    os.close(before)
                continue
            if rest:
                others = status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
                sealed &= status.st_uid in (user, ROOT) and not others
            os.close(at)
            at = next_at
    except BaseException:
        os.close(at)
        raise
    return at, sealed


def _step(at: int, part: str) -> int:
    """Return a descriptor (O_PATH) of the entry `part` in the folder with the descriptor `at`: a link itself, not its
    target. A missing entry is created as a folder. The caller closes it. Raises OSError if it can neither be opened nor
    created.
    """
    look: Callable[[], int] = functools.partial(os.open, part, os.O_PATH | os.O_NOFOLLOW, dir_fd=at)
    try:
        return look()
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process was first
            os.mkdir(part, 0o700, dir_fd=at)
        return look()


def _default_folder() -> Path:
    """Return the user's cache folder for executables, below XDG_CACHE_HOME if that is an absolute path, else below
    ~/.cache. Raises RuntimeError for a user without a home folder.
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification has relative ones ignored.
    return (chosen if chosen.is_absolute() else Path.home() / ".cache") / "jaxengine" / "executables"


def _code(key: bytes, name: str, digest: bytes) -> bytes:
    """Return the authentication code (HMAC-SHA256) of a file's name and digest. As it depends on the name, a file
    cannot replace another.
    """
    return hmac.digest(key, name.encode() + b"\0" + digest, "sha256")


def _described(status: os.stat_result) -> str:
    """Return a text with kind, owner and permissions of a file."""
    kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a file" if stat.S_ISREG(status.st_mode) else "something"
    return f"{kind} of uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}"


@functools.cache
def _warn_once(text: str) -> None:
    """Log a warning, once per process and text."""
    logger.warning("%s", text)
