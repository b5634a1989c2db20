"""InternVL 3 (Zhu et al. 2025, arXiv:2504.10479), as transformers stores it: a Qwen model with a vision tower that
encodes images in tiles, and frames of videos.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.llava import NAMES, read_text
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.internvl import read_internvl


class InternVLForConditionalGeneration(LlamaForCausalLM):
    """Qwen 2.5 or 3, or another model with Llama's layers, with a vision tower."""

    gguf_architecture: ClassVar[str | None] = None  # its GGUF files are those of the text part
    checkpoint_names: ClassVar[CheckpointNames] = NAMES._replace(
        flattened=tuple(
            f"embeddings.{name}" for name in ("patch_embeddings.projection.weight", "cls_token", "position_embeddings")
        )
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return read_text(fields) | {"tower": read_internvl(fields)}
