"""Processor of GLM-4.1V: Qwen3-VL's, with two differences.

Pixel bounds apply to all frames of a patch (an image counts as two frames), and a video's frames appear in the prompt
as images do, each followed by its whole second; in GLM-4.6V, by its second with one decimal.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.qwen2_vl import Bounds, Qwen2VLProcessor
from jaxengine.media.processors.qwen3_vl import Qwen3VLProcessor, resized_frames
from jaxengine.media.processors.settings import IMAGES, WHOLE, shown_at
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.params.files import read_object


class Glm4vProcessor(Qwen3VLProcessor):
    """Processor of Glm4vForConditionalGeneration."""

    around_name: ClassVar[str] = "image"
    video_tokens: ClassVar[int | None] = None
    defaults: ClassVar[Mapping[str, Any]] = Qwen2VLProcessor.defaults
    default_bounds: ClassVar[Mapping[str, Bounds]] = {
        "image": Bounds(112 * 112, 28 * 28 * 15000),
        "video": Bounds(112 * 112, 28 * 28 * 2 * 30000),
    }

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, the tokens around videos (video_start_token_id and video_end_token_id), and
        `with_decimals`: whether times have decimals, as in GLM-4.6V, by its processor_class or model_type. Raises
        ModelConfigError for token ids that are missing or invalid, ModelFileError for missing or invalid settings.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        fields = ConfigFields(config_json)
        self.around_video = tuple(fields.integer(f"video_{side}_token_id", minimum=0) for side in ("start", "end"))
        self.check_token_ids(model_config, *self.around_video)
        files = (read_object(folder, name) or {} for name in (WHOLE, IMAGES[1]))
        classes = {str(found.get("processor_class")) for found in files}
        self.with_decimals = "Glm46VProcessor" in classes or fields.text("model_type", None) == "glm46v"

    def placeholder(self, modality: str) -> str:
        """Return the text of a placeholder between the start and end tokens of the modality."""
        if modality == "image":
            return super().placeholder(modality)
        before, after = self.around_video
        ids = before, self.token_ids[modality], after
        return "".join(str(token) for token in self.tokenizer.convert_ids_to_tokens(ids))

    def seen_id(self, modality: str) -> int:
        """Return the placeholder token of images, at whose positions embeddings of images and videos go."""
        return self.token_ids["image"]

    def seconds(self, video: Any) -> tuple[float, ...]:
        """Return the time in seconds of each temporal step of a frames.Video, at UNKNOWN_FPS frames per second if its
        rate is unknown: that of every second frame, and of the last of these for further steps. transformers counts so
        whatever the frames of a step are; published models have two.
        """
        shown = shown_at(video, len(video.frames))[::2]
        steps = np.arange(-(-len(video.frames) // self.tower.temporal_patch_size))
        return tuple(shown[np.minimum(steps, len(shown) - 1)].tolist())

    def resized_size(self, modality: str, num_frames: int, height: int, width: int, bounds: Bounds) -> tuple[int, int]:
        """Return (height, width) in pixels after resizing, with bounds over all num_frames; an image counts as the
        frames of one patch. Raises RequestError for an extreme aspect ratio.
        """
        depth = self.tower.temporal_patch_size
        return resized_frames(depth if modality == "image" else num_frames, height, width, bounds, self.factor, depth)

    def largest_size(self, modality: str, num_frames: int, bounds: Bounds) -> tuple[int, int]:
        """Return (height, width) in pixels of the largest frames, each with an equal share of the bounds; an image
        counts as the frames of one patch.
        """
        return self.widest(bounds, self.tower.temporal_patch_size if modality == "image" else num_frames)

    def _replaced(self, ids: np.ndarray, place: int) -> tuple[int, int]:
        """Return the span [start, end) of the placeholder at `place` alone: a video's start and end tokens stay around
        all of its frames.
        """
        return place, place + 1

    def step_tokens(self, item: Processed, seconds: float) -> list[int]:
        """Return the tokens of a temporal step: its placeholders between the image's start and end tokens, then its
        time as text: "1.5 seconds" with `with_decimals`, else the whole seconds alone, rounded down.
        """
        before, after = self.around
        each = item.num_rows // item.grid[0]
        said = f"{seconds:.1f} seconds" if self.with_decimals else str(int(seconds))
        return [before, *[self.token_ids["image"]] * each, after, *self.tokenizer.encode(said, False)]


class GlmOcrProcessor(Glm4vProcessor):
    """Processor of GlmOcrForConditionalGeneration: Glm4vProcessor for images alone."""

    modalities: tuple[str, ...] = ("image",)
