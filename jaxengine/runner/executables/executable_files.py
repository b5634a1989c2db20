"""Files whose content will be run: where they lie, who may have written them, how they are read and written.

A file counts only if nobody but this user, or root, can have written it. What lies in the user's own folder is
authenticated with a key that is kept there and that only he can read; in a folder of root's, as an image ships it, the
owner is asked, and of every folder above it too. Everything below a folder is reached by its descriptor, so that what
was checked is what is read. Knows bytes and owners, nothing of programs;
docs/containers.md is about images.
"""

from __future__ import annotations

import contextlib
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

from jaxengine.config.engine_config import ConfigError

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32
ROOT = 0
_KEY = "key"
_SUFFIX = ".xla"
_TEMPORARY = "tmp"
_UNUSED_SECONDS = 30 * 24 * 3600
# Longer than any file takes to be written: what is left then is of a process that was killed.
_ABANDONED_SECONDS = 24 * 3600
_MAX_LINKS = 40
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class ExecutableFiles:
    """The folder that a user's executables are kept in, and the one that they may have been shipped in."""

    def __init__(self, directory: str | None):
        """directory: None for what JAXENGINE_CACHE_DIR names or, where that is not set, the user's cache folder; "", in
        either, to keep and find nothing.

        Where a folder of root's is named, what it lacks is kept in the user's cache folder. A folder that cannot be
        opened or made is no error: nothing is kept then (`can_keep`).

        Raises:
          ConfigError: the folder that was named may be written by others.
        """
        named = os.environ.get("JAXENGINE_CACHE_DIR") if directory is None else directory
        self._folders: list[_Folder] = []
        self._own: _Folder | None = None
        # Why nothing can be kept; None where it can, or where nothing is to be.
        self._why_not: str | None = None
        if named == "":
            return
        try:
            if named is not None:
                self._use(Path(named).expanduser())
            if self._own is None:
                self._use(_default_folder())
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
            self._why_not = str(error)
        except _NotTrusted as error:
            if named is not None and not self._folders:
                raise ConfigError("compile_cache_dir", named, f"a folder of your own, or of root's: {error}") from None
            self._why_not = str(error)
        for folder in self._folders:
            weakref.finalize(self, os.close, folder.descriptor)

    def read(self, name: str) -> bytes | None:
        """What was written under a name; None if that is nothing, damaged, or possibly another's work."""
        for folder in self._folders:
            if (payload := folder.read(name)) is not None:
                return payload
        return None

    def can_keep(self) -> bool:
        """Whether `write` keeps anything. Where it cannot, the next start takes longer: one warning says so."""
        if self._own is None and self._why_not is not None:
            _warn_once(
                f"compiled steps are not kept, so the next start compiles again: {self._why_not}. Name a folder of "
                "your own with compile_cache_dir or JAXENGINE_CACHE_DIR"
            )
        return self._own is not None

    def write(self, name: str, payload: bytes) -> None:
        """Keeps a payload under a name, if it can. Warns once where it cannot; after a failed write it keeps nothing
        more. Raises nothing."""
        if not self.can_keep():
            return
        assert self._own is not None
        try:
            self._own.write(name, payload)
        except OSError as error:
            # A full disk is not written to again and again.
            self._own, self._why_not = None, f"{self._own.path}: {error}"
            self.can_keep()

    def _use(self, path: Path) -> None:
        """Opens a folder, made if it is not there, to read from, and to keep files in if it is this user's own; then
        removes old files there.

        Raises OSError where it cannot be opened or made, _NotTrusted where others may have written it.
        """
        folder = _open_folder(path.absolute())
        self._folders.append(folder)
        if folder.key is not None:
            self._own = folder
            folder.prune()


def file_name(key: str) -> str:
    """The name of the file for what `key` describes."""
    return f"{hashlib.sha256(key.encode()).hexdigest()}{_SUFFIX}"


class _NotTrusted(Exception):
    """Others may have written here."""


class _Folder(NamedTuple):
    """An open folder.

    Attributes:
      owner: the uid that its files must have.
      key: of its files' authentication; None in a folder of root's that this user only reads.
    """

    path: Path
    descriptor: int
    owner: int
    key: bytes | None

    def read(self, name: str) -> bytes | None:
        try:
            content = self._content(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except (OSError, _NotTrusted) as error:
            logger.warning("%s is passed over: %s", self.path / name, error)
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
        """Writes a payload, after its digest and that digest's code by the folder's key, in place of an earlier file.

        No reader ever sees half of it, and a failed write leaves nothing. Only with a key. Raises OSError.
        """
        assert self.key is not None
        digest = hashlib.sha256(payload).digest()
        temporary = self._write_temporary(digest + _code(self.key, name, digest) + payload, 0o644)
        with self._removing(temporary):
            os.replace(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def make_key(self) -> bytes:
        """The folder's key, 32 bytes, made where there is none or others may read it or its length is wrong.

        Raises OSError where that fails, or has failed three times.
        """
        for _ in range(3):
            try:
                key = self._content(_KEY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, forbidden=_OTHERS)
                if len(key) == _DIGEST_BYTES:
                    return key
            except FileNotFoundError:
                pass
            except _NotTrusted:
                os.unlink(_KEY, dir_fd=self.descriptor)
            else:
                os.unlink(_KEY, dir_fd=self.descriptor)
            temporary = self._write_temporary(secrets.token_bytes(_DIGEST_BYTES), 0o600)
            # A link, unlike a replacement, leaves alone what another process has put there meanwhile.
            with self._removing(temporary, always=True), contextlib.suppress(FileExistsError):
                os.link(temporary, _KEY, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        raise OSError(f"{self.path / _KEY} is no key, and none can be made there")

    def prune(self) -> None:
        """Deletes executables that no start has used for a month, as every change of a version leaves them behind, and
        temporary files that are a day old. Other files stay; what cannot be deleted stays, too."""
        now = time.time()
        for name in os.listdir(self.descriptor):
            age = _UNUSED_SECONDS if name.endswith(_SUFFIX) else _ABANDONED_SECONDS
            if name.endswith(_SUFFIX) or name.startswith(_TEMPORARY):
                with contextlib.suppress(OSError):  # another process may be pruning too
                    if os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mtime < now - age:
                        os.unlink(name, dir_fd=self.descriptor)

    def _content(self, name: str, flags: int, forbidden: int = _OTHERS_WRITE) -> bytes:
        """The bytes of a file of this folder, which counts as used now in a folder of this user's.

        flags: of os.open. forbidden: permissions that it may not have. Raises OSError, and _NotTrusted for what is no
        file of the owner's, or has permissions that are forbidden.
        """
        with open(os.open(name, flags, dir_fd=self.descriptor), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != self.owner or status.st_mode & forbidden:
                raise _NotTrusted(f"it is {_described(status)}, not a file of uid {self.owner} alone")
            if self.key is not None:
                with contextlib.suppress(OSError):
                    os.utime(file.fileno())
            return file.read()

    def _write_temporary(self, content: bytes, mode: int) -> str:
        name = f"{_TEMPORARY}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(name, flags, mode, dir_fd=self.descriptor), "wb") as file, self._removing(name):
            file.write(content)
            file.flush()
        return name

    @contextlib.contextmanager
    def _removing(self, name: str, *, always: bool = False):
        """A context that removes a file of this folder when the block fails, or `always` when it ends; no error where
        it cannot."""
        done = False
        try:
            yield
            done = True
        finally:
            if always or not done:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self.descriptor)


def _open_folder(path: Path) -> _Folder:
    """Opens a folder, made if it is not there, that is this user's, whose key is read or made, or root's, without key.

    Its descriptor stays open. Raises OSError where that fails, _NotTrusted where others may have written it.
    """
    user = os.geteuid()
    at, sealed = _walk(path, user)
    try:
        status = os.fstat(at)
        if status.st_mode & _OTHERS_WRITE or status.st_uid not in (user, ROOT):
            raise _NotTrusted(f"{path} is {_described(status)}")
        if status.st_uid != user and not sealed:
            raise _NotTrusted(f"{path} is root's, but others than root may write to a folder above it")
        folder = _Folder(path, os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=at), status.st_uid, None)
    finally:
        os.close(at)
    if status.st_uid != user:
        return folder
    try:
        return folder._replace(key=folder.make_key())
    except BaseException:
        os.close(folder.descriptor)
        raise


def _walk(path: Path, user: int) -> tuple[int, bool]:
    """A descriptor (O_PATH) of the folder, made if it is not there, and whether nobody but root and this user could put
    another in its place. user: this user's uid. The caller closes the descriptor.

    One step after the other from the root, so that nothing can be exchanged between a look and the next step. A link
    counts if it is this user's or root's: of others', it could lead to a folder of his own that holds their files.
    Whoever may write to a folder above his own can only put there what is not his, or has not his key; so these are not
    asked for.

    Raises OSError, and _NotTrusted for a link of others.
    """
    rest, links, sealed = list(reversed(path.parts[1:])), 0, True
    at = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        while rest:
            part = rest.pop()
            next_at = _step(at, part)
            status = os.fstat(next_at)
            if stat.S_ISLNK(status.st_mode):
                target = Path(os.readlink("", dir_fd=next_at))
                os.close(next_at)
                links += 1
                if status.st_uid not in (user, ROOT):
                    raise _NotTrusted(f"{part!r} in {path} is a link of uid {status.st_uid}'s")
                if links > _MAX_LINKS:
                    raise OSError(f"{path} has too many links")
                rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
                if target.is_absolute():
                    os.close(at)
                    at = os.open("/", os.O_PATH | os.O_DIRECTORY)
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
    """A descriptor (O_PATH) of what the name `part` is in the folder with the descriptor `at`: the link itself if it is
    one, a new folder if nothing was there. The caller closes it. Raises OSError."""
    look: Callable[[], int] = functools.partial(os.open, part, os.O_PATH | os.O_NOFOLLOW, dir_fd=at)
    try:
        return look()
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process was first
            os.mkdir(part, 0o700, dir_fd=at)
        return look()


def _default_folder() -> Path:
    """The user's cache folder for executables. Raises RuntimeError where the user has no home."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification has relative ones ignored.
    return (chosen if chosen.is_absolute() else Path.home() / ".cache") / "jaxengine" / "executables"


def _code(key: bytes, name: str, digest: bytes) -> bytes:
    """The authentication code of a file, of its name too: a file cannot stand in for another one."""
    return hmac.digest(key, name.encode() + b"\0" + digest, "sha256")


def _described(status: os.stat_result) -> str:
    kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a file" if stat.S_ISREG(status.st_mode) else "something"
    return f"{kind} of uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}"


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
