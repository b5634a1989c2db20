"""Mixture of experts: a router picks a few experts for each token, and the layer returns the weighted sum of their
gated MLPs.

Sparsely gated layers: Shazeer et al. 2017, arXiv:1701.06538; as in Mixtral: Jiang et al. 2024, arXiv:2401.04088.
Further shape letters: E experts, k experts per token. ExpertNames has the names in checkpoints, and ExpertsConfig says
how tokens are routed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.adapters import Adapters
from jaxengine.models.build import Build
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS, FUSED, gated_by
from jaxengine.models.layers.base.linear import with_adapters
from jaxengine.models.layers.base.lora import LoraPools
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.base.scale import scaled
from jaxengine.models.layers.base.section import ExpertLoad, Given, Note
from jaxengine.models.layers.experts.expert_rows import (
    add_rows,
    by_expert,
    in_blocks,
    mix,
    rows_of_own,
    tokens_per_expert,
)
from jaxengine.models.layers.experts.lora_experts import ExpertPools
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.quantization.registry import PLAIN
from jaxengine.pallas_kernels.matmul.gated import activated
from jaxengine.pallas_kernels.matmul.grouped import group_step
from jaxengine.pallas_kernels.zeros import zeros_in_layer
from jaxengine.sharding.collectives import (
    exchange_rows,
    gather_tokens,
    join_tokens,
    keep_tokens,
    num_shards,
    reduce_tokens,
    scatter_tokens,
    shard_index,
    share_tokens,
    stack_parts,
    sum_same_tokens,
)

# Scoring functions that need only an expert's own logit (unlike softmax), by their names in ExpertsConfig. Each grows
# with the logit.
_ELEMENTWISE_SCORES: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {name: ACTIVATIONS[name] for name in ("sigmoid", "sqrtsoftplus")}
)


class ExpertNames(NamedTuple):
    """Checkpoint names of an expert's three matrices (`gate`, `up`, `down`), and of the modules next to the experts:
    the router, its correction bias, the shared MLP and the shared MLP's gate. `gate` is "" for experts without a gate.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    correction_bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


MLP_NAMES = ExpertNames()
NO_MODULES: Mapping[str, Any] = MappingProxyType({})


class RouterLogits(Note):
    """Router logits f32[T, E], recorded by a module with `notes_logits`."""


class PickedExperts(Note):
    """Experts i32[T, k] picked for each token, the best first, recorded by a module with `notes_experts`."""


class GivenExperts(Given):
    """Experts i32[T, k] to use in place of the router's choice. A negative entry keeps the router's choice."""


class MixtureOfExperts(nnx.Module):
    """Mixture of experts: sum over a token's k experts e of weight_e * down_e(activation(gate_e(x), up_e(x))), plus a
    shared MLP if any.

    On several devices, each has either different experts (`mesh.expert_parallel`) or a slice of every expert. In both
    cases every device gathers the tokens of all devices that share the weights, computes its part of the result, and
    the parts are added up. With different experts, devices can instead send each other only the rows that their experts
    need (`mesh.sends_rows`).

    Args:
      activation: function of (gate, up), both and the result f32[M, F]; of up alone for experts without a gate. None
        for that of `config.activation`. The shared MLP has that in any case, and biases if `config.mlp_bias` is true.
      router_dtype: dtype of the router's weights and product, by default the model's.
      router_size: number of elements of the router's input, by default the hidden size.
      shared: checkpoint modules of the shared MLP (GatedMLP's `gate_up` and `down`), by default those of `names`.

    Attributes:
      notes_logits, notes_experts: whether every call sets the attribute `logits` to its RouterLogits, and `picked` to
        its PickedExperts.
      given: GivenExperts of the next call's tokens; None for none.
      num_stored: number of matrices of each stack, those that no token uses included (`MeshLayout.padded_experts`).
    """

    notes_logits = notes_experts = False
    given: GivenExperts | None = None

    def __init__(
        self,
        config: ModelConfig,
        *,
        source: str,
        build: Build,
        names: ExpertNames = MLP_NAMES,
        activation: Callable[..., jax.Array] | None = None,
        router_dtype: Any = None,
        router_size: int | None = None,
        shared: Mapping[str, Any] = NO_MODULES,
    ):
        if config.experts is None:
            raise ModelConfigError(f"experts must be set for {config.architecture}, got None")
        self.experts = experts = config.experts
        size, ffn, count = config.hidden_size, experts.intermediate_size, experts.num_experts
        self.num_stored = stored = build.mesh.padded_experts(count)
        self.activation, self.is_gated = activation or gated_by(config.activation), bool(names.gate)
        self.fuses = config.activation in FUSED
        own: dict[str, Any] = {"activation": ACTIVATIONS[config.activation], "bias": config.mlp_bias}
        self.axis = "experts" if build.mesh.expert_parallel else "ffn"
        self.sends_rows = build.mesh.sends_rows
        over, within = ("experts", None) if build.mesh.expert_parallel else (None, "ffn")
        router = Source(f"{source}.{names.router}", scored := experts.num_scored)
        self.router_dtype = router_dtype or build.dtype
        # Routers are not quantised in any checkpoint.
        plain = replace(build, scheme=PLAIN)
        self.router = replace(plain, dtype=self.router_dtype).weight(
            (router_size or size, scored), (router,), ("embed", None)
        )
        prefix = f"{source}.experts.{{expert}}"
        gate_up = tuple(Source(f"{prefix}.{name}", ffn) for name in (names.gate, names.up) if name)
        down = (Source(f"{prefix}.{names.down}", size),)
        shape = stored, size, len(gate_up) * ffn
        self.gate_up = build.weight(shape, gate_up, (over, "embed", within), num_experts=count)
        self.down = build.weight((stored, ffn, size), down, (over, within, "embed"), num_experts=count)
        spec, dtype = build.lora if build.layer is not None else None, build.dtype

        def pools(size: int, sources: tuple[Source, ...], axes: tuple[str | None, ...]) -> ExpertPools | None:
            return None if spec is None else ExpertPools(spec, (count, stored), size, sources, axes=axes, dtype=dtype)

        def plain_pools(source: Source, dtype: Any) -> LoraPools | None:
            axes = "embed", None
            return None if spec is None else LoraPools(spec, router_size or size, (source,), axes=axes, dtype=dtype)

        self.gate_up_lora = pools(size, gate_up, (over, "embed", within))
        self.down_lora = pools(ffn, down, (over, within, "embed"))
        self.router_lora = plain_pools(router, self.router_dtype)

        self.router_bias = _bias((router,), (None,), dtype) if experts.bias else None
        self.gate_up_bias = _bias(gate_up, (over, within), dtype, (count, stored)) if experts.bias else None
        self.down_bias = _bias(down, (over, "embed"), dtype, (count, stored)) if experts.bias else None
        correction, corrects = f"{source}.{names.correction_bias}", experts.correction_bias
        self.correction_bias = self.make_correction_bias(correction, experts.num_routed) if corrects else None
        beside, gate = f"{source}.{names.shared}", (Source(f"{source}.{names.shared_gate}", 1),)
        ffn = experts.shared_intermediate_size
        self.shared = GatedMLP(size, ffn, source=beside, build=build, **{**own, **shared}) if ffn else None
        self.shared_gate = plain.weight((size, 1), gate, ("embed", None)) if experts.shared_gate else None
        self.shared_gate_lora = plain_pools(gate[0], dtype) if experts.shared_gate else None

    def make_correction_bias(self, source: str, num_experts: int) -> nnx.Param:
        """Return a new parameter for the correction bias, f32[E]; subclasses may return [1, E].

        It is float32 in every model.
        """
        decl = ParamDecl((None,), (Source(source, num_experts),), init_std=0.02)
        return declare((num_experts,), jnp.float32, decl)

    def __call__(self, x: jax.Array, rows: Rows, routed_by: jax.Array | None = None) -> jax.Array:
        """Return the layer's output [T, D] for x [T, D], including that of the shared MLP and of zero experts, which
        return their input.

        Padding goes to no expert: its output is that of the shared MLP, or 0. Sets the attribute `load` to the
        ExpertLoad, which the caller may take with `nnx.pop`. routed_by: [T, D], the router's input; None for x.
        """
        with jax.named_scope("route"):
            weights, ids = self.route(x if routed_by is None else routed_by, rows.adapters)
        return self.of_picked(x, rows, weights, ids)

    def of_picked(self, x: jax.Array, rows: Rows, weights: jax.Array, ids: jax.Array) -> jax.Array:
        """Return what `__call__` does, and set `load`, for x [T, D], experts `ids` i32[T, k], f32 `weights` [T, k]."""
        num_experts = self.experts.num_experts
        with jax.named_scope("route"):
            ids = jnp.where(rows.is_token[:, None], ids, self.experts.num_routed)
            self.load = ExpertLoad(tokens_per_expert(ids, num_experts))
        y = self._computed(x, rows, weights, jnp.where(ids < num_experts, ids, self.num_stored))
        if not self.experts.num_zero_experts:
            return y
        is_zero = (ids >= num_experts) & rows.is_token[:, None]
        share = jnp.sum(jnp.where(is_zero, weights, 0.0), axis=1, keepdims=True)
        return (y.astype(jnp.float32) + share * x.astype(jnp.float32)).astype(x.dtype)

    def _computed(self, x: jax.Array, rows: Rows, weights: jax.Array, ids: jax.Array) -> jax.Array:
        """Return the output [T, D] of the experts that have weights, plus that of the shared MLP, for x [T, D],
        multiplied by `output_scale`.

        weights, ids: [T, k], with id `num_stored` for zero experts and padding.
        """
        if not self.sends_rows:
            return scaled(self._gather_tokens(x, weights, ids, rows.adapters), self.experts.output_scale)
        y = self._send_rows(x, weights, ids, rows.adapters)
        if self.shared is not None:
            with jax.named_scope("shared"):
                shared = self.shared(x, rows)
                gated = shared if self.shared_gate is None else self._gate(x, rows.adapters) * shared
                y = y + gated.astype(x.dtype)
        return scaled(y, self.experts.output_scale)

    def _gather_tokens(self, x: jax.Array, weights: jax.Array, ids: jax.Array, adapters: Adapters | None) -> jax.Array:
        """Return the output [T, D] for this device's tokens in x's dtype, including the shared MLP: gathers all tokens
        on every device that shares the weights, and reduces the devices' results.

        weights, ids: [T, k], those of `_computed`. adapters: those of x's rows, or None.
        """
        dtype = x.dtype
        with jax.named_scope("group"):
            x, weights, ids = (gather_tokens(part, self.axis) for part in (x, weights, ids))
            if num_shards(self.axis) > 1:
                adapters = _of_rows(adapters, lambda slots: gather_tokens(slots, self.axis))
        apart = self.axis == "experts" and num_shards(self.axis) > 1
        mixed = (self._own_experts if apart else self._every_expert)(x, weights, ids, adapters)
        if self.shared is None:
            with jax.named_scope("combine"):
                return reduce_tokens(mixed.astype(dtype), self.axis)
        with jax.named_scope("shared"):
            x = keep_tokens(x, self.axis, "ffn")
            if num_shards(self.axis) > 1:
                adapters = _of_rows(adapters, lambda slots: keep_tokens(slots, self.axis, "ffn"))
            shared = self.shared.partial(x, adapters)
            shared = shared if self.shared_gate is None else self._gate(x, adapters) * shared
        # If experts are split over more devices than the shared MLP, each result is first scattered to the devices that
        # have its tokens; devices with the same tokens then add up both results at once.
        with jax.named_scope("combine"):
            if num_shards(self.axis) == num_shards("ffn"):
                return reduce_tokens((mixed + shared).astype(dtype), "ffn")
            mixed, shared = scatter_tokens(mixed.astype(dtype), self.axis), scatter_tokens(shared.astype(dtype), "ffn")
            return sum_same_tokens(mixed + shared, self.axis)

    def _every_expert(self, x: jax.Array, weights: jax.Array, ids: jax.Array, adapters: Adapters | None) -> jax.Array:
        """Return the experts' output f32[T, D] for tokens x [T, D] on a device that has all experts, or a slice of
        each: then it is a partial sum.

        weights, ids: [T, k], of the picked experts.
        """
        with jax.named_scope("group"):
            order, sizes = by_expert(ids, self.num_stored, group_step(ids.size, self.num_stored))
            rows = self._inputs(x, weights, order)
            adapters = _of_rows(adapters, self._slots_of(order))
        y = self._multiply(rows, sizes, adapters)
        with jax.named_scope("combine"):
            return self._mix(y, weights, order)

    def _own_experts(self, x: jax.Array, weights: jax.Array, ids: jax.Array, adapters: Adapters | None) -> jax.Array:
        """Return the contribution f32[T, D] of this device's experts to the output for tokens x [T, D], added in the
        order of the experts.

        Rows are computed in blocks, as many as the routing needs, and memory besides the result is that of one block.
        weights, ids: [T, k], of all experts; those of other devices' experts are skipped.
        """
        (num_tokens, k), (own, most_of_token) = ids.shape, self._own_rows
        average = -(-num_tokens * k // num_shards(self.axis))
        step = group_step(average, own)
        most, block = rows_of_own(num_tokens, most_of_token, own, average, step)
        with jax.named_scope("group"):
            ids = (ids - shard_index(self.axis) * own).ravel()
            ids = jnp.where((ids >= 0) & (ids < own), ids, own)
            order, sizes = by_expert(ids, own, step)
            order = jnp.pad(order[:most], (0, -most % block))
            mixed = zeros_in_layer(weights, x.shape)

        def add_block(first: jax.Array, sizes: jax.Array, mixed: jax.Array) -> jax.Array:
            """Return `mixed` plus the results of the block of rows that starts at `first`, `sizes` of each expert."""
            with jax.named_scope("group"):
                picked = lax.dynamic_slice_in_dim(order, first, block)
                rows = self._inputs(x, weights, picked)
                of_rows = _of_rows(adapters, self._slots_of(picked))
            y = self._multiply(rows, sizes, of_rows)
            with jax.named_scope("combine"):
                if not self.experts.apply_router_weight_on_input:
                    y = y * _taken(weights.ravel(), picked)[:, None]
                is_own = (jnp.arange(block) < jnp.sum(sizes)) & (picked < weights.size)
                tokens = jnp.where(is_own, picked // k, num_tokens)
                # The barrier keeps XLA from fusing products into some of the additions, which would round differently.
                return add_rows(mixed, lax.optimization_barrier(y), tokens, most_of_token)

        return in_blocks(sizes, most, block, add_block, mixed)

    def _send_rows(self, x: jax.Array, weights: jax.Array, ids: jax.Array, adapters: Adapters | None) -> jax.Array:
        """Return the output [T, D] in x's dtype, without the shared MLP: sends a row for each of a token's experts to
        the expert's device, and the results back.

        Of n devices with the same tokens, each sends T / n of them and gathers the others' results. Padding is not
        sent. All tokens of all N devices may pick the same device, so each has memory for N * ceil(T / n) times a
        token's most rows there (see `_own_rows`), where `_gather_tokens` needs k for each token. weights, ids: [T, k],
        of the picked experts.
        """
        k, num_tokens, (own, most_of_token) = self.experts.num_per_token, x.shape[0], self._own_rows
        with jax.named_scope("group"):
            x, weights = share_tokens(x, self.axis), share_tokens(weights, self.axis)
            ids = share_tokens(ids, self.axis, fill=self.num_stored)
            order = jnp.argsort(ids.ravel(), stable=True)
            sizes = stack_parts(tokens_per_expert(ids, self.num_stored), self.axis)
            room = lax.empty((sizes.shape[0] * x.shape[0] * most_of_token, x.shape[1]), x.dtype)
            rows = exchange_rows(self._inputs(x, weights, order), room, sizes, self.axis)
            own_sizes = lax.dynamic_slice_in_dim(jnp.sum(sizes, axis=0), shard_index(self.axis) * own, own)

            def sent(slots: jax.Array) -> jax.Array:
                slots = share_tokens(slots, self.axis, fill=-1)[order // k]
                return exchange_rows(slots, jnp.full(rows.shape[0], -1, slots.dtype), sizes, self.axis)

            adapters = _of_rows(adapters, sent)
        y = self._multiply(rows, own_sizes, adapters)
        with jax.named_scope("combine"):
            y = exchange_rows(y, jnp.zeros((order.size, y.shape[1]), y.dtype), sizes, self.axis, back=True)
            return join_tokens(self._mix(y, weights, order).astype(x.dtype), self.axis, num_tokens)

    def _inputs(self, x: jax.Array, weights: jax.Array, order: jax.Array) -> jax.Array:
        """Return the experts' inputs [M, D]: the row of x [T, D] for each of the (token, expert) pairs in `order`
        i32[M], multiplied by its router weight if `apply_router_weight_on_input`. Rows of padding are arbitrary.

        weights: [T, k], router weights.
        """
        rows = _taken(x, order // self.experts.num_per_token)
        if self.experts.apply_router_weight_on_input:
            rows = (rows * _taken(weights.ravel(), order)[:, None]).astype(x.dtype)
        return rows

    def _slots_of(self, order: jax.Array) -> Callable[[jax.Array], jax.Array]:
        """Return a function that maps adapter slots of tokens to those of their rows in `order`; -1 for padding."""
        return lambda slots: slots.at[order // self.experts.num_per_token].get(mode="fill", fill_value=-1)

    def _mix(self, y: jax.Array, weights: jax.Array, order: jax.Array) -> jax.Array:
        """Return the sum f32[T, D] of each token's results in y [M, D], weighted by `weights` unless the inputs were
        multiplied by them.
        """
        return mix(y, jnp.ones_like(weights) if self.experts.apply_router_weight_on_input else weights, order)

    def _gate(self, x: jax.Array, adapters: Adapters | None) -> jax.Array:
        """Return the sigmoid of the shared MLP's gate, f32[T, 1], for x [T, D]. adapters: of x's rows, or None."""
        assert self.shared_gate is not None
        return jax.nn.sigmoid(with_adapters(self.shared_gate.matmul(x), x, self.shared_gate_lora, adapters))

    def _multiply(self, rows: jax.Array, sizes: jax.Array, adapters: Adapters | None) -> jax.Array:
        """Return the output [M, D] of this device's experts for rows [M, D] sorted by expert; 0 in rows of no expert.

        If a device has a slice of each expert, the result is a partial sum. It has the rows' dtype. sizes: i32[experts
        of this device], the number of rows of each. adapters: those of the rows, or None.
        """
        with jax.named_scope("gate_up"):
            bias = None if self.gate_up_bias is None else self.gate_up_bias[...]
            if not self.is_gated:
                inner = self.gate_up.grouped_matmul(rows, sizes, bias, jnp.float32)
                if self.gate_up_lora is not None and adapters is not None:
                    inner = self.gate_up_lora.add(inner, rows, sizes, adapters)
                inner = self.activation(inner).astype(rows.dtype)
            elif self.fuses and (self.gate_up_lora is None or adapters is None):
                inner = self.gate_up.gated_matmul(rows, sizes, bias, self.activation, rows.dtype)
            else:
                inner = self.gate_up.grouped_matmul(rows, sizes, None, rows.dtype)
                if self.gate_up_lora is not None and adapters is not None:
                    inner = self.gate_up_lora.add(inner, rows, sizes, adapters)
                inner = activated(inner, sizes, bias, self.activation, rows.dtype)
        with jax.named_scope("down"):
            bias = None if self.down_bias is None else self.down_bias[...]
            if bias is not None and self.axis == "ffn" and num_shards("ffn") > 1:
                # The results of devices with slices of all experts are added up, so only one of them adds the bias.
                bias = jnp.where(shard_index("ffn") == 0, bias, 0)
            y = self.down.grouped_matmul(inner, sizes, bias, rows.dtype)
            if self.down_lora is not None and adapters is not None:
                y = self.down_lora.add(y, inner, sizes, adapters)
            return y

    @property
    def _own_rows(self) -> tuple[int, int]:
        """Number of a device's own experts, and the most rows of a token there: k if given, as these may repeat."""
        own, k = self.num_stored // num_shards("experts"), self.experts.num_per_token
        return own, min(k, own) if self.given is None else k

    def route(self, x: jax.Array, adapters: Adapters | None = None) -> tuple[jax.Array, jax.Array]:
        """Return weights f32[T, k] and experts i32[T, k] for each token of x [T, D], the best first; padding included.

        Of experts with equal scores the one with the lower index comes first. If `given` is set, its experts are used
        in place of the picked ones, in its order. Weights are scores without the correction bias, which only affects
        which experts are picked. With `norm_weights` they are divided by their sum, or by min_weight_sum if that is
        larger: for softmax scores the weights are then the softmax over the k largest logits. All are multiplied by
        `routed_scaling_factor`. With `notes_experts`, sets the attribute `picked` to the PickedExperts. adapters: those
        of x's rows, or None.
        """
        experts = self.experts
        logits = self._router_logits(x, adapters)
        elementwise = _ELEMENTWISE_SCORES.get(experts.scoring_func)
        scores = jax.nn.softmax(logits, axis=-1) if elementwise is None else elementwise(logits)
        if self.correction_bias is None and experts.topk_group == experts.num_expert_group:
            # Sigmoids of large logits are all 1, so experts are picked by the logits.
            order = scores if elementwise is None else logits
            best, ids = jax.lax.top_k(order, experts.num_per_token)
            if self.given is not None:
                ids = self._replayed(ids)
                best = jnp.take_along_axis(order, ids, axis=-1)
            weights = best if elementwise is None else elementwise(best)
        else:
            ids = jax.lax.top_k(self._choices(logits if experts.corrects_logits else scores), experts.num_per_token)[1]
            ids = ids if self.given is None else self._replayed(ids)
            weights = jnp.take_along_axis(scores, ids, axis=-1)
        if experts.norm_weights:
            weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), experts.min_weight_sum)
        if self.notes_experts:
            self.picked = PickedExperts(ids)
        return weights * experts.routed_scaling_factor, ids

    def _replayed(self, ids: jax.Array) -> jax.Array:
        """Return the given experts i32[T, k], with elements of `ids` [T, k] where they are negative."""
        assert self.given is not None
        given = self.given[...]
        return jnp.where(given >= 0, given, ids)

    def _router_logits(self, x: jax.Array, adapters: Adapters | None) -> jax.Array:
        """Return the router logits f32[T, E] of tokens x [T, D], with bias and soft cap if there are any. With
        `notes_logits`, also sets the attribute `logits`.

        adapters: those of x's rows, or None.
        """
        x = x.astype(self.router_dtype)
        # By default accelerators multiply float32 with fewer bits, and the float32 weights would be of no use.
        with jax.default_matmul_precision("float32") if x.dtype == jnp.float32 else nullcontext():
            logits = with_adapters(self.router.matmul(x), x, self.router_lora, adapters)
        logits = logits if self.router_bias is None else logits + self.router_bias[...].astype(jnp.float32)
        if (cap := self.experts.logit_soft_cap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        if self.notes_logits:
            self.logits = RouterLogits(logits)
        return logits

    def _choices(self, scores: jax.Array) -> jax.Array:
        """Return the scores f32[T, E] by which experts are picked: `scores` [T, E] plus the correction bias, and -inf
        outside a token's best groups.

        A group's score is that of its best expert or, with a correction bias, the sum of its two best.
        """
        experts, bias = self.experts, self.correction_bias
        choices = scores if bias is None else scores + bias[...]
        if experts.topk_group == experts.num_expert_group:
            return choices
        grouped = choices.reshape(choices.shape[0], experts.num_expert_group, -1)
        best = min(1 if bias is None else 2, grouped.shape[-1])
        groups = jax.lax.top_k(jnp.sum(jax.lax.top_k(grouped, best)[0], axis=-1), experts.topk_group)[1]
        is_best = jnp.any(groups[:, :, None] == jnp.arange(experts.num_expert_group), axis=1)
        return jnp.where(is_best[:, :, None], grouped, -jnp.inf).reshape(choices.shape)


def _bias(
    sources: Sequence[Source], axes: tuple[str | None, ...], dtype: Any, num_experts: tuple[int, int] | None = None
) -> nnx.Param:
    """Return a new parameter for the bias [out] of a product or [stored, out] of a grouped product. out is the sum of
    the sources' rows. axes: logical axis of each dimension, as in `ParamDecl`. num_experts: experts of a grouped
    product, and how many are stored; None for another product.
    """
    tensors = tuple(part.tensor("bias") for part in sources)
    count, *stack = num_experts or (None,)
    shape = *stack, sum(part.rows for part in sources)
    # An expert's bias is looked up as a row for each of its tokens.
    decl = ParamDecl(axes, tensors, init_std=0.02, num_experts=count, row_major=count is not None)
    return declare(shape, dtype, decl)


def _taken(rows: jax.Array, indices: jax.Array) -> jax.Array:
    """Return the rows with these indices; the last row for indices beyond it."""
    return rows.at[indices].get(mode="clip")


def _of_rows(adapters: Adapters | None, slots_of: Callable[[jax.Array], jax.Array]) -> Adapters | None:
    """Return the adapters of other rows, without visits; None if `adapters` is None.

    slots_of: function that maps the present rows' slots to those of the other rows.
    """
    return None if adapters is None else adapters._replace(slots=slots_of(adapters.slots), visits=None)
