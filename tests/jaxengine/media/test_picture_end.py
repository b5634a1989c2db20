"""Where a picture's file ends: bytes behind it, and white space within its data URL, are not kept."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from jaxengine.media.fetching.picture_end import picture_end, trimmed_url

JUNK = b"\xff\xd9IEND;\0" * 300
PIXELS = np.random.default_rng(0).integers(0, 256, (23, 37, 3), np.uint8)
WAYS = {
    "png": ("PNG", {}),
    "apng": ("PNG", {"save_all": True, "append_images": [Image.fromarray(PIXELS[::-1])]}),
    "jpeg": ("JPEG", {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"}),
    "progressive jpeg": ("JPEG", {"progressive": True, "quality": 95, "comment": b"\xff\xd9"}),
    "jpeg with restarts": ("JPEG", {"restart_marker_blocks": 1}),
    "webp": ("WEBP", {"lossless": True}),
    "animated webp": ("WEBP", {"save_all": True, "append_images": [Image.fromarray(PIXELS[::-1])]}),
    "gif": ("GIF", {}),
    "animated gif": ("GIF", {"save_all": True, "append_images": [Image.fromarray(PIXELS[::-1])], "comment": b";;"}),
    "bmp": ("BMP", {}),
}


def written(name):
    kind, options = WAYS[name]
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, kind, **options)
    return file.getvalue()


def test_bytes_behind_a_picture_do_not_belong_to_it():
    for name in WAYS:
        data = written(name)
        assert picture_end(data) == len(data), name
        for junk in (JUNK, b"\0", data):
            assert picture_end(data + junk) == len(data), name
            url = f"data:image/x;base64,{base64.b64encode(data + junk).decode()}"
            kept = trimmed_url(url)
            assert base64.b64decode(kept.partition(",")[2], validate=True) == data, name
            assert trimmed_url(kept) == kept


def test_a_file_that_cannot_be_followed_is_kept_whole():
    for name in WAYS:
        data = written(name)
        for size in (*range(2, 60), len(data) // 2, len(data) - 1):
            assert picture_end(data[:size]) == size, (name, size)
    assert picture_end(b"GIF89a" + b"\0" * 7 + b"!\xff" * 10) == 33
    # A file of empty blocks is not followed for ever.
    endless = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0tEXt\0\0\0\0" * 300_000
    assert picture_end(endless + b"\0\0\0\0IEND\0\0\0\0") == len(endless) + 12


@pytest.mark.parametrize("spelling", ["white space", "percent", "upper case"])
def test_a_url_is_spelled_shortly(spelling):
    data = written("png")
    text = base64.b64encode(data).decode()
    url = {
        "white space": "data:image/png;base64," + "\n".join(text) + " " * 5000,
        "percent": "data:image/png," + "".join(f"%{byte:02x}" for byte in data),
        "upper case": "DATA:image/png;BASE64," + base64.b64encode(data + JUNK).decode(),
    }[spelling]
    assert trimmed_url(url) == f"data:image/png;base64,{text}"


def test_other_texts_are_kept():
    for url in (
        "",
        "https://a/b.png",
        "data:",
        "data:text/plain,hi",
        "data:image/png;base64,?",
        "data:image/png;base64,aGk=",
    ):
        assert trimmed_url(url) == url
