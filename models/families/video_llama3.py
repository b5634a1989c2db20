"""VideoLLaMA 3 (Zhang et al. 2025, arXiv:2501.13106), for images of any shape: Qwen2 with a vision tower."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.llava import FLATTENED, read_text
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.video_llama3 import PROJECTOR, TOWER, read_video_llama3


class VideoLlama3ForConditionalGeneration(LlamaForCausalLM):
    """Qwen2, or another model with Llama's layers, with a vision tower. Embeddings have the positions of tokens."""

    gguf_architecture: ClassVar[str | None] = None  # its GGUF files are those of the text part
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
        return read_text(fields, "qwen2") | {"tower": read_video_llama3(fields)}
