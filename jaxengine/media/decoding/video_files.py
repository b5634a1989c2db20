"""Decodes video containers, MP4 and WebM, with PyAV (FFmpeg), which the extra `video` installs.

Limits what an untrusted file can reach of FFmpeg: one container chosen by its first bytes, no playlists, no other files
or addresses, and only the usual codecs.
"""

from __future__ import annotations

import io
import math
import time
from typing import Any

import numpy as np

from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.base.frames import MAX_SOURCE_FRAMES, Video, check_count, sample_frames
from jaxengine.media.decoding.bounds import MAX_SECONDS, PixelBudget
from jaxengine.media.decoding.file_types import MP4, WEBM, video_type
from jaxengine.media.decoding.images import check_size

# FFmpeg's names of demuxers; it never has to guess.
_DEMUXERS = {MP4: "mov", WEBM: "matroska"}
_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4")


def decode_video(data: bytes, options: MediaOptions, budget: PixelBudget) -> Video:
    """Decode frames of an MP4 or WebM file, upright, sampled by options.video_sampling.

    data: bytes of a type in file_types.VIDEOS. budget: the pixels of the sampled frames are taken from it. Raises
    MediaError without PyAV, for damage, a codec that is not in _CODECS, no video in it, frames that are too large or
    too many, and after MAX_SECONDS.
    """
    name = video_type(data) or MP4
    try:
        import av  # pyright: ignore[reportMissingImports]
    except ImportError:
        problem = f"is a {name} file, for which this installation has no decoder"
        raise MediaError(f"{problem}; pip install 'jaxengine[video]'") from None
    try:
        # Only these bytes: no protocol to open other sources with.
        with av.open(io.BytesIO(data), format=_DEMUXERS[name], options={"protocol_whitelist": ""}) as container:
            return _read(container, name, options, budget)
    except MediaError:
        raise
    except Exception as error:  # errors of FFmpeg and its libraries
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise MediaError(f"is a {name} file that is damaged or cut short ({why})") from None


def _read(container: Any, name: str, options: MediaOptions, budget: PixelBudget) -> Video:
    """Decode sampled frames of an opened container of the type `name`, and return them as a video, whose times count
    from its first frame.

    options: limits and sampling. budget: the pixels of the frames are taken from it. Raises MediaError for no video or
    frame in it, a codec that is not allowed, too many or too large frames, fewer frames than announced, and after
    MAX_SECONDS.
    """
    if not container.streams.video:
        raise MediaError(f"is a {name} file without a video in it")
    stream = container.streams.video[0]
    codec = stream.codec_context
    if codec.name not in _CODECS and codec.codec.canonical_name not in _CODECS:
        raise MediaError(f"is a {name} file of the codec {codec.name!r}; allowed: {', '.join(_CODECS)}")
    check_size((codec.width, codec.height), options)
    until = time.monotonic() + MAX_SECONDS
    times = _times(container, stream, until)
    total = len(times)
    if not total:
        raise MediaError(f"is a {name} file without a frame")
    step = float(np.median(np.diff(times))) if total > 1 else 0.0
    seconds = float(times[-1] - times[0]) + step
    indices = sample_frames(total, seconds, options.video_sampling)
    check_count(len(indices))
    budget.take(len(indices) * codec.width * codec.height)
    container.seek(0)
    frames = _frames(container, stream, set(indices.tolist()), (codec.width, codec.height), until)
    if len(frames) < len(indices):
        raise MediaError(f"is a {name} file that is damaged or cut short: {len(frames)} of its frames can be decoded")
    fps = total / seconds if seconds > 0 and math.isfinite(seconds) else None
    return Video(np.stack(frames), indices, times[indices] - times[0], fps, total)


def _times(container: Any, stream: Any, until: float) -> np.ndarray:
    """Return float64 [N], ascending: the seconds at which each frame is shown, read without decoding to the end of the
    container. The first need not be 0.

    stream: PyAV's stream in `container`. until: deadline in time.monotonic seconds. Raises MediaError after the
    deadline, and for more than MAX_SOURCE_FRAMES frames.
    """
    stamps: list[int] = []
    for packet in container.demux(stream):
        _check_time(until)
        if packet.pts is not None and packet.size:
            stamps.append(packet.pts)
        if len(stamps) > MAX_SOURCE_FRAMES:
            raise MediaError(f"has more than {MAX_SOURCE_FRAMES} frames")
    return np.sort(np.array(stamps, np.float64)) * float(stream.time_base)


def _frames(container: Any, stream: Any, wanted: set[int], size: tuple[int, int], until: float) -> list[np.ndarray]:
    """Decode the wanted frames, uint8 [H, W, 3] each, upright (to the nearest quarter turn) and in order, from the
    container's position on; fewer if the file ends early.

    stream: PyAV's stream in `container`. wanted: numbers of frames from 0, at least one. size: (width, height) of each
    frame before rotation. until: deadline in time.monotonic seconds. Raises MediaError after the deadline, and for a
    frame of another size.
    """
    frames, last = [], max(wanted)
    for number, frame in enumerate(container.decode(stream)):
        _check_time(until)
        if (frame.width, frame.height) != size:
            raise MediaError(f"has a frame {number} of another size than the first")
        if number in wanted:
            # Rotation that a camera records, in degrees counterclockwise.
            turns = round(getattr(frame, "rotation", 0) / 90) % 4
            frames.append(np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), turns)))
        if number >= last:
            break
    return frames


def _check_time(until: float) -> None:
    """Raise MediaError after `until`, in time.monotonic seconds."""
    if time.monotonic() > until:
        raise MediaError(f"takes more than {MAX_SECONDS:.0f} seconds to decode")
