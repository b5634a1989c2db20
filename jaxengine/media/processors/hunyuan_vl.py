"""Processor of HunyuanOCR: Qwen2-VL's for images alone, with an embedding after each line, and one before and one after
an image. M-RoPE positions are a token's column and row in its image, and the image's number. Hy4's has only the
embeddings of lines, and Qwen2-VL's positions, in which they are a further column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from jaxengine.media.base.processor import Expanded, Processed, check_room
from jaxengine.media.processors.grids import GridProcessor
from jaxengine.media.processors.qwen2_vl import Bounds, Qwen2VLProcessor, Sizes
from jaxengine.media.processors.settings import WHOLE
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import read_object
from jaxengine.scheduler.base.errors import RequestError

# Values of the column "mark", as jaxengine.models.vision.hunyuan_vl has them.
_NEWLINE, _BEGIN, _END = 1, 2, 3
# Names in config.json, which transformers 5 has, and transformers' values.
_AROUND = {"start": ("im_start_id", 120118), "end": ("im_end_id", 120119)}
_IMAGE = 120120


class LinedProcessor(Qwen2VLProcessor):
    """Base of processors for images alone, with a marked square of no patches after each line of merged squares, for a
    learned embedding.

    Attributes:
      ends: marks of two further squares, before and after an image; () for none.
    """

    modalities: tuple[str, ...] = ("image",)
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen2VLProcessor.defaults, "temporal_patch_size": 1, "patch_size": 16}
    default_bounds: ClassVar[Mapping[str, Bounds]] = {"image": Bounds(512 * 512, 2048 * 2048)}
    ends: ClassVar[tuple[int, ...]] = ()

    def _read_sizes(self, folder: Path, modality: str, *places: tuple[str, str]) -> Sizes:
        """Return the settings as Qwen2VLProcessor does, with bicubic resizing, whatever `resample` says: so the
        published processor resizes, and transformers'.
        """
        sizes = super()._read_sizes(folder, modality, *places)
        return replace(sizes, pixels=replace(sizes.pixels, resample=int(Image.Resampling.BICUBIC)))

    def check_room(self, modality: str, frames: int, height: int, width: int, most: int | None) -> None:
        """Raise RequestError if an image has more than `most` patches, those of marked squares included; None for no
        limit.

        frames: not used. height, width: size of the image after resizing, in pixels.
        """
        del frames
        squares = height // self.factor * (width // self.factor + 1) + len(self.ends)
        check_room(modality, squares * self.tower.merge, most)

    def processed(self, patches: np.ndarray, grid: tuple[int, int, int], seconds: tuple[float, ...] = ()) -> Processed:
        """Return the Processed item of an image's patches, f32[P, F], followed by marked squares of zeros: those of
        `ends`, and one for each line.

        grid: (1, height, width) in patches. seconds: ().
        """
        made = super().processed(patches, grid, seconds)
        merge, (_, lines, width) = self.tower.merge, GridProcessor.merged(self, made)
        first, count = int(bool(self.ends)), lines * (width + 1) + len(self.ends)
        marks = np.repeat(np.asarray([*self.ends, *[_NEWLINE] * lines], np.int32), merge)
        columns = np.full((len(self.tower.columns), len(marks)), -1, np.int32)
        columns[self.tower.columns.index("mark")] = marks
        zeros = np.zeros((len(marks), patches.shape[1]), np.float32)
        line, column = np.divmod(made.rows, width)
        outer = [0, count - 1] if self.ends else []
        after = np.arange(1, lines + 1, dtype=np.int32) * (width + 1) - 1 + first
        rows = np.concatenate([first + line * (width + 1) + column, outer, after])
        return made._replace(
            patches=np.concatenate([made.patches, zeros]),
            columns=np.concatenate([made.columns, columns], axis=1),
            rows=rows.astype(np.int32),
            num_rows=count,
        )

    def _coordinates(self, grid: tuple[int, int, int], order: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns of GridProcessor, and "mark", 0 for patches of an image."""
        found = super()._coordinates(grid, order)
        return {**found, "mark": np.zeros_like(found["row"])}

    def largest_size(self, modality: str, num_frames: int, bounds: Bounds) -> tuple[int, int]:
        """Return (height, width) in pixels of an image with at least as many squares, marked ones included, as any
        other: a tall one has more lines. modality, num_frames: not used.
        """
        wide, high = max(self.sides(bounds), key=lambda sides: sides[1] * (sides[0] + 1))
        return high * self.factor, wide * self.factor

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """Return `grid` unchanged. Raises RequestError without a grid, and for one that is not one frame of whole
        merged squares which, with the embeddings of lines and of `ends`, make num_rows rows.
        """
        merge, ends = self.tower.spatial_merge_size, len(self.ends)
        _, height, width = grid or (0, 0, 0)
        if num_rows != height // merge * (width // merge + 1) + ends:
            made = f"height / {merge} * (width / {merge} + 1){f' + {ends}' if ends else ''}"
            allowed = f"[1, height, width] in patches with {num_rows} = {made} rows"
            shown = list(grid) if grid else "none"
            raise RequestError(f"embeddings of an image need image_grid_thw, {allowed}; got {shown}", param="image")
        return super().grid_of(height // merge * (width // merge), grid)


class HunYuanVLProcessor(LinedProcessor):
    """Processor of HunYuanVLForConditionalGeneration."""

    around_name: ClassVar[str | None] = "image"
    ends: ClassVar[tuple[int, ...]] = (_BEGIN, _END)

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings; token ids that config_json lacks have defaults: image_token_id, and
        im_start_id and im_end_id or else image_start_token_id and image_end_token_id. Raises ModelConfigError for
        invalid token ids, ModelFileError for missing or invalid settings, and for cat_extra_token false, without the
        embeddings before and after an image.
        """
        fields = ConfigFields(config_json)
        tokens = {"image_token_id": fields.integer("image_token_id", _IMAGE, minimum=0)}
        for side, (name, default) in _AROUND.items():
            own = fields.integer(f"image_{side}_token_id", default, minimum=0)
            tokens[f"image_{side}_token_id"] = fields.integer(name, own, minimum=0)
        super().__init__(folder, {**config_json, **tokens}, model_config, tokenizer)
        if (extra := (read_object(Path(folder), WHOLE) or {}).get("cat_extra_token", True)) is not True:
            text = f"cat_extra_token must be true or absent, got {str(extra)[:100]}"
            raise ModelFileError(Path(folder) / WHOLE, text)

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with each placeholder repeated as often as its image has embeddings, and with M-RoPE
        positions: column, row and number of the image for embeddings of squares and lines, and the plain position for
        all other tokens. items: by modality, in the order of the prompt.

        Raises RequestError for another number of items than placeholders.
        """
        plain = GridProcessor.expand(self, token_ids, items)
        places = np.tile(np.arange(len(plain.token_ids), dtype=np.int32), (3, 1))
        for number, (positions, (modality, index)) in enumerate(zip(plain.positions, plain.order, strict=True)):
            _, lines, width = self.merged(items[modality][index])
            line, column = np.indices((lines, width + 1)).reshape(2, -1)
            places[:, positions[1:-1]] = column, line, np.full_like(line, number)
        return plain._replace(rope_positions=places, rope_delta=0)


class HYV4VLProcessor(LinedProcessor):
    """Processor of HYV4VLForConditionalGeneration, for images alone."""

    around_name: ClassVar[str | None] = None

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings; the token of images has a default. Raises ModelConfigError for invalid token
        ids, ModelFileError for missing or invalid settings.
        """
        config_json = ConfigFields(config_json).with_defaults(image_token_id=_IMAGE).raw
        super().__init__(folder, config_json, model_config, tokenizer)

    def placeholder(self, modality: str) -> str:
        return GridProcessor.placeholder(self, modality)

    def merged(self, item: Processed) -> tuple[int, int, int]:
        """Return an item's grid in embeddings, (1, rows, columns), with the embedding after each line as a column."""
        time, lines, width = super().merged(item)
        return time, lines, width + 1
