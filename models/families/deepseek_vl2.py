"""DeepSeek-VL2 (Wu et al. 2024, arXiv:2412.10302) in its three sizes: DeepSeek-V2's experts with Llama's attention
(Tiny) or latent attention (Small), or DeepSeek-V3's layers, with a vision tower over an image and its tiles.
"""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.deepseek_v2 import DeepseekV2ForCausalLM, read_experts
from jaxengine.models.families.deepseek_v3 import DeepseekV3ForCausalLM
from jaxengine.models.families.llama import LlamaForCausalLM, gated_fields
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.deepseek_vl2 import NEWLINE, POSITIONS, PROJECTOR, SEPARATOR, TOWER, read_deepseek_vl2

# Defaults of the published code for fields that language_config lacks.
_DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# The same for fields of corrected experts, where those of DeepSeek-V3 differ.
_CORRECTED = {
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
}
_OUTER = ("quantization_config", "tie_word_embeddings")


class DeepseekVLV2ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V2 or V3, or the former with Llama's attention, with a vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("language.model.", "model."), ("language.lm_head.", "lm_head.")),
        tower=(f"{TOWER}.", f"{PROJECTOR}.", NEWLINE, SEPARATOR),
        flattened=(".patch_embed.proj.weight", POSITIONS),
        joined={f".attn.qkv.{end}": tuple(f".attn.{part}_proj.{end}" for part in "qkv") for end in ("weight", "bias")},
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        language = fields.mapping("language_config")
        if language is None:
            raise fields.fail("language_config", "a mapping")
        outer = {name: fields.value(name) for name in _OUTER if fields.has(name)}
        text = ConfigFields({**_DEFAULTS, **outer, **language})
        shared = cls._read_text(text)
        return shared | {"tower": read_deepseek_vl2(fields, shared["hidden_size"])}

    @classmethod
    def _read_text(cls, text: ConfigFields) -> dict[str, Any]:
        """Return arguments of ModelConfig from the fields of the language model: DeepSeek-V3's if `topk_method` is
        noaux_tc, else DeepSeek-V2's, which have plain attention if `use_mla` (default: true) is false, with experts
        after the first `first_k_dense_replace` (default: 0) layers. Raises ModelConfigError for wrong ones.
        """
        if text.text("topk_method", "greedy") == "noaux_tc":
            text = text.with_defaults(**_CORRECTED)
            text.require(use_mla=True, scoring_func="sigmoid")
            return DeepseekV3ForCausalLM.read_hf(text)
        if text.boolean("use_mla", True):
            return DeepseekV2ForCausalLM.read_hf(text)
        text.require(moe_layer_freq=1)
        dense = min(text.integer("first_k_dense_replace", 0, minimum=0), text.integer("num_hidden_layers"))
        bias = text.boolean("attention_bias", False)
        experts = read_experts(text.with_defaults(n_shared_experts=2), tuple(range(dense)))
        shared = gated_fields(text, bias=bias, output_bias=bias)
        return shared | {"experts": experts, "mlp_bias": text.boolean("mlp_bias", False)}

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        if self.config.attention[layer].latent is None:
            return LlamaForCausalLM.make_attention(self, layer, build)
        return super().make_attention(layer, build)
