"""Hy4 (Tencent 2026): GLM-5.2's shared selections of keys with sinks and gates of the heads' outputs, and independent
hyper-connections.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.compressed import HyperConnections
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.deepseek_v4 import STREAM_NAMES, DeepseekV4Layer
from jaxengine.models.families.glm_moe_dsa import GlmMoeDsaForCausalLM
from jaxengine.models.families.llama import LAYER
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.attention.mla import times_gate
from jaxengine.models.layers.attention.sparse_mla import SparseLatentAttention
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import OfClamped
from jaxengine.models.layers.experts.moe import MixtureOfExperts
from jaxengine.models.layers.streams.hyper_connections import IndependentConnection, JoinedStreams, equal_streams
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames

# transformers' defaults for fields that a file lacks.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 120832,
    "hidden_size": 2816,
    "intermediate_size": 6912,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 120000,
    "eos_token_id": 120025,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_topk_freq": 4,
}
# Names in published checkpoints -> transformers', which puts `hc_pre` elsewhere when it saves a model.
HEADS = tuple(
    (f"model.{old}hc_head_", "model.hc_head.hc_") for old in ("hc_pre.hc_head.", "hc_head.hc_pre.", "hc_head.")
)
_PARTS = (
    (".hc_attn_layer.hc_pre.hc_", ".attn_hc."),
    (".hc_pre.hc_attn_layer.hc_", ".attn_hc."),
    (".hc_mlp_layer.hc_pre.hc_", ".ffn_hc."),
    (".hc_pre.hc_mlp_layer.hc_", ".ffn_hc."),
    (".learnable_sink_param", ".sinks"),
    (".linear_gate", ".gate_proj"),
)


class HYV4Attention(SparseLatentAttention):
    """Sparse latent attention with a sink for each head, whose output is multiplied by a gate."""

    def __init__(self, attention: LayerAttention, hidden_size: int, *, source: str, build: Build, **options: Any):
        super().__init__(attention, hidden_size, source=source, build=build, **options)
        value = self.latent.v_head_dim
        gate = Source(f"{source}.gate_proj", attention.num_heads * value, group=value)
        self.gate = Linear(hidden_size, (gate,), axes=("embed", "heads"), build=build)

    def gated(self, o: jax.Array, x: jax.Array, q_latent: jax.Array, step: StepInputs) -> jax.Array:
        """Return the heads' outputs o [T, N * Hv] multiplied by sigmoid gates of the layer's input x [T, D], one for
        each element. Computed in float32; returned in the dtype of o.
        """
        return times_gate(o, self.gate(x, step.rows, out_dtype=jnp.float32))


class HYV4ForCausalLM(GlmMoeDsaForCausalLM):
    """GLM-5.2 whose layers pass on A hidden states of each token, [T, A * D], with rope on the last elements of the
    indexer's heads, and with routed experts whose activation is clamped.
    """

    first_input = equal_streams
    interleaved: ClassVar[bool] = False
    index_heads: ClassVar[int] = 16
    index_interleaved: ClassVar[bool] = False
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(prefixes=HEADS, parts=_PARTS)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**DEFAULTS)
        fields.require(enable_ihc=True, gated_mla=True, gating_type="elementwise", learnable_sink=True)
        fields.require(soft_logits_capping=False, indexer_rope_interleave=cls.index_interleaved)
        # transformers replaces the field by the number of heads, which all have keys of their own.
        fields = ConfigFields({**fields.raw, "num_key_value_heads": fields.integer("num_attention_heads")})
        shared = super().read_hf(fields)
        eps = shared["rms_norm_eps"]
        attention = (
            replace(each, sinks=True, index=replace(each.index, rotates_last=True, norm_eps=eps))
            for each in shared["attention"]
        )
        unread = max(shared["num_nextn_predict_layers"], shared["num_unread_layers"])
        limit = fields.number("swiglu_limit", 10.0)
        return shared | {
            "attention": tuple(attention),
            "experts": replace(shared["experts"], swiglu_limit=limit),
            "num_nextn_predict_layers": 0,
            "num_unread_layers": unread,
            "hyper_connections": HyperConnections(
                num_streams=fields.integer("hc_mult", 4),
                rounds=None,
                eps=fields.number("hc_eps", 1e-6),
                magnitude=fields.number("hc_magnitude", 2.0),
            ),
        }

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        sizes = self.config.attention[layer], self.config.hidden_size
        return HYV4Attention(*sizes, source=f"{LAYER}.self_attn", build=build, notes=self.notes_selection(layer))

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        experts = self.config.experts
        assert experts is not None
        if layer in experts.dense_layers:
            return super().make_mlp(layer, build)
        # Experts have a SiLU, whatever the activation of the other MLPs.
        options: dict[str, Any] = {"activation": OfClamped(experts.swiglu_limit), "router_dtype": jnp.float32}
        return MixtureOfExperts(self.config, source=f"{LAYER}.mlp", build=build, **options)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        parts = self.make_attention(layer, build), self.make_mlp(layer, build), build
        return DeepseekV4Layer(self.config, *parts, connection=IndependentConnection, names=STREAM_NAMES)

    def make_norm(self, build: Build) -> nnx.Module:
        return JoinedStreams(self.config, super().make_norm(build), name="model.hc_head.hc_")
