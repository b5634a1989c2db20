"""Files that tests send: pictures that Pillow writes, and files that are no such thing or say what they do not hold."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from PIL import Image

from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.decoding.bounds import PixelBudget
from jaxengine.media.decoding.images import read_image

OPTIONS = MediaOptions()
# uint8 [6, 8, 3], no two pixels alike.
PIXELS = (np.arange(6 * 8 * 3).reshape(6, 8, 3) * 37 % 251).astype(np.uint8)
PICTURE = Image.fromarray(PIXELS)


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


PNG = saved(PICTURE, "PNG")


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def read(value: Any, options: MediaOptions = OPTIONS) -> np.ndarray:
    return read_image(value, options, PixelBudget(options.max_media_pixels))


def png(width: int, height: int, *chunks: tuple[bytes, bytes], depth: int = 8, colour: int = 2) -> bytes:
    """A PNG of these chunks behind its header."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )


def tiff(width: int, height: int, *tags: tuple[int, int], data: bytes = bytes(64)) -> bytes:
    """An uncompressed TIFF of 8 bits of grey with further tags (number, value), behind whose directory lies `data`."""
    entries = {256: width, 257: height, 258: 8, 259: 1, 262: 1, 277: 1, 278: height, 279: len(data), **dict(tags)}
    end = 8 + 2 + 12 * (len(entries) + 1) + 4
    entries[324 if 322 in entries else 273] = end
    rows = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(entries.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + rows + bytes(4) + data


def gif(width: int, height: int) -> bytes:
    """A GIF of one pixel on so large a canvas."""
    small = saved(Image.new("P", (1, 1)), "GIF")
    return small[:6] + struct.pack("<HH", width, height) + small[10:]


def bmp(width: int, height: int) -> bytes:
    small = saved(Image.new("RGB", (1, 1)), "BMP")
    return small[:18] + struct.pack("<ii", width, height) + small[26:]


def jpeg(width: int, height: int) -> bytes:
    small = saved(PICTURE, "JPEG")
    at = small.index(b"\xff\xc0") + 5
    return small[:at] + struct.pack(">HH", height, width) + small[at + 4 :]


def webp(width: int, height: int) -> bytes:
    """A WebP whose first chunk tells of so large a canvas."""
    body = struct.pack("<I", 0) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    rest = b"VP8X" + struct.pack("<I", len(body)) + body + saved(PICTURE, "WEBP")[12:]
    return b"RIFF" + struct.pack("<I", len(rest) + 4) + b"WEBP" + rest


def scan_bomb(side: int = 64, times: int = 60) -> bytes:
    """A progressive JPEG whose ten scans come again and again."""
    data = saved(Image.new("RGB", (side, side)), "JPEG", progressive=True)
    begin = data.index(b"\xff\xda")
    return data[:begin] + data[begin:-2] * times + data[-2:]


def directory(tags: Iterable[int], kind: int, count: int, place: int = 8, data: bytes = b"") -> bytes:
    """A TIFF directory of entries of `count` values at `place`, as EXIF has it, and `data` behind it."""
    rows = [struct.pack("<HHII", tag, kind, count, place) for tag in tags]
    return b"II*\0" + struct.pack("<IH", 8, len(rows)) + b"".join(rows) + bytes(4) + data


def with_exif(form: str, exif: bytes) -> bytes:
    """PICTURE with this EXIF, whatever it holds."""
    if form == "JPEG":
        data, pieces = saved(PICTURE, "JPEG"), [exif[at : at + 60_000] for at in range(0, len(exif), 60_000)]
        notes = [b"\xff\xe1" + struct.pack(">H", len(piece) + 8) + b"Exif\0\0" + piece for piece in pieces]
        return data[:2] + b"".join(notes) + data[data.index(b"\xff\xdb") :]
    lossless = {"lossless": True} if form == "WEBP" else {}
    return saved(PICTURE, form, exif=b"Exif\0\0" + exif, **lossless)


def ztxt(size: int) -> bytes:
    return b"note\0\0" + zlib.compress(bytes(size), 9)


def animation(form: str, frames: int = 4, size: tuple[int, int] = (8, 6), **options: Any) -> bytes:
    """An animated file whose frame i is grey of 40 i, shown for 100 milliseconds."""
    pictures = [Image.new("RGB", size, (40 * i, 40 * i, 40 * i)) for i in range(frames)]
    lossless = {"lossless": True} if form == "WEBP" else {}
    return saved(
        pictures[0], form, save_all=True, append_images=pictures[1:], duration=100, loop=0, **lossless, **options
    )
