"""Base64 of many megabytes, decoded so that other threads go on meanwhile."""

from __future__ import annotations

import base64
import binascii

# A step over bytes keeps every other thread from running until it has ended. A multiple of four.
PIECE_BYTES = 1 << 16


def decode(text: bytes) -> bytes:
    """What whole groups of four characters stand for, and nothing else among them. Raises binascii.Error."""
    *starts, last = range(0, len(text) or 1, PIECE_BYTES)
    if text.find(b"=", 0, last) >= 0:
        raise binascii.Error("padding before the end")
    return b"".join([base64.b64decode(text[at : at + PIECE_BYTES], validate=True) for at in (*starts, last)])
