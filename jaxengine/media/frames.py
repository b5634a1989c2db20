"""What a video is once it is read, and which of its frames are taken. Knows no file."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jaxengine.config.multimodal import MAX_FRAMES
from jaxengine.media.errors import MediaError

# Frames of a file, sampled or not: each must be decoded for those behind it.
MAX_SOURCE_FRAMES = 100_000
# Frames that the largest video is taken to have: as many as are sampled where nobody says.
LARGEST_FRAMES = 32


@dataclass(frozen=True, eq=False)
class Video:
    """Frames of a video, in the order of time.

    Attributes:
      frames: uint8 [N, H, W, 3] RGB.
      frames_indices: int64 [N], which of the source's frames they are.
      timestamps: float64 [N], seconds at which they are shown; None where nothing is known of time.
      fps: frames of the source in a second, on average; None where nothing is known of time.
      total_num_frames: of the source.
    """

    frames: np.ndarray
    frames_indices: np.ndarray
    timestamps: np.ndarray | None
    fps: float | None
    total_num_frames: int


def sample_frames(total: int, seconds: float | None, sampling: tuple[int, float]) -> np.ndarray:
    """Which frames of `total` are taken, int64 [N], evenly from the first to the last: as vLLM's VideoBackend does.

    seconds: how long all of them take, None if nobody knows. sampling: (num_frames, fps) at most, -1 for no limit.
    """
    num_frames, fps = sampling
    count = total if num_frames < 0 else min(total, num_frames)
    if fps > 0 and seconds is not None:
        count = min(count, math.floor(seconds * fps))
    return np.linspace(0, total - 1, max(1, count)).astype(np.int64)


def check_count(count: int) -> None:
    """Raises MediaError for no frames or too many."""
    if not 1 <= count <= MAX_FRAMES:
        raise MediaError(f"has {count} frames; allowed are 1 to {MAX_FRAMES}")
