"""Base of processors that keep images' aspect ratio: patches of a grid and their coordinates. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed, check_room
from jaxengine.media.processors.settings import check_options
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.scheduler.base.errors import RequestError

# Limit of the ratio of an image's sides.
MAX_ASPECT_RATIO = 200


class GridProcessor:
    """Base class of a MediaProcessor whose tower takes patches of a grid.

    The tower's configuration determines how images are cut (patch_size, temporal_patch_size, spatial_merge_size) and
    which `columns` of `_coordinates` accompany each patch.

    Attributes:
      modalities: kinds of items that are taken.
      token_ids: placeholder token of each modality.
      tower: the tower's configuration.
      tokenizer: of the model; None without one.
      factor: side in pixels of the square of merged patches that makes one row (embedding) of the tower.
      needs_grid: whether embeddings that are given need a grid; if not, they form one line without it, as the prompt
        does not depend on the grid.
      frames_first: whether a patch is ordered frame by frame, and each of its frames colour by colour; otherwise colour
        by colour, and each colour frame by frame. colours_last: whether, instead, the three colours of a pixel are
        adjacent.
      windowed: whether the tower's rows are sorted by attention window.
    """

    modalities: tuple[str, ...] = ("image",)
    frames_first = False
    colours_last = False
    windowed = False
    needs_grid = True
    token_ids: Mapping[str, int]
    tokenizer: Any = None

    def __init__(self, model_config: ModelConfig):
        self.tower: Any = model_config.tower
        self.factor: int = self.tower.patch_size * self.tower.spatial_merge_size

    def placeholder(self, modality: str) -> str:
        """Return the text of the modality's placeholder token. Needs the tokenizer."""
        return str(self.tokenizer.convert_ids_to_tokens([self.token_ids[modality]])[0])

    def option_names(self) -> tuple[str, ...]:
        """Return the names of mm_processor_kwargs that `process` takes, here ()."""
        return ()

    def with_options(self, options: Mapping[str, Any]) -> Any:
        """Return a copy with the largest image of an engine's options; this processor if, as here, they change none.
        Raises RequestError for unknown or invalid options.
        """
        check_options(options, self.option_names())
        return self

    def check_token_ids(self, model_config: ModelConfig, *others: int) -> None:
        """Raise ModelConfigError if a placeholder or one of the other token ids is not below
        model_config.vocab_size.
        """
        for token in (*self.token_ids.values(), *others):
            if token >= model_config.vocab_size:
                text = f"token ids of images must be below vocab_size {model_config.vocab_size}, got {token}"
                raise ModelConfigError(text)

    def check_room(self, modality: str, frames: int, height: int, width: int, most: int | None) -> None:
        """Raise RequestError if resized frames have more than `most` patches; None for no limit.

        frames: number of frames. height, width: size of a frame in pixels.
        """
        steps = -(-frames // self.tower.temporal_patch_size)
        check_room(modality, steps * (height // self.tower.patch_size) * (width // self.tower.patch_size), most)

    def cut(self, frames: np.ndarray, seconds: tuple[float, ...] = ()) -> Processed:
        """Cut frames f32[N, H, W, 3] into patches in the tower's order: the patches of each merged row together, each
        patch as `frames_first` and `colours_last` say.

        H and W must be multiples of `factor`. seconds: time of each temporal step of a video; () for none. The last
        frame is repeated to fill a temporal patch.
        """
        tower = self.tower
        patch, depth, merge = tower.patch_size, tower.temporal_patch_size, tower.spatial_merge_size
        missing = -len(frames) % depth
        frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)]) if missing else frames
        num_frames, height, width, _ = frames.shape
        grid = num_frames // depth, height // patch, width // patch
        cut = frames.reshape(grid[0], depth, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, 3)
        inner = (1, 4, 7, 8) if self.colours_last else (1, 8, 4, 7) if self.frames_first else (8, 1, 4, 7)
        patches = cut.transpose(0, 2, 5, 3, 6, *inner).reshape(int(np.prod(grid)), tower.num_features)
        return self.processed(patches, grid, seconds)

    def processed(self, patches: np.ndarray, grid: tuple[int, int, int], seconds: tuple[float, ...] = ()) -> Processed:
        """Return the Processed item of a grid's patches, reordered for the tower, with their columns and rows.

        patches: f32 [number of patches, features], merged row by merged row. grid: (time, height, width) in patches.
        seconds: time of each temporal step of a video; () for none.
        """
        tower = self.tower
        order, window = self.order(grid)
        merged = patches.reshape(len(order), tower.merge, patches.shape[1])
        in_order = np.arange(len(order), dtype=order.dtype)
        patches = (merged if (order == in_order).all() else merged[order]).reshape(patches.shape)
        columns = {**self._coordinates(grid, order), "window": np.repeat(window, tower.merge)}
        chosen = np.stack([columns[name] for name in tower.columns]).astype(np.int32)
        return Processed(np.ascontiguousarray(patches), chosen, order.astype(np.int32), len(order), grid, seconds)

    def joined_crops(self, crops: Sequence[Processed], tile: Processed, tiles: tuple[int, int]) -> Processed:
        """Return the item of an image's crops, whose columns "segment", if there are any, become the crops' numbers.

        tiles: (rows, columns) of the crops that are tiles, (0, 0) for none. tile: one of these, or the whole image
        without tiles. The item's grid is that of all tiles together, or of the whole image.
        """
        columns = [crop.columns.copy() for crop in crops]
        if "segment" in self.tower.columns:
            for number, each in enumerate(columns):
                each[self.tower.columns.index("segment")] = number
        count = sum(crop.num_rows for crop in crops)
        patches = np.concatenate([crop.patches for crop in crops])
        (_, height, width), (rows, wide) = tile.grid, tiles if tiles[0] else (1, 1)
        grid, sizes = (1, rows * height, wide * width), tuple(crop.grid[1:] for crop in crops)
        order = np.arange(count, dtype=np.int32)
        return Processed(patches, np.concatenate(columns, axis=1), order, count, grid, crops=sizes)

    def _coordinates(self, grid: tuple[int, int, int], order: np.ndarray) -> dict[str, np.ndarray]:
        """Return columns of each patch by name, in the order of the tower: its frame, its coordinates within the frame,
        and the frame's size.

        grid: (time, height, width) in patches. order: the first result of `order`. Each column is int [patches]:
        "segment", "row", "column", "height", "width".
        """
        merge = self.tower.spatial_merge_size
        rows, columns = grid[1] // merge, grid[2] // merge
        frame, place = np.divmod(order, rows * columns)
        row, column = np.divmod(place, columns)
        inside_row, inside_column = np.divmod(np.arange(merge * merge), merge)
        return {
            "segment": np.repeat(frame, merge * merge),
            "row": (row[:, None] * merge + inside_row).reshape(-1),
            "column": (column[:, None] * merge + inside_column).reshape(-1),
            "height": np.full(len(order) * merge * merge, grid[1]),
            "width": np.full(len(order) * merge * merge, grid[2]),
        }

    def order(self, grid: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return (order, windows), both int [rows]: the tower's rows as indices into the item's rows line by line, and
        the window of each.

        grid: (time, height, width) in patches. In this class rows stay line by line, in one window, unless `windowed`.
        """
        if self.windowed:
            return window_order(self.tower, grid)
        count = int(np.prod(grid)) // self.tower.merge
        return np.arange(count), np.zeros(count, np.int64)

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """Return `grid`, or one line of embeddings without it unless `needs_grid`. Raises RequestError for a missing
        grid that is needed, and for one that is not one frame of whole merged squares that make num_rows rows.
        """
        merge = self.tower.spatial_merge_size
        if not self.needs_grid:
            grid = grid or (1, merge, merge * num_rows)
        time, height, width = grid or (0, 0, 0)
        whole = height % merge == 0 == width % merge
        if time != 1 or not whole or height * width // merge**2 != num_rows:
            allowed = f"[1, height, width] in patches, multiples of {merge}, with height * width = {merge**2} * rows"
            shown = f"{list(grid) if grid else 'none'} for {num_rows} rows"
            raise RequestError(f"embeddings of an image need image_grid_thw, {allowed}; got {shown}", param="image")
        return time, height, width

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with each placeholder replaced by the tokens of its item. items: by modality, in the order
        of the prompt.

        Raises RequestError for another number of items than placeholders, and what `item_tokens` raises.
        """
        ids = np.asarray(token_ids, np.int64)
        at, order = self.placeholders(ids, items)
        parts: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        copied = end = 0
        for place, (modality, number) in zip(at.tolist(), order, strict=True):
            shown = self.item_tokens(modality, items[modality][number])
            end += place - copied
            positions.append((np.flatnonzero(shown < 0) + end).astype(np.int32))
            parts += [ids[copied:place], np.where(shown < 0, self.embedded_id(modality), shown)]
            end += len(shown)
            copied = place + 1
        return Expanded(np.concatenate([*parts, ids[copied:]]).tolist(), positions, order)

    def item_tokens(self, modality: str, item: Processed) -> np.ndarray:
        """Return the tokens of an item in the prompt, i64[n], with -1 for each of its embeddings; in this class only
        these.
        """
        return np.full(item.num_rows, -1)

    def embedded_id(self, modality: str) -> int:
        """Return the token at whose positions embeddings of the modality go; in this class the placeholder."""
        return self.token_ids[modality]

    def between(self, before: str, count: int, after: str) -> np.ndarray:
        """Return the tokens of `count` embeddings between two texts, as those of item_tokens. Needs the tokenizer."""
        return np.concatenate([self.encoded(before), np.full(count, -1), self.encoded(after)])

    def check_tokenizer(self, modality: str) -> None:
        """Raise RequestError without a tokenizer, for models whose prompts have text around an item's embeddings."""
        if self.tokenizer is None:
            problem = f"a prompt with an {modality} needs the model's tokenizer, for the tokens around it"
            raise RequestError(problem.replace("an video", "a video"), param=modality)

    def encoded(self, text: str) -> np.ndarray:
        """Return the token ids of a text, i64[n]. Needs the tokenizer."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int64)

    def merged(self, item: Processed) -> tuple[int, int, int]:
        """Return an item's grid in embeddings, after merging: (time, rows, columns)."""
        time, height, width = item.grid
        return time, height // self.tower.spatial_merge_size, width // self.tower.spatial_merge_size

    def placeholders(
        self, ids: np.ndarray, items: Mapping[str, Sequence[Processed]]
    ) -> tuple[np.ndarray, list[tuple[str, int]]]:
        """Return the positions i64[n] of the placeholders in `ids`, ascending, and the item of each: (modality, number
        within the modality).

        Raises RequestError if the number of a modality's placeholders differs from that of its items.
        """
        found = {modality: np.flatnonzero(ids == token) for modality, token in self.token_ids.items()}
        for modality, places in found.items():
            if len(places) != (given := len(items.get(modality, ()))):
                text = (
                    f"the prompt has {len(places)} of the {modality}'s placeholder, token {self.token_ids[modality]}, "
                    f"and {given} {modality}s are given: there must be one for each"
                )
                raise RequestError(text, param="prompt")
        named = sorted((int(at), modality, n) for modality, places in found.items() for n, at in enumerate(places))
        return np.asarray([at for at, _, _ in named], np.int64), [(modality, n) for _, modality, n in named]


def learned_places(count: int, side: int) -> np.ndarray:
    """Return the index of each of `count` patches along a side among the `side` learned positions there, i64[count]:
    patches are spread evenly over them.

    Computed in float32, whose rounding decides at some borders, as by Idefics2's published code.
    """
    borders = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    share = np.float32(1) / np.float32(max(count, 1))
    spots = np.minimum(np.arange(count, dtype=np.float32) * share, np.float32(1 - 1e-6))
    return np.searchsorted(borders, spots, side="right")


def window_order(tower: Any, grid: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return (order, windows), both int [rows]: a tower's rows as indices into an item's rows line by line, sorted by
    attention window, and the window of each.

    tower: TowerConfig with spatial_merge_size, and with the side of a window, window_size, a multiple of it; both in
    patches. grid: (time, height, width) in patches.
    """
    merge, side = tower.spatial_merge_size, tower.window_size // tower.spatial_merge_size
    time, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    wide, high = -(-columns // side), -(-rows // side)
    step, row, column = np.indices((time, rows, columns)).reshape(3, -1)
    window = (step * high + row // side) * wide + column // side
    order = np.argsort(window, kind="stable")
    return order, window[order]


def check_ratio(height: int, width: int) -> None:
    """Raise RequestError for an image of this size, in pixels, if one side is more than MAX_ASPECT_RATIO times the
    other.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise RequestError(
            f"the longer side of an image must be at most {MAX_ASPECT_RATIO} times the shorter one, got "
            f"{width}x{height} pixels",
            param="image",
        )
