"""DeepSeek-V4 (DeepSeek-AI 2026): attention to a window and to keys of blocks of tokens, several hidden states for each
token (manifold-constrained hyper-connections), and experts that the first layers look up by token id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.compressed import BlockIndex, CompressedKeys, HyperConnections
from jaxengine.models.config.experts import SCORING_FUNCS, ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.gguf import GGUFConfig, as_array, gguf_fields, gguf_limit
from jaxengine.models.config.readers.hf import read_rope
from jaxengine.models.config.rope import Rope
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.attention.blocks.compressed import CompressedAttention
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.mlp import OfClamped
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.experts.moe import ExpertNames, GivenExperts, MixtureOfExperts
from jaxengine.models.layers.streams.hyper_connections import HyperConnection, JoinedStreams, equal_streams
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.source import CheckpointNames, StackedExperts
from jaxengine.pallas_kernels.kv.pages import KVPages

# transformers' defaults for fields that a file lacks.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "max_position_embeddings": 1 << 20,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {SPARSE: 4, HEAVY: 128}
_HASHED, _ROUTED = "hash_moe", "moe"
# Modules and tensors as transformers names them -> as published checkpoints do.
_PARTS = (
    (".self_attn.compressor.indexer.kv_norm", ".attn.indexer.compressor.norm"),
    (".self_attn.compressor.indexer.position_bias", ".attn.indexer.compressor.ape"),
    (".self_attn.compressor.kv_norm", ".attn.compressor.norm"),
    (".self_attn.compressor.position_bias", ".attn.compressor.ape"),
    (".self_attn.q_a_norm", ".attn.q_norm"),
    (".self_attn.kv_norm", ".attn.kv_norm"),
    (".self_attn.sinks", ".attn.attn_sink"),
    (".input_layernorm", ".attn_norm"),
    (".post_attention_layernorm", ".ffn_norm"),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    (".self_attn.compressor.indexer.scorer.weights_proj", ".attn.indexer.weights_proj"),
    (".self_attn.compressor.indexer.q_b_proj", ".attn.indexer.wq_b"),
    (".self_attn.compressor.indexer.kv_proj", ".attn.indexer.compressor.wkv"),
    (".self_attn.compressor.indexer.gate_proj", ".attn.indexer.compressor.wgate"),
    (".self_attn.compressor.kv_proj", ".attn.compressor.wkv"),
    (".self_attn.compressor.gate_proj", ".attn.compressor.wgate"),
    *((f".self_attn.{theirs}", f".attn.{own}") for theirs, own in (("q_a_proj", "wq_a"), ("q_b_proj", "wq_b"))),
    *((f".self_attn.{theirs}", f".attn.{own}") for theirs, own in (("o_a_proj", "wo_a"), ("o_b_proj", "wo_b"))),
    (".self_attn.kv_proj", ".attn.wkv"),
    (".mlp.shared_experts.gate_proj", ".ffn.shared_experts.w1"),
    (".mlp.shared_experts.up_proj", ".ffn.shared_experts.w3"),
    (".mlp.shared_experts.down_proj", ".ffn.shared_experts.w2"),
    (".mlp.gate.e_score_correction_bias", ".ffn.gate.bias"),
    (".mlp.", ".ffn."),
)
# Names of connections and norms as transformers has them in later families.
STREAM_NAMES = ("attn_hc.", "input_layernorm", "ffn_hc.", "post_attention_layernorm")
GGUF_STREAMS = tuple(f"hyper_connection.{name}" for name in ("count", "sinkhorn_iterations", "epsilon"))
# Names in config.json of fields that GGUF files call otherwise.
_GGUF = {
    "num_hidden_layers": "block_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_hash_layers": "hash_layer_count",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
    "o_groups": "attention.output_group_count",
    "o_lora_rank": "attention.output_lora_rank",
    **{name: f"attention.{name}" for name in ("sliding_window", "q_lora_rank")},
}
NAMES = ExpertNames(gate="w1", up="w3", down="w2", correction_bias="gate.bias")


class HashedExperts(MixtureOfExperts):
    """Mixture of experts in which a table chooses the experts by token id. The router only weights them."""

    def __init__(self, config: ModelConfig, *, source: str, build: Build, **options: Any):
        assert config.experts is not None
        config = replace(config, experts=replace(config.experts, correction_bias=False))
        super().__init__(config, source=source, build=build, **options)
        table = ParamDecl((None, None), (Source(f"{source}.gate.tid2eid", config.vocab_size),), init_value=0)
        self.table = declare((config.vocab_size, self.experts.num_per_token), jnp.int32, table)

    def look_up(self, token_ids: jax.Array) -> None:
        """Set `given` to the experts that the table names for the tokens i32[T]; tokens whose experts are given already
        keep them. The next call routes to `given`. A number below 0 in the table is replaced by one beyond the last
        expert, which gives weights that are not finite.
        """
        ids = self.table[...][token_ids]
        ids = jnp.where(ids < 0, self.experts.num_experts, ids)
        self.given = GivenExperts(ids if self.given is None else self._replayed(ids))


class DeepseekV4Layer(nnx.Module):
    """Layer of attention, then experts. Each reads one hidden state, mixed from all hidden states of a token, and its
    output is added to all of them.

    connection: class of the two connections. names: checkpoint names of the first connection, the norm after it, the
    second connection and its norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: nnx.Module,
        mlp: nnx.Module,
        build: Build,
        *,
        connection: Callable[..., Any] = HyperConnection,
        names: tuple[str, str, str, str] = ("hc_attn_", "attn_norm", "hc_ffn_", "ffn_norm"),
    ):
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps, build=build)
        before_attention, input_norm, before_mlp, mlp_norm = (f"{LAYER}.{name}" for name in names)
        self.before_attention = connection(config, name=before_attention)
        self.input_norm, self.attention = norm(source=input_norm), attention
        self.before_mlp = connection(config, name=before_mlp)
        self.mlp_norm, self.mlp = norm(source=mlp_norm), mlp

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Return the hidden states after the layer, [T, A * D] for x [T, A * D], and the pool with this step's keys and
        values written. HashedExperts look up the step's token ids first.
        """
        with jax.named_scope("attention"):
            own, mixing = self.before_attention.read(x)
            attended, kv = self.attention(self.input_norm(own), kv, pages, step)
            x = self.before_attention.write(x, attended, mixing)
        with jax.named_scope("mlp"):
            own, mixing = self.before_mlp.read(x)
            for _, each in nnx.iter_modules(self.mlp):
                if isinstance(each, HashedExperts):
                    each.look_up(step.blocks.token_ids)
            return self.before_mlp.write(x, self.mlp(self.mlp_norm(own), step.rows), mixing), kv


class DeepseekV4ForCausalLM(Decoder):
    """Decoder of DeepseekV4Layers, which pass on A hidden states of each token, [T, A * D]."""

    first_input = equal_streams
    gguf_architecture: ClassVar[str | None] = "deepseek4"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("layers.", "model.layers."),
            ("embed.", "model.embed_tokens."),
            ("head.", "lm_head."),
            ("norm.", "model.norm."),
            ("hc_head_", "model.hc_head.hc_"),
        ),
        suffixes=(
            (".attn.norm.weight", ".attn.kv_norm.weight"),  # transformers' name
            *((f".{each}_hc.scale", f".hc_{each}_scale") for each in ("attn", "ffn")),
            (".scale", ".weight_scale_inv"),
        ),
        plain=("compressor.wkv", "compressor.wgate"),
        stacked_experts=StackedExperts(modules=(NAMES.gate, NAMES.up, NAMES.down)),
        parts=_PARTS,
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**DEFAULTS)
        fields.require(num_key_value_heads=1, norm_topk_prob=True, n_shared_experts=1, attention_bias=False)
        size, dim, kinds = fields.integer("moe_intermediate_size"), fields.integer("head_dim"), _layer_kinds(fields)
        ropes = read_ropes(fields, dim)
        keys = {kind: _read_keys(fields, kind, dim) for kind in dict.fromkeys(kinds)}
        raw = {**fields.raw, "intermediate_size": size}
        shared = gated_fields(ConfigFields(raw), ropes=[ropes[kind != WINDOW] for kind in kinds], sinks=True)
        layers = zip(shared["attention"], kinds, strict=True)
        experts = replace(read_experts(fields), hashed_layers=_hashed_layers(fields))
        return shared | {
            "attention": tuple(replace(each, state=keys[kind], beside_state=kind != WINDOW) for each, kind in layers),
            "experts": experts,
            "mlp_bias": fields.boolean("mlp_bias", False),
            "hyper_connections": read_connections(fields),
        }

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields, rates = gguf.fields, "attention.compress_ratios"
        fields.require(expert_weights_norm=True, expert_shared_count=1, expert_gating_func=4)
        own: Any = {name: fields.integer(key, minimum=0) for name, key in _GGUF.items()}
        own |= {"compress_ratios": as_array(fields.value(rates)).ravel().tolist(), "swiglu_limit": gguf_limit(fields)}
        own = ConfigFields({**own, "routed_scaling_factor": fields.number("expert_weights_scale")})
        experts, kinds = replace(read_experts(own), hashed_layers=_hashed_layers(own)), _layer_kinds(own)
        options: dict[str, Any] = {"sinks": True, "interleaved": True, "partial_rotary": True}
        shared = gguf_fields(gguf, experts=experts, yarn={"attention_factor": 1.0}, **options)
        first, theta = shared["attention"][0], fields.number("attention.compress_rope_freq_base")
        ropes = replace(first.rope, scaling=None), replace(first.rope, theta=theta)
        keys = {kind: _read_keys(own, kind, first.head_dim) for kind in dict.fromkeys(kinds)}
        layers = (
            replace(each, window=None, rope=ropes[kind != WINDOW], state=keys[kind], beside_state=kind != WINDOW)
            for each, kind in zip(shared["attention"], kinds, strict=False)
        )
        return shared | {"attention": tuple(layers), "hyper_connections": read_connections(fields, GGUF_STREAMS)}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config, source = self.config, f"{LAYER}.attn"
        own, eps = config.attention[layer], config.rms_norm_eps
        attention = CompressedAttention(own, config.hidden_size, eps=eps, source=source, build=build)
        return DeepseekV4Layer(config, attention, self.make_experts(layer, build), build)

    def make_experts(self, layer: int, build: Build) -> MixtureOfExperts:
        """Return the experts of a layer, with a shared MLP and a clamped activation: HashedExperts in `hashed_layers`,
        otherwise a MixtureOfExperts.
        """
        experts, source = self.config.experts, f"{LAYER}.ffn"
        assert experts is not None
        kind = HashedExperts if layer in experts.hashed_layers else MixtureOfExperts
        size, beside = experts.shared_intermediate_size, f"{source}.shared_experts"
        clamped = OfClamped(experts.swiglu_limit, ACTIVATIONS[self.config.activation])
        shared = {
            "gate_up": (Source(f"{beside}.w1", size), Source(f"{beside}.w3", size)),
            "down": Source(f"{beside}.w2", self.config.hidden_size),
            "clamped": clamped,
        }
        options: dict[str, Any] = {"activation": clamped, "router_dtype": jnp.float32, "shared": shared}
        return kind(self.config, source=source, names=NAMES, build=build, **options)

    def make_norm(self, build: Build) -> nnx.Module:
        return JoinedStreams(self.config, super().make_norm(build), name="model.hc_head.hc_")


def read_experts(fields: ConfigFields) -> ExpertsConfig:
    """Return the experts of all layers, with a correction bias and a shared MLP of an expert's size; by default 6 of
    256 for a token, with weights times 1.5 (`routed_scaling_factor`), and gates and ups bounded by 10 (`swiglu_limit`).
    Raises ModelConfigError for wrong fields.
    """
    size = fields.integer("moe_intermediate_size")
    return ExpertsConfig(
        num_experts=fields.integer("n_routed_experts", 256),
        num_per_token=fields.integer("num_experts_per_tok", 6),
        intermediate_size=size,
        scoring_func=fields.text("scoring_func", SCORING_FUNCS[-1]),
        correction_bias=True,
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.5),
        swiglu_limit=fields.number("swiglu_limit", 10.0),
        shared_intermediate_size=size,
    )


def read_connections(
    fields: ConfigFields, names: Sequence[str] = ("hc_mult", "hc_sinkhorn_iters", "hc_eps")
) -> HyperConnections:
    """Return the connections of a layer's parts, from the fields `names`, by default 4, 20 and 1e-6. Raises
    ModelConfigError for wrong fields.
    """
    streams, rounds, eps = names
    return HyperConnections(fields.integer(streams, 4), fields.integer(rounds, 20), fields.number(eps, 1e-6))


def _read_list(fields: ConfigFields, name: str, allowed: Mapping[Any, str] | Sequence[str]) -> list[str] | None:
    """Return the field `name`, a list with one of the `allowed` values for each layer; None if it is absent. If
    `allowed` is a mapping, its keys are replaced by their values. Entries after the last layer's are left out. Raises
    ModelConfigError for other values or too short a list.
    """
    given, count = fields.value(name, None), fields.integer("num_hidden_layers")
    known = dict(allowed) if isinstance(allowed, Mapping) else {each: each for each in allowed}
    if given is None:
        return None
    if (
        not isinstance(given, list)
        or len(given) < count
        or any(type(e) not in (str, int) or e not in known for e in given)
    ):
        raise fields.fail(name, f"a list of {count} of {', '.join(map(str, known))}")
    return [known[each] for each in given[:count]]


def _layer_kinds(fields: ConfigFields) -> list[str]:
    """Return each layer's kind, WINDOW, SPARSE or HEAVY, from `layer_types` or `compress_ratios`, the name in published
    files. Without both, odd layers from 3 on are SPARSE and the others HEAVY. Raises ModelConfigError for wrong lists.
    """
    ratios = {0: WINDOW, **{rate: kind for kind, rate in _RATES.items()}}
    kinds = _read_list(fields, "layer_types", (WINDOW, *_RATES)) or _read_list(fields, "compress_ratios", ratios)
    count = fields.integer("num_hidden_layers")
    return kinds or [SPARSE if layer >= 2 and layer % 2 else HEAVY for layer in range(count)]


def _hashed_layers(fields: ConfigFields) -> tuple[int, ...]:
    """Return the indices of the layers that look up their experts, from `mlp_layer_types` or, as in published files,
    the first `num_hash_layers`, 3 by default. Raises ModelConfigError for wrong fields.
    """
    count = fields.integer("num_hidden_layers")
    kinds = _read_list(fields, "mlp_layer_types", (_HASHED, _ROUTED))
    if kinds is None:
        return tuple(range(min(fields.integer("num_hash_layers", 3, minimum=0), count)))
    return tuple(layer for layer in range(count) if kinds[layer] == _HASHED)


def _read_keys(fields: ConfigFields, kind: str, head_dim: int) -> CompressedKeys:
    """Return the CompressedKeys of layers of one kind, WINDOW, SPARSE or HEAVY. WINDOW layers have no rate; the others'
    is in `compress_rates` by kind, or else in `compress_rate_csa` (default: 4) for SPARSE and `compress_rate_hca` (128)
    for HEAVY layers. The window is 128 by default; only SPARSE layers have an index of blocks, and blocks that overlap.
    Indexers have 64 heads of 128 elements and select 512 blocks by default (`index_` fields); `q_lora_rank` and
    `o_lora_rank` are 1024, `o_groups` 8. head_dim: elements of a key. Raises ModelConfigError for wrong fields.
    """
    rates, own = fields.mapping("compress_rates") or {}, {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
    rate = None if kind == WINDOW else ConfigFields(rates).integer(kind, None)
    if kind != WINDOW and rate is None:
        rate = fields.integer(own[kind], _RATES[kind])
    index = None
    if kind == SPARSE:
        index = BlockIndex(
            num_heads=fields.integer("index_n_heads", 64),
            head_dim=fields.integer("index_head_dim", 128),
            top_k=fields.integer("index_topk", 512),
        )
    return CompressedKeys(
        head_dim=head_dim,
        window=fields.integer("sliding_window", 128),
        rate=rate,
        overlapping=kind == SPARSE,
        index=index,
        q_rank=fields.integer("q_lora_rank", 1024),
        out_groups=fields.integer("o_groups", 8),
        out_rank=fields.integer("o_lora_rank", 1024),
    )


def read_ropes(fields: ConfigFields, head_dim: int) -> tuple[Rope, Rope]:
    """Return (rope of layers with only a window, rope of layers with keys of blocks). Each is interleaved and has as
    many elements as it rotates of a head, by default `qk_rope_head_dim` or, without that, 1/8 of it. Unless
    `rope_parameters` has "main" and "compress", the first is plain, of base `rope_theta` (10,000 by default), and the
    second what it or `rope_scaling` says, of base `compress_rope_theta` (160,000 by default). Raises ModelConfigError
    for wrong fields, and if that number is odd or not from 2 to head_dim.
    """
    given = fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {}
    both = ConfigFields(given)
    if not (both.has("main") and both.has("compress")):
        scaled = {"attention_factor": 1.0, **given, "rope_theta": fields.number("compress_rope_theta", 160_000.0)}
        plain = {"rope_type": "default", "rope_theta": fields.number("rope_theta", 10_000.0)}
        both = ConfigFields({"main": plain, "compress": scaled})
    share = fields.integer("qk_rope_head_dim", 64) / head_dim if fields.has("qk_rope_head_dim") else 64 / 512
    share = fields.number("partial_rotary_factor", share)
    ropes = []
    for name in ("main", "compress"):
        own = dict(both.mapping(name) or {})
        rotary = int(head_dim * min(ConfigFields(own).number("partial_rotary_factor", share), 2.0))
        if not 2 <= rotary <= head_dim or rotary % 2:
            raise fields.fail(
                "partial_rotary_factor", f"an even number of the {head_dim} elements of a head, 2 or more"
            )
        own.pop("partial_rotary_factor", None)
        flat = {"max_position_embeddings": fields.integer("max_position_embeddings"), "rope_parameters": own}
        ropes.append(read_rope(ConfigFields(flat), rotary, interleaved=True))
    return ropes[0], ropes[1]
