"""Removal of internal details from error messages that leave the server."""

from __future__ import annotations

import os
import re
from functools import cache

MAX_MESSAGE_CHARS = 2000
# Exception texts may contain file paths, object addresses (CVE-2026-22778) and source lines.
_TRACEBACK = re.compile(r"Traceback \(most recent call last\).*|File \"[^\"]*\", line \d+.*", re.DOTALL)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
# Not in the middle of a word, a URL or a JSON pointer (#/properties/x).
_PATH = re.compile(r"(?:(?<=file://)|(?<![\w:/.#]))(?:[A-Za-z]:\\|/)(?:[\w.+@~\-]+[/\\])+[\w.+@~\-]*")
# Usual folders at the root of a file system; those of this machine are added.
_USUAL = frozenset(
    (
        *("bin", "boot", "dev", "etc", "home", "lib", "lib64", "media", "mnt", "opt", "proc", "root", "run", "sbin"),
        *("srv", "sys", "tmp", "usr", "var", "Applications", "Library", "System", "Users", "Volumes", "private"),
    )
)


def scrub(message: str, kept: str = "") -> str:
    """Return a message in which internals are replaced: a traceback and everything after it by "<traceback>", file
    paths by "<path>", object addresses by "<address>". It is cut to MAX_MESSAGE_CHARS and "..." if it is longer.

    A path is absolute and begins with a folder at the root of this machine's file system, or with a drive. Whether it
    exists is not checked, because the caller could then probe for files. Other texts with slashes stay. kept: text that
    the caller wrote or may see, and that the message quotes; paths in it stay.
    """

    def replace(found: re.Match[str]) -> str:
        """Return the replacement of a match: "<path>", or the match itself if it does not begin with a folder at the
        root or a drive, or `kept` contains it.
        """
        path = found.group()
        own = not path.startswith("/") or path.split("/")[1] in _roots()
        return "<path>" if own and path not in kept else path

    message = _ADDRESS.sub("<address>", _TRACEBACK.sub("<traceback>", message[:100_000]))
    message = _PATH.sub(replace, message)
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."


@cache
def _roots() -> frozenset[str]:
    """Return the names of folders at the root of a file system, this machine's included."""
    try:
        return _USUAL | {*os.listdir("/")}
    except OSError:
        return _USUAL
