"""Sparse pooling: a prompt's vector has an element for each token of the vocabulary (SPLADE)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.config.pooler import POOLED
from jaxengine.models.layers.attention.masked import sparse_vectors
from jaxengine.runner.base.extension import Epilogue, EpilogueSpec
from jaxengine.runner.base.forward_pass import ForwardPass
from jaxengine.runner.extensions.pooling.pooling import NAME, POOL, PoolingExtension, PoolOutput
from jaxengine.sharding.collectives import stack_ranks


class StepTokens(NamedTuple):
    """Arrays that a forward pass leaves to the epilogue.

    Attributes:
      hidden: [T, D].
      row: i32[T], the row of each token; the number of slots, past all rows, for padding.
    """

    hidden: jax.Array
    row: jax.Array


class SparsePoolingExtension(PoolingExtension):
    """Device extension of sparse pooling. Prompts are computed whole in one step."""

    description = "sparse pooling"

    @property
    def num_rows(self) -> int:
        """Largest number of rows of a step, and number of rows of the epilogue's result."""
        return self.shape.num_slots

    def slots(self) -> Any:
        return None

    @property
    def epilogues(self) -> Mapping[str, Epilogue]:
        """The pooling epilogue, under POOL, which ends each step; its size is the bucket's number of tokens."""
        own = Epilogue(
            self.make_pool,
            arguments=("params", NAME),
            changes=(),
            output=PoolOutput,
            size_of=lambda buckets, bucket: bucket.num_tokens,
            ends=True,
        )
        return {POOL: own}

    def left(self, num_tokens: int, num_rows: int) -> StepTokens:
        return StepTokens(self.shape.hidden(num_tokens), self.shape.rows(num_tokens, np.int32))

    def after_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with its StepTokens left under NAME; padding tokens get the row `num_rows`."""
        assert step.hidden is not None
        row = jnp.where(step.is_token, step.token_row, self.num_rows).astype(jnp.int32)
        return step.leaving(NAME, StepTokens(step.hidden, row))

    def make_pool(self, spec: EpilogueSpec) -> Callable:
        """Return the epilogue function (params: list of arrays, StepTokens) -> (PoolOutput,), of all replicas. A row
        gets token POOLED, or -1 if one of its numbers is not finite.
        """
        num_rows = self.num_rows

        def pool_prompts(params: list[jax.Array], tokens: StepTokens):
            model = nnx.merge(spec.graph, jax.tree.unflatten(spec.params_tree, params))
            with jax.named_scope("pool"):
                vectors = sparse_vectors(model, tokens.hidden, tokens.row, num_rows)
            with jax.named_scope("results"):
                token_ids = jnp.where(jnp.all(jnp.isfinite(vectors), axis=1), jnp.int32(POOLED), jnp.int32(-1))
                return (PoolOutput(stack_ranks(token_ids), stack_ranks(vectors)),)

        return pool_prompts
