"""MiniCPM 3 (OpenBMB 2024): MiniCPM's multipliers with DeepSeek-V2's latent attention, whose rope pairs halves."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf_latent import hf_latent_fields
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.families.minicpm import MiniCPMForCausalLM, multipliers
from jaxengine.models.layers.attention.mla import LatentAttention


class MiniCPM3ForCausalLM(MiniCPMForCausalLM):
    """MiniCPM with latent attention."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(rms_norm_eps=1e-5)
        if not fields.has("v_head_dim"):
            value = fields.integer("hidden_size") // fields.integer("num_attention_heads")
            fields = ConfigFields({**fields.raw, "v_head_dim": value})
        for name in ("scale_emb", "scale_depth", "dim_model_base"):
            fields.number(name)  # required, since the defaults of its own code and of transformers differ
        bias = fields.boolean("attention_bias", False)
        options: dict[str, Any] = {"interleaved": False, "tied": True, "bias": bias, "output_bias": bias}
        shared = gated_fields(fields, read=hf_latent_fields, **options)
        return shared | multipliers(fields) | {"mlp_bias": fields.boolean("mlp_bias", False)}

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, source = self.config, f"{LAYER}.self_attn"
        return LatentAttention(config.attention[layer], config.hidden_size, source=source, build=build)
