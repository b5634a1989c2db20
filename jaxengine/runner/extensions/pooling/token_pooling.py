"""Token pooling: the rows that a pooling model gives for each token of a prompt, for requests that ask for them.

A separate epilogue computes them. It runs only in steps with such requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxengine.models.layers.token_results import token_results
from jaxengine.runner.base.extension import DeviceExtension, Epilogue, EpilogueSpec, HostExtension
from jaxengine.runner.base.forward_pass import ForwardPass
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.sharding.collectives import stack_ranks

NAME, POOL_TOKENS = "token_pooling", "pool_tokens"


class TokenRows(NamedTuple):
    """Output of the epilogue: f32[replicas, T, N], undefined in padding."""

    rows: jax.Array


class TokenPoolingExtension(DeviceExtension):
    """Device extension whose forward passes leave the hidden states of all tokens, [T, D], to the epilogue."""

    name = NAME

    @property
    def epilogues(self) -> Mapping[str, Epilogue]:
        """The epilogue, under POOL_TOKENS, that computes tokens' rows; its size is the bucket's number of tokens."""
        own = Epilogue(
            make_pool_tokens,
            arguments=("params", NAME),
            changes=(),
            output=TokenRows,
            size_of=lambda buckets, bucket: bucket.num_tokens,
        )
        return {POOL_TOKENS: own}

    def left(self, num_tokens: int, num_rows: int) -> Any:
        return self.shape.hidden(num_tokens)

    def after_model(self, step: ForwardPass) -> ForwardPass:
        assert step.hidden is not None
        return step.leaving(NAME, step.hidden)

    def on_host(self, runner: Any) -> HostExtension:
        return TokenPooler(runner)


class TokenPooler(HostExtension):
    """Host extension that computes the rows of a step's tokens."""

    def pool(self, pending: PendingStep) -> None:
        """Dispatch the epilogue, here and in the engine's other processes, and store its output in the step. Call it
        before the epilogue that ends the step is dispatched.
        """
        pending.outputs[POOL_TOKENS] = self.runner.run_epilogue(POOL_TOKENS, pending)

    def rows(self, pending: PendingStep) -> np.ndarray:
        """Return the rows of a step's tokens, f32[replicas, T, N]; waits for them. Raises KeyError for a step that was
        not passed to `pool`.
        """
        return pending.output(POOL_TOKENS).rows


def make_pool_tokens(spec: EpilogueSpec) -> Callable:
    """Return the epilogue function (params: list of arrays, hidden states [T, D]) -> (TokenRows,), of all replicas."""

    def pool_tokens(params: list[jax.Array], hidden: jax.Array):
        model = nnx.merge(spec.graph, jax.tree.unflatten(spec.params_tree, params))
        with jax.named_scope("pool_tokens"):
            rows = token_results(model, hidden)
        with jax.named_scope("results"):
            return (TokenRows(stack_ranks(rows)),)

    return pool_tokens
