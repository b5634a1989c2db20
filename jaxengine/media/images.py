"""From files and from Python's pictures to pixels, uint8 [H, W, 3] RGB.

Files come from strangers: what a header can tell is checked before anything is decoded, only the decoders of file_types
see them, and a file that is cut short is refused, never filled up. Knows nothing of where files come from or of what a
model makes of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import BmpImagePlugin, GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin

from jaxengine.config.multimodal import MediaOptions
from jaxengine.media.bounds import PixelBudget, TimedFile
from jaxengine.media.errors import MediaError
from jaxengine.media.file_types import IMAGES, described, image_type
from models.weights.errors import ModelFileError
from models.weights.files import open_regular

ALLOWED = ", ".join(IMAGES)
# Each by itself: Image.open would ask every decoder there is, some of which start other programs.
_DECODERS = {
    "PNG": PngImagePlugin.PngImageFile,
    "JPEG": JpegImagePlugin.JpegImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
}
# Of TIFF. Others bring decoders of their own, some of which write to the log what strangers have them write.
_COMPRESSIONS = ("raw", "tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "packbits")
_TILE_WIDTH, _TILE_LENGTH = 322, 323
# Of a progressive JPEG, each of which goes over all pixels; encoders write about ten.
_MAX_SCANS = 100
_SCAN = b"\xff\xda"
# EXIF's orientation, 2 to 8, and what puts the picture upright.
_ORIENTATION = 0x0112
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


def read_image(value: Any, options: MediaOptions, budget: PixelBudget) -> np.ndarray:
    """The pixels of a picture, uint8 [H, W, 3] RGB.

    Args:
      value: a file's bytes, a file's pathlib.Path, a PIL.Image.Image, or a numpy array, which must hold uint8 from 0 to
        255 in the shape [H, W, 3], [H, W, 4] with alpha, [H, W, 1] or [H, W].
      options: its limits, and the colour under transparent pictures.
      budget: of the prompt, from which its pixels are taken.

    Raises MediaError.
    """
    if isinstance(value, Path):
        value = read_file(value, options.max_media_bytes)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _decode(bytes(value), options, budget)
    if isinstance(value, Image.Image):
        check_size(value.size, options)
        budget.take(value.width * value.height)
        return to_rgb(value, options.background)
    if isinstance(value, np.ndarray):
        return _from_array(value, options, budget)
    raise MediaError(f"is a {type(value).__name__}; allowed are the bytes or Path of a file, a PIL image, or {_ARRAYS}")


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes. Raises MediaError."""
    try:
        descriptor, size = open_regular(path)
        with open(descriptor, "rb") as file:
            data = b"" if size > limit else file.read(limit + 1)
    except (ModelFileError, OSError):
        raise MediaError("cannot be read: there is no such file, or none that may be read") from None
    check_bytes(max(size, len(data)), limit)
    return data


def check_bytes(size: int, limit: int) -> None:
    """Raises MediaError for a file that is too large."""
    if size > limit:
        raise MediaError(f"has {size} bytes or more; allowed are {limit} (max_media_bytes)")


def check_size(size: tuple[int, int], options: MediaOptions) -> None:
    """Raises MediaError for a picture of no pixels or too many. size: width and height."""
    width, height = size
    if not 1 <= width * height <= options.max_image_pixels or width < 1:
        allowed = f"1 to {options.max_image_pixels} (max_image_pixels)"
        raise MediaError(f"has {width} x {height} pixels; allowed are {allowed}")


def open_image(data: bytes, options: MediaOptions) -> tuple[Image.Image, TimedFile]:
    """A picture whose header has been read and whose pixels have not, and the file under it. Raises MediaError."""
    check_bytes(len(data), options.max_media_bytes)
    name = image_type(data)
    if name is None:
        raise MediaError(f"{described(data)}; allowed: {ALLOWED}")
    if name == "WebP":  # some versions of the decoder make room for all pixels before they tell how many there are
        check_size(_webp_size(data), options)
    if name == "JPEG" and data.count(_SCAN) > _MAX_SCANS:
        raise MediaError(f"is a JPEG of more than {_MAX_SCANS} scans, each of which decodes all of its pixels")
    file = TimedFile(data)
    image = _decoding(name, lambda: _DECODERS[name](file))
    check_size(image.size, options)
    if name == "TIFF":
        _check_tiff(image, options)
    return image, file


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> np.ndarray:
    """The pixels of a picture, decoded and upright, transparent ones laid on `background`. Raises MediaError."""
    name = image.format or "picture"
    _decoding(name, image.load)
    turn = _TURNS.get(_orientation(image))
    if image.mode in _DEEP_MODES:
        image = _decoding(name, lambda: _eight_bits(image))
    if image.has_transparency_data:
        image = _decoding(name, lambda: _on_colour(image, background))
    elif image.mode not in _PLAIN_MODES:
        raise MediaError(f"has pixels of mode {image.mode!r}; allowed are colours or grey of 1 to 16 bits")
    image = _decoding(name, lambda: image.convert("RGB"))
    return np.array(image if turn is None else image.transpose(turn))


def _decode(data: bytes, options: MediaOptions, budget: PixelBudget) -> np.ndarray:
    image, _ = open_image(data, options)
    budget.take(image.width * image.height)
    return to_rgb(image, options.background)


def _decoding(name: str, step: Any) -> Any:
    """The step's result; MediaError for whatever a decoder runs into."""
    try:
        return step()
    except MediaError:
        raise
    except MemoryError:
        raise MediaError(f"is a {name} for which there is no memory") from None
    except Exception as error:  # struct, zlib, index and key errors among them: decoders check little themselves
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise MediaError(f"is a {name} that is damaged or cut short ({why})") from None


def _check_tiff(image: Any, options: MediaOptions) -> None:
    compression = image.info.get("compression")
    if compression not in _COMPRESSIONS:
        raise MediaError(f"is a TIFF compressed by {compression!r}; allowed: {', '.join(_COMPRESSIONS)}")
    # A tile is decoded whole, however little of it the picture shows.
    width, length = (image.tag_v2.get(tag, 1) for tag in (_TILE_WIDTH, _TILE_LENGTH))
    if type(width) is not int or type(length) is not int or not 0 < width * length <= options.max_image_pixels:
        raise MediaError(f"is a TIFF with tiles of {width} x {length} pixels")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height that a WebP's first chunk tells (RFC 9649), 0 where it has none."""
    kind, body = data[12:16], data[20:30].ljust(10, b"\0")
    if kind == b"VP8X":
        return int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF


def _orientation(image: Image.Image) -> Any:
    """EXIF's, where it can be read: a camera's faulty note does no harm to the picture."""
    try:
        return image.getexif().get(_ORIENTATION)
    except Exception:
        return None


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits by its upper half, as Pillow reads colours of 16 bits."""
    deep = np.asarray(image)
    grey = Image.fromarray((deep >> 8).astype(np.uint8))
    if "transparency" not in image.info:
        return grey
    alpha = np.where(deep == image.info["transparency"], 0, 255).astype(np.uint8)
    return Image.merge("LA", (grey, Image.fromarray(alpha)))


def _on_colour(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    rgba = image.convert("RGBA")
    under = Image.new("RGB", image.size, background)
    under.paste(rgba, mask=rgba.getchannel("A"))
    return under


def _from_array(value: np.ndarray, options: MediaOptions, budget: PixelBudget) -> np.ndarray:
    channels = value.shape[2] if value.ndim == 3 else 1
    if value.dtype != np.uint8 or value.ndim not in (2, 3) or channels not in (1, 3, 4):
        problem = f"is an array of {value.dtype} and shape {list(value.shape)}"
        raise MediaError(f"{problem}; allowed is {_ARRAYS}")
    check_size((value.shape[1], value.shape[0]), options)
    budget.take(value.shape[0] * value.shape[1])
    if channels == 4:
        return to_rgb(Image.fromarray(np.ascontiguousarray(value)), options.background)
    if channels == 1:
        return np.repeat(value.reshape(*value.shape[:2], 1), 3, axis=2)
    return np.ascontiguousarray(value)
