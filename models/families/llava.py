"""LLaVA 1.5 (Liu et al. 2023, arXiv:2310.03744), LLaVA-NeXT (Liu et al. 2024), LLaVA-NeXT-Video (Zhang et al. 2024),
LLaVA-OneVision (Li et al. 2024, arXiv:2408.03326), ViP-LLaVA (Cai et al. 2023, arXiv:2312.00784) and, as transformers
stores it, Pixtral (Agrawal et al. 2024, arXiv:2410.07073): Llama, or a model with its layers, with a vision tower.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.llava import NEWLINE, PROJECTOR, TOWER, read_llava, read_llava_next, read_vip_llava
from jaxengine.models.vision.llava_next_video import read_llava_next_video
from jaxengine.models.vision.llava_onevision import read_llava_onevision
from jaxengine.models.vision.pixtral import read_pixtral

# Kernels of convolutions, which are flattened to matrices.
FLATTENED = ("embeddings.patch_embedding.weight", ".patch_conv.weight")
# Names of transformers 4 and of transformers 5, which has "model." before all parts.
NAMES = CheckpointNames(
    prefixes=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
        *(("model." * new + f"{TOWER}.vision_model.", f"{TOWER}.") for new in (0, 1)),
        *((f"model.{part}", part) for part in (f"{TOWER}.", f"{PROJECTOR}.", NEWLINE)),
    ),
    tower=(f"{TOWER}.", f"{PROJECTOR}.", NEWLINE),
    flattened=FLATTENED,
)


class LlavaForConditionalGeneration(Wrapper, LlamaForCausalLM):
    """Llama, or a model with its layers, with a vision tower; also Pixtral 12B as transformers stores it."""

    checkpoint_names: ClassVar[CheckpointNames] = NAMES

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        kind = (fields.mapping("vision_config") or {}).get("model_type")
        return cls.read_text(fields) | {"tower": _read_pixtral(fields) if kind == "pixtral" else read_llava(fields)}


def _read_pixtral(fields: ConfigFields) -> TowerConfig:
    """Return the config of Pixtral's tower, of whose hidden states, by default those before its last layer, LLaVA's
    class must use all. Raises ModelConfigError for wrong fields, and unless `vision_feature_select_strategy`, which is
    another by default, says so.
    """
    fields = fields.with_defaults(vision_feature_layer=-2, vision_feature_select_strategy="default")
    fields.require(vision_feature_select_strategy="full")
    return read_pixtral(fields)


class VipLlavaForConditionalGeneration(LlavaForConditionalGeneration):
    """LLaVA that uses the hidden states of several of its tower's layers, with a norm before the projector."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return cls.read_text(fields) | {"tower": read_vip_llava(fields)}


class LlavaNextForConditionalGeneration(LlavaForConditionalGeneration):
    """LLaVA that encodes images both as a whole and in tiles."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return cls.read_text(fields) | {"tower": read_llava_next(fields)}


class LlavaNextVideoForConditionalGeneration(LlavaForConditionalGeneration):
    """LLaVA-NeXT that also takes videos."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return cls.read_text(fields) | {"tower": read_llava_next_video(fields)}


class LlavaOnevisionForConditionalGeneration(LlavaForConditionalGeneration):
    """LLaVA-NeXT that interpolates the embeddings of images with many tiles, and also takes videos."""

    text: ClassVar[str] = "qwen2"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return cls.read_text(fields) | {"tower": read_llava_onevision(fields)}
