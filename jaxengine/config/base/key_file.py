"""Files that hold a secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.files import named_path

HOW_TO_MAKE = "make one with `head -c 32 /dev/urandom | base64 > key && chmod 600 key`"
_LEAST, _MOST = 16, 4096


def read_api_key(file: str) -> str:
    """Return a server's API key, the first word of the text file that a client's api_key_file option names.

    Raises ConfigError for a file that cannot be read or has no word, and for a key that no HTTP header can carry.
    """
    try:
        words = Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_key_file", file, f"a text file with the key ({error})") from None
    if not words:
        raise ConfigError.because("api_key_file", f"{file} contains no key", "write one into it")
    check_header("api_key_file", words[0])
    return words[0]


def check_header(option: str, key: str) -> None:
    """Raise ConfigError, which names the option and not the key, unless the key is printable ASCII, as an HTTP header
    needs.
    """
    if not (key.isascii() and key.isprintable()):
        raise ConfigError.because(option, f"{option} gives a key that no HTTP header can carry", "use printable ASCII")


def read_key(option: str, file: str) -> bytes:
    """Return the key in a file: its content without surrounding white space, 16 to 4096 bytes.

    option: name of the option that names the file. Raises ConfigError, which names the option, for a file that cannot
    be read, that belongs to somebody other than this user or root, that others may access, or with a key of another
    length.
    """
    try:
        with named_path(option, file).open("rb") as opened:
            status = os.fstat(opened.fileno())
            key = opened.read(_MOST + 1).strip()
    except OSError as error:
        problem = f"{option} {file!r} cannot be read ({error.strerror})"
        raise ConfigError.because(option, problem, HOW_TO_MAKE) from None
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        problem = f"{option} {file!r} is not yours alone"
        raise ConfigError.because(option, problem, f"own it and shut others out: chmod 600 {file}")
    if not _LEAST <= len(key) <= _MOST:
        problem = f"{option} {file!r} holds {len(key)} bytes, not {_LEAST} to {_MOST} random bytes"
        raise ConfigError.because(option, problem, HOW_TO_MAKE)
    return key
