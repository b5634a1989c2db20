"""MiniMax M3 (MiniMax 2026): each KV head attends to the blocks of keys that it selects, in some or all layers; norms
of each head of q and k, rope on a part of each head, sigmoid-scored experts with a clamped activation; a tower for
images and videos.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import KeyIndex
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields, gguf_shared_experts
from jaxengine.models.config.readers.hf import FULL, Activation, hf_fields, listed_dense, read_each_layer, text_fields
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM
from jaxengine.models.layers.attention.attention import QK_NORMS, Attention
from jaxengine.models.layers.attention.blocks.head_blocks import HeadBlockAttention
from jaxengine.models.layers.base.mlp import ClampedSwish, GatedMLP
from jaxengine.models.layers.base.norm import NormClass, OffsetRMSNorm
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.params.source import CheckpointNames, StackedExperts
from jaxengine.models.vision.llava import PROJECTOR, TOWER
from jaxengine.models.vision.minimax_m3 import read_minimax_m3_tower

# The kind of layers that select blocks.
SPARSE = "minimax_m3_sparse"
# transformers' defaults for fields that a file lacks.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 200064,
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 1 << 19,
    "rope_theta": 5_000_000.0,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 200034,
    "eos_token_id": 200020,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
}
# Fields of published files that transformers does not read, and the only values with which its model is the same.
_ONLY: dict[str, Any] = {
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "attention_output_gate": False,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "n_shared_experts": 1,
    "swiglu_beta": 1.0,
}
_ACTIVATION = Activation("hidden_act", ("swigluoai", "silu"))  # transformers writes the second name and means the first
_PUBLISHED = "sparse_attention_config"
_MOE = "block_sparse_moe"
_VISION = (f"{TOWER}.", f"{PROJECTOR}.")
_PATCHES = f"{TOWER}.embeddings.patch_embedding."


class MiniMaxM3VLForCausalLM(LlamaForCausalLM):
    """Llama with HeadBlockAttention in some layers, norms of q and k, and experts in some layers."""

    gguf_architecture: ClassVar[str | None] = "minimax-m3"
    norm_class: ClassVar[NormClass] = OffsetRMSNorm
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("language_model.model.", "model."),
            ("model.language_model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            (f"{TOWER}.vision_model.encoder.", f"{TOWER}."),
            (f"{TOWER}.vision_model.", f"{TOWER}."),
            (f"model.{TOWER}.embeddings.proj.", _PATCHES),
            *((f"model.{name}", name) for name in _VISION),
            ("patch_merge_mlp.", f"{PROJECTOR}.merge_"),
        ),
        tower=_VISION,
        flattened=(f"{_PATCHES}weight",),
        stacked_experts=StackedExperts(modules=("w1", "w3", "w2")),
        joined={".gate_up_proj.weight": (".gate_proj.weight", ".up_proj.weight")},
        parts=(
            (".mlp.gate.e_score_correction_bias", f".{_MOE}.e_score_correction_bias"),
            *((f".mlp.{name}.", f".{_MOE}.{name}.") for name in ("experts", "gate", "shared_experts")),
            (".self_attn.indexer.", ".self_attn.index_"),
        ),
        tower_parts=(),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = fields
        if fields.has("text_config") or fields.value("model_type", None) == "minimax_m3_vl":
            text = text_fields(fields, optional=True)
            if fields.boolean("tie_word_embeddings", False):
                text = ConfigFields({**text.raw, "tie_word_embeddings": True})
        text = text.with_defaults(**DEFAULTS)
        text.require(**_ONLY)
        shared = hf_fields(text, activation=_ACTIVATION, partial_rotary=True, qk_norm=True)
        own, kinds = ConfigFields(text.mapping(_PUBLISHED) or {}), _kinds(text)
        index = _index(text, own)
        layers = zip(shared["attention"], kinds, strict=True)
        attention = tuple(replace(each, index=index if kind == SPARSE else None) for each, kind in layers)
        size = text.integer("dense_intermediate_size", 12288)
        return shared | {"attention": attention, "experts": _experts(text), "intermediate_size": size}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields, indexer = gguf.fields, "attention.indexer."
        if (experts := gguf_shared_experts(fields, scoring_func="sigmoid", norm_weights=True)) is None:
            raise fields.fail("expert_count", "at least 1")
        index = KeyIndex(
            num_heads=fields.integer(f"{indexer}head_count"),
            head_dim=fields.integer(f"{indexer}key_length"),
            top_k=fields.integer(f"{indexer}top_k") * (block := fields.integer(f"{indexer}block_size")),
            block=block,
            local=fields.integer(f"{indexer}local_blocks", minimum=0),
        )
        clamped = replace(experts, swiglu_alpha=1.702, swiglu_limit=7.0)
        shared = gguf_fields(gguf, partial_rotary=True, qk_norm=True, experts=clamped)
        layers = enumerate(shared["attention"])
        # Those with experts select blocks.
        attention = (replace(each, index=None if at in experts.dense_layers else index) for at, each in layers)
        return shared | {"attention": tuple(attention)}

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, source = self.config, f"{LAYER}.self_attn"
        own, eps = config.attention[layer], config.rms_norm_eps
        norms = [OffsetRMSNorm(own.head_dim, eps, source=f"{source}.{name}", build=build) for name in QK_NORMS]
        options: dict[str, Any] = {"eps": eps, "source": source, "build": build, "qk_norms": norms}
        if own.index is None:
            return Attention(own, config.hidden_size, **options)
        return HeadBlockAttention(own, config.hidden_size, norm_class=OffsetRMSNorm, **options)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        config, experts = self.config, self.config.experts
        assert experts is not None
        activation = ClampedSwish(experts.swiglu_alpha, experts.swiglu_limit)
        if layer in experts.dense_layers:
            sizes = config.hidden_size, config.intermediate_size
            return GatedMLP(*sizes, source=f"{LAYER}.mlp", clamped=activation, build=build)
        return MixtureOfExperts(
            config,
            source=f"{LAYER}.{_MOE}",
            names=ExpertNames(gate="w1", up="w3", down="w2", correction_bias="e_score_correction_bias"),
            activation=activation,
            router_dtype=jnp.float32,
            shared={"clamped": activation},
            build=build,
        )


class MiniMaxM3SparseForConditionalGeneration(MiniMaxM3VLForCausalLM):
    """MiniMax M3 with its tower of images and videos."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return super().read_hf(fields) | {"tower": read_minimax_m3_tower(fields)}


def _kinds(fields: ConfigFields) -> list[str]:
    """Return FULL or SPARSE for each layer, as `layer_types` lists them; without it, as the list
    `sparse_attention_freq` of the published `sparse_attention_config` has 0 or another number. Without either, all
    layers are FULL. Raises ModelConfigError for other lists.
    """
    listed = read_each_layer(fields, "layer_types", (FULL, SPARSE))
    if listed is not None:
        return listed
    count, name = fields.integer("num_hidden_layers"), "sparse_attention_freq"
    found = (fields.mapping(_PUBLISHED) or {}).get(name, [0] * count)
    if not isinstance(found, list) or len(found) != count or any(type(each) not in (int, bool) for each in found):
        raise fields.fail(_PUBLISHED, f"a mapping whose {name} is a list of {count} of 0, 1")
    return [SPARSE if each else FULL for each in found]


def _index(fields: ConfigFields, published: ConfigFields) -> KeyIndex:
    """Return the indexer of SPARSE layers. The fields of the published `sparse_attention_config` replace transformers'.

    Raises ModelConfigError for wrong fields, and for published ones that ask for scores of another type, first blocks
    that are always selected, or values of the indexer.
    """
    published.require(use_sparse_attention=True, sparse_score_type="max", sparse_init_block=0)
    values = published.value("sparse_disable_index_value", None)
    kinds = _kinds(fields)
    if values is not None and not (
        isinstance(values, list)
        and len(values) == len(kinds)
        and all(off for off, kind in zip(values, kinds, strict=True) if kind == SPARSE)
    ):
        raise published.fail("sparse_disable_index_value", f"a list of {len(kinds)} with 1 for each sparse layer")

    def size(name: str, of_published: str, default: int, minimum: int = 1) -> int:
        own = fields.integer(name, default, minimum=minimum)
        return published.integer(of_published, own, minimum=minimum)

    block = size("index_block_size", "sparse_block_size", 128)
    return KeyIndex(
        num_heads=size("index_n_heads", "sparse_num_index_heads", 4),
        head_dim=size("index_head_dim", "sparse_index_dim", 128),
        top_k=size("index_topk_blocks", "sparse_topk_blocks", 16) * block,
        block=block,
        local=size("index_local_blocks", "sparse_local_block", 1, minimum=0),
    )


def _experts(fields: ConfigFields) -> ExpertsConfig:
    """Return the experts, in the layers that `mlp_layer_types` lists as sparse; without it, in those for which the list
    `moe_layer_freq` does not have 0; without either, in all. By default weights are multiplied by
    `routed_scaling_factor` 2, the activation has `swiglu_alpha` 1.702 and `swiglu_limit` 7, and the shared MLP the size
    3072. Raises ModelConfigError for wrong fields.
    """
    dense = listed_dense(fields)
    if dense is None:
        sparse = read_each_layer(fields, "moe_layer_freq", (0, 1)) or []
        dense = tuple(layer for layer, each in enumerate(sparse) if not each)
    return ExpertsConfig(
        # The first name is another one for the second.
        num_experts=fields.integer("num_experts", None) or fields.integer("num_local_experts"),
        num_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        dense_layers=dense,
        scoring_func="sigmoid",
        correction_bias=True,
        routed_scaling_factor=fields.number("routed_scaling_factor", 2.0),
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
        swiglu_limit=fields.number("swiglu_limit", 7.0),
        shared_intermediate_size=fields.integer("shared_intermediate_size", 3072),
    )
