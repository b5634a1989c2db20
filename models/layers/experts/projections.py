"""Experts of attention (Zhang et al. 2022, Mixture of Attention Heads, arXiv:2210.05144): each has a projection before
attention and one after it. Attention itself, with its keys and values, is the caller's.

Shape letters as in jaxengine.models.layers.experts.moe, and W elements of an expert's projection.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.experts.expert_rows import by_expert, mix
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.quantization.registry import PLAIN
from jaxengine.pallas_kernels.matmul.grouped import group_step
from jaxengine.sharding.collectives import gather_tokens, reduce_tokens


class Picks(NamedTuple):
    """A step's tokens with the experts picked for each: those of all devices that share the heads.

    Attributes:
      weights: f32[T, k], the softmax of the picked experts' logits.
      order, sizes: i32[M] and i32[E], results of `by_expert`.
    """

    weights: jax.Array
    order: jax.Array
    sizes: jax.Array


class ExpertProjections(nnx.Module):
    """Projections of k experts for each token, which a router picks by its logits, before and after attention. The sum
    of the second ones is weighted by the softmax of the picked logits, and a bias is added to it.

    Heads of all experts are split over devices. The router takes adapters, the experts take none.

    Args:
      width: W. group: number of neighbouring elements of W that devices do not split. source: beginning of the names of
        the checkpoint's modules, `router` and an expert's `before` and `after`, and of the `bias`.
    """

    def __init__(
        self, size: int, width: int, num_experts: int, num_picked: int, *, group: int, source: str, build: Build
    ):
        count = self.num_experts = num_experts
        self.num_picked = num_picked
        router = (Source(f"{source}.router", count),)  # not quantised in any checkpoint
        self.router = Linear(size, router, axes=("embed", "latent"), build=replace(build, scheme=PLAIN))
        before = (Source(f"{source}.{{expert}}.up_proj", width, group=group),)
        self.before = build.weight((count, size, width), before, (None, "embed", "heads"), num_experts=count)
        after = (Source(f"{source}.{{expert}}.down_proj", size),)
        self.after = build.weight((count, width, size), after, (None, "heads", "embed"), num_experts=count)
        bias = ParamDecl((None,), (Source(f"{source}.bias", size),), init_std=0.02)
        self.bias = declare((size,), build.dtype, bias)

    def pick(self, x: jax.Array, rows: Rows) -> Picks:
        """Return the Picks of tokens x [T, D], with weights that are softmaxes of their logits, sorted by expert; of
        experts with equal logits the one with the lower index comes first. Padding goes to no expert.
        """
        with jax.default_matmul_precision("float32"):
            best, ids = jax.lax.top_k(self.router(x, rows, out_dtype=jnp.float32), self.num_picked)
        ids = jnp.where(rows.is_token[:, None], ids, self.num_experts)
        weights, ids = (gather_tokens(each, "heads") for each in (jax.nn.softmax(best), ids))
        return Picks(weights, *by_expert(ids, self.num_experts, group_step(ids.size, self.num_experts)))

    def project(self, x: jax.Array, picks: Picks) -> jax.Array:
        """Return the projections before attention, [T, k, W] of all devices' tokens and this device's part of W, for x
        [T, D]; 0 for padding.
        """
        rows = gather_tokens(x, "heads").at[picks.order // self.num_picked].get(mode="clip")
        rows = self.before.grouped_matmul(rows, picks.sizes, None, x.dtype)
        return rows[jnp.argsort(picks.order)[: picks.weights.size]].reshape(*picks.weights.shape, -1)

    def combine(self, y: jax.Array, picks: Picks) -> jax.Array:
        """Return the weighted sum of the projections after attention, plus the bias, [T, D], for y [T, k, W]."""
        rows = y.reshape(picks.weights.size, -1).at[picks.order].get(mode="clip")
        rows = self.after.grouped_matmul(rows, picks.sizes, None, y.dtype)
        mixed = reduce_tokens(mix(rows, picks.weights, picks.order).astype(y.dtype), "heads")
        return (mixed.astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(y.dtype)
