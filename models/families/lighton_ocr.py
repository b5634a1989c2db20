"""LightOnOCR (LightOn 2025): Qwen3 with Pixtral's vision tower, whose squares of patches are merged as in Mistral Small
3.1.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.qwen3 import Qwen3ForCausalLM
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.pixtral import PROJECTOR, TOWER, read_pixtral

_ENCODER, _PROJECTION = "vision_encoder", "vision_projection"


class LightOnOcrForConditionalGeneration(Wrapper, Qwen3ForCausalLM):
    """Qwen3 with Pixtral's vision tower."""

    text: ClassVar[str] = "qwen3"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("model.language_model.", "model."),
            (f"model.{_ENCODER}.", f"{TOWER}."),
            (f"model.{_PROJECTION}.", f"{PROJECTOR}."),
        ),
        tower=(f"{TOWER}.", f"{PROJECTOR}."),
        flattened=(".patch_conv.weight",),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # Whatever the file says, the projector's activation is GELU, it has no biases, and it gets the last states.
        fixed: dict[str, Any] = {"projector_hidden_act": "gelu", "multimodal_projector_bias": False}
        fixed["vision_feature_layer"] = -1
        fields = ConfigFields({**fields.with_defaults(tie_word_embeddings=True).raw, **fixed})
        shared = cls.read_text(fields)
        return shared | {"tower": read_pixtral(fields, shared["rms_norm_eps"])}
