"""Removes internal details from error messages that leave the server."""

from __future__ import annotations

import re

MAX_MESSAGE_CHARS = 2000
# Exception texts may contain file paths, object addresses (CVE-2026-22778) and source lines.
_TRACEBACK = re.compile(r"Traceback \(most recent call last\).*|File \"[^\"]*\", line \d+.*", re.DOTALL)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_PATH = re.compile(r"(?<![\w:/.])(?:[A-Za-z]:\\|/)(?:[\w.+@~\-]+[/\\])+[\w.+@~\-]*")


def scrub(message: str) -> str:
    """Removes tracebacks, file paths and object addresses from a message, and bounds its length."""
    message = _PATH.sub("<path>", _ADDRESS.sub("<address>", _TRACEBACK.sub("<traceback>", message[:100_000])))
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."
