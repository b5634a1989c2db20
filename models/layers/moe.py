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
from jax import lax

from models.build import Build
from models.config.fields import ModelConfigError
from models.config.model_config import ModelConfig
from models.layers.rows import Rows
from models.weights.declare import Source
from sharding.collectives import (
    exchange_rows,
    gather_tokens,
    join_tokens,
    num_shards,
    reduce_tokens,
    shard_index,
    share_tokens,
    stack_parts,
)


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
    of every expert. Both gather the tokens of the devices that share the weights, compute what is here and add; whole
    experts can be sent the rows of their tokens instead (`mesh.sends_rows`).
    """

    def __init__(self, config: ModelConfig, *, source: str, names: ExpertNames, build: Build):
        if config.experts is None:
            raise ModelConfigError(f"experts must be set for {config.architecture}, got None")
        self.experts = experts = config.experts
        size, ffn, count = config.hidden_size, experts.intermediate_size, experts.num_experts
        self.axis = "experts" if build.mesh.expert_parallel else "ffn"
        self.sends_rows = build.mesh.sends_rows
        over, within = ("experts", None) if build.mesh.expert_parallel else (None, "ffn")
        self.router = build.weight((size, count), (Source(f"{source}.gate", count),), ("embed", None))
        gate, up, down = (f"{source}.experts.{{expert}}.{name}" for name in names)
        self.gate_up = build.weight(
            (count, size, 2 * ffn), (Source(gate, ffn), Source(up, ffn)), (over, "embed", within), num_experts=count
        )
        self.down = build.weight((count, ffn, size), (Source(down, size),), (over, within, "embed"), num_experts=count)

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        """[T, D] -> [T, D]

        Padding goes to no expert and gives 0. The module then holds its ExpertLoad, which the caller may take with
        `nnx.pop`.
        """
        num_experts = self.experts.num_experts
        with jax.named_scope("route"):
            weights, ids = self.route(x)
            ids = jnp.where(rows.is_token[:, None], ids, num_experts)
            self.load = ExpertLoad(tokens_per_expert(ids, num_experts))
        return self._send_rows(x, weights, ids) if self.sends_rows else self._gather_tokens(x, weights, ids)

    def _gather_tokens(self, x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
        """Every token to every device that shares the weights; the sum of what each made of it."""
        with jax.named_scope("group"):
            x, weights, ids = (gather_tokens(part, self.axis) for part in (x, weights, ids))
            order = jnp.argsort(ids.ravel(), stable=True)
            rows = x[order // self.experts.num_per_token]
            sizes = tokens_per_expert(ids, self.experts.num_experts)
            first = shard_index("experts") * self._num_own if self.axis == "experts" else 0
        y = self._multiply(rows, sizes, first, jnp.float32)
        with jax.named_scope("combine"):
            return reduce_tokens(mix(y, weights, order).astype(x.dtype), self.axis)

    def _send_rows(self, x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
        """Each token's rows, one for each of its experts, to the devices that hold these, and their results back.

        Of n devices with the same tokens each takes T / n of them and gathers the others' results, which is less to
        exchange than the sum of the results would be. Padding goes nowhere. A device may be picked for all tokens of
        all N devices, so that it has room for N * ceil(T / n) * min(k, experts of a device) rows of D and of twice the
        experts' intermediate size; `_gather_tokens` has rows for all tokens and k.
        """
        k, num_tokens, own = self.experts.num_per_token, x.shape[0], self._num_own
        with jax.named_scope("group"):
            x, weights = share_tokens(x, self.axis), share_tokens(weights, self.axis)
            ids = share_tokens(ids, self.axis, fill=self.experts.num_experts)
            order = jnp.argsort(ids.ravel(), stable=True)
            sizes = stack_parts(tokens_per_expert(ids, self.experts.num_experts), self.axis)
            room = lax.empty((sizes.shape[0] * x.shape[0] * min(k, own), x.shape[1]), x.dtype)
            rows = exchange_rows(x[order // k], room, sizes, self.axis)
            own_sizes = lax.dynamic_slice_in_dim(jnp.sum(sizes, axis=0), shard_index(self.axis) * own, own)
        y = self._multiply(rows, own_sizes, 0, x.dtype)
        with jax.named_scope("combine"):
            y = exchange_rows(y, jnp.zeros((order.size, y.shape[1]), y.dtype), sizes, self.axis, back=True)
            return join_tokens(mix(y, weights, order).astype(x.dtype), self.axis, num_tokens)

    def _multiply(self, rows: jax.Array, sizes: jax.Array, first: Any, out_dtype: Any) -> jax.Array:
        """The experts' MLPs for rows [M, D] sorted by expert, `sizes` of each, of which those here begin at `first`."""
        with jax.named_scope("gate_up"):
            gate, up = jnp.split(self.gate_up.grouped_matmul(rows, sizes, first, rows.dtype), 2, axis=-1)
            inner = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        with jax.named_scope("down"):
            return self.down.grouped_matmul(inner.astype(rows.dtype), sizes, first, out_dtype)

    @property
    def _num_own(self) -> int:
        """Whole experts of this device, where experts are whole."""
        return self.experts.num_experts // num_shards("experts")

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x[T, D] -> weights f32[T, k] and experts i32[T, k] of each token, the likeliest first.

        Experts of equal probability come in the order of their indices. With `norm_weights` the weights are the softmax
        over the k largest logits.
        """
        probabilities = jax.nn.softmax(self.router.matmul(x), axis=-1)
        weights, ids = jax.lax.top_k(probabilities, self.experts.num_per_token)
        if self.experts.norm_weights:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, ids


def tokens_per_expert(ids: jax.Array, num_experts: int) -> jax.Array:
    """i32[num_experts]: how often each expert occurs in ids i32[T, k]; other ids are not counted."""
    return jnp.sum(ids.reshape(-1, 1) == jnp.arange(num_experts, dtype=ids.dtype), axis=0, dtype=jnp.int32)


def mix(y: jax.Array, weights: jax.Array, order: jax.Array) -> jax.Array:
    """Results y [T * k, D], row i of token order[i] // k, and weights f32[T, k] to f32[T, D].

    One addition after the other, in the order of k: no token's sum depends on another's.
    """
    y = y[jnp.argsort(order)].reshape(*weights.shape, -1)
    mixed = jnp.zeros((y.shape[0], y.shape[2]))
    for k in range(weights.shape[1]):
        mixed = mixed + weights[:, k, None] * y[:, k]
    return mixed
