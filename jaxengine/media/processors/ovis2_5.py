"""Processor of Ovis2.5 and Ovis2.6: Qwen2-VL's with patches of one frame, and an embedding before and one after an
image or a video. A text that need not be a token stands for an item in prompts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed, check_room
from jaxengine.media.processors.grids import GridProcessor, check_ratio
from jaxengine.media.processors.qwen2_vl import Bounds
from jaxengine.media.processors.text_placeholder import with_tokens_of
from jaxengine.media.processors.token_positions import TokenPositions
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.scheduler.base.errors import RequestError

# Values of the column "mark" of the embeddings around an item, as jaxengine.models.vision.ovis2_5 has them.
_ENDS = {"image": (1, 2), "video": (3, 4)}
_TEXTS = {"image": "<image>", "video": "<video>"}
_PADS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
_WRITTEN = re.compile("|".join(_TEXTS.values()))
_BOUNDS = Bounds(448 * 448, 1792 * 1792)


class Ovis2_5Processor(TokenPositions):
    """Processor of Ovis2_5. All embeddings are at the positions of <|image_pad|>."""

    # The published file is of SigLIP's processor, which cuts no patches.
    defaults: ClassVar[Mapping[str, Any]] = {
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "patch_size": None,
        "temporal_patch_size": None,
        "merge_size": None,
    }
    video_tokens: ClassVar[int | None] = None
    default_bounds: ClassVar[Mapping[str, Bounds]] = dict.fromkeys(_TEXTS, _BOUNDS)

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, with <|image_pad|> and <|video_pad|> as placeholder tokens. Raises
        ModelConfigError without a tokenizer, and for one without the tokens <|image_pad|> and <|video_pad|>,
        ModelFileError for missing or invalid settings.
        """
        if tokenizer is None:
            raise ModelConfigError("this model's images need its tokenizer: leave skip_tokenizer_init False")
        found = {kind: tokenizer.encode(text, add_special_tokens=False) for kind, text in _PADS.items()}
        if missing := [_PADS[kind] for kind, ids in found.items() if len(ids) != 1]:
            raise ModelConfigError(f"the tokenizer must have the token {missing[0]}")
        pads = {f"{kind}_token_id": ids[0] for kind, ids in found.items()}
        super().__init__(folder, {**config_json, **pads}, model_config, tokenizer)
        # Tokenizers whose vocabularies have the texts, too.
        texts = {kind: tokenizer.encode(text, add_special_tokens=False) for kind, text in _TEXTS.items()}
        self._tokens = {ids[0]: self.token_ids[kind] for kind, ids in texts.items() if len(ids) == 1}

    def placeholder(self, modality: str) -> str:
        return _TEXTS[modality]

    def encode(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt `text`, with one token for each text that stands for an item.

        token_ids: token ids of the whole text (see `with_tokens_of`).
        """
        tokens = {text: self.token_ids[kind] for kind, text in _TEXTS.items()}
        return with_tokens_of(text, token_ids, _WRITTEN, tokens.__getitem__, self.tokenizer)

    def resized_size(self, modality: str, num_frames: int, height: int, width: int, bounds: Bounds) -> tuple[int, int]:
        """Return (height, width) in pixels of an image or a video's frames after resizing: if a side is below `factor`
        pixels, the shorter one is first enlarged to it and the other in proportion, rounded; then Qwen2-VL's rule
        applies.

        Raises RequestError for an extreme aspect ratio.
        """
        check_ratio(height, width)
        factor = self.factor
        if min(height, width) < factor:
            wide = height < width
            long = round(factor / height * width) if wide else round(factor / width * height)
            height, width = (factor, long) if wide else (long, factor)
        return super().resized_size(modality, num_frames, height, width, bounds)

    def check_room(self, modality: str, frames: int, height: int, width: int, most: int | None) -> None:
        count = frames * (height // self.tower.patch_size) * (width // self.tower.patch_size)
        check_room(modality, count + 2 * self.tower.merge, most)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        made = super().process(modality, value, options, most)
        return self._marked(made, modality)

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        return self._marked(super().largest(modality, size, num_frames), modality)

    def _marked(self, made: Processed, modality: str) -> Processed:
        """Return an item followed by two marked squares of zeros, for the embeddings before and after it."""
        marks = np.repeat(np.asarray(_ENDS[modality], np.int32), self.tower.merge)
        columns = np.full((len(self.tower.columns), len(marks)), -1, np.int32)
        columns[self.tower.columns.index("mark")] = marks
        count = made.num_rows + 2
        return made._replace(
            patches=np.concatenate([made.patches, np.zeros((len(marks), made.patches.shape[1]), np.float32)]),
            columns=np.concatenate([made.columns, columns], axis=1),
            rows=np.concatenate([made.rows + 1, [0, count - 1]]).astype(np.int32),
            num_rows=count,
        )

    def _coordinates(self, grid: tuple[int, int, int], order: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns of GridProcessor, and "mark", 0 for patches of an item."""
        found = super()._coordinates(grid, order)
        return {**found, "mark": np.zeros_like(found["row"])}

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        return super().expand([self._tokens.get(token, token) for token in token_ids], items)

    def embedded_id(self, modality: str) -> int:
        return self.token_ids["image"]

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """Return `grid` unchanged. Raises RequestError without a grid, and for one that is not one frame of whole
        merged squares which, with the embeddings around them, make num_rows rows.
        """
        if num_rows < 2:
            problem = f"embeddings of an image have one before and one after it; got {num_rows} rows"
            raise RequestError(problem, param="image")
        return GridProcessor.grid_of(self, num_rows - 2, grid)
