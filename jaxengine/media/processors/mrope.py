"""Expansion of placeholders in prompts, and M-RoPE positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxengine.scheduler.base.errors import RequestError

# Limit of positions in time: float32, in which rotations are computed, represents all smaller whole numbers.
_MAX_TIME = 1 << 24


class EmbeddingRun(NamedTuple):
    """Consecutive embeddings in a prompt: an image, a video, or a frame of one.

    Attributes:
      start: position of the first one.
      grid: temporal steps, rows and columns of embeddings.
      times: i32[grid[0]], temporal M-RoPE position of each step relative to the first.
    """

    start: int
    grid: tuple[int, int, int]
    times: np.ndarray


def whole_times(times: np.ndarray) -> np.ndarray:
    """Return the temporal positions of a video's steps, f32[n], rounded down to i64[n].

    Raises RequestError for positions that are not below _MAX_TIME, as those of a video of months.
    """
    if not (last := times.max(initial=0)) < _MAX_TIME:
        problem = f"a video's M-RoPE positions in time must be below {_MAX_TIME}, got {last:.3g}"
        raise RequestError(f"{problem}: it lasts too long", param="video")
    return times.astype(np.int64)


def repeated(token_ids: np.ndarray, at: np.ndarray, counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return (token ids, starts): the ids with those at positions `at` repeated `counts` times, and the new position of
    the first of each.
    """
    repeats = np.ones(len(token_ids), np.int64)
    repeats[at] = counts
    starts = np.cumsum(repeats) - repeats
    return np.repeat(token_ids, repeats), starts[at]


def mrope_positions(num_tokens: int, runs: Sequence[EmbeddingRun]) -> tuple[np.ndarray, int]:
    """Return M-RoPE positions in time, height and width, i32[3, num_tokens], and the M-RoPE position delta of tokens
    after the prompt.

    runs: runs of the prompt's embeddings, in order; all other tokens are text. Text advances all three coordinates.
    Embeddings count from the end of the text before them, each by its coordinates in the grid, and the following text
    begins after their largest position (Qwen2-VL, Wang et al. 2024, arXiv:2409.12191, section 2.1, and transformers 4,
    but not 5.23). The delta is M-RoPE position minus token position.
    """
    places = np.zeros((3, num_tokens), np.int32)
    position = place = 0
    for start, grid, times in runs:
        size = int(np.prod(grid))
        places[:, position:start] = np.arange(place, place + start - position)
        place += start - position
        axes = times, np.arange(grid[1]), np.arange(grid[2])
        inside = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(3, -1) + place
        places[:, start : start + size] = inside
        position, place = start + size, int(inside.max()) + 1
    places[:, position:] = np.arange(place, place + num_tokens - position)
    return places, place - position
