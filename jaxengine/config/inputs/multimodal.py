"""Options of images, videos and sounds in requests: number, sources, sizes. Names are vLLM's.

By default everything must be in the request itself: no address is fetched and no file is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.values import plain, read_size, whole_number

IMAGE, VIDEO = "image", "video"
MODALITIES = (IMAGE, VIDEO)
# Sounds: in prompts, or the input of models that cross-attend to them.
AUDIO = "audio"
# Default limit of a sound, in seconds.
MAX_AUDIO_SECONDS = 7200
# Default limit of items of one modality in a prompt, as in vLLM.
MAX_ITEMS = 999
ANY_DOMAIN = "*"
# Above this number of pixels Pillow warns of a decompression bomb.
MAX_IMAGE_PIXELS = 89_478_485
MAX_FRAMES = 4096
# What limit_mm_per_prompt may give for a modality: vLLM's names. Sounds are encoded in windows of one length, so that
# the length of the longest one, in samples, changes nothing.
_KEYS = {
    IMAGE: ("count", "width", "height"),
    VIDEO: ("count", "num_frames", "width", "height"),
    AUDIO: ("count", "length"),
}
# The value of media_proxy for the proxies that HTTP_PROXY, HTTPS_PROXY and NO_PROXY name.
PROXY_OF_ENVIRONMENT = "environment"
_PROXY = re.compile(r"http://([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})/?")
_WHITE = (255, 255, 255)


@dataclass(frozen=True, kw_only=True)
class MediaOptions:
    """The fields of EngineConfig about images, videos and sounds in requests.

    Attributes:
      limit_mm_per_prompt: limits of images, videos and sounds ("audio") per prompt, {"image": 2, "video": 0} or
        image=2,video=0; as in vLLM, a dict with the count and the sizes to prepare for (width, height, num_frames)
        may replace a number. The default is 999.
      language_model_only: accept only text, whatever limit_mm_per_prompt says; no tower is loaded.
      allowed_media_domains: hosts from which images may be fetched over http and https; "*" for all. None by default.
        Private addresses are only contacted if listed here as addresses, not through a name that resolves to them.
      allowed_local_media_path: folder from which file:// may be read; "" for none.
      media_loading_thread_count: number of threads per process that decode, and as many that fetch and that preprocess.
      mm_processor_kwargs: options of the model's processor of images and videos, a dict of its arguments.
      enable_mm_embeds: also accept embeddings instead of images. They bypass the tower and only their size and type are
        checked, so allow it only to clients that may be trusted with the model's input.
      enable_prompt_embeds: also accept embeddings instead of a prompt's tokens, of a model that reads text. Only their
        size and type are checked, so allow it only to clients that may be trusted with the model's input.
      media_io_kwargs: how files are read: {"video": {"num_frames": 32, "fps": 2}, "image": {"rgba_background_color":
        [255, 255, 255]}}. num_frames are sampled evenly from a video, -1 for all; transparent pixels are blended with
        the colour.
      max_media_bytes: limit of an image or video file, in bytes.
      max_image_pixels: limit of an image, or frame of a video, in pixels.
      max_media_pixels: limit of all images and frames of a prompt, in pixels; each takes three bytes.
      media_fetch_timeout: seconds within which a file must arrive from another host.
      media_proxy: an HTTP proxy through which hosts are reached, as http://HOST:PORT; "environment" for that of
        HTTP_PROXY, HTTPS_PROXY and NO_PROXY; "" for none. It is asked to CONNECT to an address: as without a proxy,
        this process resolves names and refuses private addresses.
      max_audio_seconds: limit of all sounds of a prompt, or of one that is transcribed, in seconds; an hour takes 230
        MB.
    """

    limit_mm_per_prompt: Mapping[str, Any] | str | None = None
    language_model_only: bool = False
    allowed_media_domains: tuple[str, ...] = field(default=(), metadata={"nargs": "+"})
    allowed_local_media_path: str = ""
    media_loading_thread_count: int = 8
    mm_processor_kwargs: Mapping[str, Any] | None = None
    enable_mm_embeds: bool = False
    enable_prompt_embeds: bool = False
    media_io_kwargs: Mapping[str, Any] | None = None
    max_media_bytes: int = 32 << 20
    max_image_pixels: int = 50_000_000
    max_media_pixels: int = 1 << 26
    media_fetch_timeout: float = 10.0
    media_proxy: str = ""
    max_audio_seconds: int = MAX_AUDIO_SECONDS

    def mm_limit(self, modality: str) -> int:
        """Return how many items of a modality one prompt may have: 0 with language_model_only, MAX_ITEMS if
        limit_mm_per_prompt gives no limit.
        """
        return 0 if self.language_model_only else self._limits(modality).get("count", MAX_ITEMS)

    def mm_size(self, modality: str) -> tuple[int, int] | None:
        """Return (height, width) in pixels of a modality's largest item if limit_mm_per_prompt gives them, otherwise
        None.
        """
        limits = self._limits(modality)
        return (limits["height"], limits["width"]) if "height" in limits else None

    def mm_frames(self, modality: str) -> int | None:
        """Return the frames of a modality's largest item if limit_mm_per_prompt gives them, otherwise None."""
        return self._limits(modality).get("num_frames")

    @property
    def background(self) -> tuple[int, int, int]:
        """RGB colour, from 0 to 255 each, with which transparent pixels are blended; white by default."""
        return tuple(self._io(IMAGE).get("rgba_background_color", _WHITE))

    @property
    def video_sampling(self) -> tuple[int, float]:
        """Limits (number of frames, frames per second) of the frames sampled from a video, by default (32, -1); -1 for
        no limit.
        """
        chosen = self._io(VIDEO)
        return chosen.get("num_frames", 32), chosen.get("fps", -1)

    def _limits(self, modality: str) -> Mapping[str, int]:
        """Return what limit_mm_per_prompt gives of _KEYS for a modality; {} for none."""
        limits: Any = self.limit_mm_per_prompt or {}
        return limits.get(modality, {})

    def _io(self, modality: str) -> Mapping[str, Any]:
        """Return the options of media_io_kwargs for a modality; {} for none."""
        return (self.media_io_kwargs or {}).get(modality, {})


# Smallest and largest values of those of _KEYS that are no sizes in pixels.
_BOUNDS = {"count": (0, MAX_ITEMS), "num_frames": (1, MAX_FRAMES), "length": (1, 1 << 40)}


def _read_limits(value: Any) -> dict[str, dict[str, int]]:
    """Return limit_mm_per_prompt as a dict, by modality, of dicts with those of _KEYS given.

    value: a dict, its JSON, or text such as image=2,video=0; a number stands for a count. Raises ConfigError for other
    modalities, keys and numbers, and for a width or a height alone.
    """
    name = "limit_mm_per_prompt"
    limits: dict[str, dict[str, int]] = {}
    for modality, given in _pairs(name, value).items():
        allowed = (*MODALITIES, AUDIO)
        if modality not in allowed:
            raise ConfigError.because(name, f"{name} has {modality!r}", f"it may have {', '.join(allowed)}")
        sizes = given if isinstance(given, Mapping) else {"count": given}
        limits[modality] = {}
        for key, each in sizes.items():
            if key not in _KEYS[modality]:
                problem = f"{name}.{modality} has {key!r}"
                raise ConfigError.because(name, problem, f"it may have {', '.join(_KEYS[modality])}")
            limits[modality][key] = _whole(f"{name}.{modality}.{key}", each, *_BOUNDS.get(key, (1, 1 << 16)))
        if ("width" in limits[modality]) != ("height" in limits[modality]):
            problem = f"{name}.{modality} has only one of width and height"
            raise ConfigError.because(name, problem, "give both, or neither")
    return limits


def _pairs(name: str, value: Any) -> Mapping[str, Any]:
    """Return an option's value as a dict. value: a dict, a JSON object, or text such as image=2,video=0.

    name: name of the option. Raises ConfigError, which names it, for other values and for keys that are not strings.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            pairs = [pair.partition("=") for pair in value.split(",")]
            if not all(key.strip() and re.fullmatch(r"\s*\d{1,9}\s*", count) for key, _, count in pairs):
                raise ConfigError(name, value, '{"image": 2, "video": 0} or image=2,video=0') from None
            value = {key.strip(): int(count) for key, _, count in pairs}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(name, value, 'a dict such as {"image": 2, "video": 0}')
    return value


def _read_domains(value: Any) -> tuple[str, ...]:
    """Return allowed_media_domains normalised for comparison: lower case, no trailing dot, IDNA-encoded.

    value: a list or tuple of strings. Raises ConfigError for anything that is not a list of host names.
    """
    name = "allowed_media_domains"
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) and each for each in value):
        raise ConfigError(name, value, "a list of hosts")
    if wrong := next((each for each in value if set(each) & set("/@ ?#\\[]")), None):
        raise ConfigError.because(name, f"{name} has {wrong!r}", "give names of hosts, such as upload.wikimedia.org")
    try:
        return tuple(each.lower().rstrip(".").encode("idna").decode() for each in value)
    except UnicodeError:
        raise ConfigError(name, value, "a list of hosts") from None


def _read_io(value: Any) -> dict[str, dict[str, Any]]:
    """Return media_io_kwargs, a dict or its JSON, as a dict of dicts with checked options, by modality.

    Raises ConfigError for other modalities, options and values.
    """
    name = "media_io_kwargs"
    chosen: dict[str, dict[str, Any]] = {}
    for modality, given in _pairs(name, value).items():
        if modality not in _IO or not isinstance(given, Mapping):
            problem = f"{name} has {modality!r}: {given!r}"
            raise ConfigError.because(name, problem, f"it may have {' and '.join(_IO)}, each a dict")
        readers = _IO[modality]
        if wrong := next((key for key in given if key not in readers), None):
            raise ConfigError.because(name, f"{name}.{modality} has {wrong!r}", f"it may have {', '.join(readers)}")
        chosen[modality] = {key: readers[key](f"{name}.{modality}.{key}", plain(each)) for key, each in given.items()}
    return chosen


def _read_colour(name: str, value: Any) -> list[int]:
    """Return an RGB colour as a list of three ints from 0 to 255.

    Raises ConfigError, which names the option `name`, for other values.
    """
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise ConfigError(name, value, "three numbers from 0 to 255, red, green and blue")
    return [_whole(name, each, 0, 255) for each in value]


def _read_mode(name: str, value: Any) -> str:
    """Return an image mode, which must be "RGB". Raises ConfigError, which names the option `name`, for other modes."""
    if value != "RGB":
        raise ConfigError(name, value, "'RGB'")
    return value


def _read_num_frames(name: str, value: Any) -> int:
    """Return a number of frames, -1 or from 1 to MAX_FRAMES.

    Raises ConfigError, which names the option `name`, for other values.
    """
    return value if type(value) is int and value == -1 else _whole(name, value, 1, MAX_FRAMES)


def _read_fps(name: str, value: Any) -> float:
    """Return frames per second, -1 or more than 0 and at most 1000.

    Raises ConfigError, which names the option `name`, for other values.
    """
    if type(value) not in (int, float) or not (value == -1 or 0 < value <= 1000):
        raise ConfigError(name, value, "-1, or more than 0 and at most 1000")
    return value


_IO: dict[str, dict[str, Callable[[str, Any], Any]]] = {
    IMAGE: {"rgba_background_color": _read_colour, "image_mode": _read_mode},
    VIDEO: {"num_frames": _read_num_frames, "fps": _read_fps},
}


def _read_folder(value: Any) -> str:
    """Return allowed_local_media_path unchanged, an absolute path or "". Raises ConfigError for other values; whether
    the folder exists is not checked.
    """
    name = "allowed_local_media_path"
    if not isinstance(value, str):
        raise ConfigError(name, value, "a folder, or '' for none")
    if value and not value.startswith("/"):
        raise ConfigError.because(name, f"{name} is {value!r}, which is not an absolute path", "begin it with /")
    return value


def _read_seconds(value: Any) -> float:
    """Return media_fetch_timeout as a float, 0.1 to 3600 seconds. Raises ConfigError for other values."""
    if type(value) not in (int, float) or not 0.1 <= value <= 3600:
        raise ConfigError("media_fetch_timeout", value, "0.1 to 3600 seconds")
    return float(value)


def _read_proxy(value: Any) -> str:
    """Return media_proxy without a final slash; "" for none, PROXY_OF_ENVIRONMENT for that of the environment.

    Raises ConfigError, whose message omits credentials, for anything but http://HOST:PORT with a port from 1 to 65535.
    """
    allowed = "http://HOST:PORT, 'environment', or '' for none"
    if not isinstance(value, str):
        raise ConfigError("media_proxy", value, allowed)
    found = _PROXY.fullmatch(value)
    if value in ("", PROXY_OF_ENVIRONMENT) or found is not None and 0 < int(found[2]) <= 65535:
        return value.rstrip("/")
    raise ConfigError("media_proxy", "an address with credentials" if "@" in value else value, allowed)


def _number(name: str, least: int, most: int) -> Callable[[Any], int]:
    """Return a reader of the option `name`, whose value is an integer from `least` to `most` or a size such as "4k".

    The reader returns an int, and raises ConfigError for other values.
    """

    def read(value: Any) -> int:
        """Return the value as an int. Raises ConfigError if it is not a size or out of range."""
        if isinstance(value, str):
            try:
                value = read_size(value)
            except ValueError as error:
                raise ConfigError.because(name, f"{name} cannot be read: {error}", "write 4096, 4k or 4G") from None
        return _whole(name, value, least, most)

    return read


def _whole(name: str, value: Any, least: int, most: int) -> int:
    """Return a whole number from `least` to `most` as an int.

    Raises ConfigError, which names the option `name`, for other values.
    """
    value = whole_number(plain(value))
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(name, value, f"a whole number, {least} to {most}")
    return value


# Readers of EngineConfig's fields. Each raises ConfigError for invalid values, and accepts its own result.
READERS: dict[str, Callable[[Any], Any]] = {
    "limit_mm_per_prompt": _read_limits,
    "allowed_media_domains": _read_domains,
    "allowed_local_media_path": _read_folder,
    "media_loading_thread_count": _number("media_loading_thread_count", 1, 256),
    "mm_processor_kwargs": lambda value: dict(_pairs("mm_processor_kwargs", value)),
    "media_io_kwargs": _read_io,
    "max_media_bytes": _number("max_media_bytes", 1, 1 << 31),
    "max_image_pixels": _number("max_image_pixels", 1, MAX_IMAGE_PIXELS),
    "max_media_pixels": _number("max_media_pixels", 1, 1 << 34),
    "media_fetch_timeout": _read_seconds,
    "media_proxy": _read_proxy,
    "max_audio_seconds": _number("max_audio_seconds", 1, 1 << 17),
}
