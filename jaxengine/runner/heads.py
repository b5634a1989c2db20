"""The heads: what is done with what a forward pass leaves. Each is a program of its own, compiled for few sizes.

So a forward pass can be under way before it is known what its rows may sample, a sampler is not compiled once for every
number of tokens, and a head that nobody asked for does not run. To add one is to write its function and a row of
`HEADS`. Knows arrays and nothing of requests.

On a mesh a head is what every device runs on its own parts (sharding.collectives).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.config.speculation import MAX_DRAFTS
from jaxengine.runner.device_state import SlotState, TokenState
from jaxengine.runner.step import SampledRows
from jaxengine.sampling.logprobs import TokenLogprobs, prompt_logprobs
from jaxengine.sampling.sampler import SampleOutput, SamplerFlags, flags_of, sample
from jaxengine.sampling.state import SamplingState, count_tokens, write_slots, write_tokens
from jaxengine.sampling.verification import assumed_tokens, only_tokens, verify
from models.config.model_config import ModelConfig
from scheduler.buckets import Bucket, Buckets
from scheduler.request import POOLED
from sharding.collectives import num_shards, stack_ranks


@dataclass(frozen=True)
class HeadSpec:
    """Everything static about the heads of a model but their sizes.

    Attributes:
      graph, params_tree: of the model, for heads that need its weights.
    """

    graph: nnx.GraphDef
    params_tree: Any
    max_logprobs: int
    logprobs_mode: str


@dataclass(frozen=True)
class Head:
    """A kind of program that runs after a forward pass.

    Attributes:
      make: its function; arguments as named, results the state that it changes, then its output.
      arguments: names of what it takes: "params" (the model's leaves), fields of DeviceState, fields of Forwarded.
      changes: those arguments, fields of DeviceState, that it gives back changed; they are donated.
      output: the NamedTuple that the host reads: of all ranks, [ranks, ...].
      size_of: the size of the one that serves a bucket, which the arguments from Forwarded have; None where none does.
      pools: it is for models that pool, and no other is.
      width: tokens of a row in the steps that it is for, whose logits are of size * width places.
    """

    make: Callable[[HeadSpec], Callable]
    arguments: tuple[str, ...]
    changes: tuple[str, ...]
    output: Any
    size_of: Callable[[Buckets, Bucket], int | None]
    pools: bool = False
    width: int = 1

    def sizes(self, buckets: Buckets) -> list[int]:
        """All sizes, ascending."""
        return sorted({size for bucket in buckets if (size := self.size_of(buckets, bucket)) is not None})


def make_sample(spec: HeadSpec) -> Callable:
    """Chooses a token for every row and remembers it: (TokenState, SamplingState, SampledRows, logits f32[S, V / n]) ->
    (TokenState, SampleOutput)."""

    def sample_rows(tokens: TokenState, sampling: SamplingState, rows: SampledRows, logits: jax.Array):
        flags = flags_of(rows.features[0])
        own = _chosen(spec, logits, sampling, tokens, rows.slot, rows.position, flags)
        target = jnp.where(rows.is_sampled, rows.slot, tokens.last_token.shape[0])
        kept = own.token_ids, rows.is_sampled, flags
        tokens = _remember(tokens, target, own.token_ids, rows.slot, rows.position, *kept)
        with jax.named_scope("results"):
            token_ids, scores = _stack(own.token_ids, TokenLogprobs(*own[1:]), flags.any_logprobs)
            return tokens, SampleOutput(token_ids, *scores)

    return sample_rows


class VerifyOutput(NamedTuple):
    """What the host reads of a step whose rows had drafts; the first five of all S * W places, as SampleOutput's.

    Attributes:
      counts: i32[ranks, S], tokens that each row has got, the first ones of its places.
      num_drafts: i32[ranks, S], drafts that each row had.
    """

    token_ids: jax.Array
    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    counts: jax.Array
    num_drafts: jax.Array


def make_verify(spec: HeadSpec) -> Callable:
    """Chooses a token at every place of every row, and keeps those behind drafts that were right: (SlotState,
    TokenState, SamplingState, SampledRows, logits f32[S * W, V / n]) -> (SlotState, TokenState, VerifyOutput).

    What a row has computed behind its first wrong draft is as if it had not been, and is written again.
    """

    def verify_rows(
        slots: SlotState, tokens: TokenState, sampling: SamplingState, rows: SampledRows, logits: jax.Array
    ):
        drafts, num_drafts = rows.drafts, rows.num_drafts
        assert drafts is not None and num_drafts is not None
        assert rows.is_forced is not None and rows.is_guided is not None
        width = drafts.shape[1] + 1
        slot = jnp.repeat(rows.slot, width)
        position = (rows.position[:, None] + jnp.arange(width, dtype=jnp.int32)).reshape(-1)
        flags = flags_of(rows.features[0])
        before = assumed_tokens(drafts), only_tokens(drafts, num_drafts, rows.is_forced)
        is_guided = jnp.repeat(rows.is_guided, width)
        own = _chosen(spec, logits, sampling, tokens, slot, position, flags, *before, is_guided)
        with jax.named_scope("verify"):
            chosen = own.token_ids.reshape(-1, width)
            found = verify(chosen, drafts, num_drafts, rows.is_sampled, rows.is_guided)
            target = jnp.where(rows.is_sampled, rows.slot, tokens.last_token.shape[0])
            num_computed = write_slots(slots.num_computed, target, rows.position - 1 + found.counts)
            kept = own.token_ids, found.is_kept.reshape(-1), flags
            tokens = _remember(tokens, target, found.last, slot, position, *kept)
        with jax.named_scope("results"):
            told = own.token_ids, found.counts, num_drafts
            (token_ids, *told), scores = _stack(told, TokenLogprobs(*own[1:]), flags.any_logprobs)
            output = VerifyOutput(token_ids, *scores, *told)
        return slots._replace(num_computed=num_computed), tokens, output

    return verify_rows


def make_score(spec: HeadSpec) -> Callable:
    """How likely each prompt token was after those before it: (params, hidden [T, D], targets i32[T]) ->
    (TokenLogprobs,)."""

    def score_prompts(params: list[jax.Array], hidden: jax.Array, targets: jax.Array):
        model = nnx.merge(spec.graph, jax.tree.unflatten(spec.params_tree, params))
        with jax.named_scope("prompt_logprobs"):
            scores = prompt_logprobs(
                hidden,
                targets,
                model.logits,
                max_logprobs=spec.max_logprobs,
                logprobs_mode=spec.logprobs_mode,
            )
        with jax.named_scope("results"):
            return (TokenLogprobs(*map(stack_ranks, scores)),)

    return score_prompts


class PoolOutput(NamedTuple):
    """What is told of the prompts that end in a step; of other rows it means nothing.

    Attributes:
      token_ids: i32[ranks, S], POOLED, or -1 for a row that is not finite.
      vectors: f32[ranks, S, N].
    """

    token_ids: jax.Array
    vectors: jax.Array


def make_pool(spec: HeadSpec) -> Callable:
    """What a pooling model tells of each prompt: (params, pooled states f32[S, D]) -> (PoolOutput,)."""

    def pool_prompts(params: list[jax.Array], hidden: jax.Array):
        model = nnx.merge(spec.graph, jax.tree.unflatten(spec.params_tree, params))
        with jax.named_scope("pool"):
            vectors = model.pool(hidden)
        with jax.named_scope("results"):
            token_ids = jnp.where(jnp.all(jnp.isfinite(vectors), axis=1), jnp.int32(POOLED), jnp.int32(-1))
            return (PoolOutput(stack_ranks(token_ids), stack_ranks(vectors)),)

    return pool_prompts


def _stack(told: Any, scores: TokenLogprobs, wanted: jax.Array) -> tuple[Any, TokenLogprobs]:
    """`stack_ranks` of both, without an exchange of scores where nobody asked.

    All in one conditional: what of it lay beside another with exchanges, XLA:CPU would begin in any order, each device
    in its own (tests/sharding/exchange_order.py).
    """
    ranks = num_shards("batch")
    if ranks == 1:
        return jax.tree.map(stack_ranks, (told, scores))

    def without() -> tuple[Any, TokenLogprobs]:
        nothing = [jnp.zeros((ranks, *leaf.shape), leaf.dtype) for leaf in scores]
        return jax.tree.map(stack_ranks, told), TokenLogprobs(*nothing)

    return lax.cond(wanted, lambda: jax.tree.map(stack_ranks, (told, scores)), without)


def _chosen(
    spec: HeadSpec,
    logits: jax.Array,
    sampling: SamplingState,
    tokens: TokenState,
    slot: jax.Array,
    position: jax.Array,
    flags: SamplerFlags,
    assumed: jax.Array | None = None,
    only: jax.Array | None = None,
    is_guided: jax.Array | None = None,
) -> SampleOutput:
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
            assumed=assumed,
            only=only,
            is_guided=is_guided,
        )


def _remember(
    tokens: TokenState,
    target: jax.Array,
    last: jax.Array,
    slot: jax.Array,
    position: jax.Array,
    token_ids: jax.Array,
    is_kept: jax.Array,
    flags: SamplerFlags,
) -> TokenState:
    """Keeps each row's `last` token, i32[S] of the slots `target`, for the next step, and all that were chosen and
    kept, each at its slot and position; counts these where penalties need it."""
    # A poisoned row's -1 would index the embedding; its request ends anyway.
    last_token = write_slots(tokens.last_token, target, jnp.maximum(last, 0))
    # Not a conditional around it: its result would be a copy of the counts.
    counted = count_tokens(tokens.token_counts, slot, token_ids, is_kept & flags.any_penalties)
    return TokenState(last_token, counted, _written(tokens.history, slot, position, token_ids, is_kept))


def _written(
    history: jax.Array | None, slots: jax.Array, positions: jax.Array, token_ids: jax.Array, valid: jax.Array
) -> jax.Array | None:
    """The history with these tokens, where one is kept."""
    return None if history is None else write_tokens(history, slots, positions, jnp.maximum(token_ids, 0), valid)


SAMPLE, SCORE, POOL = "sample", "score", "pool"


def verifier(width: int) -> str:
    """The name of the head that samples where rows have `width` tokens."""
    return SAMPLE if width == 1 else f"verify {width}"


def _verify_head(width: int) -> Head:
    return Head(
        make_verify,
        arguments=("slots", "tokens", "sampling", "rows", "logits"),
        changes=("slots", "tokens"),
        output=VerifyOutput,
        size_of=lambda buckets, bucket: bucket.num_seqs if bucket.width == width else None,
        width=width,
    )


HEADS = {
    SAMPLE: Head(
        make_sample,
        arguments=("tokens", "sampling", "rows", "logits"),
        changes=("tokens",),
        output=SampleOutput,
        size_of=lambda buckets, bucket: buckets.sample_size(bucket) if bucket.width == 1 else None,
    ),
    **{verifier(width): _verify_head(width) for width in range(2, MAX_DRAFTS + 2)},
    SCORE: Head(
        make_score,
        arguments=("params", "hidden", "targets"),
        changes=(),
        output=TokenLogprobs,
        size_of=lambda buckets, bucket: bucket.num_tokens if bucket in buckets.prompt else None,
    ),
    POOL: Head(
        make_pool,
        arguments=("params", "hidden"),
        changes=(),
        output=PoolOutput,
        size_of=lambda buckets, bucket: buckets.sample_size(bucket),
        pools=True,
    ),
}


def heads_of(config: ModelConfig) -> dict[str, Head]:
    """The heads of a model."""
    return {name: head for name, head in HEADS.items() if head.pools == (config.pooler is not None)}
