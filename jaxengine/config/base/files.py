"""Paths of files and folders that options name."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from jaxengine.config.base.errors import ConfigError


def named_path(option: str, value: str | os.PathLike[str]) -> Path:
    """Return the path that an option names, with "~" expanded. The path need not exist.

    Raises ConfigError, which names the option, for a text that cannot be a file's name: with "~" for a user without a
    home folder (as a container's may be), with a NUL, or too long.
    """
    try:
        path = Path(value).expanduser()
        os.lstat(path)
    except OSError as error:  # whether other problems matter depends on the use of the file
        if error.errno != errno.ENAMETOOLONG:
            return path
        why = error.strerror
    except (RuntimeError, ValueError) as error:
        why = f"{error}".removesuffix(".")
    else:
        return path
    text = str(value)[:200]
    raise ConfigError.because(option, f"{option} {text!r} cannot be the name of a file ({why})", "give another one")


def read_file(path: Path, most: int) -> tuple[bytes, os.stat_result]:
    """Return the content of a regular file of at most `most` bytes, and its status. Raises OSError for a file that
    cannot be read, ValueError for other files.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG((status := os.fstat(descriptor)).st_mode):
            raise ValueError("it is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(descriptor)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    return content, status


def is_writable_folder(path: Path) -> bool:
    """Return whether there is a folder at `path` in which this process may write."""
    # os.path, unlike Path, does not raise for a folder without permission to search it.
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def writable_folder(option: str, value: str | os.PathLike[str]) -> Path:
    """Return the path of the folder that an option names, with "~" expanded. Creates nothing.

    The folder, or its nearest existing parent if it does not exist, must be a folder in which this process may write.
    Raises ConfigError, which names the option, otherwise.
    """
    path = named_path(option, value)
    there = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
    if not is_writable_folder(there):
        raise ConfigError(option, str(path), "a folder that can be written")
    return path
