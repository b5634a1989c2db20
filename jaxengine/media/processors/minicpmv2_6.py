"""Processor of MiniCPM-V 2.6, 4.0 and 4.5: crops as MiniCPM-V 4.6 has them, each with the same number of embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.grids import learned_places
from jaxengine.media.processors.minicpmv import MiniCPMVProcessor
from jaxengine.media.processors.settings import token_text
from jaxengine.media.processors.text_placeholder import TextPlaceholder
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import read_object
from jaxengine.scheduler.base.errors import RequestError

_PLACEHOLDER = "(<image>./</image>)"
_FILE, _UNKNOWN = "tokenizer_config.json", "unk_token"


class ResampledProcessor(TextPlaceholder, MiniCPMVProcessor):
    """Processor of MiniCPMV. In a prompt the text (<image>./</image>) stands for an image; the tokenizer's unk_token is
    at the positions of embeddings.
    """

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        """Read the checkpoint's settings, and set the placeholder text of images. Raises ModelConfigError without a
        tokenizer and for an invalid config.json, ModelFileError for missing or invalid settings.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        self.place_text(Path(folder), "the placeholder of images", _PLACEHOLDER)

    @property
    def image_id(self) -> int:
        """Token that stands for an image after `encode`, and then at the positions of its embeddings."""
        return self.token_ids["image"]

    def read_token(self, folder: Path, fields: ConfigFields) -> int:
        """Return the token of `unk_token` (default: <unk>) in the folder's tokenizer_config.json. fields: not used.
        Raises ModelFileError unless that is one token.
        """
        del fields
        text = token_text(folder / _FILE, read_object(folder, _FILE) or {}, _UNKNOWN, "<unk>")
        found = self.ids(text)
        if len(found) != 1:
            raise ModelFileError(folder / _FILE, f"{_UNKNOWN} must be one token, got {text[:100]!r}")
        return found[0]

    def defaults_of(self, fields: ConfigFields) -> Mapping[str, Any]:
        """Return the defaults of settings that `fields` lack, where mean and deviation are called norm_mean and
        norm_std.
        """
        half = [0.5] * 3
        mean, std = fields.value("norm_mean", half), fields.value("norm_std", half)
        return {"image_mean": mean, "image_std": std, "use_image_id": False}

    def check_tower(self, fields: ConfigFields) -> None:
        """Raise ModelConfigError for a patch_size, image_feature_size or scale_resolution that does not fit the tower,
        and for images that are not to be cut (slice_mode false), whose size would not be changed either.
        """
        tower = self.tower
        fields.require(patch_size=tower.patch_size, image_feature_size=tower.num_queries, slice_mode=True)
        if fields.integer("scale_resolution", 448) != tower.resolution:
            raise fields.fail("scale_resolution", f"{tower.resolution}, as in slice_config of config.json")

    def num_patches(self, grid: tuple[int, int, int]) -> int:
        """Return the number of patches that a crop takes in the tower, padding included. grid: not used."""
        del grid
        return self.tower.unit

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return an image with as many crops as any, or one of `size`, (height, width) in pixels, with patches
        f32[P, 0]. Raises RequestError for an extreme aspect ratio.
        """
        if size is not None:
            return super().largest(modality, size, num_frames)
        slices = self.most_slices if self.most_slices > 1 else 0
        crop = self.processed(np.empty((1, 0), np.float32), (1, 1, 1))
        return self.joined_crops([crop] * (1 + slices), crop, (min(slices, 1), slices))

    def processed(self, patches: np.ndarray, grid: tuple[int, int, int], seconds: tuple[float, ...] = ()) -> Processed:
        """Return the Processed item of one crop's patches, padded to a unit.

        patches: f32[P, F], line by line. grid: (1, height, width) in patches. seconds: not used.
        """
        del seconds
        tower, (_, height, width) = self.tower, grid
        unit, side = tower.unit, tower.vit.grid
        row, column = np.divmod(np.arange(height * width), width)
        place = learned_places(height, side)[row] * side + learned_places(width, side)[column]
        columns = np.full((len(tower.columns), unit), -1, np.int32)
        columns[:, : len(row)] = place, row, column
        padded = np.pad(patches, ((0, unit - len(patches)), (0, 0)))
        return Processed(padded, columns, np.arange(tower.num_queries, dtype=np.int32), tower.num_queries, grid)

    def crop_grids(self, item: Processed) -> list[tuple[int, int]]:
        """Return (1, number of its embeddings) for each crop of an item."""
        return [(1, self.tower.num_queries)] * max(1, len(item.crops))

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        queries = self.tower.num_queries
        if grid is not None or num_rows != queries:
            problem = f"embeddings of an image of this model must be {queries}, of one that is not cut, without a grid"
            raise RequestError(f"{problem}; got {num_rows}", param="image")
        side = self.tower.resolution // self.tower.patch_size
        return 1, side, side

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the expanded prompt of MiniCPMVProcessor.expand, after replacing the tokens of each placeholder text.
        items: by modality, in order. Raises RequestError for another number of items than placeholders.
        """
        return super().expand(self.with_tokens(token_ids), items)
