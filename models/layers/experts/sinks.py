"""Mixture of experts with shared experts whose weights a router computes together with those of a token's experts."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.adapters import Adapters
from jaxengine.models.build import Build
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.experts.moe import MixtureOfExperts, PickedExperts, RouterLogits
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.sharding.collectives import gather_tokens, reduce_tokens


class SinkExperts(MixtureOfExperts):
    """Mixture of experts with `num_sinks` shared experts, to all of which every token goes (Inkling). The weights of a
    token's experts and of the shared ones are the softmax of the logarithms of their sigmoid scores, times a constant
    and a learned number.

    The router has float32 weights. Shared experts are `{source}.shared.experts.{index}` in the model's names.
    """

    def __init__(self, config: ModelConfig, *, source: str, build: Build):
        super().__init__(config, source=source, build=build, router_dtype=jnp.float32)
        sizes = config.hidden_size, self.experts.intermediate_size
        names = (f"{source}.shared.experts.{index}" for index in range(self.experts.num_sinks))
        plain = replace(build, lora=None)  # parameters of all together in transformers, and no modules for adapters
        options = {"activation": ACTIVATIONS[config.activation], "build": plain}
        self.sinks = nnx.List([GatedMLP(*sizes, source=name, **options) for name in names])
        scale = ParamDecl((None,), (Source(f"{source}.gate.global_scale", 1),))
        self.scale = declare((1,), jnp.float32, scale)

    def __call__(self, x: jax.Array, rows: Rows, routed_by: jax.Array | None = None) -> jax.Array:
        with jax.named_scope("route"):
            weights, ids = self.route(x if routed_by is None else routed_by, rows.adapters)
            weights, shares = jnp.split(weights, [ids.shape[1]], axis=1)
        y = self.of_picked(x, rows, weights, ids)
        with jax.named_scope("shared"):
            return y + self._shared(x, shares)

    def route(self, x: jax.Array, adapters: Adapters | None = None) -> tuple[jax.Array, jax.Array]:
        """Return weights f32[T, k + S], those of the shared experts last, and experts i32[T, k] of tokens x [T, D].
        Weights are sigmoids that add up to 1 over both, times the scaling factor and `scale`. Otherwise as in
        MixtureOfExperts.
        """
        count = self.experts.num_experts
        logits, shared = jnp.split(self._router_logits(x, adapters), [count], axis=1)
        if self.notes_logits:
            self.logits = RouterLogits(logits)
        ids = jax.lax.top_k(self._choices(jax.nn.sigmoid(logits)), self.experts.num_per_token)[1]
        ids = ids if self.given is None else self._replayed(ids)
        if self.notes_experts:
            self.picked = PickedExperts(ids)
        scores = jax.nn.log_sigmoid(jnp.concatenate([jnp.take_along_axis(logits, ids, axis=1), shared], axis=1))
        return jax.nn.softmax(scores, axis=1) * self.experts.routed_scaling_factor * self.scale[...], ids

    def _shared(self, x: jax.Array, shares: jax.Array) -> jax.Array:
        """Return the sum [T, D] of the shared experts' outputs for x [T, D], weighted by `shares` f32[T, S]."""
        dtype = x.dtype
        x, shares = (gather_tokens(each, "ffn") for each in (x, shares))
        parts = [shares[:, i, None] * mlp.partial(x, None) for i, mlp in enumerate(self.sinks)]
        return reduce_tokens(sum(parts[1:], parts[0]).astype(dtype), "ffn")
