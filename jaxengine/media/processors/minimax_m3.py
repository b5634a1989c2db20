"""Processor of MiniMax M3: Qwen2-VL's sizes, without M-RoPE. Steps of a video are separate in the prompt, each after
its time; patches attend to those of a few steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.grids import GridProcessor
from jaxengine.media.processors.qwen2_vl import Bounds, Qwen2VLProcessor, Sizes
from jaxengine.media.processors.settings import IMAGES, VIDEOS, read_settings
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of

_TOKENS = {"image": 200025, "video": 200026}
_START, _END = "]<]start of image[>[", "]<]end of image[>["
_UNREAD = [672, 672]
_STEPS = "vision_segment_max_frames"


class MiniMaxM3Processor(Qwen2VLProcessor):
    """Processor of MiniMaxM3SparseForConditionalGeneration.

    Attributes:
      segment_steps: the most temporal steps of a video whose patches attend to each other; 0 for no limit.
    """

    around_name: ClassVar[str | None] = None
    video_tokens: ClassVar[int | None] = None
    default_bounds: ClassVar[Mapping[str, Bounds]] = {
        "image": Bounds(4 * 28 * 28, 451584),
        "video": Bounds(4 * 28 * 28, 768 * 28 * 28),
    }

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's token ids (KIND_token_id, else KIND_token_index, else a default), settings of
        Qwen2VLProcessor and `segment_steps`: vision_segment_max_frames, 4 if absent, no limit if null. Raises
        ModelConfigError for invalid or equal token ids, ModelFileError for missing or invalid settings.
        """
        fields = ConfigFields(config_json)
        tokens = {
            f"{kind}_token_id": fields.integer(
                f"{kind}_token_id", fields.integer(f"{kind}_token_index", default, minimum=0), minimum=0
            )
            for kind, default in _TOKENS.items()
        }
        if len(set(tokens.values())) < len(tokens):
            raise ModelConfigError(f"video_token_id must be another token than that of images, {tokens}")
        super().__init__(folder, tokens, model_config, tokenizer)
        path, found = read_settings(Path(folder), VIDEOS, IMAGES)
        with errors_of(path):
            unlimited = _STEPS in found.raw and not found.has(_STEPS)
            self.segment_steps: int = 0 if unlimited else found.integer(_STEPS, 4)
        self.settings += f" {self.segment_steps}"

    def read_sizes(self, modality: str, found: ConfigFields) -> Sizes:
        """Return a modality's settings from those that were found. As in transformers, the bounds of frames are
        min_pixels and max_pixels alone, and the published `size` of images, [672, 672], is not read.

        Raises ModelConfigError for settings that are invalid or do not fit the tower.
        """
        if modality == "video" or found.value("size", None) == _UNREAD:
            found = ConfigFields({name: value for name, value in found.raw.items() if name != "size"})
        return super().read_sizes(modality, found)

    def placeholder(self, modality: str) -> str:
        return GridProcessor.placeholder(self, modality)

    def seconds(self, video: Any) -> tuple[float, ...]:
        """Return the time of the first frame of each temporal step of a frames.Video, in seconds; () if its rate is
        unknown: then the prompt states none.
        """
        if video.fps is None:
            return ()
        return tuple((np.asarray(video.frames_indices) / video.fps)[:: self.tower.temporal_patch_size].tolist())

    def _coordinates(self, grid: tuple[int, int, int], order: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns of GridProcessor._coordinates by name, with as "segment" the number of the segment of
        steps, and as "frame" the step's number in it.
        """
        found = super()._coordinates(grid, order)
        segment, frame = np.divmod(found["segment"], self.segment_steps or grid[0])
        return {**found, "segment": segment, "frame": frame}

    expand = GridProcessor.expand  # without M-RoPE positions

    def item_tokens(self, modality: str, item: Processed) -> np.ndarray:
        """Return the tokens of an item, with -1 for each of its embeddings: those of each temporal step between the
        tokens of an image's start and end, in a video after the step's time in seconds, with one decimal. Raises
        RequestError without a tokenizer.
        """
        self.check_tokenizer(modality)
        steps = item.grid[0]
        times = [f"]<]{seconds:.1f} seconds[>[" for seconds in item.seconds] or [""] * steps
        return np.concatenate([self.between(time + _START, item.num_rows // steps, _END) for time in times])
