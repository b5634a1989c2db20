"""AliceAI (Yandex 2026): Kimi delta attention in most layers, Qwen3-Next's gated attention in the others, attention
residuals over blocks of layers, and experts picked by corrected sigmoid scores in addition to a gated shared MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.altup import KimiK3Parts
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.state import GatedDelta
from jaxengine.models.families.llama import LAYER
from jaxengine.models.families.qwen2_moe import gated_experts
from jaxengine.models.families.qwen3_next import Qwen3NextForCausalLM, hybrid_fields
from jaxengine.models.layers.states.delta_net import APART, CONVS, GatedDeltaNet
from jaxengine.models.layers.streams.block_residuals import BlockResidualLayer, StreamMix, first_stream
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames

# Defaults of the configuration class that comes with the checkpoint.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 129024,
    "intermediate_size": 5632,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 32,
    "linear_num_value_heads": 32,
}
_ONLY: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_score_function": "sigmoid",
    "router_bias_correction": True,
    "kda_allow_negative_eigenvalues": False,
}


class AliceAIForCausalLM(Qwen3NextForCausalLM):
    """Decoder of BlockResidualLayers, whose hidden states are side by side, with norm weights stored as their
    difference from one. Layers that predict further tokens are not read.
    """

    first_input = first_stream
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        squeezed=CONVS,
        raveled=(".A_log", "_res_proj.weight"),
        suffixes=(
            (".a_log_bias", ".A_log"),
            (".attn_res_norm_weight", ".self_attention_res_norm.weight"),
            (".mlp_res_norm_weight", ".mlp_res_norm.weight"),
            (".attnres_final.res_norm_weight", ".output_attn_res_norm.weight"),
        ),
        parts=(
            (".attn_res_proj.", ".self_attention_res_proj."),
            (".attnres_final.res_proj.", ".output_attn_res_proj."),
        ),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_DEFAULTS)
        fields.require(**_ONLY)
        for name in ("num_{}_heads", "{}_head_dim"):
            key, value = (f"linear_{name.format(kind)}" for kind in ("key", "value"))
            if fields.integer(key) != fields.integer(value):
                raise fields.fail(value, f"{fields.integer(key)}, as {key}")
        shared = hybrid_fields(fields)
        more = {"by_element": True, "rank": fields.integer("linear_key_head_dim")}
        attention = tuple(
            each if each.state is None else replace(each, state=replace(each.state, **more))
            for each in shared["attention"]
        )
        experts = replace(gated_experts(fields, norm_weights=True), scoring_func="sigmoid", correction_bias=True)
        blocks = fields.integer("block_attn_res_block_size")
        parts = KimiK3Parts(num_layers=len(attention), layers_per_block=blocks)
        return shared | {"attention": attention, "experts": experts, "kimi_k3": parts}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        modules = self.make_attention(layer, build), self.make_mlp(layer, build), build
        options: dict[str, Any] = {"scores_first": False, "norm_class": self.norm_class}
        return BlockResidualLayer(self.config, *modules, layer=layer, **options)

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, state = self.config, self.config.attention[layer].state
        if not isinstance(state, GatedDelta):
            return super().make_attention(layer, build)
        source, eps = f"{LAYER}.linear_attn", config.rms_norm_eps
        sizes = {"q": state.key_size, "k": state.key_size, "v": state.value_size, "b": state.num_v_heads}
        inputs = [Source(f"{source}.{name}_proj", size) for name, size in sizes.items()]
        options: dict[str, Any] = {"source": source, "build": build, "inputs": inputs, "names": APART}
        return GatedDeltaNet(state, config.hidden_size, eps=eps, **options)

    def make_norm(self, build: Build) -> nnx.Module:
        parts, name = self.config.kimi_k3, "model.output_attn_res"
        assert parts is not None
        count = 1 + parts.num_finished(self.config.num_layers)
        options: dict[str, Any] = {"norm": "model.norm", "build": build, "norm_class": self.norm_class}
        return StreamMix(self.config, count, name=name, **options)
