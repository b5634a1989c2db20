"""Prompts with pictures in them: placeholders to as many as a picture has embeddings, and places for M-RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Run(NamedTuple):
    """Embeddings that stand one after the other in a prompt: a picture, a video, or a frame of one.

    Attributes:
      start: position of the first.
      grid: steps in time, rows and columns of embeddings.
      times: places in time of the steps, i32[grid[0]], counted from the first.
    """

    start: int
    grid: tuple[int, int, int]
    times: np.ndarray


def repeated(token_ids: np.ndarray, at: np.ndarray, counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The ids with those at the positions `at` repeated, and where the first of each then is."""
    repeats = np.ones(len(token_ids), np.int64)
    repeats[at] = counts
    starts = np.cumsum(repeats) - repeats
    return np.repeat(token_ids, repeats), starts[at]


def mrope_positions(num_tokens: int, runs: Sequence[Run]) -> tuple[np.ndarray, int]:
    """Places of a prompt's tokens in time, height and width, i32[3, num_tokens], and by how much more than its position
    the place of a token behind the prompt is.

    Text counts all three on. Embeddings of a run count from where the text before them ends, each by its place in the
    grid, and the text behind begins after the largest of their places (Qwen2-VL, Wang et al. 2024, arXiv:2409.12191,
    section 2.1, and transformers 4; transformers 5.23 begins after the larger of rows and columns, which is less where
    a video has more steps in time than rows and columns).
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
