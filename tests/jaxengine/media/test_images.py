"""Pictures: each way to store one gives its pixels; what is hostile, damaged or none is one error, and costs little."""

from __future__ import annotations

import io
import logging
import resource
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.decoding import bounds
from jaxengine.media.decoding.bounds import PixelBudget, TimedFile
from jaxengine.media.decoding.images import quiet_pillow, read_image
from jaxengine.media.decoding.orientation import orientation_in
from tests.jaxengine.media.pictures import (
    OPTIONS,
    PICTURE,
    PIXELS,
    PNG,
    bmp,
    directory,
    gif,
    jpeg,
    png,
    read,
    saved,
    scan_bomb,
    tiff,
    webp,
    with_exif,
    ztxt,
)
from tests.tables import each_row

RED_ON_CLEAR = Image.fromarray(np.array([[[255, 0, 0, 255], [9, 9, 9, 0], [0, 0, 0, 128]]], np.uint8))


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "tiff_adobe_deflate"}),
        ("TIFF", {"compression": "packbits"}),
    ],
)
def test_what_is_stored_exactly_is_read_exactly(form, options):
    pixels = read(saved(PICTURE, form, **options))
    assert pixels.dtype == np.uint8 and pixels.flags.c_contiguous and np.array_equal(pixels, PIXELS)


@pytest.mark.parametrize(
    "data",
    [
        saved(PICTURE, "JPEG", quality=95),
        saved(PICTURE, "JPEG", progressive=True),
        saved(PICTURE, "WEBP"),
        saved(PICTURE.convert("CMYK"), "JPEG"),
        saved(PICTURE.convert("CMYK"), "TIFF"),
        saved(PICTURE.convert("YCbCr"), "JPEG"),
    ],
)
def test_other_colours_are_what_pillow_makes_of_them(data):
    assert np.array_equal(read(data), np.array(Image.open(io.BytesIO(data)).convert("RGB")))


@each_row("form", ["PNG", "JPEG", "WEBP", "TIFF"])
@each_row("orientation", range(1, 9))
def test_a_picture_is_put_upright(form, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"lossless": True} if form == "WEBP" else {}
    stored = read(saved(PICTURE, form, **lossless))
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: np.rot90(stored, -1),
        7: stored[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(stored, 1),
    }[orientation]
    assert np.array_equal(read(saved(PICTURE, form, exif=exif, **lossless)), upright)


def test_a_faulty_note_of_the_camera_does_no_harm():
    assert np.array_equal(read(saved(PICTURE, "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")), PIXELS)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_of_the_exif_of_strangers_only_the_orientation_is_read(form, monkeypatch):
    """Pillow would read every entry, warn of each, and keep every warning's text for ever."""
    monkeypatch.setattr(TiffImagePlugin.ImageFileDirectory_v2, "load", None)
    plain = read(with_exif(form, directory([], 3, 1)))
    for kind, count in ((7, 100_000_000), (5, 1 << 28), (4, 1)):
        many = directory(range(300, 65_300), kind, count, data=bytes(99))
        assert np.array_equal(read(with_exif(form, many)), plain)
    turned = directory([700, 0x0112], 3, 1, place=6)
    assert np.array_equal(read(with_exif(form, turned)), np.rot90(plain, -1))


@each_row(
    ("info", "orientation"),
    [
        ({}, None),
        ({"exif": b"Exif\0\0" + directory([0x0112], 3, 1, place=6)}, 6),
        ({"exif": directory([0x0112], 4, 1, place=8)}, 8),
        ({"exif": b"MM\0*" + bytes([0, 0, 0, 8, 0, 1, 1, 0x12, 0, 3, 0, 0, 0, 1, 0, 5, 0, 0])}, 5),
        ({"Raw profile type exif": "\nexif\n 4\n" + directory([0x0112], 3, 1, place=3).hex()}, 3),
        ({"Raw profile type exif": "\nexif\n 4\nno"}, None),
        ({"xmp": b'<a tiff:Orientation="7"/>'}, 7),
        ({"XML:com.adobe.xmp": "<tiff:Orientation>2</tiff:Orientation>"}, 2),
        ({"exif": directory([0x0112], 3, 1, place=6), "xmp": b'tiff:Orientation="7"'}, 6),
        ({"exif": directory([0x0112], 5, 1, place=6), "xmp": b'tiff:Orientation="7"'}, 7),
        *[({"exif": directory([0x0112], 3, 1, place=6)[:end]}, None) for end in (0, 1, 7, 8, 9, 10, 15, 21)],
        ({"exif": b"II*\0\xff\xff\xff\xff" + bytes(20)}, None),
        ({"exif": "text"}, None),
    ],
)
def test_orientations(info, orientation):
    assert orientation_in(info) == orientation


def test_pillow_writes_nothing_to_the_log_and_remembers_nothing():
    hostile = [directory(range(300, 3300), 7, 100 + number * 5000) for number in range(4)]
    registry: dict = {}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        quiet_pillow()
        TiffImagePlugin.__dict__.get("__warningregistry__", registry).clear()
        for data in (*hostile, *[with_exif(form, each) for form in ("PNG", "JPEG") for each in hostile]):
            try:
                read(data)
            except MediaError:
                continue
    assert not found and len(TiffImagePlugin.__dict__.get("__warningregistry__", registry)) <= 1
    assert not logging.getLogger("PIL.TiffImagePlugin").isEnabledFor(logging.CRITICAL)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF"])
def test_what_is_transparent_lies_on_the_background(form):
    lossless = {"lossless": True} if form == "WEBP" else {}
    data = saved(RED_ON_CLEAR, form, **lossless)
    assert read(data).tolist() == [[[255, 0, 0], [255, 255, 255], [127, 127, 127]]]
    blue = MediaOptions(media_io_kwargs={"image": {"rgba_background_color": [0, 0, 255]}})
    assert read(data, blue).tolist() == [[[255, 0, 0], [0, 0, 255], [0, 0, 127]]]


def palette(mode: str, transparency: object) -> bytes:
    picture = Image.new("P", (3, 1))
    picture.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    picture.putdata([0, 1, 2])
    return saved(picture, mode, transparency=transparency)


@pytest.mark.parametrize(
    ("data", "row"),
    [
        (palette("PNG", 1), [[255, 0, 0], [255, 255, 255], [0, 0, 255]]),
        (palette("PNG", bytes([255, 0, 255])), [[255, 0, 0], [255, 255, 255], [0, 0, 255]]),
        (palette("GIF", 1), [[255, 0, 0], [255, 255, 255], [0, 0, 255]]),
        (saved(Image.fromarray(np.array([[7, 200]], np.uint8)), "PNG"), [[7] * 3, [200] * 3]),
        (saved(Image.fromarray(np.array([[7, 200]], np.uint8)), "PNG", transparency=7), [[255] * 3, [200] * 3]),
        (saved(Image.fromarray(np.array([[False, True]])), "PNG"), [[0] * 3, [255] * 3]),
        (saved(Image.merge("LA", [Image.new("L", (1, 1), 9), Image.new("L", (1, 1), 0)]), "PNG"), [[255] * 3]),
        (
            saved(Image.fromarray(np.array([[0, 255, 256, 65535]], np.uint16)), "PNG"),
            [[0] * 3, [0] * 3, [1] * 3, [255] * 3],
        ),
        (saved(Image.fromarray(np.array([[256, 65535]], np.uint16)), "TIFF"), [[1] * 3, [255] * 3]),
        (saved(Image.fromarray(np.array([[300, 65535]], np.uint16)), "PNG", transparency=300), [[255] * 3, [255] * 3]),
    ],
    ids=[
        "palette",
        "palette alpha",
        "gif",
        "grey",
        "grey with one clear",
        "1 bit",
        "LA",
        "16 bits",
        "tiff 16",
        "16 clear",
    ],
)
def test_palettes_and_grey(data, row):
    assert read(data).tolist() == [row]


def test_16_bit_colours_are_their_upper_half():
    row = b"\0" + bytes([1, 99, 128, 7, 255, 255])
    assert read(png(1, 1, (b"IDAT", zlib.compress(row)), depth=16)).tolist() == [[[1, 128, 255]]]


def test_of_an_animation_the_first_frame():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for form in ("GIF", "WEBP", "PNG"):
        lossless = {"lossless": True} if form == "WEBP" else {}
        data = saved(frames[0], form, save_all=True, append_images=frames[1:], **lossless)
        assert read(data)[0, 0].tolist() == [255, 0, 0]


SVG = b'<?xml version="1.0"?>\n<!-- a -->\n<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
HUGE = "pixels; allowed: 1 to 50000000"
HOSTILE = {
    "nothing": (b"", "has no bytes; allowed: PNG, JPEG"),
    "svg": (SVG, "is an SVG; allowed: PNG, JPEG"),
    "bare svg": (b"  <svg>", "is an SVG"),
    "svg behind comments": (b"<!-- -->" * 60 + b"<svg", "a file of an unknown type|is an SVG"),
    "html": (b"<!DOCTYPE html><html>", "is a web page"),
    "pdf": (b"%PDF-1.7\n", "is a PDF"),
    "postscript": (b"%!PS-Adobe", "is PostScript"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0", "is a HEIC"),
    "avif": (b"\0\0\0\x18ftypavif\0\0\0\0", "is an AVIF"),
    "mp4": (b"\0\0\0\x18ftypisom\0\0\0\0", "is an MP4 video"),
    "webm": (b"\x1a\x45\xdf\xa3\0\0\0\0", "is a WebM video"),
    "jpeg 2000": (b"\0\0\0\x0cjP  \r\n\x87\n", "is JPEG 2000"),
    "icon": (b"\0\0\1\0\1\0", "is an icon"),
    "psd": (b"8BPS\0\1", "is a Photoshop file"),
    "zip": (b"PK\3\4", "is a ZIP"),
    "gzip": (b"\x1f\x8b\x08", "is a gzip"),
    "json": (b'{"a": 1}', "is JSON"),
    "text": (b"hello", "a file of an unknown type"),
    "noise": (bytes(range(200, 256)), "a file of an unknown type"),
    "png of 10^9 pixels": (png(50_000, 20_000, (b"IDAT", b"x")), f"has 50000 x 20000 {HUGE}"),
    "png as large as can be": (png(2**31 - 1, 2**31 - 1), HUGE),
    "jpeg of 4 * 10^9 pixels": (jpeg(65_500, 65_500), HUGE),
    "gif of 4 * 10^9 pixels": (gif(65_535, 65_535), HUGE),
    "bmp of 10^9 pixels": (bmp(100_000, 10_000), HUGE),
    "webp of 10^9 pixels": (webp(2**24, 64), HUGE),
    "tiff of 10^9 pixels": (tiff(100_000, 10_000), HUGE),
    "png of no pixels": (png(0, 4), "is a PNG that is damaged"),
    "tiff with a tile of 10^9 pixels": (
        tiff(8, 8, (322, 32_768), (323, 32_768), (325, 64)),
        "with tiles of 32768 x 32768",
    ),
    "png with a text of 20 MB": (png(1, 1, (b"zTXt", ztxt(20 << 20))), "is a PNG that is damaged"),
    "png with a profile of 20 MB": (png(1, 1, (b"iCCP", ztxt(20 << 20))), "is a PNG that is damaged"),
    "png without pixels": (png(4, 4), "is a PNG that is damaged"),
    "png of too few rows": (png(400, 400, (b"IDAT", b"x\x9cc\0\0\0\1\0\1")), "is a PNG that is damaged"),
    "png header only": (PNG[:20], "is a PNG that is damaged"),
    "wrong checksum": (PNG[:30] + b"\xff" + PNG[31:], "is a PNG that is damaged"),
    "jpeg cut": (saved(PICTURE, "JPEG")[:-40], "is a JPEG that is damaged or cut short"),
    "jpeg of many scans": (scan_bomb(), "a JPEG of more than 100 scans"),
    "jpeg of few scans too many": (scan_bomb(64, 9), "90 scans of 64 x 64 pixels; scans times pixels may be 49152 "),
    "png of many profiles": (png(1, 1, *[(b"iCCP", ztxt(1 << 20))] * 9), "many colour profiles; allowed: one"),
    "tiff of many tiles for few pixels": (
        tiff(3000, 1, (322, 1), (323, 1_000_000), (325, 64)),
        "with tiles of 1 x 1000000 pixels, 3000 of them",
    ),
    "tiff of a million strips": (directory([273], 4, 1_000_000), "entry 273 has 1000000 values; allowed: 200000"),
    "tiff of very many numbers": (directory([256, 282], 5, 300_000), "entry 256 has 300000 values"),
    "webp cut": (saved(PICTURE, "WEBP")[:-9], "is a WebP that is damaged"),
    "webp without a frame": (b"RIFF\0\0\0\0WEBPVP8 ", "0 x 0 pixels"),
    "gif cut": (saved(PICTURE, "GIF")[:-40], "is a GIF that is damaged"),
    "bmp cut": (saved(PICTURE, "BMP")[:-9], "is a BMP that is damaged"),
    "tiff cut": (saved(PICTURE, "TIFF")[:-90], "is a TIFF that is damaged"),
    "fax": (saved(PICTURE.convert("1"), "TIFF", compression="group4"), "compressed by 'group4'; allowed: raw"),
    "tiff with jpeg in it": (saved(PICTURE, "TIFF", compression="jpeg"), "compressed by 'jpeg'"),
    "tiff of floats": (saved(Image.new("F", (2, 2)), "TIFF"), "pixels of mode 'F'"),
    "tiff of 32 bits": (saved(Image.new("I", (2, 2)), "TIFF"), "pixels of mode 'I'"),
    "bigtiff": (b"II+\0\x08\0\0\0", "is a BigTIFF"),
    "too many bytes": (PNG + bytes(32 << 20), "bytes or more; allowed: 33554432"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_error_and_costs_little(name):
    data, message = HOSTILE[name]
    options = MediaOptions(max_image_pixels=64 * 64) if "few scans" in name else OPTIONS
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MediaError, match=message):
        read(data, options)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 << 10  # KiB


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_what_is_cut_short_is_refused_or_whole(form):
    """What is behind the last pixel may be missing; no pixel is ever made up."""
    data = saved(PICTURE, form)
    whole, refused = read(data), 0
    for end in {*range(0, len(data), max(1, len(data) // 25)), *range(len(data) - 14, len(data))}:
        try:
            assert np.array_equal(read(data[:end]), whole)
        except MediaError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("data", [png(4, 4, *[(b"teST", b"")] * 3000), b"\xff\xd8" + b"\xff\xee\0\2" * 3000])
def test_a_file_of_very_many_parts(data, monkeypatch):
    monkeypatch.setattr(bounds, "MAX_READS", 2000)
    with pytest.raises(MediaError, match="has more than 2000 parts"):
        read(data)


def test_a_decoder_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(bounds, "MAX_SECONDS", -1.0)
    with pytest.raises(MediaError, match="takes more than -1 seconds to decode"):
        read(PNG)
    with pytest.raises(MediaError):
        TimedFile(b"x").check()


def test_parts_that_lie_over_each_other_are_read_so_often():
    file = TimedFile(bytes(1 << 20))
    with pytest.raises(MediaError, match="has parts that lie over each other: they make 8 times its bytes"):
        for number in range(20):
            file.seek(0)
            assert len(file.read()) == 1 << 20 and number < 9


def test_limits_are_those_of_the_options():
    few = MediaOptions(max_image_pixels=47)
    for value in (PNG, PICTURE, PIXELS):
        with pytest.raises(MediaError, match="8 x 6 pixels; allowed: 1 to 47 .max_image_pixels"):
            read(value, few)
    with pytest.raises(MediaError, match="allowed: 9 .max_media_bytes"):
        read(PNG, MediaOptions(max_media_bytes=9))
    budget = PixelBudget(100)
    read_image(PNG, OPTIONS, budget)
    read_image(PIXELS, OPTIONS, budget)
    with pytest.raises(MediaError, match="has 48 pixels, which makes 144 in one prompt; allowed: 100"):
        read_image(PICTURE, OPTIONS, budget)


def test_pictures_of_python(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    for value in (PICTURE, PIXELS, bytearray(PNG), memoryview(PNG), tmp_path / "a.png", PICTURE.convert("RGBA")):
        assert np.array_equal(read(value), PIXELS)
    grey = PIXELS[..., 0]
    for value in (grey, grey[..., None], Image.fromarray(grey)):
        assert np.array_equal(read(value), np.stack([grey] * 3, axis=2))
    assert read(np.asarray(RED_ON_CLEAR)).tolist() == [[[255, 0, 0], [255, 255, 255], [127, 127, 127]]]
    lazy = Image.open(tmp_path / "a.png")
    assert np.array_equal(read(lazy), PIXELS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (PIXELS / 255, r"array of float64 and shape \[6, 8, 3\]; allowed: uint8"),
        (PIXELS.astype(np.int32), "array of int32"),
        (PIXELS[None], r"shape \[1, 6, 8, 3\]"),
        (PIXELS.transpose(2, 0, 1), r"shape \[3, 6, 8\]"),
        (PIXELS[:, :0], "0 x 6 pixels"),
        (np.array([object()]), "array of object"),
        (3, "is a int; allowed: the bytes or Path"),
        ([PIXELS], "is a list"),
        (Path("/nowhere/a.png"), "cannot be read"),
        (Path("/dev/zero"), "cannot be read"),
        (Path("/"), "cannot be read"),
        (Image.new("F", (2, 2)), "mode 'F'"),
        (Image.new("I", (2, 2)), "mode 'I'"),
        (Image.new("LAB", (2, 2)), "mode 'LAB'"),
        (Image.new("RGB", (0, 2)), "0 x 2 pixels"),
    ],
)
def test_what_is_no_picture_of_python(value, message):
    with pytest.raises(MediaError, match=message):
        read(value)
