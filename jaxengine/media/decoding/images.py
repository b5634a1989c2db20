"""Decodes image files and Python image objects to pixels, uint8 [H, W, 3] RGB.

Files are untrusted: everything in the header is checked before decoding, only the decoders of file_types are used, and
truncated files are refused, never filled up.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import BmpImagePlugin, GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin

from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.decoding.bounds import PixelBudget, TimedFile
from jaxengine.media.decoding.file_types import IMAGES, described, image_type
from jaxengine.media.decoding.orientation import ORIENTATION, first_directory, orientation_in
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import open_regular

ALLOWED = ", ".join(IMAGES)


class _Jpeg(JpegImagePlugin.JpegImageFile):
    def _read_dpi_from_exif(self) -> None:
        """Do nothing: the resolution is not used, and finding it would mean parsing untrusted EXIF."""


class _Tiff(TiffImagePlugin.TiffImageFile):
    def getexif(self) -> Image.Exif:
        """Return EXIF with only the orientation, by which Pillow rotates the image upright; other directories are not
        read.
        """
        exif = Image.Exif()
        if (orientation := self.tag_v2.get(ORIENTATION)) is not None:
            exif[ORIENTATION] = orientation
        return exif


# Used directly: Image.open would try every decoder, some of which start other programs.
_DECODERS = {
    "PNG": PngImagePlugin.PngImageFile,
    "JPEG": _Jpeg,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": _Tiff,
}
# Allowed TIFF compressions. Others use further decoders, some of which write untrusted text to the log.
_COMPRESSIONS = ("raw", "tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "packbits")
_WIDTH, _LENGTH, _TILE_WIDTH, _TILE_LENGTH = 256, 257, 322, 323
# Limit of the values of a TIFF's entry, other than bytes and texts (types 1, 2, 6, 7): offsets of the smallest tiles,
# or three palettes of 16 bits. Each value becomes a Python object.
_MAX_VALUES = 200_000
_BYTES = (1, 2, 6, 7)
# Limit of a progressive JPEG's scans, each of which covers all pixels; encoders write about ten.
_MAX_SCANS = 100
# Limit of scans times pixels: so many scans of the largest image.
_FULL_SCANS = 12
_SCAN = b"\xff\xda"
# Limit of a PNG's colour profiles, each of which is decompressed; one is allowed.
_MAX_PROFILES = 8
# EXIF orientations, 2 to 8, and the transforms that put the image upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PLAIN_MODES = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV")
_DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
_ARRAYS = "uint8 of shape [H, W, 3], [H, W, 4], [H, W, 1] or [H, W]"


def quiet_pillow() -> None:
    """Switch off the warnings and the log of Pillow for the whole process, since untrusted files could fill them."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").setLevel(logging.CRITICAL + 1)


def read_image(value: Any, options: MediaOptions, budget: PixelBudget) -> np.ndarray:
    """Return the pixels of an image, uint8 [H, W, 3] RGB, rotated upright. A contiguous array of this form is returned
    itself, not copied.

    Args:
      value: bytes of a file, pathlib.Path of a file, a PIL.Image.Image, or a numpy array, which must hold uint8 from 0
        to 255 in the shape [H, W, 3], [H, W, 4] with alpha, [H, W, 1] or [H, W].
      options: limits, and the colour under transparent images.
      budget: the prompt's, from which the pixels are taken.

    Raises MediaError for other values, and for an image that is damaged, has too many bytes or pixels, or exceeds the
    budget.
    """
    if isinstance(value, Path):
        value = read_file(value, options.max_media_bytes)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _decode(bytes(value), options, budget)
    if isinstance(value, Image.Image):
        check_size(value.size, options)
        budget.take(value.width * value.height)
        return to_rgb(value, options.background, _noted_orientation)
    if isinstance(value, np.ndarray):
        return _from_array(value, options, budget)
    raise MediaError(f"is a {type(value).__name__}; allowed: the bytes or Path of a file, a PIL image, or {_ARRAYS}")


def read_file(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes. Raises MediaError for a larger file, and for one
    that cannot be read.
    """
    try:
        descriptor, size = open_regular(path)
        with open(descriptor, "rb") as file:
            data = b"" if size > limit else file.read(limit + 1)
    except (ModelFileError, OSError):
        raise MediaError("cannot be read: there is no such file, or no permission to read it") from None
    check_bytes(max(size, len(data)), limit)
    return data


def check_bytes(size: int, limit: int) -> None:
    """Raise MediaError for a file of `size` bytes if that is more than `limit`."""
    if size > limit:
        raise MediaError(f"has {size} bytes or more; allowed: {limit} (max_media_bytes)")


def check_size(size: tuple[int, int], options: MediaOptions) -> None:
    """Raise MediaError for an image with no pixels, or more than options.max_image_pixels. size: (width, height)."""
    width, height = size
    if not 1 <= width * height <= options.max_image_pixels or width < 1:
        allowed = f"1 to {options.max_image_pixels} (max_image_pixels)"
        raise MediaError(f"has {width} x {height} pixels; allowed: {allowed}")


def open_image(data: bytes, options: MediaOptions) -> tuple[Image.Image, TimedFile]:
    """Return (image, file): an image opened by its header, without decoding pixels, and the file that it reads from,
    which limits the time of decoding.

    data: bytes of a file. Raises MediaError for another type, damage, and more bytes, pixels, scans, colour profiles,
    tiles or entries than options and this module allow.
    """
    check_bytes(len(data), options.max_media_bytes)
    name = image_type(data)
    if name is None:
        raise MediaError(f"{described(data)}; allowed: {ALLOWED}")
    if name == "WebP":  # some versions of the decoder allocate all pixels before they check the size
        check_size(_webp_size(data), options)
    if name == "JPEG" and data.count(_SCAN) > _MAX_SCANS:
        raise MediaError(f"is a JPEG of more than {_MAX_SCANS} scans, each of which decodes all of its pixels")
    if name == "PNG" and data.count(b"iCCP") > _MAX_PROFILES:
        raise MediaError("is a PNG with many colour profiles; allowed: one")
    if name == "TIFF":
        _check_entries(data)
    file = TimedFile(data)
    image = _decoding(name, lambda: _DECODERS[name](file))
    check_size(image.size, options)
    if name == "TIFF":
        _check_tiff(image, options)
    if name == "JPEG":
        _check_scans(data.count(_SCAN), image.size, options)
    return image, file


def to_rgb(
    image: Image.Image,
    background: tuple[int, int, int],
    orientation: Callable[[Image.Image], Any] = lambda image: orientation_in(image.info),
) -> np.ndarray:
    """Decode an image to uint8 [H, W, 3] and rotate it upright; transparent pixels are blended with `background`, and
    16-bit grey keeps its upper 8 bits.

    background: RGB. orientation: returns the EXIF orientation of the decoded image, by default from the metadata of its
    file. Raises MediaError for damage, and for pixels that are neither colours nor grey.
    """
    name = image.format or "picture"
    _decoding(name, image.load)
    turn = _TURNS.get(orientation(image))
    if image.mode in _DEEP_MODES:
        image = _decoding(name, lambda: _eight_bits(image))
    if image.has_transparency_data:
        image = _decoding(name, lambda: _on_colour(image, background))
    elif image.mode not in _PLAIN_MODES:
        raise MediaError(f"has pixels of mode {image.mode!r}; allowed: colours or grey of 1 to 16 bits")
    image = _decoding(name, lambda: image.convert("RGB"))
    return np.array(image if turn is None else image.transpose(turn))


def _decode(data: bytes, options: MediaOptions, budget: PixelBudget) -> np.ndarray:
    """Return the pixels of an image file, uint8 [H, W, 3] RGB and upright, and take them from the budget.

    data: bytes of the file. Raises MediaError for a file that is damaged or exceeds the limits of options or budget.
    """
    image, _ = open_image(data, options)
    budget.take(image.width * image.height)
    return to_rgb(image, options.background)


def _decoding(name: str, step: Any) -> Any:
    """Call `step`, without arguments, and return its result; any exception of a decoder is raised as MediaError.

    name: type of the file, for the error.
    """
    try:
        return step()
    except MediaError:
        raise
    except MemoryError:
        raise MediaError(f"is a {name} too large for the available memory") from None
    except Exception as error:  # includes struct, zlib, index and key errors: decoders check little
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise MediaError(f"is a {name} that is damaged or cut short ({why})") from None


def _check_scans(count: int, size: tuple[int, int], options: MediaOptions) -> None:
    """Raise MediaError for a JPEG whose scans decode more than _FULL_SCANS * max_image_pixels pixels altogether. count:
    scans. size: (width, height).
    """
    width, height = size
    most = _FULL_SCANS * options.max_image_pixels
    if count * width * height > most:
        allowed = f"scans times pixels may be {most} ({_FULL_SCANS} times max_image_pixels)"
        raise MediaError(f"is a JPEG of {count} scans of {width} x {height} pixels; {allowed}")


def _check_entries(data: bytes) -> None:
    """Raise MediaError for a TIFF with an entry of more than _MAX_VALUES values other than bytes, before they are read.
    data: bytes of the file.
    """
    for entry in first_directory(data):
        if entry.count > _MAX_VALUES and entry.kind not in _BYTES:
            problem = f"is a TIFF whose entry {entry.tag} has {entry.count} values"
            raise MediaError(f"{problem}; allowed: {_MAX_VALUES}")


def _check_tiff(image: Any, options: MediaOptions) -> None:
    """Raise MediaError for an opened TIFF whose compression is not allowed, whose sizes are no integers >= 1, with a
    tile of more than options.max_image_pixels pixels, or with tiles of more than twice as many altogether.
    """
    compression = image.info.get("compression")
    if compression not in _COMPRESSIONS:
        raise MediaError(f"is a TIFF compressed by {compression!r}; allowed: {', '.join(_COMPRESSIONS)}")
    # A tile is decoded as a whole, however little of it the image shows.
    sides = [image.tag_v2.get(tag, 1) for tag in (_WIDTH, _LENGTH, _TILE_WIDTH, _TILE_LENGTH)]
    if any(type(side) is not int or side < 1 for side in sides):
        raise MediaError("is a TIFF without whole numbers for its sizes")
    width, height, tile_width, tile_length = sides
    num_tiles = -(-width // tile_width) * -(-height // tile_length)
    # As many again may lie outside of the image: its last row and column of tiles.
    tile = tile_width * tile_length
    if tile > options.max_image_pixels or num_tiles * tile > 2 * options.max_image_pixels:
        raise MediaError(f"is a TIFF with tiles of {tile_width} x {tile_length} pixels, {num_tiles} of them")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) in pixels from the first chunk of a WebP file (RFC 9649); missing bytes count as 0.

    data: bytes of the file. A chunk of an unknown kind is read as VP8, so that the sizes may be arbitrary.
    """
    kind, body = data[12:16], data[20:30].ljust(10, b"\0")
    if kind == b"VP8X":
        return int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF


def _noted_orientation(image: Image.Image) -> Any:
    """Return the EXIF orientation of a PIL image object, whose metadata Python code may have changed; unchecked,
    usually 1 to 8.

    None if it has none or it cannot be read.
    """
    try:
        return image.getexif().get(ORIENTATION)
    except Exception:
        return None


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return 16-bit grey reduced to its upper 8 bits: mode L, or LA if its metadata name a transparent grey value.
    Pillow reduces 16-bit colours in the same way.
    """
    deep = np.asarray(image)
    grey = Image.fromarray((deep >> 8).astype(np.uint8))
    if "transparency" not in image.info:
        return grey
    alpha = np.where(deep == image.info["transparency"], 0, 255).astype(np.uint8)
    return Image.merge("LA", (grey, Image.fromarray(alpha)))


def _on_colour(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Return the image as RGB, its transparent pixels blended with the RGB colour `background`."""
    rgba = image.convert("RGBA")
    under = Image.new("RGB", image.size, background)
    under.paste(rgba, mask=rgba.getchannel("A"))
    return under


def _from_array(value: np.ndarray, options: MediaOptions, budget: PixelBudget) -> np.ndarray:
    """Convert an array of a form that `read_image` accepts (grey, RGB, or RGBA, which is blended with
    options.background) to uint8 [H, W, 3], and take its pixels from the budget. A contiguous array of this form is
    returned itself, not copied.

    Raises MediaError for other arrays, and for too many pixels.
    """
    channels = value.shape[2] if value.ndim == 3 else 1
    if value.dtype != np.uint8 or value.ndim not in (2, 3) or channels not in (1, 3, 4):
        problem = f"is an array of {value.dtype} and shape {list(value.shape)}"
        raise MediaError(f"{problem}; allowed: {_ARRAYS}")
    check_size((value.shape[1], value.shape[0]), options)
    budget.take(value.shape[0] * value.shape[1])
    if channels == 4:
        return to_rgb(Image.fromarray(np.ascontiguousarray(value)), options.background)
    if channels == 1:
        return np.repeat(value.reshape(*value.shape[:2], 1), 3, axis=2)
    return np.ascontiguousarray(value)
