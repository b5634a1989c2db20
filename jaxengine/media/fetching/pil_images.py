"""PIL images for a user's program, by vLLM's names: fetching, conversion, and encoding for messages."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.inputs.multimodal import ANY_DOMAIN
from jaxengine.media.decoding.bounds import PixelBudget
from jaxengine.media.decoding.images import read_image, to_rgb
from jaxengine.media.fetching.fetch import fetch, scheme_of


def fetch_image(image_url: str, image_io_kwargs: Mapping[str, Any] | None = None) -> Image.Image:
    """Return the image at image_url, a data:, http(s): or file: address or a file's name, as RGB and upright.

    image_io_kwargs: options of media_io_kwargs for images; None for the defaults. Any public host and any file is read,
    so the address must come from a trusted source. Blocks. Raises MediaError for an image that cannot be used,
    ConfigError for unknown options.
    """
    io_kwargs = None if image_io_kwargs is None else {"image": dict(image_io_kwargs)}
    options = EngineConfig(allowed_media_domains=(ANY_DOMAIN,), allowed_local_media_path="/", media_io_kwargs=io_kwargs)
    value = fetch(image_url, options) if scheme_of(image_url) else Path(image_url)
    return Image.fromarray(read_image(value, options, PixelBudget(options.max_media_pixels)))


def convert_image_mode(
    image: Image.Image, to_mode: str, background_color: Sequence[int] = (255, 255, 255)
) -> Image.Image:
    """Return an image converted to a mode of PIL. For "RGB" it is also rotated upright, and transparent pixels are
    blended with the background.

    background_color: red, green and blue, 0 to 255. Other modes are left to PIL, which raises ValueError for those it
    cannot make. Raises MediaError for "RGB" of pixels that are neither colours nor grey.
    """
    if to_mode != "RGB":
        return image.convert(to_mode)
    red, green, blue = background_color
    return Image.fromarray(to_rgb(image, (red, green, blue)))


def encode_image_url(image: Image.Image, *, image_mode: str | None = "RGB", format: str = "PNG") -> str:
    """Return the data: URL of an image, for `image_url` of a message.

    image_mode: mode to which `convert_image_mode` converts it first; None keeps its mode. format: Pillow's name of the
    file format. Raises the errors of `convert_image_mode`, KeyError for an unknown format, OSError for one that cannot
    hold the mode.
    """
    converted = image if image_mode is None else convert_image_mode(image, image_mode)
    file = io.BytesIO()
    converted.save(file, format)
    return f"data:image/{format.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
