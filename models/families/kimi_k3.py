"""Kimi K3 (Kimi Team 2026): Kimi Linear with attention residuals over blocks of layers, gated latent attention, whole
gates of delta nets, experts that are smaller than the hidden state, and a tower for images.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_of_type
from jaxengine.models.families.kimi_linear import KimiLinearForCausalLM
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.moonvit import POSITIONS, TOWER, read_kimi_k3

# Defaults of the published configuration where they are not those of Kimi Linear in transformers.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 163840,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 1.0,
    "num_shared_experts": 0,
    "first_k_dense_replace": 0,
    "max_position_embeddings": 4096,
}


class KimiK3ForConditionalGeneration(KimiLinearForCausalLM):
    """Kimi Linear with what `kimi_k3` adds to its layers, and a tower that reads images."""

    gguf_architecture: ClassVar[str | None] = "kimi-k3"
    checkpoint_names: ClassVar[CheckpointNames] = KimiLinearForCausalLM.checkpoint_names._replace(
        prefixes=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("language_model.layers.", "model.layers."),
        ),
        # Nothing of these is quantised, whatever the configuration lists.
        plain=(TOWER, "mm_projector", "routed_expert_down_proj", "routed_expert_up_proj"),
        tower=(f"{TOWER}.", "mm_projector."),
        flattened=(".patch_embed.proj.weight", POSITIONS),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_of_type(fields, "kimi_linear")
        text.require(attention_bias=False)
        return super().read_hf(text.with_defaults(**_DEFAULTS)) | {"tower": read_kimi_k3(fields)}
