"""Detects file types by their first bytes: the few that are decoded, and names of others for errors.

Only this decides which decoder reads a file; file names and declared media types are ignored.
"""

from __future__ import annotations

import re

IMAGES = {
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "WebP": re.compile(rb"RIFF.{4}WEBPVP8[ XL]", re.DOTALL),
    "GIF": re.compile(rb"GIF8[79]a"),
    "BMP": re.compile(rb"BM"),
    "TIFF": re.compile(rb"II\*\0|MM\0\*"),
}
# Containers of videos.
MP4, WEBM = "MP4", "WebM"
VIDEOS = {
    MP4: re.compile(rb".{4}ftyp(?!avif|avis|heic|heix|hevc|heim|heis|mif1|msf1|crx )", re.DOTALL),
    WEBM: re.compile(rb"\x1a\x45\xdf\xa3"),
}
# Sounds; containers of videos may also have sound alone.
SOUNDS = {
    "WAV": re.compile(rb"(?:RIFF|RF64|BW64).{4}WAVE", re.DOTALL),
    "FLAC": re.compile(rb"fLaC"),
    "Ogg": re.compile(rb"OggS"),
    "MP3": re.compile(rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]"),
    **VIDEOS,
}
_OTHERS = {
    # Atomic groups and possessive quantifiers: linear time for any file.
    "an SVG": re.compile(
        rb"(?:\xef\xbb\xbf)?(?>\s|<\?xml[^>]*+>|<!--.*?-->|<!DOCTYPE\s+svg[^>]*+>)*+<svg\b", re.DOTALL | re.I
    ),
    "a web page": re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype html|html|head|body)\b", re.I),
    "XML": re.compile(rb"(?:\xef\xbb\xbf)?\s*<\?xml"),
    "an AVIF": re.compile(rb".{4}ftypavi[fs]", re.DOTALL),
    "a HEIC": re.compile(rb".{4}ftyp(?:hei|hev|mif1|msf1)", re.DOTALL),
    "a raw photo": re.compile(rb".{4}ftypcrx |FUJIFILMCCD-RAW|IIRO|II\x55\0", re.DOTALL),
    "a PDF": re.compile(rb"%PDF-"),
    "PostScript": re.compile(rb"%!PS|\xc5\xd0\xd3\xc6"),
    "JPEG 2000": re.compile(rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51"),
    "JPEG XL": re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "),
    "an icon": re.compile(rb"\0\0[\x01\x02]\0"),
    "a Photoshop file": re.compile(rb"8BPS"),
    "a BigTIFF": re.compile(rb"II\+\0|MM\0\+"),
    "a ZIP": re.compile(rb"PK\x03\x04"),
    "a gzip": re.compile(rb"\x1f\x8b"),
    "an AVI": re.compile(rb"RIFF.{4}AVI ", re.DOTALL),
    "a WAV": re.compile(rb"RIFF.{4}WAVE", re.DOTALL),
    "JSON": re.compile(rb"\s*[\[{]"),
}
_HEAD = 512


def image_type(data: bytes) -> str | None:
    """Return the type of an image file by its first bytes, a key of IMAGES; None for other files. data: bytes of the
    file.
    """
    return _first(IMAGES, data)


def video_type(data: bytes) -> str | None:
    """Return the type of a video file by its first bytes, a key of VIDEOS; None for other files. data: bytes of the
    file.
    """
    return _first(VIDEOS, data)


def sound_type(data: bytes) -> str | None:
    """Return the type of a sound file by its first bytes, a key of SOUNDS, which includes VIDEOS; None for other files.
    data: bytes of the file.
    """
    return _first(SOUNDS, data)


def described(data: bytes) -> str:
    """Return a description of a file by its first bytes, for an error message about a wrong type: "is a PNG", "has no
    bytes", "is a file of an unknown type".
    """
    if not data:
        return "has no bytes"
    if name := image_type(data):
        return f"is a {name}"
    if name := video_type(data):
        return f"is an {name} video" if name == MP4 else f"is a {name} video"
    name = _first(_OTHERS, data[:_HEAD])
    return f"is {name}" if name else "is a file of an unknown type"


def _first(kinds: dict[str, re.Pattern[bytes]], data: bytes) -> str | None:
    """Return the name of the first pattern that matches at the beginning of `data`; None if none does."""
    return next((name for name, pattern in kinds.items() if pattern.match(data)), None)
