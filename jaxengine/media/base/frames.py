"""Decoded videos and the sampling of their frames."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jaxengine.config.inputs.multimodal import MAX_FRAMES
from jaxengine.media.base.errors import MediaError

# Limit of a file's frames, sampled or not: each must be decoded for the following ones.
MAX_SOURCE_FRAMES = 100_000
# Frames assumed for the largest video: the default number of sampled frames.
LARGEST_FRAMES = 32


@dataclass(frozen=True, eq=False)
class Video:
    """Frames of a video, in temporal order.

    Attributes:
      frames: uint8 [N, H, W, 3] RGB.
      frames_indices: int64 [N], index of each frame in the source.
      timestamps: float64 [N], seconds at which they are shown; None if unknown.
      fps: average frames per second of the source; None if unknown.
      total_num_frames: number of frames of the source.
    """

    frames: np.ndarray
    frames_indices: np.ndarray
    timestamps: np.ndarray | None
    fps: float | None
    total_num_frames: int


def sample_frames(total: int, seconds: float | None, sampling: tuple[int, float]) -> np.ndarray:
    """Return frame indices, int64 [N], evenly spaced from the first to the last of `total` frames and rounded down, as
    in vLLM's VideoBackend.

    seconds: duration of all frames; None if unknown, in which case fps is ignored. sampling: limits (num_frames, fps),
    -1 for none. N, at least 1, is the least of `total`, num_frames and seconds * fps rounded down.
    """
    num_frames, fps = sampling
    count = total if num_frames < 0 else min(total, num_frames)
    if fps > 0 and seconds is not None:
        count = min(count, math.floor(seconds * fps))
    return np.linspace(0, total - 1, max(1, count)).astype(np.int64)


def check_count(count: int) -> None:
    """Raise MediaError unless `count` frames are at least 1 and at most MAX_FRAMES."""
    if not 1 <= count <= MAX_FRAMES:
        raise MediaError(f"has {count} frames; allowed: 1 to {MAX_FRAMES}")
