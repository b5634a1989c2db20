"""Gemma 4 (Google 2026), with and without towers of images and audio: head sizes by kind of layer, layers that attend
to the keys and values of others, per-layer inputs, and in some checkpoints experts in addition to the MLP of every
layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.gguf import (
    EXPERT_SIZE,
    GGUFConfig,
    RopeFactors,
    gguf_experts,
    gguf_fields,
    gguf_of_layers,
    gguf_sliding,
)
from jaxengine.models.config.readers.hf import (
    FULL,
    LAYER_CONFIG,
    SLIDING,
    layer_kinds,
    read_rope,
    text_fields,
    windows_by_kind,
)
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.config.tower import TOWERS, TowerConfig
from jaxengine.models.families.gemma2 import Gemma2ForCausalLM, gelu_fields, read_cap
from jaxengine.models.families.llama import LAYER
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.base.activations import ACTIVATIONS, GELU_TANH
from jaxengine.models.layers.base.embedding import Embedding
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import RMSNorm, rms_normalized
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.base.scale import scaled
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.sound import gemma4 as sound
from jaxengine.models.vision.gemma4 import LIMITS, POSITIONS, PROJECTOR, TOWER, read_gemma4
from jaxengine.pallas_kernels.kv.pages import KVPages

# transformers' defaults for fields that a file lacks.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_FULL_EVERY, _FULL_HEAD_DIM, _INPUT_SIZE = 6, 512, 256
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
# Names of the language model and of the towers in checkpoints that have towers.
NAMES = CheckpointNames(
    prefixes=(("model.language_model.", "model."),),
    tower=(f"{TOWER}.", f"{PROJECTOR}."),
    sound_tower=(f"{sound.TOWER}.", f"{sound.PROJECTOR}."),
    flattened=(POSITIONS, *sound.CONVOLUTIONS),
    raveled=tuple(f".{name}" for name in LIMITS),
)


class Gemma4Attention(Attention):
    """Attention with norms of q, k and v; the norm of v has no weight."""

    def __init__(self, attention: LayerAttention, hidden_size: int, *, eps: float, source: str, build: Build):
        def norm(name: str) -> RMSNorm:
            return RMSNorm(attention.head_dim, eps, source=f"{source}.{name}", build=build)

        norms = norm("q_norm"), norm("k_norm") if attention.kv_source is None else None
        super().__init__(attention, hidden_size, eps=eps, source=source, qk_norms=norms, build=build)
        self.eps = eps

    def values(self, v: jax.Array) -> jax.Array:
        """Return values v with an RMS norm over each head, without weights."""
        with jax.named_scope("v_norm"):
            return rms_normalized(v, self.eps).astype(v.dtype)


class Gemma4Experts(MixtureOfExperts):
    """Mixture of experts whose router normalises and scales its input, and multiplies each chosen expert's weight by a
    learned number.
    """

    def __init__(self, config: ModelConfig, *, source: str, build: Build):
        names = ExpertNames(router="router.proj")
        super().__init__(config, source=source, build=build, names=names)
        size, count, self.eps = config.hidden_size, self.experts.num_experts, config.rms_norm_eps
        # float32, as the router's decisions are.
        scale = ParamDecl((None,), (Source(f"{source}.router.scale", size),))
        self.router_scale = declare((size,), jnp.float32, scale)
        weights = ParamDecl((None,), (Source(f"{source}.router.per_expert_scale", count),))
        self.expert_scale = declare((count,), jnp.float32, weights)

    def route(self, x: jax.Array, adapters: Any = None) -> tuple[jax.Array, jax.Array]:
        """Return the weights f32[T, k] and the experts i32[T, k] of tokens x [T, D], hidden states before any norm.
        Like MixtureOfExperts.route, but each weight is multiplied by its expert's learned number. adapters: LoRA
        adapters of x's rows.
        """
        scale = self.router_scale[...] * x.shape[-1] ** -0.5
        weights, ids = super().route((rms_normalized(x, self.eps) * scale).astype(x.dtype), adapters)
        return weights * self.expert_scale[...][ids], ids


class Gemma4MLP(nnx.Module):
    """Feed-forward part of a layer: dense(norm(x)) or, if the model has experts, norm(dense(norm(x))) +
    norm(experts(norm(x))), each with its own norms.
    """

    def __init__(self, config: ModelConfig, ffn: int, build: Build):
        """Create the dense MLP of size `ffn` and, if the model has experts, these and their norms."""
        options: dict[str, Any] = {"activation": ACTIVATIONS[config.activation], "build": build}
        self.dense = GatedMLP(config.hidden_size, ffn, source=f"{LAYER}.mlp", **options)
        self.experts = None if config.experts is None else Gemma4Experts(config, source=LAYER, build=build)
        size, eps, feedforward = config.hidden_size, config.rms_norm_eps, "feedforward_layernorm"

        def norm(name: str) -> RMSNorm:
            return RMSNorm(size, eps, source=f"{LAYER}.{name}", build=build)

        self.input_norm = norm(f"pre_{feedforward}")
        if self.experts is not None:
            self.dense_norm, self.experts_norm = norm(f"post_{feedforward}_1"), norm(f"post_{feedforward}_2")
            self.experts_input_norm = norm(f"pre_{feedforward}_2")

    def __call__(self, x: jax.Array, rows: Any) -> jax.Array:
        """Return dense(norm(x)) or, with experts, norm(dense(norm(x))) + norm(experts(norm(x))), [T, D] -> [T, D]. The
        router gets x before any norm. rows: the step's rows, as for GatedMLP.
        """
        y = self.dense(self.input_norm(x), rows)
        if self.experts is None:
            return y
        mixed = self.experts(self.experts_input_norm(x), rows, x)
        return self.dense_norm(y) + self.experts_norm(mixed)


class PerLayerGate(nnx.Module):
    """Per-layer input p [T, P], gated by the hidden state: norm(project(gelu(gate(x)) * p)). Its weights are replicated
    over devices. source: checkpoint module that has its modules.
    """

    def __init__(self, config: ModelConfig, build: Build, source: str = LAYER):
        size, own = config.hidden_size, config.layer_input_size
        gate, project = Source(f"{source}.per_layer_input_gate", own), Source(f"{source}.per_layer_projection", size)
        self.activation = ACTIVATIONS[config.activation]
        self.gate = Linear(size, (gate,), axes=("embed", "latent"), build=build)
        self.project = Linear(own, (project,), axes=("latent", "embed"), build=build)
        self.norm = RMSNorm(size, config.rms_norm_eps, source=f"{source}.post_per_layer_input_norm", build=build)

    def __call__(self, x: jax.Array, step: StepInputs) -> jax.Array:
        """Return norm(project(gelu(gate(x)) * p)), [T, D] -> [T, D]. p is `step.of_layer` [T, P], which must be set for
        the layer.
        """
        assert step.of_layer is not None
        gate = self.activation(self.gate(x, step.rows, out_dtype=jnp.float32))
        inner = (gate * step.of_layer.astype(jnp.float32)).astype(x.dtype)
        return self.norm(self.project(inner, step.rows))


class Gemma4Layer(nnx.Module):
    """Layer that applies Gemma 2's computation, then x + gate(x) if there are per-layer inputs, and multiplies the
    result by a learned number.
    """

    def __init__(self, config: ModelConfig, layer: int, build: Build, gate_source: str = LAYER):
        """Create the modules of layer number `layer`, with a gate of the per-layer input if there is one, whose
        checkpoint modules are in `gate_source`.
        """
        size, eps = config.hidden_size, config.rms_norm_eps

        def norm(name: str) -> RMSNorm:
            return RMSNorm(size, eps, source=f"{LAYER}.{name}_layernorm", build=build)

        self.input_norm, self.attention_norm, self.mlp_norm = map(norm, ("input", "post_attention", "post_feedforward"))
        attention = config.attention[layer]
        self.attention = Gemma4Attention(attention, size, eps=eps, source=f"{LAYER}.self_attn", build=build)
        self.mlp = Gemma4MLP(config, config.ffn_sizes[layer] if config.ffn_sizes else config.intermediate_size, build)
        self.input_gate = PerLayerGate(config, build, gate_source) if config.layer_input_size else None
        self.scalar = declare((1,), build.dtype, ParamDecl((None,), (Source(f"{LAYER}.layer_scalar", 1),)))

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        with jax.named_scope("attention"):
            attended, kv = self.attention(self.input_norm(x), kv, pages, step)
            x = x + self.attention_norm(attended)
        with jax.named_scope("mlp"):
            x = x + self.mlp_norm(self.mlp(x, step.rows))
        if self.input_gate is not None:
            with jax.named_scope("layer_input"):
                x = x + self.input_gate(x, step)
        return x * self.scalar[...].astype(x.dtype), kv


class LayerInputs(nnx.Module):
    """Per-layer inputs of tokens, in addition to the hidden state: (norm(project(x) / sqrt(D)) + sqrt(P) *
    table[token]) / sqrt(2). The table has the configuration's `layer_input_rows`.
    """

    def __init__(self, config: ModelConfig, build: Build):
        size, self.own, self.num_layers = config.hidden_size, config.layer_input_size, config.num_layers
        width = self.own * self.num_layers
        tokens = config.layer_input_rows or config.vocab_size
        self.table = Embedding(tokens, width, source="model.embed_tokens_per_layer", build=build)
        project = Source("model.per_layer_model_projection", width)
        self.project = Linear(size, (project,), axes=("embed", "latent"), build=build, of_tokens=True)
        norm = "model.per_layer_projection_norm"
        self.norm = RMSNorm(self.own, config.rms_norm_eps, source=norm, build=build)

    def __call__(self, token_ids: jax.Array, x: jax.Array, rows: Rows) -> jax.Array:
        """Return the inputs [T, L, P] of all L layers of the model, for tokens i32[T] with embeddings x [T, D]:
        (norm(project(x) / sqrt(D)) + sqrt(P) * table[token]) / sqrt(2). rows: as for Linear.
        """
        shape = x.shape[0], self.num_layers, self.own
        of_token = scaled(self.table(token_ids).reshape(shape), self.own**0.5)
        projected = self.norm(scaled(self.project(x, rows), x.shape[1] ** -0.5).reshape(shape))
        return scaled(projected + of_token, 2**-0.5)


class Gemma4ForCausalLM(Gemma2ForCausalLM):
    """Decoder of Gemma4Layers with a scaled embedding and soft-capped logits."""

    gguf_architecture: ClassVar[str | None] = "gemma4"
    checkpoint_names: ClassVar[CheckpointNames] = NAMES
    norm_class = RMSNorm

    def __init__(self, config: ModelConfig, build: Build):
        super().__init__(config, build)
        if self.stage.is_first and config.layer_input_size:
            self.layer_inputs = LayerInputs(config, self.build)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**DEFAULTS)
        fields.require(rope_scaling=None)  # its ropes have no older spelling
        if fields.text("use_bidirectional_attention", None) not in (None, "vision"):
            raise fields.fail("use_bidirectional_attention", '"vision", null or absent')
        kinds, bias = layer_kinds(fields, _FULL_EVERY), fields.boolean("attention_bias", False)
        kinds = (*kinds[:-1], FULL)  # as transformers does, whatever the file says
        shared = gelu_fields(
            ConfigFields({**fields.raw, LAYER_CONFIG: None}),  # see _attention
            windows=windows_by_kind(kinds, fields.integer("sliding_window")),
            ropes=[None] * len(kinds),
            tied=True,
            scale=1.0,
            bias=bias,
            output_bias=bias,
        )
        name = "hidden_size_per_layer_input"
        size = fields.integer(name, 0 if name in fields.raw else _INPUT_SIZE, minimum=0)  # null, too, means none
        rows, vocab_size = fields.integer("vocab_size_per_layer_input", 262144), shared["vocab_size"]
        if size and rows < vocab_size:
            raise fields.fail("vocab_size_per_layer_input", f"at least vocab_size, {vocab_size}")
        attention = _attention(fields, kinds, shared["attention"])
        ffn = shared["intermediate_size"]
        wide = fields.boolean("use_double_wide_mlp", False)
        sizes = tuple(ffn * (1 + (wide and each.kv_source is not None)) for each in attention)
        return shared | {
            "attention": attention,
            "ffn_sizes": () if set(sizes) == {ffn} else sizes,
            "layer_input_size": size,
            "layer_input_rows": rows if size and rows > vocab_size else 0,
            "logit_soft_cap": read_cap(fields, "final_logit_softcapping", None),
            "experts": _experts(fields) if fields.boolean("enable_moe_block", False) else None,
        }

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields = gguf.fields
        kinds = [SLIDING if windowed else FULL for windowed in gguf_sliding(fields, _FULL_EVERY)]
        heads, sizes = (gguf_of_layers(fields, name) for name in ("attention.head_count_kv", "feed_forward_length"))
        # gguf_fields reads one number for all layers, which is corrected below.
        named = {"attention.head_count_kv": heads[0], "feed_forward_length": sizes[0]}
        named = {f"{fields.prefix}{name}": value for name, value in named.items()}
        experts = bool(fields.integer("expert_count", 0, minimum=0))
        shared = gguf_fields(
            gguf._replace(metadata={**gguf.metadata, **named}, rope_factors=RopeFactors()),
            scale=1.0,
            experts=gguf_experts(fields, norm_weights=True, size=EXPERT_SIZE) if experts else None,
        )
        layers = _gguf_attention(gguf, kinds, heads, shared["attention"][0])
        sharing = ConfigFields({"num_kv_shared_layers": fields.integer("attention.shared_kv_layers", 0, minimum=0)})
        return shared | {
            "attention": with_sources(sharing, kinds, layers),
            "ffn_sizes": () if len(set(sizes)) == 1 else sizes,
            "layer_input_size": fields.integer("embedding_length_per_layer_input", 0, minimum=0),
            "logit_soft_cap": fields.number("final_logit_softcapping", None),
            "activation": GELU_TANH,
        }

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return Gemma4Layer(self.config, layer, build)

    def make_layer_inputs(self, batch: ForwardBatch, x: jax.Array, rows: Rows) -> jax.Array:
        """Return the inputs [T, L, P] of all layers from the step's tokens and their embeddings x [T, D]. Tokens of
        images and audio count as the tower's filler token.
        """
        token_ids, pictures = batch.token_ids, batch.sections.get("pictures")
        if pictures is not None:
            tower: Any = self.config.tower
            token_ids = jnp.where(pictures.index >= 0, tower.filler_id, token_ids)
        return self.layer_inputs(token_ids, x, rows)


def _attention(
    fields: ConfigFields, kinds: Sequence[str], layers: Sequence[LayerAttention]
) -> tuple[LayerAttention, ...]:
    """Return `layers` with the heads, rope and keys of their `kinds`, FULL or SLIDING, or with the heads that
    `per_layer_config` has for each layer. With `attention_k_eq_v` (default: false) FULL layers have
    `num_global_key_value_heads` KV heads, whose keys are values, too. The last ones get a kv_source, as in
    with_sources. Raises ModelConfigError for wrong fields.
    """
    k_eq_v = fields.boolean("attention_k_eq_v", False)
    full_heads = fields.integer("num_global_key_value_heads", None) if k_eq_v else None
    found = with_own_heads(fields, kinds, layers, full_heads=full_heads, ropes=_ROPES)
    with_keys = (
        replace(layer, keys_as_values=k_eq_v and kind == FULL) for kind, layer in zip(kinds, found, strict=True)
    )
    return with_sources(fields, kinds, [*with_keys])


def with_own_heads(
    fields: ConfigFields,
    kinds: Sequence[str],
    layers: Sequence[LayerAttention],
    *,
    full_heads: int | None,
    ropes: Mapping[str, Mapping[str, Any]],
) -> list[LayerAttention]:
    """Return `layers` with the head sizes, KV heads and ropes of their `kinds`, FULL or SLIDING.

    If the file has `per_layer_config`, a layer has the sizes that this lists for it, and otherwise its own. Without it
    FULL layers have `global_head_dim`, 512 by default, and `full_heads` KV heads (None: their own). ropes: by kind, the
    rope of a file without `rope_parameters`. Raises ModelConfigError for wrong fields.
    """
    full_dim = fields.integer("global_head_dim", _FULL_HEAD_DIM)
    own = _own_fields(fields, len(layers))
    found: list[LayerAttention] = []
    for number, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        head_dim, num_kv_heads = layer.head_dim, layer.num_kv_heads
        if own is not None:
            each = own.get(number, ConfigFields({}))
            head_dim = each.integer("head_dim", head_dim)
            num_kv_heads = each.integer("num_key_value_heads", num_kv_heads)
        elif kind == FULL:
            head_dim, num_kv_heads = full_dim, full_heads or num_kv_heads
        rope = _rope(fields, kind, head_dim, ropes)
        found.append(replace(layer, rope=rope, head_dim=head_dim, num_kv_heads=num_kv_heads))
    return found


def _own_fields(fields: ConfigFields, count: int) -> dict[int, ConfigFields] | None:
    """Return the fields that `per_layer_config` has for single layers, by the layer's number; None if the file lacks
    it. null stands for a mapping without layers.

    transformers pads the numbers with zeros to equal length ("05" beside "11"). Raises ModelConfigError for keys that
    are not numbers below `count` and for fields other than head_dim and num_key_value_heads.
    """
    if LAYER_CONFIG not in fields.raw:
        return None
    given = fields.mapping(LAYER_CONFIG) or {}
    listed = ConfigFields({LAYER_CONFIG: given}).part(LAYER_CONFIG)
    found: dict[int, ConfigFields] = {}
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 10) or int(key) >= count or int(key) in found:
            raise fields.fail(LAYER_CONFIG, f"a mapping whose keys are numbers of layers, each once and below {count}")
        own = listed.mapping(key) or {}
        if own.keys() - {"head_dim", "num_key_value_heads"}:
            raise fields.fail(LAYER_CONFIG, "head_dim and num_key_value_heads of single layers")
        found[int(key)] = listed.part(key) if own else ConfigFields({})
    return found


def with_sources(
    fields: ConfigFields, kinds: Sequence[str], layers: Sequence[LayerAttention]
) -> tuple[LayerAttention, ...]:
    """Return the layers, of which the last `num_kv_shared_layers` (0 by default) attend to the keys and values of the
    last layer of the same kind before them, so that their own keys_as_values is false. Raises ModelConfigError for
    a wrong field, and if a kind has no such layer.
    """
    first = len(layers) - fields.integer("num_kv_shared_layers", 0, minimum=0)
    if first < 1 or set(kinds[:first]) != set(kinds):
        raise fields.fail("num_kv_shared_layers", "a number that leaves a layer of each kind before those that share")
    last = {kind: number for number, kind in enumerate(kinds[:first])}
    shared = (
        replace(layer, kv_source=last[kind], keys_as_values=False)
        for kind, layer in zip(kinds[first:], layers[first:], strict=True)
    )
    return (*layers[:first], *shared)


def _rope(fields: ConfigFields, kind: str, head_dim: int, usual: Mapping[str, Mapping[str, Any]]) -> Rope:
    """Return the rope of layers of one kind, FULL or SLIDING, from its mapping in `rope_parameters`, or in `usual` if
    the file has no `rope_parameters`. head_dim: elements of a head. Raises ModelConfigError for wrong fields, and if
    `rope_parameters` lacks the kind.
    """
    parameters = fields.mapping("rope_parameters")
    given: Mapping[str, Any] | None = usual[kind] if parameters is None else ConfigFields(parameters).mapping(kind)
    if given is None:
        raise fields.fail("rope_parameters", f"a mapping that has one for {kind}")
    ConfigFields(given).number("rope_theta")
    return read_rope(ConfigFields({**fields.raw, "rope_parameters": given, "rope_scaling": None}), head_dim)


def _experts(fields: ConfigFields) -> ExpertsConfig:
    """Return the ExpertsConfig of a config.json, for all layers, from `num_experts`, `top_k_experts` and
    `moe_intermediate_size`. Raises ModelConfigError for wrong fields.
    """
    count, chosen, size = map(fields.integer, ("num_experts", "top_k_experts", "moe_intermediate_size"))
    return ExpertsConfig(num_experts=count, num_per_token=chosen, intermediate_size=size)


def _gguf_attention(
    gguf: GGUFConfig, kinds: Sequence[str], heads: Sequence[int], layer: LayerAttention
) -> list[LayerAttention]:
    """Return the attention of layers of these kinds, with their KV heads and ropes. Full layers rotate the share of
    pairs whose factor in rope_freqs.weight is 1, all without that tensor; SLIDING ones rotate all pairs, of heads of
    `attention.key_length_swa` elements. Bases are `rope.freq_base` (default: 1,000,000) and `rope.freq_base_swa`
    (10,000). layer: attention with the fields that all layers share. Raises ModelConfigError for wrong fields, and for
    a rope_freqs.weight of another size.

    Files do not say whether values are keys. In published models that is so exactly if the kinds differ in their KV
    heads.
    """
    fields, factors = gguf.fields, gguf.rope_factors.factors
    half, size = layer.head_dim // 2, fields.integer("attention.key_length_swa", layer.head_dim)
    if factors and len(factors) != half:
        raise ModelConfigError(f"rope_freqs.weight must hold {half} numbers, got {len(factors)}")
    # A pair that is not rotated has so large a factor that its frequency is practically 0.
    turned = sum(factor == 1.0 for factor in factors) / half if factors else 1.0
    theta = fields.number("rope.freq_base", 1_000_000.0)
    full = replace(
        layer,
        window=None,
        rope=Rope(layer.head_dim, theta, RopeScaling("proportional", 1.0, rotated=turned)),
        keys_as_values=len(set(heads)) > 1,
    )
    local = replace(layer, head_dim=size, rope=Rope(size, fields.number("rope.freq_base_swa", 10_000.0)))
    return [
        replace(local if kind == SLIDING else full, num_kv_heads=count)
        for kind, count in zip(kinds, heads, strict=True)
    ]


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """Gemma 4 with images and audio in the prompt. In large checkpoints, which take no audio, the tokens of an image
    attend to each other in layers with windows.
    """

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields)
        found = super().read_hf(text)
        filler = text.integer("pad_token_id", 0, minimum=0)
        if filler >= found["vocab_size"]:
            raise text.fail("pad_token_id", f"below vocab_size {found['vocab_size']}")
        both_ways = text.text("use_bidirectional_attention", None) == "vision"
        towers: list[TowerConfig | None] = []  # a text part alone may be stored under this name
        if fields.has("vision_config"):
            towers.append(read_gemma4(fields, both_ways=both_ways, filler_id=filler))
        if fields.has("audio_config") and not both_ways:
            towers.append(sound.read_gemma4_sound(fields, filler_id=filler))
        return found | dict(zip(TOWERS, towers, strict=False))
