"""Qwen4-Exp (Qwen Team 2026): Qwen3.5's layers with experts, whose attention is to blocks of keys that an indexer
selects, several hidden states of a token, embeddings of n-grams in some layers, and Qwen3.5's vision tower.

Multi-token-prediction (MTP) layers are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import KeyBlocks, LayerAttention
from jaxengine.models.config.compressed import HyperConnections, RecentPlaces
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import FULL, read_each_layer, text_fields
from jaxengine.models.config.state import GatedDelta, NGrams
from jaxengine.models.families.llama import LAYER
from jaxengine.models.families.qwen2_moe import gated_experts
from jaxengine.models.families.qwen2_vl import QWEN_NAMES, with_sight, without_mrope
from jaxengine.models.families.qwen3_5 import Qwen3_5ForCausalLM
from jaxengine.models.families.qwen3_next import LINEAR, gated_inputs, hybrid_fields
from jaxengine.models.layers.attention.attention import QK_NORMS, StepInputs
from jaxengine.models.layers.attention.blocks.mean_blocks import MeanBlockAttention
from jaxengine.models.layers.base.activations import SILU
from jaxengine.models.layers.base.norm import OffsetRMSNorm
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.states.ngrams import GatedNGrams
from jaxengine.models.layers.streams.hyper_connections import GatedConnection, GatedStreams, equal_streams
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.qwen3_vl import read_qwen3_5

INDEXED = "indexed_attention"
# transformers' defaults for fields that a file lacks.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 1.0,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
# Of n-grams: numbers that follow from the configuration, a look-up table, and statistics of hashes; and a part that the
# last mixer lacks.
_GATES = ("silu", "sigmoid")
_STATISTICS = (".ple_embedding.hashstats_",)
_HASHES = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets", "token_lookup")
_TABLES, _MOST_TABLES = ".ple_embedding.ngram_embedding", 512  # tables of a file, which are one in memory
_UNREAD = (*(f".ple_embedding.{name}" for name in _HASHES), ".hyper_connection_mixer.block_inject_weight.weight")


class Qwen4ExpLayer(nnx.Module):
    """Layer of a delta net or attention, then experts, each with a GatedConnection to a token's hidden states.

    ngrams: what is added to the hidden states before; None for nothing.
    """

    def __init__(self, attention: nnx.Module, mlp: nnx.Module, connections: list[GatedConnection], ngrams: Any):
        self.attention, self.mlp, self.ngrams = attention, mlp, ngrams
        self.before_attention, self.before_mlp = connections

    def __call__(self, x: jax.Array, kept: Any, located: Any, step: StepInputs) -> tuple[jax.Array, Any]:
        """Return the hidden states after the layer, [T, A * D] for x [T, A * D], and what is kept of them: the pool, or
        the states of a layer with a delta net, followed by those of `ngrams`. kept, located: the pool and the layer's
        LayerPages, or the states and StateRows.
        """
        further: tuple[jax.Array, ...] = ()
        if self.ngrams is not None:
            with jax.named_scope("ngrams"):
                kept, further = kept[:2], kept[2:]
                added, further = self.ngrams(x, further, located, step)
                x = x + added
        with jax.named_scope("attention"):
            own, factors = self.before_attention.read(x, step.rows)
            mixed, kept = self.attention(own, kept, located, step)
            x = self.before_attention.write(x, mixed, factors)
        with jax.named_scope("mlp"):
            own, factors = self.before_mlp.read(x, step.rows)
            x = self.before_mlp.write(x, self.mlp(own, step.rows), factors)
        return x, (*kept, *further) if self.ngrams is not None else kept


class Qwen4ExpForCausalLM(Qwen3_5ForCausalLM):
    """Decoder of Qwen4ExpLayers, which pass on A hidden states of each token, [T, A * D]."""

    first_input = equal_streams
    checkpoint_names: ClassVar[CheckpointNames] = QWEN_NAMES._replace(
        unused_ends=_UNREAD,
        unused_parts=_STATISTICS,
        squeezed=(".conv1d.weight",),
        joined={f"{_TABLES}.weight": tuple(f"{_TABLES}.shard_{number}.weight" for number in range(_MOST_TABLES))},
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return _read(fields, fields.token_ids("eos_token_id"))

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config, ngrams = self.config, self.config.attention[layer].ngrams
        connections = [
            GatedConnection(config, source=f"{LAYER}.{part}_hyper_connection", build=build) for part in ("attn", "mlp")
        ]
        sizes = {"eps": config.rms_norm_eps, "source": f"{LAYER}.ple", "build": build}
        added = None if ngrams is None else GatedNGrams(ngrams, config.hidden_size, **sizes)
        return Qwen4ExpLayer(self.make_attention(layer, build), self.make_experts(build), connections, added)

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, own = self.config, self.config.attention[layer]
        if own.blocks is None:
            return super().make_attention(layer, build)
        source, eps = f"{LAYER}.self_attn", config.rms_norm_eps
        norms = [OffsetRMSNorm(own.head_dim, eps, source=f"{source}.{name}", build=build) for name in QK_NORMS]
        *qkv, gate = gated_inputs(own, source)
        options: dict[str, Any] = {"qkv": qkv, "gate": gate, "qk_norms": norms}
        return MeanBlockAttention(own, config.hidden_size, eps=eps, source=source, build=build, **options)

    def make_norm(self, build: Build) -> nnx.Module:
        return GatedStreams(self.config, source="model.hyper_connection_mixer", build=build)

    def last_normed(self, x: jax.Array, rows: Rows) -> jax.Array:
        return self.norm(x, rows)


class Qwen4ExpForConditionalGeneration(Qwen4ExpForCausalLM):
    """Qwen4-Exp as published: with a vision tower, and positions in three dimensions (M-RoPE)."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        own = ConfigFields(fields.mapping("text_config") or {})  # the outer tokens only end generation
        text = without_mrope(text_fields(fields))
        shared = with_sight(_read(text, own.token_ids("eos_token_id")), text, fields, read_qwen3_5)
        layers = (
            each if each.blocks is None else replace(each, state=RecentPlaces(each.blocks.size), beside_state=True)
            for each in shared["attention"]
        )
        return shared | {"attention": tuple(layers)}


def _read(fields: ConfigFields, ends: tuple[int, ...]) -> dict[str, Any]:
    """Return the keyword arguments of ModelConfig, without the architecture, for the fields of the text. Tokens have
    `hc_count` (default: 4) hidden states, with gates of rank `hc_lowrank` (320). ends: token ids of which the first one
    separates n-grams. Raises ModelConfigError for wrong fields.
    """
    fields = without_mrope(fields).with_defaults(**DEFAULTS)
    experts = replace(gated_experts(fields, norm_weights=True), dense_layers=())
    kinds = _layer_kinds(fields)
    usual = {"layer_types": kinds, "intermediate_size": experts.intermediate_size}
    shared = hybrid_fields(ConfigFields({**fields.raw, **usual}))
    streams = HyperConnections(
        num_streams=fields.integer("hc_count", 4),
        rounds=None,
        eps=shared["rms_norm_eps"],
        rank=fields.integer("hc_lowrank", 320),
    )
    layers = _with_blocks(fields, shared["attention"], _read_blocks(fields) if FULL in kinds else None)
    attention = _with_ngrams(fields, layers, shared["hidden_size"] * streams.num_streams, ends)
    return shared | {"attention": attention, "experts": experts, "hyper_connections": streams}


def _layer_kinds(fields: ConfigFields) -> list[str]:
    """Return LINEAR or FULL for each layer, as `layer_types` lists them, where INDEXED also means FULL; without the
    list every `full_attention_interval`-th layer is FULL. Raises ModelConfigError for a wrong list.
    """
    count, kinds = fields.integer("num_hidden_layers"), read_each_layer(fields, "layer_types", (LINEAR, INDEXED, FULL))
    if kinds is None:
        every = fields.integer("full_attention_interval", 4)
        return [LINEAR if (layer + 1) % every else FULL for layer in range(count)]
    return [FULL if kind == INDEXED else kind for kind in kinds]


def _read_blocks(fields: ConfigFields) -> KeyBlocks:
    """Return the blocks of keys that layers with attention select, from the fields `indexer_...`. Raises
    ModelConfigError for fields that are missing or wrong, and unless indexer_compress_ratio divides indexer_budget.
    """
    if fields.integer("indexer_kv_heads") != 1:
        raise fields.fail("indexer_kv_heads", "1")
    size, budget = fields.integer("indexer_compress_ratio"), fields.integer("indexer_budget")
    if budget % size:
        raise fields.fail("indexer_budget", f"a multiple of indexer_compress_ratio, {size}")
    heads, head_dim = fields.integer("indexer_n_heads"), fields.integer("indexer_head_dim")
    return KeyBlocks(num_heads=heads, head_dim=head_dim, size=size, top_k=budget // size)


def _with_blocks(
    fields: ConfigFields, layers: tuple[LayerAttention, ...], blocks: KeyBlocks | None
) -> list[LayerAttention]:
    """Return the layers with `blocks` where they attend, with delta nets whose gates follow `output_gate_type`, or
    `hidden_act` where it is absent, and with values that all have room for the indexer's key. Raises ModelConfigError
    for another gate.
    """
    gate = fields.text("output_gate_type", None) or fields.text("hidden_act", SILU)
    if gate not in _GATES:  # as in transformers
        raise fields.fail("output_gate_type", " or ".join(_GATES))
    made = []
    for layer in layers:
        width = layer.head_dim + (0 if blocks is None else blocks.head_dim)
        if isinstance(layer.state, GatedDelta):
            state = replace(layer.state, gate=gate)
            made.append(replace(layer, state=state, value_size=width))
        else:
            made.append(replace(layer, blocks=blocks, value_size=width))
    return made


def _with_ngrams(
    fields: ConfigFields, layers: list[LayerAttention], channels: int, ends: tuple[int, ...]
) -> tuple[LayerAttention, ...]:
    """Return the layers with embeddings of n-grams in those that `ple_layer_ids` lists, counted from 1. Their sizes are
    `ngram_size` (default: 3), `heads_per_ngram` (8), `ple_embed_dim` (the hidden size), `ngram_vocab_size_base` (20
    million), `make_ngram_vocab_size_divisible_by` (128), `split_ngram_parts` (512), `seed` (1234) and
    `ple_conv_kernel_size` (4). channels: elements of all hidden states of a token. ends: token ids of which the first
    one separates n-grams. Raises ModelConfigError for wrong fields, for a layer without a delta net, and if there is
    such a layer but no token id.
    """
    name, listed = "ple_layer_ids", fields.value("ple_layer_ids", None) or []
    with_delta = [number + 1 for number, layer in enumerate(layers) if layer.state is not None]
    if not isinstance(listed, list) or any(type(each) is not int or each not in with_delta for each in listed):
        raise fields.fail(name, f"a list of numbers of layers of {LINEAR}, counted from 1")
    if listed and not ends:
        raise fields.fail("eos_token_id", f"a token id where {name} has layers")
    made = list(layers)
    for number, each in enumerate(sorted(set(listed))):
        ngrams = NGrams(
            number=number,
            longest=fields.integer("ngram_size", 3),
            num_heads=fields.integer("heads_per_ngram", 8),
            size=fields.integer("ple_embed_dim", fields.integer("hidden_size")),
            least=fields.integer("ngram_vocab_size_base", 20_000_000),
            divisor=fields.integer("make_ngram_vocab_size_divisible_by", 128),
            parts=fields.integer("split_ngram_parts", 512),
            seed=fields.integer("seed", 1234, minimum=0),
            end=ends[0],
            vocab_size=fields.integer("vocab_size"),
            channels=channels,
            kernel=fields.integer("ple_conv_kernel_size", 4),
        )
        state = made[each - 1].state
        assert isinstance(state, GatedDelta)
        made[each - 1] = replace(made[each - 1], state=replace(state, ngrams=ngrams))
    return tuple(made)
