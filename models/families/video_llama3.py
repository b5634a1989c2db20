"""VideoLLaMA 3 (Zhang et al. 2025, arXiv:2501.13106), for images of any shape: Qwen2 with a vision tower."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.llava import FLATTENED
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.video_llama3 import PROJECTOR, TOWER, read_video_llama3


class VideoLlama3ForConditionalGeneration(Wrapper, LlamaForCausalLM):
    """Qwen2, or another model with Llama's layers, with a vision tower. Embeddings have the positions of tokens."""

    text: ClassVar[str] = "qwen2"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("model.language_model.", "model."),
            ("model.vision_model.", f"{TOWER}."),
            (f"model.{PROJECTOR}.", f"{PROJECTOR}."),
        ),
        tower=(f"{TOWER}.", f"{PROJECTOR}."),
        flattened=FLATTENED,
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return cls.read_text(fields) | {"tower": read_video_llama3(fields)}
