"""M-RoPE positions of MiniCPM-V 4.7: an image and its slices lie on one canvas, with their start and end tokens (marks)
at its corners.

NumPy only. Results are those of transformers, whose canvas follows from the tokens around embeddings.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import numpy as np


class Frame(NamedTuple):
    """Crops of an image in a prompt: the whole, then slices row by row.

    Attributes:
      spans: [start, end) of each crop's embeddings; a mark comes before and after each.
      grids: (height, width) of each crop, in embeddings.
      columns: slices in a row, 0 without slices.
    """

    spans: tuple[tuple[int, int], ...]
    grids: tuple[tuple[int, int], ...]
    columns: int


def canvas_positions(token_ids: list[int], frames: list[Frame], marks: Set[int]) -> tuple[np.ndarray, int]:
    """Return M-RoPE positions in time, height and width, i32[3, T], and the M-RoPE position delta of tokens after the
    prompt.

    frames: frames of the prompt's images, in order. marks: tokens that separate crops; between images with nothing else
    between them, no text positions are counted. Text advances all three coordinates.
    """
    places = np.zeros((3, len(token_ids)), np.int32)
    end = origin = 0  # index after the tokens that have positions, and the next position
    for number, frame in enumerate(frames):
        start = frame.spans[0][0] - 1
        previous = frames[number - 1].spans[-1][1] if number else 0
        follows = number > 0 and all(token in marks for token in token_ids[previous:start])
        if start > end:
            places[:, end:start] = np.arange(origin, origin + start - end)
            # One more between adjacent images: the next image's first mark is before its canvas.
            origin += start - end + follows
        end = frame.spans[-1][1]
        while end < len(token_ids) and token_ids[end] in marks:
            end += 1
        size = _place(places, frame, end, origin)
        origin += size + 1
    places[:, end:] = np.arange(origin, origin + len(token_ids) - end)
    return places, int(places.max(initial=-1)) + 1 - len(token_ids)


def _place(places: np.ndarray, frame: Frame, end: int, origin: int) -> int:
    """Write the positions of an image's tokens, up to index `end`, into `places`, i32[3, T], and return the longer side
    of its canvas. origin: position of the canvas's corner, in all three coordinates.
    """
    (first, last), (height, width), rest = frame.spans[0], frame.grids[0], len(frame.spans) - 1
    high, wide = frame.grids[1] if rest else (height, width)
    if rest:
        height, width = rest // frame.columns * high, frame.columns * wide
    places[:, first - 1 : end] = origin
    places[1:, first - 1] = max(origin - 1, 0)
    places[1:, last] = origin + height, origin + width
    rows, columns = (_spread(side, count) for side, count in zip((height, width), frame.grids[0], strict=True))
    _write_grid(places, frame.spans[0], origin + rows, origin + columns)
    for number, ((start, stop), grid) in enumerate(zip(frame.spans[1:], frame.grids[1:], strict=True)):
        line, column = divmod(number, frame.columns)
        top, left = origin + line * high, origin + column * wide
        places[1:, start - 1] = top, left
        places[1:, stop] = top + grid[0] - 1, left + grid[1] - 1
        _write_grid(places, (start, stop), top + np.arange(grid[0]), left + np.arange(grid[1]))
        if column == frame.columns - 1 and number < rest - 1:  # a line break is right of the row that it ends
            following = frame.spans[number + 2][0] - 1
            places[1:, stop + 1 : following] = np.asarray([[top + high - 1], [origin + width]])
    return max(height, width)


def _write_grid(places: np.ndarray, span: tuple[int, int], rows: np.ndarray, columns: np.ndarray) -> None:
    """Write the height and width positions of a crop's embeddings, line by line, into rows 1 and 2 of `places`, i32[3,
    T], at `span`, [start, end). rows, columns: positions of the lines and columns of its grid.
    """
    places[1, slice(*span)] = np.repeat(rows, len(columns))
    places[2, slice(*span)] = np.tile(columns, len(rows))


def _spread(side: int, count: int) -> np.ndarray:
    """Return `count` evenly spaced numbers from 0 to side - 1, rounded, i64[count]."""
    step = np.float32(side - 1) / np.float32(max(count - 1, 1))
    index = np.arange(count, dtype=np.float32)
    # From both ends, like torch.linspace, since halves are rounded to even numbers.
    found = np.where(index < count // 2, step * index, np.float32(side - 1) - step * (count - 1 - index))
    return np.round(found).astype(np.int64) if count > 1 else np.zeros(1, np.int64)
