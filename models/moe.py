"""Mixture of experts: a router picks experts for each token, and their gated MLPs are added with its weights.

Sparsely gated layers: Shazeer et al. 2017, arXiv:1701.06538; as Mixtral has them: Jiang et al. 2024, arXiv:2401.04088.
Further shape letters: E experts, k experts of a token. Knows nothing of families: what their checkpoints call things is
told, how they route is in ExpertsConfig.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import ModelConfig
from models.config_fields import ModelConfigError
from models.declare import ParamDecl, Source, declare
from models.layers import matmul
from pallas_kernels.grouped_matmul import grouped_matmul
from sharding.collectives import gather_tokens, reduce_tokens, shard_index
from sharding.layout import MeshLayout


class ExpertNames(NamedTuple):
    """What a checkpoint calls the three matrices of an expert."""

    gate: str
    up: str
    down: str


class ExpertLoad(nnx.Variable):
    """i32[E] of one layer and step: tokens of this rank that each expert was picked for."""


class MixtureOfExperts(nnx.Module):
    """sum over a token's k experts e of weight_e * down_e(silu(gate_e(x)) * up_e(x)).

    On several devices either whole experts are on different devices (`mesh.expert_parallel`) or each device has a part
    of every expert. Both gather the tokens of the devices that share the weights, compute what is here and add.
    """

    def __init__(self, config: ModelConfig, *, source: str, names: ExpertNames, dtype: Any, mesh: MeshLayout):
        if config.experts is None:
            raise ModelConfigError(f"experts must be set for {config.architecture}, got None")
        self.experts = experts = config.experts
        size, ffn, count = config.hidden_size, experts.intermediate_size, experts.num_experts
        self.axis = "experts" if mesh.expert_parallel else "ffn"
        over, within = ("experts", None) if mesh.expert_parallel else (None, "ffn")
        router = (Source(f"{source}.gate.weight", count),)
        self.router = declare(
            (size, count), dtype, ParamDecl(("embed", None), router, transposed=True, init_std=size**-0.5)
        )
        gate, up, down = (f"{source}.experts.{{expert}}.{name}.weight" for name in names)
        gate_up = ParamDecl(
            (over, "embed", within),
            (Source(gate, ffn), Source(up, ffn)),
            transposed=True,
            init_std=size**-0.5,
            num_experts=count,
        )
        self.gate_up = declare((count, size, 2 * ffn), dtype, gate_up)
        down = ParamDecl(
            (over, within, "embed"), (Source(down, size),), transposed=True, init_std=ffn**-0.5, num_experts=count
        )
        self.down = declare((count, ffn, size), dtype, down)

    def __call__(self, x: jax.Array, is_token: jax.Array | None = None) -> jax.Array:
        """[T, D] -> [T, D]

        is_token: bool[T], False for padding, which then goes to no expert and gives 0; None if all are tokens. The
        module then holds its ExpertLoad, which the caller may take with `nnx.pop`.
        """
        experts, num_experts = self.experts, self.experts.num_experts
        with jax.named_scope("route"):
            weights, ids = self.route(x)
            if is_token is not None:
                ids = jnp.where(is_token[:, None], ids, num_experts)
            self.load = ExpertLoad(tokens_per_expert(ids, num_experts))
        with jax.named_scope("group"):
            x, weights, ids = (gather_tokens(part, self.axis) for part in (x, weights, ids))
            order = jnp.argsort(ids.ravel(), stable=True)
            rows = x[order // experts.num_per_token]
            sizes = tokens_per_expert(ids, num_experts)
            first = shard_index("experts") * self.down[...].shape[0] if self.axis == "experts" else 0
        with jax.named_scope("gate_up"):
            gate, up = jnp.split(grouped_matmul(rows, self.gate_up[...], sizes, group_offset=first), 2, axis=-1)
            inner = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        with jax.named_scope("down"):
            inner = inner.astype(x.dtype)
            y = grouped_matmul(inner, self.down[...], sizes, group_offset=first, out_dtype=jnp.float32)
        with jax.named_scope("combine"):
            # Rows back in the order of tokens, then one addition after the other: no token's sum depends on another's.
            y = y[jnp.argsort(order)].reshape(*ids.shape, -1)
            mixed = jnp.zeros((x.shape[0], y.shape[2]))
            for k in range(experts.num_per_token):
                mixed = mixed + weights[:, k, None] * y[:, k]
            return reduce_tokens(mixed.astype(x.dtype), self.axis)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x[T, D] -> weights f32[T, k] and experts i32[T, k] of each token, the likeliest first.

        Experts of equal probability come in the order of their indices. With `norm_weights` the weights are the softmax
        over the k largest logits.
        """
        probabilities = jax.nn.softmax(matmul(x, self.router[...]), axis=-1)
        weights, ids = jax.lax.top_k(probabilities, self.experts.num_per_token)
        if self.experts.norm_weights:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, ids


def tokens_per_expert(ids: jax.Array, num_experts: int) -> jax.Array:
    """i32[num_experts]: how often each expert occurs in ids i32[T, k]; other ids are not counted."""
    return jnp.sum(ids.reshape(-1, 1) == jnp.arange(num_experts, dtype=ids.dtype), axis=0, dtype=jnp.int32)
