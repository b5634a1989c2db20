"""Epilogues: programs that run after a forward pass, on its results. Each is compiled for a few sizes.

So a forward pass can run before it is known which tokens its rows may sample, and an epilogue that no request needs
does not run. This module has the sampler, and what it shares with other epilogues that sample. Epilogues of optional
capabilities are in the capabilities' own files (jaxengine.runner.extensions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.runner.base.device_state import TokenState
from jaxengine.runner.base.extension import Epilogue, EpilogueSpec
from jaxengine.runner.base.forward_pass import SampledRows
from jaxengine.sampling.logprobs import TokenLogprobs
from jaxengine.sampling.sampler import SampleOutput, SamplerFlags, flags_of, sample
from jaxengine.sampling.state import SamplingState, count_tokens, write_slots
from jaxengine.sharding.collectives import num_shards, stack_ranks

SAMPLE = "sample"


def make_sample(spec: EpilogueSpec) -> Callable:
    """Return the epilogue function that samples a token for every row and stores it.

    It maps (TokenState, SamplingState, SampledRows, logits f32[S, V / n]) to (TokenState, SampleOutput), whose arrays
    are those of all replicas, [replicas, S, ...]. Rows that do not sample get a token as well, which is not stored.
    """

    def sample_rows(tokens: TokenState, sampling: SamplingState, rows: SampledRows, logits: jax.Array):
        flags = flags_of(rows.features[0])
        chosen = choose(spec, logits, sampling, tokens, rows.slot, rows.position, flags)
        target = jnp.where(rows.is_sampled, rows.slot, tokens.last_token.shape[0])
        kept = chosen.token_ids, rows.is_sampled, flags
        tokens = remember(spec, tokens, target, chosen.token_ids, rows.slot, rows.position, *kept)
        with jax.named_scope("results"):
            token_ids, scores = stack_results(chosen.token_ids, chosen, flags)
            return tokens, SampleOutput(token_ids, *scores)

    return sample_rows


def choose(
    spec: EpilogueSpec,
    logits: jax.Array,
    sampling: SamplingState,
    tokens: TokenState,
    slot: jax.Array,
    position: jax.Array,
    flags: SamplerFlags,
    **more: Any,
) -> SampleOutput:
    """Sample a token for each row of logits f32[S, V / n], with jaxengine.sampling.sampler.sample and the functions of
    the stage's extensions, and return its SampleOutput.

    slot, position: i32[S], those of the rows. more: further arguments of `sample`, such as `assumed`.
    """
    with jax.named_scope("sample"):
        return sample(
            logits,
            sampling,
            tokens.token_counts,
            slot,
            position,
            flags,
            max_logprobs=spec.max_logprobs,
            logprobs_mode=spec.logprobs_mode,
            suppressed_tokens=spec.suppressed_tokens,
            process=spec.process(tokens),
            replace=spec.replace(tokens),
            more=spec.more_scores,
            **more,
        )


def remember(
    spec: EpilogueSpec,
    tokens: TokenState,
    target: jax.Array,
    last: jax.Array,
    slot: jax.Array,
    position: jax.Array,
    token_ids: jax.Array,
    is_kept: jax.Array,
    flags: SamplerFlags,
) -> TokenState:
    """Return the token state after sampling. `last` i32[S] are the last tokens of the slots `target` i32[S]. All kept
    tokens are stored in extensions' sections and counted for penalties.

    slot, position, token_ids: i32[N], slots, positions and ids of all sampled tokens. is_kept: bool[N], whether the
    token is kept. flags: features of the step; without penalties nothing is counted. A target >= R is ignored; a
    negative last token is stored as 0.
    """
    # -1, for a row with logits that are not finite, would be an invalid index of the embedding. Its request ends
    # anyway.
    last_token = write_slots(tokens.last_token, target, jnp.maximum(last, 0))
    # No conditional here, since its result would be a copy of the counts.
    counted = count_tokens(tokens.token_counts, slot, token_ids, is_kept & flags.any_penalties)
    tokens = TokenState(last_token, counted, tokens.sections)
    for extension in spec.extensions:
        tokens = extension.remember(tokens, slot, position, token_ids, is_kept)
    return tokens


def stack_results(results: Any, chosen: SampleOutput, flags: SamplerFlags) -> tuple[Any, TokenLogprobs]:
    """Gather `results`, a pytree of arrays, and the logprobs of sampled tokens from all replicas; return both, with
    arrays [replicas, ...].

    Logprobs are exchanged only if a row needs them; otherwise they are zeros if there are several replicas. All
    exchanges are within one conditional. Outside of it, XLA:CPU could start them in a different order on each device
    (tests/sharding/exchange_order.py).
    """
    scores, ranks = TokenLogprobs(*chosen[1:]), num_shards("batch")
    if ranks == 1:
        return jax.tree.map(stack_ranks, (results, scores))

    def without() -> tuple[Any, TokenLogprobs]:
        nothing = jax.tree.map(lambda leaf: jnp.zeros((ranks, *leaf.shape), leaf.dtype), scores)
        return jax.tree.map(stack_ranks, results), nothing

    return lax.cond(flags.any_logprobs, lambda: jax.tree.map(stack_ranks, (results, scores)), without)


SAMPLER = Epilogue(
    make_sample,
    arguments=("tokens", "sampling", "rows", "logits"),
    changes=("tokens",),
    output=SampleOutput,
    size_of=lambda buckets, bucket: buckets.sample_size(bucket) if bucket.width == 1 else None,
    ends=True,
    of_model=False,
)
