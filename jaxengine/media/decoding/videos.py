"""Decodes video files and Python frames to a video: sampled frames with their times.

Animated images are decoded here, video containers in video_files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.base.frames import MAX_SOURCE_FRAMES, Video, check_count, sample_frames
from jaxengine.media.decoding.bounds import PixelBudget
from jaxengine.media.decoding.file_types import described, image_type, video_type
from jaxengine.media.decoding.images import check_bytes, check_size, open_image, read_file, read_image, to_rgb
from jaxengine.media.decoding.video_files import decode_video

_ANIMATED = ("GIF", "WebP", "PNG")
# Duration that browsers assume for a frame without one.
_DEFAULT_SECONDS = 0.1
# Limits of the metadata of decoded frames, within which their times are finite.
_MOST_FPS, _MOST_TOTAL = 1e6, 2**31 - 1
_METADATA = ("fps", "frames_indices", "total_num_frames")
FORMS = "the bytes or Path of a file, uint8 frames [N, H, W, 3], a list of images, or (either, dict of fps, ...)"


def read_video(value: Any, options: MediaOptions, budget: PixelBudget) -> Video:
    """Return a video: sampled frames with their times.

    Args:
      value: bytes or pathlib.Path of a file, whose frames are sampled by options.video_sampling; or frames, which are
        all used: uint8 [N, H, W, 3], a list of images of one size (see read_image), or a pair of these and a dict with
        fps, frames_indices and total_num_frames; or a Video.
      options: limits.
      budget: the prompt's, from which the pixels of all frames are taken.

    Blocks while it reads and decodes. A Video is returned itself, and a contiguous array of frames is not copied.
    Raises MediaError for other values, a file that is damaged, of an unknown type or too large, too many frames or
    pixels, and contradictory metadata.
    """
    if isinstance(value, Path):
        value = read_file(value, options.max_media_bytes)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _decode(bytes(value), options, budget)
    if isinstance(value, Video):
        _check_frames(value.frames, options, budget)
        return value
    about: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, about = value
    if isinstance(value, np.ndarray):
        _check_frames(value, options, budget)
        return _with_times(np.ascontiguousarray(value), about)
    if isinstance(value, (list, tuple)) and value:
        return _with_times(_joined(value, options, budget), about)
    raise MediaError(f"is {'an empty' if value == [] else 'a'} {type(value).__name__}; allowed: {FORMS}")


def _decode(data: bytes, options: MediaOptions, budget: PixelBudget) -> Video:
    """Return the sampled frames of a video file or an animated image, given as its bytes; take their pixels from the
    budget.

    Raises MediaError for other types, damage, and more bytes, frames or pixels than allowed.
    """
    check_bytes(len(data), options.max_media_bytes)
    if video_type(data) is not None:
        return decode_video(data, options, budget)
    if image_type(data) not in _ANIMATED:
        raise MediaError(f"{described(data)}; allowed: MP4, WebM, and animated GIF, WebP and PNG")
    return _animation(data, options, budget)


def _animation(data: bytes, options: MediaOptions, budget: PixelBudget) -> Video:
    """Return the sampled frames of an animated image, which must have one size, with their times; take their pixels
    from the budget. data: bytes of the file. Raises MediaError for a damaged file, too many frames or pixels, and after
    the processor time of TimedFile.
    """
    image, file = open_image(data, options)
    name = image.format or "animation"

    def go_to(frame: int) -> None:
        file.check()
        try:
            image.seek(frame)
            # Frames that are not sampled, too: WebP would decode them all at once, without checking the time, and does
            # not have their durations before.
            image.load()
        except MediaError:
            raise
        except Exception as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise MediaError(f"is a {name} that is damaged or cut short in frame {frame} ({why})") from None

    total = _count(image, name)
    seconds: list[float] = []
    if options.video_sampling[1] > 0:  # the number of frames depends on the total duration
        for number in range(total):
            go_to(number)
            seconds.append(_seconds(image))
    indices = sample_frames(total, sum(seconds) if seconds else None, options.video_sampling)
    check_count(len(indices))
    budget.take(len(indices) * image.width * image.height)
    size, frames, wanted, seconds = image.size, [], set(indices.tolist()), []
    for number in range(total):
        go_to(number)
        seconds.append(_seconds(image))
        if number in wanted:
            if image.size != size:
                raise MediaError(f"is a {name} whose frame {number} has another size than the first")
            frames.append(to_rgb(image, options.background))
    starts = np.concatenate(([0.0], np.cumsum(seconds)))
    return Video(np.stack(frames), indices, starts[indices], total / float(starts[-1]), total)


def _count(image: Any, name: str) -> int:
    """Return the number of frames of an animation that Pillow has opened. name: the file's type, for errors. Raises
    MediaError for damage, and unless it is 1 to MAX_SOURCE_FRAMES.
    """
    try:
        total = getattr(image, "n_frames", 1)
    except MediaError:
        raise
    except Exception:
        raise MediaError(f"is a {name} that is damaged or cut short") from None
    if not 1 <= total <= MAX_SOURCE_FRAMES:
        raise MediaError(f"has {total} frames; allowed: 1 to {MAX_SOURCE_FRAMES}")
    return total


def _seconds(image: Any) -> float:
    """Return the duration of an animation's current frame in seconds; _DEFAULT_SECONDS if the file gives none."""
    duration = image.info.get("duration", 0)
    known = isinstance(duration, (int, float)) and 0 < duration < 1e9
    return duration / 1000 if known else _DEFAULT_SECONDS


def _joined(pictures: Sequence[Any], options: MediaOptions, budget: PixelBudget) -> np.ndarray:
    """Decode images and return them as frames uint8 [N, H, W, 3]; take their pixels from the budget.

    pictures: values for `read_image`. Raises MediaError if their sizes differ, for no or more than MAX_FRAMES images,
    and for an image that cannot be used.
    """
    check_count(len(pictures))
    frames = []
    for number, picture in enumerate(pictures):
        try:
            frames.append(read_image(picture, options, budget))
        except MediaError as error:
            raise MediaError(f"has a frame {number} that {error}") from None
        if frames[-1].shape != frames[0].shape:
            sizes = " and ".join(f"{frame.shape[1]} x {frame.shape[0]}" for frame in (frames[0], frames[-1]))
            raise MediaError(f"has frames of {sizes} pixels; all must have one size")
    return np.stack(frames)


def _check_frames(frames: np.ndarray, options: MediaOptions, budget: PixelBudget) -> None:
    """Check decoded frames, and take their pixels from the budget.

    Raises MediaError for arrays other than uint8 [N, H, W, 3], and for too many frames or pixels.
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        problem = f"is an array of {frames.dtype} and shape {list(frames.shape)}"
        raise MediaError(f"{problem}; allowed: uint8 of shape [N, H, W, 3]")
    check_count(len(frames))
    check_size((frames.shape[2], frames.shape[1]), options)
    budget.take(frames.size // 3)


def _with_times(frames: np.ndarray, about: Mapping[str, Any]) -> Video:
    """Return a Video of decoded frames, uint8 [N, H, W, 3].

    about: fps, frames_indices and total_num_frames, as far as given. Without fps the times are unknown (None); by
    default the indices count from 0, and the last frame is the source's last. An index may occur again, as when more
    frames are sampled than there are. Raises MediaError for other keys, an fps out of range, a total or an index above
    _MOST_TOTAL, and indices that are not N non-decreasing numbers below the total.
    """
    if wrong := next((key for key in about if key not in _METADATA), None):
        raise MediaError(f"has {str(wrong)[:100]!r} in addition to its frames; allowed: {', '.join(_METADATA)}")
    count, fps = len(frames), about.get("fps")
    if fps is not None and not (isinstance(fps, (int, float)) and 1 / _MOST_FPS <= fps <= _MOST_FPS):
        raise MediaError(f"has an fps that is not a number from {1 / _MOST_FPS:g} to {_MOST_FPS:g}")
    try:
        indices = np.asarray(about.get("frames_indices", range(count)))
        total = int(about.get("total_num_frames", 0)) or int(indices.max(initial=count - 1)) + 1
    except (TypeError, ValueError, OverflowError):
        indices, total = np.zeros(0), 0
    if total > _MOST_TOTAL:
        raise MediaError(f"has a total_num_frames or frames_indices above {_MOST_TOTAL}")
    if indices.shape != (count,) or indices.dtype.kind not in "iu" or (np.diff(indices.astype(np.int64)) < 0).any():
        raise MediaError(f"has frames_indices that are not {count} non-decreasing whole numbers")
    if not 0 <= indices[0] <= indices[-1] < total:
        raise MediaError(f"has frames_indices beyond its total_num_frames, {total}")
    indices = indices.astype(np.int64)
    return Video(frames, indices, None if fps is None else indices / fps, None if fps is None else float(fps), total)
