"""Qwen3-Next (Qwen Team 2025): gated delta nets in three of four layers, gated attention in the others, and experts
with a gated shared MLP everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig
from jaxengine.models.config.readers.gguf_states import gguf_delta_fields
from jaxengine.models.config.readers.hf import FULL, predicting, read_each_layer
from jaxengine.models.config.state import GatedDelta
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.families.qwen2_moe import Qwen2MoeForCausalLM, gated_experts, gated_gguf_experts
from jaxengine.models.layers.attention.attention import QK_NORMS, Attention
from jaxengine.models.layers.base.norm import OffsetRMSNorm
from jaxengine.models.layers.states.delta_net import GatedDeltaNet
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import MTP_LAYER, CheckpointNames

LINEAR = "linear_attention"


class Qwen3NextForCausalLM(Qwen2MoeForCausalLM):
    """Llama's layers with norm weights stored as their difference from one, a gated delta net or gated attention in
    each layer, and experts.
    """

    gguf_architecture: ClassVar[str | None] = "qwen3next"
    norm_class = OffsetRMSNorm
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(squeezed=(".conv1d.weight",), next_layer=MTP_LAYER)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # Its configuration does not say that there is one.
        fields = fields.with_defaults(num_nextn_predict_layers=1)
        return predicting(hybrid_fields(fields)) | {"experts": gated_experts(fields, norm_weights=True)}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_delta_fields(gguf, experts=gated_gguf_experts(gguf.fields, norm_weights=True))

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, attention = self.config, self.config.attention[layer]
        size, eps = config.hidden_size, config.rms_norm_eps
        if isinstance(attention.state, GatedDelta):
            source = f"{LAYER}.linear_attn"
            inputs = self.delta_inputs(attention.state, source)
            return GatedDeltaNet(attention.state, size, eps=eps, source=source, build=build, inputs=inputs)
        source, head_dim = f"{LAYER}.self_attn", attention.head_dim
        norms = [OffsetRMSNorm(head_dim, eps, source=f"{source}.{name}", build=build) for name in QK_NORMS]
        *qkv, gate = gated_inputs(attention, source)
        return Attention(attention, size, eps=eps, source=source, build=build, qkv=qkv, gate=gate, qk_norms=norms)

    def delta_inputs(self, state: GatedDelta, source: str) -> list[Source]:
        """Return the sources of q, k, v, z, beta and decay, in this order. In the checkpoint, the rows of one key head
        are adjacent.

        source: name of the delta net's checkpoint module.
        """
        per_key, heads = state.num_v_heads // state.num_k_heads, state.num_k_heads
        keys, values = state.k_head_dim, per_key * state.v_head_dim
        return [
            *_in_turns(f"{source}.in_proj_qkvz", heads, keys, keys, values, values),
            *_in_turns(f"{source}.in_proj_ba", heads, per_key, per_key),
        ]


def hybrid_fields(fields: ConfigFields) -> dict[str, Any]:
    """Return the keyword arguments of ModelConfig that all families with delta nets and gated attention share, which
    are all except "experts".

    A layer of kind LINEAR has a GatedDelta state, of sizes `linear_num_key_heads`, `linear_key_head_dim`, those of
    values, and `linear_conv_kernel_dim`, and no rope. By default heads have 256 elements, and rope rotates a quarter of
    each. Raises ModelConfigError for wrong fields.
    """
    bias = fields.boolean("attention_bias", False)
    fields = fields.with_defaults(partial_rotary_factor=0.25)
    shared = gated_fields(fields, head_dim=256, partial_rotary=True, bias=bias, output_bias=bias)
    state = GatedDelta(
        num_k_heads=fields.integer("linear_num_key_heads"),
        num_v_heads=fields.integer("linear_num_value_heads"),
        k_head_dim=fields.integer("linear_key_head_dim"),
        v_head_dim=fields.integer("linear_value_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim"),
        activation=shared["activation"],
    )
    layers = zip(shared["attention"], _layer_kinds(fields), strict=True)
    attention = (replace(each, rope=None, state=state) if kind == LINEAR else each for each, kind in layers)
    return shared | {"attention": tuple(attention)}


def _layer_kinds(fields: ConfigFields) -> tuple[str, ...]:
    """Return the kind of each layer, LINEAR or FULL: as `layer_types` lists them, or, if that is absent, FULL for every
    `full_attention_interval`-th layer (default: 4th) and LINEAR for the others.

    Raises ModelConfigError if `layer_types` has another length or another kind.
    """
    num_layers, kinds = fields.integer("num_hidden_layers"), read_each_layer(fields, "layer_types", (FULL, LINEAR))
    if kinds is None:
        every = fields.integer("full_attention_interval", 4)
        return tuple(LINEAR if (layer + 1) % every else FULL for layer in range(num_layers))
    return tuple(kinds)


def gated_inputs(attention: LayerAttention, source: str) -> list[Source]:
    """Return the sources of q, k, v and the gate, in this order. In the checkpoint, `q_proj` has the queries and the
    gate of each head adjacent.

    source: name of the attention's checkpoint module.
    """
    q, gate = _in_turns(f"{source}.q_proj", attention.num_heads, attention.head_dim, attention.head_dim)
    rows = attention.num_kv_heads * attention.head_dim
    return [q, Source(f"{source}.k_proj", rows), Source(f"{source}.v_proj", rows), gate]


def _in_turns(name: str, count: int, *sizes: int) -> list[Source]:
    """Return one source per size for a checkpoint tensor `name` whose rows repeat a pattern `count` times: sizes[0]
    rows of the first source, then sizes[1] rows of the second, and so on.
    """
    stride, firsts = sum(sizes), [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        Source(name, count * size, group=size, first=first, tensor_rows=count * stride, stride=stride)
        for size, first in zip(sizes, firsts, strict=True)
    ]
