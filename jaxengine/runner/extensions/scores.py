"""Scores: log-probability of each prompt token given those before it (prompt_logprobs)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.runner.base.extension import DeviceExtension, Epilogue, EpilogueSpec, HostExtension
from jaxengine.runner.base.forward_pass import ForwardPass
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.sampling.logprobs import TokenLogprobs, prompt_logprobs
from jaxengine.sampling.state import SamplingState
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.sharding.collectives import stack_ranks

NAME, SCORE = "scores", "score"


class Scored(NamedTuple):
    """Arrays that a forward pass leaves to the scoring epilogue.

    Attributes:
      hidden: [T, D] after the final norm.
      targets: i32[T], the prompt token after each token, -1 if there is none.
      slots: i32[T], slots of the tokens' requests.
    """

    hidden: jax.Array
    targets: jax.Array
    slots: jax.Array


class ScoresExtension(DeviceExtension):
    """Device extension with the scoring epilogue, for the step shapes that can have prompts to score."""

    name = NAME

    @property
    def epilogues(self) -> Mapping[str, Epilogue]:
        """The scoring epilogue, under SCORE, for buckets that can have prompts; its size is the bucket's number of
        tokens.
        """
        own = Epilogue(
            make_score,
            arguments=("params", "sampling", NAME),
            changes=(),
            output=TokenLogprobs,
            size_of=lambda buckets, bucket: bucket.num_tokens if bucket in buckets.prompt else None,
        )
        return {SCORE: own}

    def left(self, num_tokens: int, num_rows: int) -> Scored:
        """Return the abstract Scored of a forward pass."""
        of_tokens = self.shape.rows(num_tokens, np.int32)
        return Scored(self.shape.hidden(num_tokens), of_tokens, of_tokens)

    def leaves(self, bucket: Bucket) -> bool:
        """Whether a bucket can have prompts to score."""
        return bucket in self.shape.buckets.prompt

    def after_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with its Scored left under NAME; unchanged if its bucket cannot have prompts."""
        if not self.leaves(step.spec.bucket):
            return step
        assert step.hidden is not None
        return step.leaving(NAME, Scored(step.hidden, _targets(step), step.rows.slot[step.token_row]))

    def on_host(self, runner: Any) -> HostExtension:
        return Scorer(runner)


class Scorer(HostExtension):
    """Host extension that scores prompts."""

    def prompt_logprobs(self, pending: PendingStep, given: bool) -> TokenLogprobs:
        """Return the prompt tokens' logprobs of a step passed to `score`, as numpy arrays; waits for them.

        given: whether to fetch logprobs of the token ids that requests name, too; otherwise `given_logprobs` has no
        columns, and the step's output is replaced so. Raises KeyError for another step.
        """
        if not given:
            own = pending.outputs[SCORE]
            none = np.empty((*own.rank.shape, 0), np.float32)
            pending.outputs[SCORE] = own._replace(given_logprobs=none)
        return pending.output(SCORE)

    def score(self, pending: PendingStep) -> None:
        """Dispatch the scoring of a step's prompts, here and in the engine's other processes, and store its output in
        the step. Call it before the step's sampler is dispatched.
        """
        pending.outputs[SCORE] = self.runner.run_epilogue(SCORE, pending)


def make_score(spec: EpilogueSpec) -> Callable:
    """Return the epilogue function that scores prompt tokens: (params: list of arrays, SamplingState, Scored) ->
    (TokenLogprobs,).

    Its fields are [replicas, T, ...], for the target of each token; a token without one gets (-inf, 0, ...).
    """

    def score_prompts(params: list[jax.Array], sampling: SamplingState, scored: Scored):
        """Compute the prompt logprobs of one device's tokens, and gather them over replicas."""
        model = nnx.merge(spec.graph, jax.tree.unflatten(spec.params_tree, params))
        with jax.named_scope("prompt_logprobs"):
            scores = prompt_logprobs(
                scored.hidden,
                scored.targets,
                model.logits,
                max_logprobs=spec.max_logprobs,
                logprobs_mode=spec.logprobs_mode,
                slots=scored.slots,
                given_ids=sampling.logprob_ids,
            )
        with jax.named_scope("results"):
            return (jax.tree.map(stack_ranks, scores),)

    return score_prompts


def _targets(step: ForwardPass) -> jax.Array:
    """Return i32[T]: the prompt token after each token, also across the end of the step's chunk; -1 if there is
    none.
    """
    batch, rows = step.batch, step.rows
    if batch.token_ids.shape == rows.slot.shape:  # one token a row
        return rows.next_token
    last = jnp.where(rows.num_scheduled > 0, batch.logits_indices, batch.token_ids.shape[0])
    return jnp.roll(batch.token_ids, -1).at[last].set(rows.next_token, mode="drop")
