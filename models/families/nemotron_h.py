"""Nemotron-H, Nemotron Nano 2 and 3, Nemotron 3 Super and Nemotron 3 Puzzle (NVIDIA 2025, arXiv:2504.03624,
arXiv:2508.14444): layers that each have one part, Mamba-2, attention without rope, an MLP or experts, in the order that
the configuration lists. Puzzle's layers differ in their experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config import taps
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields, gguf_of_layers, gguf_shared_experts
from jaxengine.models.config.readers.gguf_states import gguf_state_space
from jaxengine.models.config.readers.hf import FULL, predicting
from jaxengine.models.config.readers.state_space import read_dt_limits
from jaxengine.models.config.state import StateSpace
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.layers.attention.attention import Attention, StepInputs
from jaxengine.models.layers.base.activations import ACTIVATIONS, SILU, read_activation
from jaxengine.models.layers.base.mlp import MLP
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.experts.latent_experts import LatentExperts
from jaxengine.models.layers.experts.moe import ExpertNames
from jaxengine.models.layers.states.mamba2 import Mamba2
from jaxengine.models.params.source import CheckpointNames, NextLayer

MAMBA, ATTENTION, FEED_FORWARD, EXPERTS = "mamba", "attention", "mlp", "moe"
# Kinds of layers as transformers 4 and 5 name them, and the letters of a `hybrid_override_pattern` -> kind.
KINDS = {
    **dict.fromkeys(("mamba", "linear_attention", "M"), MAMBA),
    **dict.fromkeys(("attention", FULL, "*"), ATTENTION),
    **dict.fromkeys(("mlp", "-"), FEED_FORWARD),
    **dict.fromkeys(("moe", "E"), EXPERTS),
}
SOURCE = f"{LAYER}.mixer"
# The field of Puzzle's files with a mapping for each layer, and the fields in these that differ between layers.
_BLOCKS = "block_configs"
_SIZES = ("num_experts_per_tok", "moe_intermediate_size")


class MixerLayer(nnx.Module):
    """Layer x + mixer(norm(x)). kind: the mixer's kind, one of the values of KINDS."""

    def __init__(self, config: ModelConfig, mixer: nnx.Module, kind: str, build: Build):
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, source=f"{LAYER}.norm", build=build)
        self.mixer, self.kind = mixer, kind

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """Where taps find the mixer, the layer's only part (jaxengine.models.layers.taps.path_of): as MLP if it is an
        MLP or experts, else as ATTENTION.
        """
        return {taps.MLP if self.kind in (FEED_FORWARD, EXPERTS) else taps.ATTENTION: ("mixer",)}

    def __call__(self, x: jax.Array, kv: Any, pages: Any, step: StepInputs) -> tuple[jax.Array, Any]:
        normed = self.norm(x)
        with jax.named_scope(self.kind):
            if self.kind in (FEED_FORWARD, EXPERTS):
                return x + self.mixer(normed, step.rows), kv
            mixed, kv = self.mixer(normed, kv, pages, step)
            return x + mixed, kv


class NemotronHForCausalLM(Decoder):
    """Decoder of MixerLayers."""

    gguf_architecture: ClassVar[str | None] = "nemotron_h"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=tuple(
            (f"{old}.{module}.", f"model.{new}.")
            for old in ("backbone", "model")
            for module, new in (("embeddings", "embed_tokens"), ("norm_f", "norm"), ("layers", "layers"))
        ),
        squeezed=(".conv1d.weight",),
        next_layer=NextLayer((("mtp.layers.{}.", ""),), norm="final_layernorm", normed=True, count=2),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields, sizes = _read_blocks(fields)
        kinds = layer_kinds(fields)
        fields.require(
            attention_bias=False,
            residual_in_fp32=False,
            sliding_window=None,
        )
        fields = fields.with_defaults(num_hidden_layers=len(kinds), layer_norm_epsilon=1e-5)
        shared = gated_fields(
            fields,
            ropes=[None] * len(kinds),
            head_dim=fields.integer("attention_head_dim", 128),
            named="mlp_hidden_act",
            default="relu2",
            eps="layer_norm_epsilon",
        )
        state = _state(fields) if MAMBA in kinds else None
        shared["attention"] = _of_kinds(shared["attention"], kinds, state)
        if EXPERTS in kinds:
            shared["experts"] = replace(_experts(fields, _dense(kinds)), by_layer=sizes)
        shared["mlp_bias"] = fields.boolean("mlp_bias", False)
        return predicting(shared) if EXPERTS in kinds and not sizes and _predicts(fields) else shared

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields, heads_name, size_name = gguf.fields, "attention.head_count_kv", "feed_forward_length"
        heads, sizes = (gguf_of_layers(fields, each, minimum=0) for each in (heads_name, size_name))
        for name, numbers in ((heads_name, heads), (size_name, sizes)):
            if len(set(numbers) - {0}) > 1:
                raise fields.fail(name, "0, or the same number, in each layer")
        experts = gguf_shared_experts(fields, scoring_func="sigmoid")
        further = FEED_FORWARD if experts is None else EXPERTS
        pairs = zip(heads, sizes, strict=True)
        kinds = [further if size else ATTENTION if count else MAMBA for count, size in pairs]
        kinds = kinds[: len(kinds) - fields.integer("nextn_predict_layers", 0, minimum=0)]
        if experts is not None:
            experts = replace(
                experts,
                dense_layers=_dense(kinds),
                shared_intermediate_size=fields.integer("expert_shared_feed_forward_length"),
                latent_size=fields.integer("moe_latent_size", 0, minimum=0) or None,
            )
        named = {heads_name: max(heads) or fields.value("attention.head_count"), size_name: max(sizes) or 1}
        named = {f"{fields.prefix}{name}": value for name, value in named.items()}
        eps = "attention.layer_norm_rms_epsilon"
        eps = eps if fields.has(eps) else "attention.layer_norm_epsilon"
        shared = gguf_fields(gguf._replace(metadata={**gguf.metadata, **named}), experts=experts, eps=eps)
        layers = tuple(replace(each, rope=None) for each in shared["attention"])
        state = gguf_state_space(fields) if MAMBA in kinds else None
        return shared | {"attention": _of_kinds(layers, kinds, state), "activation": "relu2"}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config, own = self.config, self.config.attention[layer]
        size, eps = config.hidden_size, config.rms_norm_eps
        if own.attends:
            return MixerLayer(config, Attention(own, size, eps=eps, source=SOURCE, build=build), ATTENTION, build)
        if isinstance(own.state, StateSpace):
            return MixerLayer(config, Mamba2(own.state, size, eps=eps, source=SOURCE, build=build), MAMBA, build)
        if config.experts is not None and layer not in config.experts.dense_layers:
            return MixerLayer(config, self._make_experts(layer, build), EXPERTS, build)
        options: dict[str, Any] = {
            "activation": ACTIVATIONS[config.activation],
            "bias": config.mlp_bias,
            "build": build,
        }
        return MixerLayer(config, MLP(size, config.intermediate_size, source=SOURCE, **options), FEED_FORWARD, build)

    def _make_experts(self, layer: int, build: Build) -> LatentExperts:
        """Return a new module of a layer's experts, which have no gates, and its shared MLP."""
        assert self.config.experts is not None
        experts, bias = self.config.experts.of_layer(layer), self.config.mlp_bias
        config = replace(self.config, experts=experts)
        options: dict[str, Any] = {"activation": ACTIVATIONS[config.activation], "bias": bias, "build": build}
        sizes = config.hidden_size, experts.shared_intermediate_size
        shared = MLP(*sizes, source=f"{SOURCE}.shared_experts", **options)
        latent = f"{SOURCE}.fc1_latent_proj", f"{SOURCE}.fc2_latent_proj"
        router = {"names": ExpertNames(gate=""), "router_dtype": jnp.float32}
        return LatentExperts(config, shared, source=SOURCE, latent=latent, **options, **router)


def _of_kinds(
    layers: Sequence[LayerAttention], kinds: Sequence[str], state: StateSpace | None
) -> tuple[LayerAttention, ...]:
    """Return `layers` with only the part of their kinds; MAMBA has this state."""
    by_kind = {MAMBA: {"state": state, "mixer_only": True}, ATTENTION: {"mixer_only": True}}
    pairs = zip(layers, kinds, strict=True)
    return tuple(replace(layer, **by_kind.get(kind, {"feed_forward_only": True})) for layer, kind in pairs)


def _dense(kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of layers without experts."""
    return tuple(layer for layer, kind in enumerate(kinds) if kind != EXPERTS)


def layer_kinds(fields: ConfigFields) -> list[str]:
    """Return the kind of each layer, a value of KINDS, as listed in `layers_block_type` or `layer_types`, or else as
    the letters of `hybrid_override_pattern`. Raises ModelConfigError for other kinds, for no layers, and for a number
    of layers other than `num_hidden_layers`.
    """
    name = next((name for name in ("layers_block_type", "layer_types") if fields.has(name)), None)
    listed = fields.text("hybrid_override_pattern") if name is None else fields.value(name)
    name = name or "hybrid_override_pattern"
    known = isinstance(listed, (list, str)) and all(isinstance(kind, str) and kind in KINDS for kind in listed)
    count = fields.integer("num_hidden_layers", None)
    if not known or not listed or count not in (None, len(listed)):
        number = "" if count is None else f"{count} "
        raise fields.fail(name, f"{number}layers, each one of {', '.join(KINDS)}")
    return [KINDS[kind] for kind in listed]


def _predicts(fields: ConfigFields) -> bool:
    """Return whether attention and experts, a layer each, predict further tokens by `mtp_hybrid_override_pattern`, or
    else `mtp_layers_block_type`: no others are read.
    """
    listed = fields.value("mtp_hybrid_override_pattern", None) or fields.value("mtp_layers_block_type", None)
    return isinstance(listed, (list, str)) and [KINDS.get(str(kind)) for kind in listed] == [ATTENTION, EXPERTS]


def _read_blocks(fields: ConfigFields) -> tuple[ConfigFields, tuple[tuple[int, int], ...]]:
    """Return the fields with those of `block_configs`, which Puzzle's files have, and the number of experts of a token
    and the size of an expert in each layer, (1, 1) in a layer without experts; the fields as they are and () for files
    without. A block's kind is its `block_type`. Of these two numbers the fields get the largest, and of layers the
    blocks' number if they lack it. Raises ModelConfigError for wrong blocks, and for blocks that differ otherwise.
    """
    if not fields.has(_BLOCKS):
        return fields, ()
    blocks = fields.value(_BLOCKS)
    if not (isinstance(blocks, list) and blocks and all(isinstance(each, dict) for each in blocks)):
        raise fields.fail(_BLOCKS, "a list of mappings, one for each layer")
    found: dict[str, Any] = {"layers_block_type": [each.get("block_type") for each in blocks]}
    sizes = []
    for number, given in enumerate(blocks):
        prefix = f"{_BLOCKS}.{number}."
        own = ConfigFields({prefix + name: value for name, value in given.items()}, prefix)
        with_experts = given.get("block_type") == EXPERTS
        for name, value in given.items():
            if name == "block_type" or value is None or (with_experts and name in _SIZES):
                continue
            if found.setdefault(name, value) != value:
                raise own.fail(name, f"{found[name]!r} as in the blocks before it")
        sizes.append(tuple(own.integer(name) for name in _SIZES) if with_experts else (1, 1))
    found |= {name: max(each[place] for each in sizes) for place, name in enumerate(_SIZES)}
    if not fields.has("num_hidden_layers"):  # null in published files
        found["num_hidden_layers"] = len(blocks)
    return ConfigFields({**fields.raw, **found}), tuple((count, size) for count, size in sizes)


def _state(fields: ConfigFields) -> StateSpace:
    """Return the state of Mamba-2's layers, from `mamba_num_heads`, `mamba_head_dim`, `n_groups` (default: 8),
    `ssm_state_size` (128), `conv_kernel` (4), `use_conv_bias` (true), `use_bias` (false) and `mamba_hidden_act`. The
    bounds of time steps are `time_step_limit`; in a file that lists the kinds of layers and has no `block_configs`,
    they are `time_step_min` (0.001 by default) and infinity. Raises ModelConfigError for wrong fields.
    """
    low, high = read_dt_limits(fields)
    if (fields.has("layers_block_type") or fields.has("layer_types")) and not fields.has(_BLOCKS):
        # transformers bounds time steps by this field; NVIDIA's code, whose configurations spell a pattern, does not.
        low, high = fields.number("time_step_min", 0.001), float("inf")
    bias = fields.boolean("use_bias", False)
    return StateSpace(
        num_heads=fields.integer("mamba_num_heads"),
        head_dim=fields.integer("mamba_head_dim"),
        num_groups=fields.integer("n_groups", 8),
        state_size=fields.integer("ssm_state_size", 128),
        conv_kernel=fields.integer("conv_kernel", 4),
        conv_bias=fields.boolean("use_conv_bias", True),
        activation=read_activation(fields, "mamba_hidden_act", SILU),
        bias=bias,
        output_bias=bias,
        dt_limits=(low, high),
    )


def _experts(fields: ConfigFields, dense_layers: tuple[int, ...]) -> ExpertsConfig:
    """Return the ExpertsConfig of all layers but `dense_layers`: sigmoid scores with a correction bias, a shared MLP of
    size `moe_shared_expert_intermediate_size`, `moe_latent_size` if present, and by default one group, weights that add
    up to 1 (`norm_topk_prob`) and a factor of 1. Raises ModelConfigError for wrong fields.
    """
    return ExpertsConfig(
        num_experts=fields.integer("n_routed_experts"),
        num_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        norm_weights=fields.boolean("norm_topk_prob", True),
        dense_layers=dense_layers,
        scoring_func="sigmoid",
        correction_bias=True,
        num_expert_group=fields.integer("n_group", 1),
        topk_group=fields.integer("topk_group", 1),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        shared_intermediate_size=fields.integer("moe_shared_expert_intermediate_size"),
        latent_size=fields.integer("moe_latent_size", None),
    )
