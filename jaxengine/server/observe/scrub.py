"""What of an error's words may leave the server."""

from __future__ import annotations

import re

MAX_MESSAGE_CHARS = 2000
# What an exception's words may carry: where files lie, where objects lie (CVE-2026-22778), how the code looks.
_TRACEBACK = re.compile(r"Traceback \(most recent call last\).*|File \"[^\"]*\", line \d+.*", re.DOTALL)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_PATH = re.compile(r"(?<![\w:/.])(?:[A-Za-z]:\\|/)(?:[\w.+@~\-]+[/\\])+[\w.+@~\-]*")


def scrub(message: str) -> str:
    """The message without tracebacks, paths of files and addresses of objects, and of bounded length."""
    message = _PATH.sub("<path>", _ADDRESS.sub("<address>", _TRACEBACK.sub("<traceback>", message[:100_000])))
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."
