"""GLM-5.3-Flash (Z.ai 2026), served as text: Kimi delta attention in most layers, latent attention without rope to
groups of keys that an indexer selects in the others, DeepSeek-V4's hyper-connections, and a clamped activation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import KeyIndex, LayerAttention, LayerState
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_flags, gguf_limit
from jaxengine.models.config.readers.hf import FULL, read_each_layer, text_fields
from jaxengine.models.config.readers.latent import hf_latent_fields
from jaxengine.models.config.state import GatedDelta
from jaxengine.models.families.deepseek_v4 import (
    GGUF_STREAMS,
    STREAM_NAMES,
    DeepseekV4Layer,
    read_connections,
)
from jaxengine.models.families.glm4_moe import sigmoid_experts
from jaxengine.models.families.kimi_linear import (
    LINEAR,
    KimiLinearForCausalLM,
    gguf_delta_nets,
    read_kda,
    read_lower_bound,
)
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.layers.attention.sparse_mla import SparseLatentAttention
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.mlp import GatedMLP, OfClamped
from jaxengine.models.layers.experts.moe import MixtureOfExperts
from jaxengine.models.layers.states.delta_net import CONVS, JOINED
from jaxengine.models.layers.streams.hyper_connections import MeanOfStreams, equal_streams
from jaxengine.models.params.source import CheckpointNames

INDEXED = "indexed_attention"
# transformers' defaults for fields that a file lacks.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 154880,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 288,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "v_head_dim": 256,
    "num_nextn_predict_layers": 1,
}
# Fields of `linear_attn_config` -> those that transformers has outside of it.
_INNER = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
_BOUND = "linear_lower_bound"
_GATE = ".index_kpool_compress_gate"


class Glm5NextForConditionalGeneration(KimiLinearForCausalLM):
    """Kimi Linear with an indexer in the layers with attention, whose layers pass on A hidden states of each token, [T,
    A * D]. The vision tower is not read.
    """

    first_input = equal_streams
    gguf_architecture: ClassVar[str | None] = "glm5-next"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.language_model.", "model."),),
        suffixes=((_GATE, f"{_GATE}.weight"),),
        unused=("model.visual.", "visual."),
        squeezed=(*CONVS, *JOINED),
        raveled=(".A_log",),
        joined=JOINED,
        parts=(
            *((f".self_attn.forget_gate.{name}", f".self_attn.{name}") for name in ("f_", "dt_bias", "A_log")),
            *((f".hc_{each}_", f".{each}_hc.") for each in ("attn", "ffn")),
        ),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = (text_fields(fields) if fields.has("text_config") else fields).with_defaults(**DEFAULTS)
        fields.require(index_kpool_always_select_tail=True, moe_layer_freq=1)
        kinds, bias = _mixer_kinds(fields), fields.boolean("attention_bias", False)
        shared = gated_fields(fields, read=hf_latent_fields, roped=False, bias=bias, output_bias=bias)
        index = KeyIndex(
            num_heads=fields.integer("index_n_heads", 32),
            head_dim=fields.integer("index_head_dim", 128),
            top_k=fields.integer("index_topk", 2048),
            pool=fields.integer("index_kpool", 16),
        )
        state, layers = _read_delta(fields, shared["activation"]), zip(shared["attention"], kinds, strict=True)
        return shared | {
            "attention": tuple(_of_kind(each, kind, index, state) for each, kind in layers),
            "experts": replace(sigmoid_experts(fields), swiglu_limit=fields.number("swiglu_limit", 10.0)),
            "hyper_connections": read_connections(fields),
        }

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields, bound = gguf.fields, read_lower_bound(gguf.fields, "kda.gate_lower_bound", None)
        shared = gguf_delta_nets(gguf, rank=fields.integer("kda.head_dim"), lower_bound=bound)
        fields.require(**{"attention.indexer.kpool_select_tail": True})
        selecting = "attention.indexer.types"
        if not all(gguf_flags(fields, selecting, [True] * len(shared["attention"]))):
            raise fields.fail(selecting, "true for each layer")
        sizes = (fields.integer(f"attention.indexer.{name}") for name in ("head_count", "key_length", "top_k"))
        index = KeyIndex(*sizes, pool=fields.integer("attention.indexer.kpool"))
        layers = ((each, INDEXED if each.state is None else LINEAR) for each in shared["attention"])
        return shared | {
            "attention": tuple(_of_kind(each, kind, index, each.state) for each, kind in layers),
            "experts": replace(shared["experts"], swiglu_limit=gguf_limit(fields)),
            "hyper_connections": read_connections(fields, GGUF_STREAMS),
        }

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        parts = self.make_attention(layer, build), self.make_mlp(layer, build), build
        return DeepseekV4Layer(self.config, *parts, names=STREAM_NAMES)

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, own = self.config, self.config.attention[layer]
        if own.state is not None:
            return super().make_attention(layer, build)
        source, eps = f"{LAYER}.self_attn", config.rms_norm_eps
        return SparseLatentAttention(own, config.hidden_size, source=source, build=build, eps=eps)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        config, experts = self.config, self.config.experts
        assert experts is not None
        source, clamped = f"{LAYER}.mlp", OfClamped(experts.swiglu_limit, ACTIVATIONS[config.activation])
        if layer in experts.dense_layers:
            sizes = config.hidden_size, config.intermediate_size
            return GatedMLP(*sizes, source=source, build=build, clamped=clamped)
        # Experts have a SiLU, whatever the activation of the other MLPs.
        options: dict[str, Any] = {"activation": OfClamped(experts.swiglu_limit), "shared": {"clamped": clamped}}
        return MixtureOfExperts(config, source=source, router_dtype=jnp.float32, build=build, **options)

    def make_norm(self, build: Build) -> nnx.Module:
        return MeanOfStreams(self.config, super().make_norm(build))


def _of_kind(attention: LayerAttention, kind: str, index: KeyIndex, state: LayerState | None) -> LayerAttention:
    """Return the attention of a layer: with `index` for INDEXED, otherwise with `state`, without latent, scale and
    biases, and with index.stored_size as the size of values, so that the pages have the size of the others'.
    """
    if kind == INDEXED:
        return replace(attention, index=index)
    return replace(
        attention, latent=None, scale=None, bias=False, output_bias=False, state=state, value_size=index.stored_size
    )


def _mixer_kinds(fields: ConfigFields) -> list[str]:
    """Return LINEAR or INDEXED for each layer, as listed in `layer_types`, where FULL also means INDEXED; without the
    list every fourth layer is INDEXED. Raises ModelConfigError for a wrong list, and where `indexer_types`,
    `index_topk_pattern` or `index_topk_freq` let an INDEXED layer use the selection of another.
    """
    count = fields.integer("num_hidden_layers")
    kinds = read_each_layer(fields, "layer_types", (LINEAR, INDEXED, FULL))
    kinds = [LINEAR if (layer + 1) % 4 else INDEXED for layer in range(count)] if kinds is None else kinds
    kinds = [INDEXED if kind == FULL else kind for kind in kinds]
    own = read_each_layer(fields, "indexer_types", ("full", "shared")) or ["full"] * count
    if any(kind == INDEXED and each != "full" for kind, each in zip(kinds, own, strict=True)):
        raise fields.fail("indexer_types", f"full for each layer of {INDEXED}, or absent")
    fields.require(index_topk_pattern=None, index_topk_freq=1)
    return kinds


def _read_delta(fields: ConfigFields, activation: str) -> GatedDelta:
    """Return the delta net of LINEAR layers. `linear_attn_config` goes before the fields outside of it. The lower bound
    of decays is -5 by default; null means none, unless `linear_attn_config` is present without a false `safe_gate`,
    where it means -5. activation: that of the convolution. Raises ModelConfigError for wrong fields.
    """
    inner, raw = fields.mapping("linear_attn_config"), dict(fields.raw)
    raw |= {outer: inner[name] for name, outer in _INNER.items() if inner is not None and name in inner}
    bound = raw.get(_BOUND, -5.0)
    if bound is None and inner is not None and ConfigFields(dict(inner)).boolean("safe_gate", True):
        bound = -5.0
    sizes = ConfigFields({**raw, _BOUND: bound}).with_defaults(linear_num_heads=64, linear_head_dim=128)
    return read_kda(sizes, activation=activation, lower_bound=read_lower_bound(sizes, _BOUND, None))
