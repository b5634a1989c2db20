"""Forward pass that a trainer differentiates: the engine's own modules, over whole sequences."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.layers.base.section import Capture, Recompute
from jaxengine.models.layers.exact import check_exact, run_exact
from jaxengine.models.layers.taps import ReplayedExperts
from jaxengine.models.unpaged import run_unpaged
from jaxengine.rl.arguments import Arguments, checked
from jaxengine.sampling.logprobs import log_sum_exp


def forward(
    model: CausalLM,
    params: Any,
    tokens: ArrayLike,
    segment_ids: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    *,
    remat: bool = False,
    exact: bool = False,
    routed_experts: ArrayLike | None = None,
) -> jax.Array:
    """Return the logits float32[B, T, V] of tokens int32[B, T]: at each position those of the next token.

    A pure function, for `jax.grad`, `jax.jvp`, `jax.jit`, `jax.checkpoint` and arrays that are split over any mesh with
    automatic axes.

    Args:
      model: module of the family; its own weights are not read.
      params: weights, an `nnx.State` as `nnx.state(model)` gives.
      segment_ids: int32[B, T], for several sequences in a row. Neighbours with equal ids are a segment, and a token
        sees only its own segment up to itself. Negative ids are padding. None: each row is one segment.
      positions: int32[B, T], for rope; None to count from 0 in each segment. Windows count tokens, not positions.
      remat: compute each layer again for its gradient, instead of keeping its intermediate arrays.
      exact: return bit for bit the logits that an engine with rl_exact computes. The gradient is that of the forward
        pass with exact=False, which is then computed as well. Only on CPUs, for arrays that are not split over devices.
        Logits of padding are meaningless.
      routed_experts: int[B, T, L, k], the experts of each token in the L layers that have some, as an engine returns
        them (rollout routing replay): only the choice is replayed, and gradients reach the router through the weights
        that its scores give the chosen. Where one is negative the router chooses. None: it always does.

    Tokens must be ids of the vocabulary, positions at least 0 and, for a model with learned vectors of positions, below
    their number; padding is not checked. Under `jax.jit` these values cannot be checked: a token whose id or position
    is out of range gets logits of NaN.

    Raises ValueError for a model that has no such forward pass (a pooling model, a pipeline stage, one built for
    several devices, quantised weights), for arguments whose shape, dtype or range does not fit, for arrays over
    explicit mesh axes, for routed_experts of a model without experts or with exact=True, and for exact=True if the bits
    cannot be equal.
    """
    given = _checked_for(exact, model, params, tokens, segment_ids, positions, routed_experts)
    return _forward(model, params, given, remat, exact)


def log_probs(
    model: CausalLM,
    params: Any,
    tokens: ArrayLike,
    segment_ids: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    *,
    remat: bool = False,
    exact: bool = False,
    routed_experts: ArrayLike | None = None,
) -> jax.Array:
    """Return the log-probability float32[B, T] of each token given those before it in its segment.

    The first token of each segment, and padding, have 0. With `exact` the values have the bits that an engine with
    rl_exact reports (raw_logprobs) and that its `get_logprobs` returns. The arguments and errors are those of
    `forward`, and so is NaN for traced values out of range.
    """
    given = _checked_for(exact, model, params, tokens, segment_ids, positions, routed_experts)
    logits = _forward(model, params, given, remat, exact)
    return given.marked(_token_log_probs(logits, given.tokens, given.segment_ids))


def hidden_states(
    model: CausalLM,
    params: Any,
    tokens: ArrayLike,
    segment_ids: ArrayLike | None = None,
    positions: ArrayLike | None = None,
) -> jax.Array:
    """Return the hidden states between layers, [B, T, layers + 1, D] in the model's dtype.

    Numbered as in transformers' `hidden_states`: 0 is the embeddings, n is the output of layer n, and the last is taken
    after the final norm. The arguments and errors are those of `forward`, and so is NaN for traced values out of range.
    Raises ValueError, too, for a model with several hidden states per token.
    """
    if model.config.num_streams > 1:
        why = f"a token of {model.config.architecture} has {model.config.num_streams} of them before the last norm"
        raise ValueError(f"hidden_states needs one hidden state per token between layers: {why}")
    given = checked(model, params, tokens, segment_ids, positions)
    states = _states(nnx.split(model)[0], params, given.tokens, given.segment_ids, given.positions)
    return given.marked(states)


def _checked_for(exact: bool, model: CausalLM, params: Any, *arguments: Any) -> Arguments:
    """Check `tokens` and the arguments after it in the order of `forward`, and return the checked Arguments.

    Raises the ValueErrors of `checked`. With `exact`, also for routed_experts and where the bits cannot be equal
    (`check_exact`).
    """
    given = checked(model, params, *arguments)
    if exact:
        if given.experts is not None:
            raise ValueError("routed_experts must be None with exact=True, whose router chooses as the engine's does")
        check_exact(model, {"params": params, "tokens": given.tokens})
    return given


def _forward(model: CausalLM, params: Any, given: Arguments, remat: bool, exact: bool) -> jax.Array:
    """Compute the logits float32[B, T, V] of the checked arguments `given`; NaN for tokens that do not fit. remat,
    exact: arguments of `forward`.
    """
    graph, own = nnx.split(model)[0], (given.tokens, given.segment_ids, given.positions)
    if exact:
        return given.marked(_exact_logits(graph, params, *own, remat=remat))
    return given.marked(_logits(graph, params, *own, given.experts, remat=remat))


@partial(jax.jit, static_argnums=0, static_argnames="remat")
def _logits(
    graph: Any,
    params: Any,
    tokens: jax.Array,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
    experts: Mapping[int, jax.Array] | None = None,
    *,
    remat: bool,
) -> jax.Array:
    """Compute logits f32[B, T, V] of checked arguments.

    graph: graph definition of the model, from `nnx.split`. experts: choices to be replayed, int32[B * T, k] by layer
    number; None if the router chooses. Other operands are arguments of `forward`.
    """
    sections: dict[str, Any] = {"recompute": Recompute()} if remat else {}
    if experts is not None:
        sections["routed_experts"] = ReplayedExperts(experts)
    return run_unpaged(nnx.merge(graph, params), tokens, segment_ids, positions, sections)[1]


@partial(jax.jit, static_argnums=0, static_argnames="remat")
def _exact_logits(
    graph: Any,
    params: Any,
    tokens: jax.Array,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
    *,
    remat: bool,
) -> jax.Array:
    """Compute logits f32[B, T, V] in the engine's exact form, with the derivatives of the plain forward pass
    (`_logits`). graph: graph definition of the model, from `nnx.split`. Other operands are arguments of `forward`.
    """

    @jax.custom_jvp
    def logits_of(params: Any, given: tuple[Any, ...]) -> jax.Array:
        """Compute the logits in the exact form; `tangent` defines its derivative."""
        return run_exact(nnx.merge(graph, params), *given)

    @logits_of.defjvp
    def tangent(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        """Return (exact logits, tangent of the plain forward pass's logits, by `params` alone)."""
        params, given = primals
        _, of_logits = jax.jvp(lambda params: _logits(graph, params, *given, remat=remat), (params,), tangents[:1])
        return logits_of(params, given), of_logits

    return logits_of(params, (tokens, segment_ids, positions))


@jax.jit
def _token_log_probs(logits: jax.Array, tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Compute log-probabilities f32[B, T] from logits f32[B, T, V], by the same arithmetic as an engine's logprobs.

    0 for the first token of each segment and for padding. tokens: int32[B, T]. segment_ids: int32[B, T], negative for
    padding; None if each row is one segment.
    """
    before = logits[:, :-1]
    chosen = jnp.take_along_axis(before, tokens[:, 1:, None], axis=2).reshape(-1, 1)
    rows = before.reshape(-1, before.shape[2])
    found = (chosen - log_sum_exp(rows)).reshape(before.shape[:2])
    if segment_ids is not None:
        goes_on = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] >= 0)
        found = jnp.where(goes_on, found, 0.0)
    return jnp.pad(found, ((0, 0), (1, 0)))


@partial(jax.jit, static_argnums=0)
def _states(
    graph: Any, params: Any, tokens: jax.Array, segment_ids: jax.Array | None, positions: jax.Array | None
) -> jax.Array:
    """Compute hidden states [B, T, layers + 1, D] from checked arguments: the embeddings, the outputs of all layers but
    the last, and the final norm's output. graph: graph definition of the model, from `nnx.split`. Other operands are
    arguments of `forward`.
    """
    model = nnx.merge(graph, params)
    counts = range(model.config.num_layers)
    capture = Capture(counts)
    normed, _ = run_unpaged(model, tokens, segment_ids, positions, {"capture": capture})
    return jnp.stack([*(capture.after(count).reshape(normed.shape) for count in counts), normed], axis=2)
