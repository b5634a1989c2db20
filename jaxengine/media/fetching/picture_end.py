"""Finds where an image's file ends, so that bytes after it need not be kept."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable

from jaxengine.media.base.errors import MediaError
from jaxengine.media.decoding.file_types import image_type
from jaxengine.media.fetching.base64_pieces import PIECE_BYTES
from jaxengine.media.fetching.fetch import read_data

# Limit of a file's blocks. Images have fewer; a file of empty blocks would take seconds.
_MOST_BLOCKS = 200_000
# Bytes to encode at a time, a multiple of three.
_ENCODED_BYTES = PIECE_BYTES // 4 * 3
# In a scan of a JPEG: a marker other than a stuffed zero, a restart and a fill byte.
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def picture_end(data: bytes) -> int:
    """Return the number of bytes of the image file at the beginning of `data`.

    All bytes count if they are not an image, of a type whose end is not determined (TIFF), or cannot be followed to the
    end.
    """
    find = _ENDS.get(image_type(data) or "")
    try:
        end = None if find is None else find(data)
    except (IndexError, struct.error):  # the file is cut off
        end = None
    return len(data) if end is None else min(end, len(data))


def trimmed_url(url: str) -> str:
    """Return a data URL of the same image, in base64 and with the type of its bytes, without white space and without
    bytes after the image's end; `url` itself if it has neither.

    Other addresses, and data that are not an image, are returned unchanged.
    """
    if url[:5].lower() != "data:":
        return url
    try:
        data = read_data(url, len(url))
    except MediaError:
        return url
    end, kind = picture_end(data), image_type(data)
    if kind is None:
        return url
    pieces = [base64.b64encode(data[at : min(at + _ENCODED_BYTES, end)]) for at in range(0, end, _ENCODED_BYTES)]
    short = f"data:image/{kind.lower()};base64,{b''.join(pieces).decode()}"
    return short if end < len(data) or len(short) < len(url) else url


def _png(data: bytes) -> int | None:
    """Return the position after the block IEND, with its checksum, which may lie beyond the end of `data`; None after
    _MOST_BLOCKS blocks without one. The first 8 bytes, the signature, are skipped unread. Raises struct.error if the
    file is cut off before a block's length and name.
    """
    at = 8
    for _ in range(_MOST_BLOCKS):
        length, kind = struct.unpack_from(">I4s", data, at)
        at += 12 + length
        if kind == b"IEND":
            return at
    return None


def _jpeg(data: bytes) -> int | None:
    """Return the position in `data` after the end marker; None without one or after too many blocks. Raises
    struct.error or IndexError if the file is cut off.
    """
    at = 2
    for _ in range(_MOST_BLOCKS):
        marker = _NEXT_MARKER.search(data, at)
        if marker is None:
            return None
        kind, at = data[marker.start() + 1], marker.end()
        if kind == 0xD9:
            return at
        if kind != 0x01:
            at += struct.unpack_from(">H", data, at)[0]
    return None


def _webp(data: bytes) -> int:
    """Return the length of the file that the RIFF header of `data` announces. Raises struct.error if the header is cut
    off.
    """
    (size,) = struct.unpack_from("<I", data, 4)
    return 8 + size + size % 2


def _gif(data: bytes) -> int | None:
    """Return the position in `data` after the trailer; None for an unknown block or too many blocks. Raises IndexError
    if the file is cut off.
    """
    at, in_block = 13 + _gif_table(data[10]), False
    for _ in range(_MOST_BLOCKS):
        if in_block:  # a length and so many bytes; a block ends with an empty piece
            in_block = data[at] != 0
            at += 1 + data[at]
        elif data[at] == 0x3B:
            return at + 1
        elif data[at] == 0x21:
            at, in_block = at + 2, True
        elif data[at] == 0x2C:
            at, in_block = at + 11 + _gif_table(data[at + 9]), True
        else:
            return None
    return None


def _gif_table(flags: int) -> int:
    """Return the size in bytes of the colour table that the flags of a GIF header or image announce; 0 for none."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _bmp(data: bytes) -> int | None:
    """Return the position in `data` after the pixels of an uncompressed BMP; None for other headers and compressions.
    Raises struct.error if the header is cut off.
    """
    first, header = struct.unpack_from("<II", data, 10)
    if header < 40:
        return None
    width, height, _, bits, compression = struct.unpack_from("<iiHHI", data, 18)
    if compression not in (0, 3) or width < 1:
        return None
    return first + (width * bits + 31) // 32 * 4 * abs(height)


# By type, the function data -> length of the file at its beginning; None or an exception if it cannot be determined.
_ENDS: dict[str, Callable[[bytes], int | None]] = {
    "PNG": _png,
    "JPEG": _jpeg,
    "WebP": _webp,
    "GIF": _gif,
    "BMP": _bmp,
}
