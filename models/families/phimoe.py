"""Phi-3.5-MoE and Phi-mini-MoE (Abdin et al. 2024, arXiv:2404.14219): layer norms, and experts that are picked one
after the other, each weighed against those with scores close to its own (SparseMixer, arXiv:2409.12136).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.adapters import Adapters
from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.declared import DeclaredForm
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import gguf_experts
from jaxengine.models.families.declared import DeclaredForCausalLM
from jaxengine.models.families.declared_row import GGUFRow, Row
from jaxengine.models.families.llama import LAYER
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts, PickedExperts
from jaxengine.models.params.source import CheckpointNames, StackedExperts

NAMES = ExpertNames(gate="w1", up="w3", down="w2")
_MSCALES = ("short_mscale", "long_mscale")
_MSCALE = 1.243163121016122  # both, in all published models with longrope


class SparseMixer(MixtureOfExperts):
    """Mixture of experts with a SparseMixer router: a token goes to the expert with the best score, then to the best of
    the other experts.
    """

    def route(self, x: jax.Array, adapters: Adapters | None = None) -> tuple[jax.Array, jax.Array]:
        """Return weights f32[T, k] and experts i32[T, k] of each token of x [T, D], the best expert first.

        An expert's weight is its share of a softmax over the scores that are close to its own pick's best score: those
        whose difference from it, relative to the larger magnitude, is at most twice `router_jitter_noise`. Experts
        picked before it are left out. `adapters` are those of the rows of x. If `given` is set, its experts replace the
        picked ones. Sets the attribute `picked` if `notes_experts`.
        """
        logits = self._router_logits(x, adapters)
        ids = jax.lax.top_k(logits, self.experts.num_per_token)[1]
        ids = ids if self.given is None else self._replayed(ids)
        left, weights = logits, []
        for pick in range(self.experts.num_per_token):
            best = jnp.max(left, axis=-1, keepdims=True)
            far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * self.experts.router_jitter_noise
            shares = jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=-1)
            own = ids[:, pick, None]
            weights.append(jnp.take_along_axis(shares, own, axis=-1))
            left = jnp.where(jnp.arange(left.shape[-1]) == own, -jnp.inf, left)
        if self.notes_experts:
            self.picked = PickedExperts(ids)
        return jnp.concatenate(weights, axis=-1), ids


def _one_mscale(fields: ConfigFields) -> dict[str, Any]:
    """Return the rope fields of `fields` with longrope's two factors of cos and sin, `short_mscale` and `long_mscale`,
    replaced by one `attention_factor`, under the name `rope_parameters` or `rope_scaling` that `fields` uses; {} if
    both factors are absent.

    Raises ModelConfigError if the factors differ, or only one is present.
    """
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    rope = ConfigFields(fields.mapping(name) or {})
    if not any(rope.has(each) for each in _MSCALES):
        return {}
    short, long = (rope.number(each) for each in _MSCALES)
    if short != long:
        raise rope.fail("long_mscale", f"short_mscale, {short}")
    kept = {key: value for key, value in rope.raw.items() if key not in _MSCALES}
    return {name: {**kept, "attention_factor": short}}


def _read_experts(fields: ConfigFields) -> ExpertsConfig:
    """Return the configuration of the experts: by default 16 experts, two of them for each token, and a
    `router_jitter_noise` of 0.01. Raises ModelConfigError if a field is invalid or a number of experts per token other
    than 2 is given.
    """
    experts = ExpertsConfig(
        num_experts=fields.integer("num_local_experts", 16),
        num_per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=fields.integer("intermediate_size"),
        router_jitter_noise=fields.number("router_jitter_noise", 0.01),
    )
    if experts.num_per_token != 2:
        raise fields.fail("num_experts_per_tok", "2")
    return experts


def _gguf_experts(fields: ConfigFields) -> ExpertsConfig:
    """Return the ExpertsConfig of a GGUF file. It does not say `router_jitter_noise`, which is 0.01 in all published
    models. Raises ModelConfigError for wrong fields and a number of experts per token other than 2.
    """
    experts = gguf_experts(fields, norm_weights=True, router_jitter_noise=0.01)
    if experts.num_per_token != 2:
        raise fields.fail("expert_used_count", "2")
    return experts


def _gguf_rope(fields: ConfigFields, layers: tuple[LayerAttention, ...]) -> tuple[LayerAttention, ...]:
    """Return a GGUF file's layers; longrope gets the attention factor _MSCALE in place of Phi-3's, which files have."""
    rope = layers[0].rope
    if rope is None or rope.scaling is None or not rope.scaling.short_factors:
        return layers
    rope = replace(rope, scaling=replace(rope.scaling, attention_factor=_MSCALE))
    return tuple(replace(each, rope=rope) for each in layers)


class PhiMoEForCausalLM(DeclaredForCausalLM):
    """Llama with layer norms, experts in every layer, and in some checkpoints biases."""

    gguf_architecture: ClassVar[str | None] = "phimoe"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        stacked_experts=StackedExperts(modules=(NAMES.gate, NAMES.up, NAMES.down)),
        parts=((".mlp.router.", ".block_sparse_moe.gate."), (".mlp.", ".block_sparse_moe.")),
    )
    row = Row(
        "Phi-3.5-MoE",
        DeclaredForm(),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "attention_bias": False, "lm_head_bias": False},
        eps="rms_norm_eps",
        grouped=True,
        bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias=False,
        adapt=_one_mscale,
        choose=lambda fields, form: replace(form, head_bias=fields.boolean("lm_head_bias")),
        each_layer=lambda fields, layer, attention: replace(attention, window=fields.integer("sliding_window", None)),
        experts=_read_experts,
        gguf=GGUFRow(
            "phimoe",
            bias=True,
            choose=lambda gguf, form: replace(form, head_bias=True),
            experts=_gguf_experts,
            layers=_gguf_rope,
        ),
    )

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        return SparseMixer(self.config, source=f"{LAYER}.block_sparse_moe", names=NAMES, build=build)
