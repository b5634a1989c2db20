"""LFM2 (Liquid AI 2025, LFM2 Technical Report): gated short convolutions in most layers, attention with q/k norms in
the others, and in LFM2-MoE experts after some dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.pooler import LAST
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_shared_experts
from jaxengine.models.config.readers.gguf_states import gguf_hybrid
from jaxengine.models.config.readers.hf import FULL, hf_fields, read_each_layer
from jaxengine.models.config.state import ShortConvolution
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, LlamaLayer
from jaxengine.models.layers.attention.attention import Attention
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.layers.states.short_conv import ShortConv, WholeShortConv, taps_of_layers
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames, StackedExperts

CONV = "conv"
MLP = f"{LAYER}.feed_forward"


class Lfm2ForCausalLM(LlamaForCausalLM):
    """Llama's layers under other names, with short convolutions in place of attention in most of them."""

    gguf_architecture: ClassVar[str | None] = "lfm2"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(squeezed=(".conv.conv.weight",))

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return hybrid_fields(fields, _ffn_size(fields))

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields = gguf.fields
        if not fields.boolean("attention.causal", True):
            raise fields.fail("attention.causal", "true or absent: convolutions over both sides are not read from GGUF")
        state = ShortConvolution(fields.integer("embedding_length"), fields.integer("shortconv.l_cache"))
        return gguf_hybrid(gguf, state, experts=cls.gguf_experts(fields))

    @classmethod
    def gguf_experts(cls, fields: ConfigFields) -> ExpertsConfig | None:
        """Return the ExpertsConfig of a GGUF file; None for a family without experts, as here. Overrides raise
        ModelConfigError for wrong fields.
        """
        return None

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        parts = self.make_attention(layer, build), self.make_mlp(layer, build)
        return LlamaLayer(self.config, *parts, build, norm_names=("operator_norm", "ffn_norm"))

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, attention = self.config, self.config.attention[layer]
        size, eps = config.hidden_size, config.rms_norm_eps
        if isinstance(attention.state, ShortConvolution):
            return ShortConv(attention.state, size, source=f"{LAYER}.conv", build=build)
        source = f"{LAYER}.self_attn"
        names = "q_layernorm", "k_layernorm"
        norms = [RMSNorm(attention.head_dim, eps, source=f"{source}.{name}", build=build) for name in names]
        out = Source(f"{source}.out_proj", size)
        return Attention(attention, size, eps=eps, source=source, build=build, out=out, qk_norms=norms)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        size, ffn = self.config.hidden_size, self.config.intermediate_size
        gate_up, down = (Source(f"{MLP}.w1", ffn), Source(f"{MLP}.w3", ffn)), Source(f"{MLP}.w2", size)
        return GatedMLP(size, ffn, source=MLP, gate_up=gate_up, down=down, build=build)

    def make_norm(self, build: Build) -> nnx.Module:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, source="model.embedding_norm", build=build)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with experts, which are chosen with a correction bias."""

    gguf_architecture: ClassVar[str | None] = "lfm2moe"
    checkpoint_names: ClassVar[CheckpointNames] = Lfm2ForCausalLM.checkpoint_names._replace(
        stacked_experts=StackedExperts(modules=("w1", "w3", "w2"))
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        first = fields.integer("num_dense_layers", 2, minimum=0)
        experts = ExpertsConfig(
            num_experts=fields.integer("num_experts"),
            num_per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("moe_intermediate_size"),
            norm_weights=fields.boolean("norm_topk_prob", True),
            dense_layers=tuple(range(min(first, fields.integer("num_hidden_layers")))),
            scoring_func="sigmoid",
            correction_bias=fields.boolean("use_expert_bias", True),
            routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        )
        return hybrid_fields(fields, fields.integer("intermediate_size")) | {"experts": experts}

    @classmethod
    def gguf_experts(cls, fields: ConfigFields) -> ExpertsConfig | None:
        fields.integer("expert_count")  # there is no model without
        return gguf_shared_experts(fields, scoring_func="sigmoid", norm_weights=True)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        assert self.config.experts is not None
        if layer in self.config.experts.dense_layers:
            return super().make_mlp(layer, build)
        names = ExpertNames(gate="w1", up="w3", down="w2", correction_bias="expert_bias")
        return MixtureOfExperts(self.config, source=MLP, names=names, build=build)


class Lfm2BidirectionalModel(Lfm2ForCausalLM):
    """LFM2.5's embedders: LFM2 whose tokens attend to their whole prompt, with convolutions over both sides."""

    make_layer_inputs = taps_of_layers

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(conv_bias=False)
        shared = super().read_hf(fields)
        kernel = fields.integer("conv_L_cache", 3)
        layers = (
            replace(each, causal=False) if each.state is None else replace(each, state=None, feed_forward_only=True)
            for each in shared["attention"]
        )
        return shared | {"attention": tuple(layers), "layer_input_size": kernel}

    @classmethod
    def usual_pooling(cls, fields: ConfigFields) -> str:
        """Return LAST, the type of pooling of a checkpoint without a file that states it, as in vLLM."""
        return LAST

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        if not self.config.attention[layer].feed_forward_only:
            return super().make_attention(layer, build)
        size = self.config.hidden_size
        conv = ShortConvolution(size, self.config.layer_input_size)
        return WholeShortConv(conv, size, source=f"{LAYER}.conv", build=build)


def hybrid_fields(fields: ConfigFields, ffn_size: int) -> dict[str, Any]:
    """Return the arguments of ModelConfig that LFM2 and LFM2-MoE read from the same fields: all but the experts. CONV
    layers have a short convolution as their state, and no rope. By default rope has the base 1e6, norms the epsilon
    1e-5, convolutions a kernel of 3 (`conv_L_cache`) and no bias (`conv_bias`), and the LM head is tied;
    `tie_embedding` counts before `tie_word_embeddings`. ffn_size: width of the dense feed-forward layers, which
    replaces the file's. Raises ModelConfigError for wrong fields.
    """
    fields = fields.with_defaults(rope_theta=1e6, norm_eps=1e-5, intermediate_size=ffn_size)
    shared = hf_fields(fields, eps="norm_eps", tied=True)
    shared["tie_word_embeddings"] = fields.boolean("tie_embedding", shared["tie_word_embeddings"])
    kernel, bias = fields.integer("conv_L_cache", 3), fields.boolean("conv_bias", False)
    state = ShortConvolution(shared["hidden_size"], kernel, bias)
    layers = zip(shared["attention"], _layer_kinds(fields), strict=True)
    attention = (replace(each, rope=None, state=state) if kind == CONV else each for each, kind in layers)
    return shared | {"attention": tuple(attention), "intermediate_size": ffn_size}


def _ffn_size(fields: ConfigFields) -> int:
    """Return the width of feed-forward layers: two thirds of the file's (`block_ff_dim`, else `intermediate_size`),
    times `block_ffn_dim_multiplier` (1 by default), rounded up to a multiple of `block_multiple_of` (256 by default);
    not rounded if the multiplier is null. If block_auto_adjust_ff_dim is false, return the file's width. Raises
    ModelConfigError for wrong fields.
    """
    size = fields.integer("block_ff_dim", None) or fields.integer("intermediate_size")
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return size
    size, multiple = int(2 * size / 3), fields.integer("block_multiple_of", 256)
    multiplier = fields.with_defaults(block_ffn_dim_multiplier=1.0).number("block_ffn_dim_multiplier", None)
    return size if multiplier is None else -(-int(multiplier * size) // multiple) * multiple


def _layer_kinds(fields: ConfigFields) -> tuple[str, ...]:
    """Return CONV or FULL for each layer, as `layer_types` lists them. Without it, layers in `full_attn_idxs` are FULL,
    and without that too, all layers are. Raises ModelConfigError for wrong lists.
    """
    num_layers, kinds = fields.integer("num_hidden_layers"), read_each_layer(fields, "layer_types", (FULL, CONV))
    if kinds is None:
        full = fields.value("full_attn_idxs", None)
        full = list(range(num_layers)) if full is None else full
        if not isinstance(full, list) or any(type(layer) is not int or not 0 <= layer < num_layers for layer in full):
            raise fields.fail("full_attn_idxs", f"a list of layers from 0 to {num_layers - 1}")
        return tuple(FULL if layer in full else CONV for layer in range(num_layers))
    return tuple(kinds)
