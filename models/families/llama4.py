"""Llama 4 (Meta 2025): attention in chunks with rope over neighbouring elements, every fourth layer over all keys and
without rope, a shared MLP, and experts whose inputs are multiplied by a sigmoid weight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import TemperatureTuning
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import EXPERT_SIZE, GGUFConfig, gguf_experts, gguf_fields, gguf_layers
from jaxengine.models.config.readers.hf import FULL, read_each_layer, read_head_dim, read_rope, text_fields
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.families.qwen3_moe import Qwen3MoeForCausalLM
from jaxengine.models.layers.attention.attention import Attention, StepInputs
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import rms_normalized
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.params.source import CheckpointNames, StackedExperts
from jaxengine.models.vision.llama4 import PROJECTOR, TOWER, read_llama4_tower

CHUNKED = "chunked_attention"
DEFAULTS: dict[str, Any] = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_chunk_size": 8192}
_MAVERICK_EXPERTS = 128
_STACKED = StackedExperts(out_first=False)


class NormedAttention(Attention):
    """Attention with RMS norms of q and k, without weights, after rope. eps: epsilon of these norms."""

    eps: float

    def rotate(self, q: jax.Array, k: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array]:
        q, k = super().rotate(q, k, step)
        with jax.named_scope("qk_norm"):
            return rms_normalized(q, self.eps).astype(q.dtype), rms_normalized(k, self.eps).astype(k.dtype)


class Llama4ForCausalLM(Qwen3MoeForCausalLM):
    """Llama with chunked attention, layers without rope, and experts in some of its layers."""

    gguf_architecture: ClassVar[str | None] = "llama4"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(stacked_experts=_STACKED)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields, num_layers = fields.with_defaults(**DEFAULTS), fields.integer("num_hidden_layers")
        rope = read_rope(fields, read_head_dim(fields), interleaved=True)
        every = fields.integer("no_rope_layer_interval", 4)
        with_rope = _flags(fields, "no_rope_layers", [int((layer + 1) % every > 0) for layer in range(num_layers)])
        chunks = _chunks(fields, with_rope)
        bias = fields.boolean("attention_bias", False)
        shared = gated_fields(fields, bias=bias, output_bias=bias, qk_norm=fields.boolean("use_qk_norm", True))
        tuning = None
        if fields.value("attn_temperature_tuning", True):
            floor_scale, attn_scale = fields.number("floor_scale", 8192.0), fields.number("attn_scale", 0.1)
            tuning = TemperatureTuning(floor_scale, attn_scale, offset=1)
        attention = tuple(
            replace(one, rope=rope, chunk=chunk)
            if rotated
            else replace(one, rope=None, chunk=chunk, qk_norm=False, temperature=tuning)
            for one, rotated, chunk in zip(shared["attention"], with_rope, chunks, strict=True)
        )
        size, step = fields.integer("intermediate_size"), fields.integer("interleave_moe_layer_step", 1)
        sparse = fields.value("moe_layers", None)
        if sparse is None:
            sparse = list(range(step - 1, num_layers, step))
        if not isinstance(sparse, list) or any(type(n) is not int or not 0 <= n < num_layers for n in sparse):
            raise fields.fail("moe_layers", f"a list of layer indices from 0 to {num_layers - 1}")
        experts = ExpertsConfig(
            num_experts=fields.integer("num_local_experts"),
            num_per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=size,
            norm_weights=False,
            dense_layers=tuple(sorted(set(range(num_layers)) - set(sparse))),
            scoring_func="sigmoid",
            apply_router_weight_on_input=True,
            shared_intermediate_size=size,
        )
        own = {"attention": attention, "intermediate_size": fields.integer("intermediate_size_mlp", size)}
        return shared | own | {"experts": experts}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields, num_layers = gguf.fields, gguf.fields.integer("block_count")
        size, step = fields.integer(EXPERT_SIZE), fields.integer("interleave_moe_layer_step", 1)
        more: dict[str, Any] = {
            "dense_layers": tuple(layer for layer in range(num_layers) if (layer + 1) % step),
            "scoring_func": "sigmoid",
            "apply_router_weight_on_input": True,
            "shared_intermediate_size": size,
        }
        experts = gguf_experts(fields, norm_weights=False, size=EXPERT_SIZE, **more)
        # Files do not say whether q and k have norms: all models do but Maverick, recognised, as in llama.cpp, by its
        # 128 experts.
        qk_norm = experts.num_experts != _MAVERICK_EXPERTS
        shared = gguf_fields(gguf, experts=experts, interleaved=True, qk_norm=qk_norm)
        chunk, tuning = fields.integer("attention.chunk_size", 8192), TemperatureTuning(8192.0, 0.1, offset=1)
        layer = shared["attention"][0]
        full = replace(layer, rope=None, qk_norm=False, temperature=tuning)
        return shared | {"attention": gguf_layers(fields, replace(layer, chunk=chunk), full, full_every=4)}

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        attention, source = self.config.attention[layer], f"{LAYER}.self_attn"
        sizes: dict[str, Any] = {"eps": self.config.rms_norm_eps, "source": source, "build": build}
        if not attention.qk_norm:
            return Attention(attention, self.config.hidden_size, **sizes)
        made = NormedAttention(replace(attention, qk_norm=False), self.config.hidden_size, **sizes)
        made.eps = self.config.rms_norm_eps
        return made

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        config, source = self.config, f"{LAYER}.feed_forward"
        if config.experts is not None and layer in config.experts.dense_layers:
            sizes, activation = (config.hidden_size, config.intermediate_size), ACTIVATIONS[config.activation]
            return GatedMLP(*sizes, source=source, activation=activation, build=build)
        names = ExpertNames(router="router", shared="shared_expert")
        return MixtureOfExperts(config, source=source, names=names, build=build)


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """Llama 4 as published, with a vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")),
        tower=(f"{TOWER}.", f"{PROJECTOR}."),
        stacked_experts=_STACKED,
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return super().read_hf(text_fields(fields)) | {"tower": read_llama4_tower(fields)}


def _flags(fields: ConfigFields, name: str, default: list[int]) -> list[int]:
    """Return the field `name`, a list of 0 or 1 for each layer; `default` if it is empty or absent. Raises
    ModelConfigError for other values or a list of another length.
    """
    return (read_each_layer(fields, name, (0, 1)) if fields.value(name, None) else None) or default


def _chunks(fields: ConfigFields, with_rope: list[int]) -> list[int | None]:
    """Return the tokens of an attention chunk in each layer, None for no chunks. Layers that `layer_types` lists as
    chunked have chunks; without the list, those with rope. A file without `attention_chunk_size` has no chunks.
    with_rope: 0 or 1 for each layer. Raises ModelConfigError for wrong fields.
    """
    size, kinds = fields.integer("attention_chunk_size", None), read_each_layer(fields, "layer_types", (CHUNKED, FULL))
    if kinds is None:
        kinds = [CHUNKED if rotated else FULL for rotated in with_rope]
    return [size if kind == CHUNKED else None for kind in kinds]
