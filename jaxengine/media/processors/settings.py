"""Settings of image and video processors, in the formats of transformers 4 and 5, and pixel transforms.

NumPy and Pillow only. Results are those of transformers' processors with Pillow (`backend="pil"`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import read_object
from jaxengine.scheduler.base.errors import RequestError

# The file of transformers 5 with all processors, and the files of transformers 4 with one each.
WHOLE = "processor_config.json"
IMAGES, VIDEOS = ("image_processor", "preprocessor_config.json"), ("video_processor", "video_preprocessor_config.json")
OPTIONS = "mm_processor_kwargs"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Limits of pixels of a side, and of an image, in settings and requests.
MAX_SIDE, MAX_PIXELS = 1 << 14, 1 << 28
# Limit of the numbers of a pixel transform, so that float32 can represent its results.
_MOST = 1e6
# Frames per second of a video that does not say it, as in transformers, and the limit of its times, which timedelta
# can write.
UNKNOWN_FPS, _MOST_SECONDS = 24.0, 1e9


def read_settings(folder: Path, *places: tuple[str, str], needed: bool = True) -> tuple[Path, ConfigFields]:
    """Return (file, settings) of a processor, from the first of `places` that the checkpoint has.

    folder: folder of the checkpoint. places: pairs of a key in the file of all processors (WHOLE) and the name of a
    file with only this processor. needed: whether it must have one of them; otherwise there may be no settings. Raises
    ModelFileError if one that is needed is missing, and for an unreadable file.
    """
    whole = read_object(folder, WHOLE) or {}
    for key, name in places:
        if isinstance(whole.get(key), Mapping):
            return folder / WHOLE, ConfigFields(whole[key])
        if (found := read_object(folder, name)) is not None:
            return folder / name, ConfigFields(found)
    if not needed:
        return folder / places[-1][1], ConfigFields({})
    raise ModelFileError(folder, f"has no {places[-1][1]}: a model that sees says there what it makes of images")


def switch(fields: ConfigFields, name: str, default: bool = True) -> bool:
    """Return the switch `name` of a processor: `default` if it is absent, off if it is null, as in transformers 5.
    Raises ModelConfigError for other values than true and false.
    """
    return fields.boolean(name, default, null_is_false=True)


def token_text(path: Path, found: Mapping[str, Any], name: str, usual: str) -> str:
    """Return the text of the token `name` in a file's content, where it is a text or {"content": text}; `usual` if it
    is missing.

    path: the file, for errors. found: its content. Raises ModelFileError for other values.
    """
    text = found.get(name)
    text = text.get("content") if isinstance(text, Mapping) else usual if text is None else text
    if not isinstance(text, str) or not text:
        raise ModelFileError(path, f"{name} must be a text, got {str(text)[:100]!r}")
    return text


def token_texts(folder: Path | str, **usual: str) -> list[str]:
    """Return the texts of tokens that a checkpoint's tokenizer_config.json names, at its top level or else in
    extra_special_tokens.

    folder: of the checkpoint. usual: by name, in the order of the result, the text of a token that is missing. Raises
    ModelFileError for a value that is not text.
    """
    path = Path(folder) / "tokenizer_config.json"
    found = read_object(folder, path.name) or {}
    more = found.get("extra_special_tokens")
    found = {**(more if isinstance(more, Mapping) else {}), **found}
    return [token_text(path, found, *each) for each in usual.items()]


@dataclass(frozen=True)
class Pixels:
    """Pixel transform: resizing, and (byte * scale - mean) / std per colour. resample: number of Pillow's filter for
    all resizing.
    """

    resample: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(cls, fields: ConfigFields) -> Pixels:
        """Return the transform in a processor's settings: resample, rescale_factor unless do_rescale is false, and
        image_mean and image_std unless do_normalize is false.

        Defaults are bicubic resizing, bilinear for a null resample as in transformers, and scale 1/255; mean and
        standard deviation have none. Raises ModelConfigError for an invalid field, and unless do_resize is true or
        absent.
        """
        if not switch(fields, "do_resize"):
            raise fields.fail("do_resize", "true or absent")
        usual = Image.Resampling.BILINEAR if "resample" in fields.raw else Image.Resampling.BICUBIC
        resample = fields.value("resample", int(usual))
        if type(resample) is not int or not 0 <= resample <= 5:
            raise fields.fail("resample", "the number of one of Pillow's filters, 0 to 5")
        scale = fields.number("rescale_factor", 1 / 255) if switch(fields, "do_rescale") else 1.0
        if scale > _MOST:
            raise fields.fail("rescale_factor", f"a number > 0 and <= {_MOST:g}")
        if not switch(fields, "do_normalize"):
            return cls(resample, scale, (0.0,) * 3, (1.0,) * 3)
        return cls(resample, scale, _colours(fields, "image_mean"), _colours(fields, "image_std", least=1 / _MOST))

    def resized(self, picture: np.ndarray, height: int, width: int) -> np.ndarray:
        """Return uint8[H, W, 3] resized to uint8[height, width, 3]; the array itself if it has that size."""
        if picture.shape[:2] == (height, width):
            return picture
        return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling(self.resample)))

    def normalized(self, pictures: np.ndarray) -> np.ndarray:
        """Return uint8[..., 3] normalised to f32[..., 3]: (byte * scale - mean) / std."""
        scaled = pictures.astype(np.float32) * np.float32(self.scale)
        return (scaled - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)


def _colours(fields: ConfigFields, name: str, least: float = -_MOST) -> tuple[float, ...]:
    """Return the field `name`, a number for each of the three colours; a single number counts for all.

    Raises ModelConfigError for a number that is not from `least` to _MOST, and for a list of other than three.
    """
    value = fields.value(name)
    listed = value if isinstance(value, (list, tuple)) else [value] * 3
    if len(listed) != 3 or any(type(one) not in (int, float) or not least <= one <= _MOST for one in listed):
        raise fields.fail(name, f"three numbers from {least:g} to {_MOST:g}")
    return tuple(float(one) for one in listed)


def check_options(options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise RequestError for the first of the mm_processor_kwargs `options` whose name is not in `known`, the model's
    options.
    """
    for name in options:
        if name not in known:
            text = f"{OPTIONS} has {str(name)[:100]!r}; this model has {', '.join(known) or 'none'}"
            raise RequestError(text, param=OPTIONS, value=name)


def bad_option(name: str, value: Any, allowed: str) -> RequestError:
    """Return the error for an invalid value of the option `name` of mm_processor_kwargs. allowed: what it must be."""
    return RequestError(f"{OPTIONS}.{name} must be {allowed}, got {str(value)[:100]!r}", param=OPTIONS, value=value)


def check_pictures(modality: str, value: Any, modalities: tuple[str, ...], ndim: int) -> None:
    """Raise RequestError unless the value is an image, uint8[H, W, 3] (ndim 3), or frames, uint8[N, H, W, 3] (ndim 4),
    none of whose sizes is 0, and its modality is one of `modalities`, which the model takes.
    """
    if modality not in modalities:
        text = f"{modality} is not supported by this model; it takes {', '.join(modalities)}"
        raise RequestError(text, param=modality)
    form = "uint8[height, width, 3]" if ndim == 3 else "uint8[frames, height, width, 3]"
    sound = isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == ndim and value.shape[-1] == 3
    if not sound or 0 in value.shape:
        shown = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise RequestError(f"{modality} must be {form}, got {shown}", param=modality)


def tiles_of(canvas: np.ndarray, rows: int, columns: int) -> list[np.ndarray]:
    """Return the rows * columns equal parts of a canvas [H, W, 3], line by line."""
    height, width = len(canvas) // rows, canvas.shape[1] // columns
    cut = canvas.reshape(rows, height, columns, width, 3).swapaxes(1, 2)
    return list(cut.reshape(-1, height, width, 3))


def are_sizes(listed: Any, most: int) -> bool:
    """Whether a setting is a list of 1 to `most` pairs of sides, each of 1 to MAX_SIDE pixels."""
    if not isinstance(listed, (list, tuple)) or not 0 < len(listed) <= most:
        return False
    are_pairs = all(isinstance(each, (list, tuple)) and len(each) == 2 for each in listed)
    return are_pairs and all(type(side) is int and 1 <= side <= MAX_SIDE for each in listed for side in each)


def shown_at(video: Any, count: int, fps: float = UNKNOWN_FPS) -> np.ndarray:
    """Return the seconds f64[count] at which the `count` frames of a video are shown. video: frames.Video, or only its
    frames, which then follow each other. fps: frames per second if it does not say how many.
    """
    return np.asarray(getattr(video, "frames_indices", range(count))) / (getattr(video, "fps", None) or fps)


def check_seconds(seconds: Sequence[float]) -> None:
    """Raise RequestError for a video with a time beyond _MOST_SECONDS."""
    if not max(seconds) <= _MOST_SECONDS:
        problem = f"a video is of {max(seconds):.3g} seconds; allowed: {_MOST_SECONDS:.0e}"
        raise RequestError(problem, param="video", value=max(seconds))


def frames_of(modality: str, value: Any, modalities: tuple[str, ...]) -> np.ndarray:
    """Return the frames, uint8[N, H, W, 3], of a video, frames.Video or only its frames, or of an image, which is one.
    Raises the errors of `check_pictures`.
    """
    frames = value if modality == "image" else getattr(value, "frames", value)
    check_pictures(modality, frames, modalities, 3 if modality == "image" else 4)
    return frames[None] if modality == "image" else frames
