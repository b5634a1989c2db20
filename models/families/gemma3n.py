"""Gemma 3n (Google 2025), text part: several hidden states per token, of which a layer computes one and predicts the
others (AltUp, Baykal et al. 2023, arXiv:2301.13310), a low-rank product in parallel with attention (LAuReL, Menghani et
al. 2024, arXiv:2411.07501), MLPs in which most gates are zero, and Gemma 4's shared keys and per-layer inputs.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.altup import AltUp
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.gguf import (
    GGUFConfig,
    as_array,
    gguf_fields,
    gguf_layers,
    gguf_of_layers,
    gguf_sliding,
)
from jaxengine.models.config.readers.hf import (
    FULL,
    SLIDING,
    layer_kinds,
    ropes_by_kind,
    text_fields,
    windows_by_kind,
)
from jaxengine.models.config.rope import Rope
from jaxengine.models.families.gemma2 import Gemma2ForCausalLM, gelu_fields, read_cap
from jaxengine.models.families.gemma4 import Gemma4Attention, LayerInputs, PerLayerGate, with_sources
from jaxengine.models.families.llama import LAYER
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.base.activations import ACTIVATIONS, GELU_TANH
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import GatedMLP, SparseGate
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.base.scale import scaled
from jaxengine.models.layers.streams.altup import Projections, Streams
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames
from jaxengine.pallas_kernels.kv.pages import KVPages

# transformers' defaults for fields that a file lacks.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_FULL_EVERY, _SPARSE_LAYERS, _SPARSITY = 5, 10, 0.95
# What llama.cpp fixes for all GGUF files: the rank of LAuReL, and how many layers have keys of their own.
_RANK, _OWN_KEYS = 64, 20
_MOST_SPARSE = 5.0  # standard deviations, beyond which the share of zeros is 1 but for its seventh digit
# Names of the language model in checkpoints that also have towers, which are not read.
NAMES = CheckpointNames(
    prefixes=(("model.language_model.", "model."),),
    unused=tuple(f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")),
)


class Laurel(nnx.Module):
    """Low-rank product with a residual (LAuReL): x + norm(right(left(x)))."""

    def __init__(self, config: ModelConfig, rank: int, build: Build):
        size, source = config.hidden_size, f"{LAYER}.laurel"
        self.left = Linear(size, (Source(f"{source}.linear_left", rank),), axes=("embed", "latent"), build=build)
        self.right = Linear(rank, (Source(f"{source}.linear_right", size),), axes=("latent", "embed"), build=build)
        self.norm = RMSNorm(size, config.rms_norm_eps, source=f"{source}.post_laurel_norm", build=build)

    def __call__(self, x: jax.Array, rows: Any) -> jax.Array:
        """Return x + norm(right(left(x))), [T, D] -> [T, D]. rows: the step's rows, as for Linear."""
        return x + self.norm(self.right(self.left(x, rows), rows))


class Gemma3nLayer(nnx.Module):
    """Layer that applies Gemma 2's computation, with a low-rank product in parallel with attention, to the active
    hidden state, then corrects all predicted states by the result, and adds the per-layer input to all but the first.
    """

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        """Create the modules of layer number `layer`. Its MLP has sparse gates if the configuration gives the layer a
        sparsity.
        """
        altup, size, eps = config.altup, config.hidden_size, config.rms_norm_eps
        assert altup is not None

        def norm(name: str) -> RMSNorm:
            return RMSNorm(size, eps, source=f"{LAYER}.{name}_layernorm", build=build)

        self.streams, self.laurel = (
            Streams(config, altup, source=f"{LAYER}.altup", build=build),
            Laurel(config, altup.laurel_rank, build),
        )
        self.input_norm, self.attention_norm = norm("input"), norm("post_attention")
        self.mlp_input_norm, self.mlp_norm = norm("pre_feedforward"), norm("post_feedforward")
        attention = config.attention[layer]
        self.attention = Gemma4Attention(attention, size, eps=eps, source=f"{LAYER}.self_attn", build=build)
        share, activation = altup.sparsity[layer], ACTIVATIONS[config.activation]
        activation = SparseGate(NormalDist().inv_cdf(share), activation) if share else activation
        ffn = config.ffn_sizes[layer] if config.ffn_sizes else config.intermediate_size
        self.mlp = GatedMLP(size, ffn, source=f"{LAYER}.mlp", activation=activation, build=build)
        self.input_gate = PerLayerGate(config, build)
        self.num_streams, self.active = altup.num_streams, altup.active

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Return the hidden states after the layer, [T, A * D] for x [T, A * D], and the pool with this step's keys and
        values written. All states are predicted, the active one is computed by attention and MLP, the others are
        corrected by it, and the gated per-layer input is added to all but the first.
        """
        with jax.named_scope("predict"):
            predictions = self.streams.predict(x.reshape(x.shape[0], self.num_streams, -1))
            active = predictions[:, self.active].astype(x.dtype)
        with jax.named_scope("attention"):
            normed = self.input_norm(active)
            attended, kv = self.attention(normed, kv, pages, step)
            beside = self.laurel(normed, step.rows)
            active = scaled(active + self.attention_norm(attended) + beside, 2**-0.5)
        with jax.named_scope("mlp"):
            active = active + self.mlp_norm(self.mlp(self.mlp_input_norm(active), step.rows))
        with jax.named_scope("correct"):
            corrected = self.streams.correct(predictions, active).astype(x.dtype)
        with jax.named_scope("layer_input"):
            own = self.input_gate(self.streams.scaled_active(corrected), step)
            corrected = corrected.at[:, 1:].add(own[:, None])
        return corrected.reshape(x.shape), kv


class JoinedNorm(nnx.Module):
    """Norm of the mean of a token's hidden states, after all but the first have been projected: [T, A * D] -> [T,
    D].
    """

    def __init__(self, config: ModelConfig, altup: AltUp, build: Build):
        self.projections = Projections(config, altup, "model.altup_unembed_projections", build)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, source="model.norm", build=build)
        self.num_streams = altup.num_streams

    def __call__(self, x: jax.Array) -> jax.Array:
        first, *others = jnp.split(x, self.num_streams, axis=-1)
        projected = self.projections(first, others)
        total = sum(projected, first.astype(jnp.float32))
        return self.norm((total / self.num_streams).astype(x.dtype))


class Gemma3nForCausalLM(Gemma2ForCausalLM):
    """Decoder of Gemma3nLayers, which pass on A hidden states of each token, [T, A * D]."""

    gguf_architecture: ClassVar[str | None] = "gemma3n"
    checkpoint_names: ClassVar[CheckpointNames] = NAMES
    norm_class = RMSNorm

    def __init__(self, config: ModelConfig, build: Build):
        super().__init__(config, build)
        if self.stage.is_first:
            assert config.altup is not None
            self.layer_inputs = LayerInputs(config, self.build)
            self.projections = Projections(config, config.altup, "model.altup_projections", self.build)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**DEFAULTS)
        kinds, bias = layer_kinds(fields, _FULL_EVERY), fields.boolean("attention_bias", False)
        fields, sizes = _with_ffn_sizes(fields)
        shared = gelu_fields(
            fields,
            windows=windows_by_kind(kinds, fields.integer("sliding_window")),
            ropes=ropes_by_kind(fields, fields.integer("head_dim"), kinds, sliding_theta="rope_local_base_freq"),
            tied=True,
            scale=1.0,
            bias=bias,
            output_bias=bias,
        )
        return shared | {
            "attention": with_sources(fields, kinds, shared["attention"]),
            "ffn_sizes": () if len(set(sizes)) == 1 else sizes,
            "layer_input_size": fields.integer("hidden_size_per_layer_input", 256),
            "layer_input_rows": fields.integer("vocab_size_per_layer_input", 262144),
            "logit_soft_cap": read_cap(fields, "final_logit_softcapping", 30.0),
            "altup": AltUp(
                num_streams=fields.integer("altup_num_inputs", 4),
                active=fields.integer("altup_active_idx", 0, minimum=0),
                scales_active=fields.value("altup_correct_scale", True) is not False,
                laurel_rank=fields.integer("laurel_rank", 64),
                sparsity=_read_sparsity(fields, len(kinds)),
            ),
        }

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields = gguf.fields
        fields.integer("attention.sliding_window")  # llama.cpp reads no file without it
        sizes = gguf_of_layers(fields, "feed_forward_length")
        # gguf_fields reads one number for all layers.
        named = {f"{fields.prefix}feed_forward_length": max(sizes)}
        shared = gguf_fields(gguf._replace(metadata={**gguf.metadata, **named}), scale=1.0)
        layer, count = shared["attention"][0], len(sizes)
        local, full = replace(layer, rope=Rope(layer.head_dim, 10_000.0)), replace(layer, window=None)
        layers = gguf_layers(fields, local, full, _FULL_EVERY)
        sharing = fields.integer("attention.shared_kv_layers", max(count - _OWN_KEYS, 0), minimum=0)
        kinds = [SLIDING if slides else FULL for slides in gguf_sliding(fields, _FULL_EVERY)]
        return shared | {
            "attention": with_sources(ConfigFields({"num_kv_shared_layers": sharing}), kinds, layers),
            "ffn_sizes": () if len(set(sizes)) == 1 else sizes,
            "layer_input_size": fields.integer("embedding_length_per_layer_input", 256),
            "layer_input_rows": shared["vocab_size"],  # rows that the checkpoint lacks are zeros
            "logit_soft_cap": fields.number("final_logit_softcapping", 30.0),
            "activation": GELU_TANH,
            "altup": AltUp(
                num_streams=fields.integer("altup.num_inputs", 4),
                active=fields.integer("altup.active_idx", 0, minimum=0),
                scales_active=True,
                laurel_rank=_RANK,
                sparsity=_gguf_sparsity(fields, count),
            ),
        }

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return Gemma3nLayer(self.config, layer, build)

    def make_norm(self, build: Build) -> nnx.Module:
        assert self.config.altup is not None
        return JoinedNorm(self.config, self.config.altup, build)

    def first_input(self, x: jax.Array, batch: ForwardBatch) -> jax.Array:
        """Return the hidden states [T, A * D] of a step's tokens: the embeddings x [T, D] as the first one, joined with
        their projections as the others.
        """
        others = self.projections(x, [x] * len(self.projections.products))
        return jnp.concatenate([x, *(each.astype(x.dtype) for each in others)], axis=-1)

    def make_layer_inputs(self, batch: ForwardBatch, x: jax.Array, rows: Rows) -> jax.Array:
        """Return the inputs [T, L, P] of all layers from the step's tokens and the first of their hidden states x [T, A
        * D]. Tokens beyond the table have those of token 0.
        """
        token_ids = batch.token_ids
        known = jnp.where(token_ids < self.config.layer_input_rows, token_ids, 0)
        return self.layer_inputs(known, x[:, : self.config.hidden_size], rows)


def _with_ffn_sizes(fields: ConfigFields) -> tuple[ConfigFields, tuple[int, ...]]:
    """Return (fields, feed-forward sizes of all layers). If the file lists one size per layer, `intermediate_size` in
    the returned fields is the largest of them. Raises ModelConfigError for a list of another length or with other
    values.
    """
    count, given = fields.integer("num_hidden_layers"), fields.value("intermediate_size")
    if not isinstance(given, (list, tuple)):
        return fields, (fields.integer("intermediate_size"),) * count
    if len(given) != count or any(type(size) is not int or size < 1 for size in given):
        raise fields.fail("intermediate_size", f"an integer >= 1, or a list of {count}")
    return ConfigFields({**fields.raw, "intermediate_size": max(given)}), tuple(given)


def _read_sparsity(fields: ConfigFields, count: int) -> tuple[float, ...]:
    """Return the share of the MLP's gates that are to be zero in each of `count` layers, at least 0 and below 1. By
    default it is 0.95 in the first 10 layers of a model with more than 10, and 0 in all others. Raises ModelConfigError
    for a wrong list.
    """
    name = "activation_sparsity_pattern"
    sparse = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
    found = fields.value(name, [_SPARSITY] * sparse + [0.0] * (count - sparse))
    if (
        not isinstance(found, (list, tuple))
        or len(found) != count
        or any(type(share) not in (int, float) or not 0 <= share < 1 for share in found)
    ):
        raise fields.fail(name, f"a list of {count} numbers >= 0 and < 1")
    return tuple(float(share) for share in found)


def _gguf_sparsity(fields: ConfigFields, count: int) -> tuple[float, ...]:
    """Return `_read_sparsity` of a GGUF file, which has quantiles of the standard normal distribution instead of
    shares; by default the first 10 layers are sparse. Raises ModelConfigError for a wrong list.
    """
    name = "activation_sparsity_scale"
    if not fields.has(name):
        return tuple(_SPARSITY if layer < _SPARSE_LAYERS else 0.0 for layer in range(count))
    listed = as_array(fields.value(name))
    if listed.dtype.kind != "f" or listed.shape != (count,) or np.isnan(listed).any() or listed.max() > _MOST_SPARSE:
        raise fields.fail(name, f"a list of {count} numbers of at most {_MOST_SPARSE}")
    return tuple(NormalDist().cdf(float(scale)) for scale in listed)


class Gemma3nForConditionalGeneration(Gemma3nForCausalLM):
    """Text part of Gemma 3n, read from checkpoints that also have vision and audio towers."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return super().read_hf(text_fields(fields))
