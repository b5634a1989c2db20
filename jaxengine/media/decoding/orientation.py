"""Orientation in an image's metadata, which tells how the camera was held.

Metadata are untrusted, so only this number is searched for: Pillow would read all of a directory of up to 65,535 long
entries.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

ORIENTATION = 0x0112
_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
# Types of an entry's values that hold a small whole number, and how they are packed.
_WHOLE = {1: "B", 3: "H", 4: "I"}
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_EXIF_TEXT, _XMP_TEXT = "Raw profile type exif", "XML:com.adobe.xmp"


class Entry(NamedTuple):
    """Entry of a TIFF directory.

    Attributes:
      tag: number that identifies the entry's meaning.
      kind: type of its values.
      count: number of its values.
      field: the four bytes with the value, or with its offset in the file.
    """

    tag: int
    kind: int
    count: int
    field: bytes


def first_directory(data: bytes | memoryview) -> Iterator[Entry]:
    """Yield the complete entries of the first directory of a TIFF or of EXIF; none for other data.

    data: bytes from the byte order mark on.
    """
    order = _ORDERS.get(bytes(data[:4]))
    if order is None or len(data) < 8:
        return
    (start,) = struct.unpack_from(f"{order}I", data, 4)
    if start + 2 > len(data):
        return
    (count,) = struct.unpack_from(f"{order}H", data, start)
    end = min(len(data), start + 2 + 12 * count)
    end -= (end - start - 2) % 12
    yield from map(Entry._make, struct.iter_unpack(f"{order}HHI4s", data[start + 2 : end]))


def orientation_in(info: Mapping[Any, Any]) -> int | None:
    """Return the orientation in the metadata that Pillow found in a file (`Image.info`), from EXIF or else XMP; None if
    it is absent.

    The number is unchecked; 1 to 8 are defined.
    """
    exif = info.get("exif")
    if exif is None and isinstance(text := info.get(_EXIF_TEXT), str):
        try:
            exif = bytes.fromhex("".join(text.split("\n")[3:]))
        except ValueError:
            exif = None
    if isinstance(exif, bytes) and (found := _in_exif(memoryview(exif))) is not None:
        return found
    xmp = info.get(_XMP_TEXT) or info.get("xmp")
    if isinstance(xmp, str):
        xmp = xmp.encode("utf-8", "replace")
    match = _XMP.search(xmp) if isinstance(xmp, bytes) else None
    return int(match[1]) if match else None


def _in_exif(exif: memoryview) -> int | None:
    """Return the orientation in EXIF data, unchecked; None if it has none."""
    exif = exif[6:] if exif[:6] == b"Exif\0\0" else exif
    order = _ORDERS.get(bytes(exif[:4]), "")
    for entry in first_directory(exif):
        if entry.tag == ORIENTATION and entry.count and entry.kind in _WHOLE:
            return struct.unpack_from(order + _WHOLE[entry.kind], entry.field)[0]
    return None
