"""Processor of LFM3-VL: Qwen3-VL's, but embeddings have the positions of tokens, not M-RoPE positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.qwen3_vl import Qwen3VLProcessor
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig

# transformers' defaults of the fields of config.json.
_TOKENS = {
    "image_token_id": 125030,
    "video_token_id": 125029,
    "vision_start_token_id": 125009,
    "vision_end_token_id": 125010,
}


class Lfm3VlProcessor(Qwen3VLProcessor):
    """Processor of Lfm3VlForConditionalGeneration."""

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings; token ids that config_json lacks have defaults. Raises ModelConfigError for
        invalid token ids, ModelFileError for missing or invalid settings.
        """
        super().__init__(folder, ConfigFields(config_json).with_defaults(**_TOKENS).raw, model_config, tokenizer)

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        return super().expand(token_ids, items)._replace(rope_positions=None, rope_delta=0)
