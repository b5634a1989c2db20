"""From logits to tokens, for a batch in which every row has its own parameters. Traced inside the program `sample`.

The order of operations is vLLM's: raw logprobs, suppressed tokens, mask, additive bias, penalties, temperature,
truncation (jaxengine.sampling.token_choice), draw. Parts that no row needs are skipped by `lax.cond`. Depends on no
request or text, nor on how the parameters came to the device (jaxengine.sampling.state).

The vocabulary may be split over n devices: each has V / n columns of the logits and finds the same tokens, bit for bit
those of one device. Padding columns come last and hold -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxengine.sampling.logprobs import TokenLogprobs, no_logprobs, token_logprobs
from jaxengine.sampling.row_functions import least_kept, penalized
from jaxengine.sampling.state import NEUTRAL, RowParams, SamplingState
from jaxengine.sampling.token_choice import draw, draw_keys, lowest_kept
from jaxengine.sampling.top_tokens import best_token, first_id, vocab_size
from jaxengine.scheduler.base.sampling_fields import PENALTIES, RANDOM, TRUNCATION
from jaxengine.scheduler.base.token_params import BIAS, LOGPROBS, MASK, PROCESSOR

# (logits f32[S, V / n], slots i32[S], counts i32[S, V / n], features=i32[]) -> logits.
Process = Callable[..., jax.Array]
# (token_ids i32[S], slots i32[S], positions i32[S]) -> token_ids.
Replace = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class MoreScores(NamedTuple):
    """Further results for rows with logprobs.

    Attributes:
      count: number of scores for each row.
      score: (logits, adjusted, kept, token_ids) -> f32[S, count]. The arguments are the given logits, those before
        truncation, those sampled from, f32[S, V / n] each, and the sampled tokens, i32[S]. None if count is 0.
      support: kept -> u32[S, ceil(V / 32)], the support of each row's draw; None to report none.
    """

    count: int = 0
    score: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array] | None = None
    support: Callable[[jax.Array], jax.Array] | None = None

    def add(
        self, found: TokenLogprobs, logits: jax.Array, adjusted: jax.Array, kept: jax.Array, token_ids: jax.Array
    ) -> TokenLogprobs:
        """Return `found` with the columns of `score` appended to its given_logprobs, and `support` of `kept`, whichever
        this has.
        """
        if self.score is not None:
            own = self.score(logits, adjusted, kept, token_ids)
            found = found._replace(given_logprobs=jnp.concatenate([found.given_logprobs, own], axis=1))
        return found if self.support is None else found._replace(support=self.support(kept))

    def none(self, logits: jax.Array, num_top: int, num_given: int) -> TokenLogprobs:
        """Return what `add` returns for rows that no request needs: `no_logprobs`, and a support of no token."""
        rows = no_logprobs(logits.shape[0], num_top, num_given + self.count)
        if self.support is None:
            return rows
        return rows._replace(support=jnp.zeros((logits.shape[0], -(-vocab_size(logits) // 32)), jnp.uint32))


class SamplerFlags(NamedTuple):
    """Sampler features that some row of the batch needs; bool[] each. False promises that no row needs the feature.

    Attributes:
      any_random: temperature above 0.
      any_truncation: a parameter that cuts off unlikely tokens.
      any_penalties: repetition, frequency or presence penalty.
      any_bias: bias rows.
      any_mask: token masks.
      any_logprobs: logprobs of sampled tokens.
      features: i32[], union of the features of the step's requests, for `process`; None if there is no `process`.
    """

    any_random: jax.Array
    any_truncation: jax.Array
    any_penalties: jax.Array
    any_bias: jax.Array
    any_mask: jax.Array
    any_logprobs: jax.Array
    features: jax.Array | None = None


# Bit of TokenParams.features that each flag stands for.
FLAG_FEATURES = {
    "any_random": RANDOM,
    "any_truncation": TRUNCATION,
    "any_penalties": PENALTIES,
    "any_bias": BIAS,
    "any_mask": MASK,
    "any_logprobs": LOGPROBS,
}


def flags_of(features: jax.Array) -> SamplerFlags:
    """Return the sampler flags of a batch: each is True if its bit is set. features: i32[], bitwise union of
    TokenParams.features of its requests.
    """
    return SamplerFlags(**{flag: features & feature > 0 for flag, feature in FLAG_FEATURES.items()}, features=features)


class SampleOutput(NamedTuple):
    """Output of the sampler for S rows; Kl = min(max_logprobs, V). Without `any_logprobs` the last six fields hold
    (-inf, 0, 0, -inf, -inf, 0).

    Attributes:
      token_ids: i32[S]; -1: the row's logits hold NaN or +inf, or every token is forbidden.
      logprob: f32[S] of the chosen token.
      rank: i32[S], 1 = the best token.
      top_ids: i32[S, Kl].
      top_logprobs: f32[S, Kl].
      given_logprobs: f32[S, G], of the row's `SamplingState.logprob_ids`, then those of MoreScores.
      support: u32[S, ceil(V / 32)], that of MoreScores; None if it has none.
    """

    token_ids: jax.Array
    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    given_logprobs: jax.Array
    support: jax.Array | None = None


def sample(
    logits: jax.Array,
    state: SamplingState,
    token_counts: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    flags: SamplerFlags,
    *,
    max_logprobs: int,
    logprobs_mode: str,
    suppressed_tokens: tuple[int, ...] = (),
    assumed: jax.Array | None = None,
    only: jax.Array | None = None,
    is_guided: jax.Array | None = None,
    process: Process | None = None,
    replace: Replace | None = None,
    more: MoreScores | None = None,
) -> SampleOutput:
    """Sample one token per row of logits f32[S, V / n], and return the tokens with their log-probabilities. Each of the
    n devices that share the vocabulary has its own columns.

    A row's token depends on its logits, its slot's parameters and its position, never on other rows or on S. It is -1,
    no token, if the logits hold NaN or +inf or every token is forbidden.

    slots: i32[S], the row of `state` and of `token_counts` i32[R, V / n] that each row uses; >= R marks a padding row,
    which reads no state and is greedy. positions: i32[S], position of the token being sampled. flags: features that
    some row needs; parts whose flag is False are skipped. max_logprobs: best tokens reported for each row.
    logprobs_mode: vLLM's (config.checks.LOGPROBS_MODES); the raw modes report the given logits, the processed ones the
    logits that are sampled from, after temperature and truncation. suppressed_tokens: token ids that no row samples,
    whatever its parameters are; the given logits keep theirs.

    Each of the following is None if no row has any. assumed: i32[S, k], output tokens of each row that `token_counts`
    does not contain yet, -1 for none. only: i32[S], the one token that a row may have, whatever its slot's mask allows,
    or -1; such a step has `flags.any_mask`. is_guided: bool[S], whether row s has a mask for itself, which is row R + s
    of `state.token_mask`. process: the user's logits processors, which run between bias and penalties if
    `flags.features` has one of their bits. replace: (token_ids, slots, positions) -> tokens that replace the sampled
    ones; a row without a token stays -1. more: further scores.
    """
    rows = RowParams(
        *(
            column.at[slots].get(mode="fill", fill_value=neutral)[:, None]
            for column, neutral in zip(state.params, NEUTRAL, strict=True)
        )
    )
    # Greedy rows are divided by 1, as in vLLM's processed logprobs.
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)

    processed, normalize = logprobs_mode.startswith("processed"), logprobs_mode.endswith("logprobs")
    num_top = min(max_logprobs, vocab_size(logits))

    def score(
        scored: Callable[[], jax.Array], token_ids: jax.Array, add: Callable[[TokenLogprobs], TokenLogprobs]
    ) -> TokenLogprobs:
        """Return the log-probabilities of token_ids i32[S] and of each row's `logprob_ids` under `scored()`, with what
        `add` adds to them; MoreScores.none if flags.any_logprobs is False.
        """

        def scores() -> TokenLogprobs:
            given_ids = state.logprob_ids.at[slots].get(mode="fill", fill_value=-1)
            return add(token_logprobs(scored(), token_ids, given_ids, num_top=num_top, normalize=normalize))

        num_given = state.logprob_ids.shape[1]
        return lax.cond(flags.any_logprobs, scores, lambda: (more or MoreScores()).none(logits, num_top, num_given))

    def choose(adjusted: jax.Array, draw_rows: Callable[..., tuple[jax.Array, jax.Array]]):
        """Sample token ids i32[S] from the adjusted logits. Return them with TokenLogprobs if the mode reports
        processed logits or `more` is given, else with None.

        draw_rows: (adjusted, best logits f32[S, 1], best ids i32[S]) -> (token ids i32[S], least logit kept f32[S, 1]).
        """
        best, greedy_ids = best_token(adjusted)
        token_ids, kept_from = draw_rows(adjusted, best, greedy_ids)
        token_ids = token_ids if replace is None else replace(token_ids, slots, positions)
        token_ids = jnp.where(jnp.isfinite(best[:, 0]), token_ids, -1)
        if not processed and more is None:
            return token_ids, None

        def kept() -> jax.Array:
            return jnp.where(adjusted >= kept_from, adjusted / temperature, -jnp.inf)

        if more is None:
            return token_ids, score(kept, token_ids, lambda found: found)
        own = more.add
        return token_ids, score(
            kept if processed else lambda: logits,
            token_ids,
            lambda found: own(found, logits, adjusted / temperature, kept(), token_ids),
        )

    def draw_none(adjusted: jax.Array, best: jax.Array, greedy_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return greedy_ids, jnp.full_like(best, -jnp.inf)

    def draw_random(adjusted: jax.Array, best: jax.Array, greedy_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return token ids i32[S], drawn after truncation for rows with a temperature above 0 and greedy for others,
        and the least logit that truncation keeps, f32[S, 1].
        """
        kept_from = lax.cond(
            flags.any_truncation,
            lambda: lowest_kept(
                *(adjusted, best, temperature, rows.top_k, rows.top_p), least_kept(best, temperature, rows)
            ),
            lambda: jnp.full_like(best, -jnp.inf),
        )
        seeds = jnp.concatenate([rows.seed_low, rows.seed_high], axis=1)
        drawn = draw(adjusted, best, kept_from, temperature, draw_keys(seeds, positions))
        return jnp.where(rows.temperature[:, 0] > 0, drawn, greedy_ids), kept_from

    def allowed() -> jax.Array:
        return _masked(logits, _suppressing_row(suppressed_tokens, logits)) if suppressed_tokens else logits

    features = None if process is None else flags.features
    own = None if process is None or features is None else partial(process, features=features)

    def changes() -> jax.Array:
        changed = flags.any_bias | flags.any_penalties
        return changed if features is None else changed | (features >= PROCESSOR)

    def choose_any() -> tuple[jax.Array, TokenLogprobs | None]:
        """Return the result of `choose` for logits after mask, bias, processors and penalties, as far as some row needs
        them.
        """
        # Outside of the branches that need them: XLA:TPU would fetch the table of all slots into VMEM for the branches,
        # and write it back where their other operands need the room.
        masks = _mask_rows(state, slots, is_guided, flags.any_mask)
        if only is not None:
            masks = jnp.where(only[:, None] >= 0, _only_rows(only - first_id(logits), masks.shape[1]), masks)
        adjusted = lax.cond(
            changes(),
            lambda: _adjust(_masked(allowed(), masks), state, token_counts, slots, rows, assumed, own),
            lambda: lax.cond(flags.any_mask, lambda: _masked(allowed(), masks), allowed),
        )
        return choose(adjusted, lambda *known: lax.cond(flags.any_random, draw_random, draw_none, *known))

    adjusts = changes() | flags.any_mask
    # Greedy steps read the logits once: a conditional that gives [S, V] copies them even where nothing is adjusted.
    token_ids, scores = lax.cond(adjusts | flags.any_random, choose_any, lambda: choose(allowed(), draw_none))
    found = score(lambda: logits, token_ids, lambda own: own) if scores is None else scores
    return SampleOutput(token_ids, *found[:5], support=found.support)


def _state_rows(array: jax.Array, slots: jax.Array) -> jax.Array:
    """Return the rows of an array [R, ...] at slots i32[S]; zeros for slots >= R."""
    return array.at[slots].get(mode="fill", fill_value=0)


def _mask_rows(state: SamplingState, slots: jax.Array, is_guided: jax.Array | None, any_mask: jax.Array) -> jax.Array:
    """Return the token mask of each row, u32[S, W]; bit t % 32 of word t / 32 allows token t. It is the mask of the
    row's slot or, where is_guided bool[S], row R + s of state.token_mask for row s.

    is_guided: None if no row has a mask for itself. Every token is allowed in padding rows (slots >= R), and in all
    rows if any_mask, bool[], is False.
    """
    num_slots, num_masks, rows = state.params.temperature.shape[0], state.token_mask.shape[0], slots
    if num_masks > num_slots:
        rows = jnp.where(slots < num_slots, slots, num_masks)
        if is_guided is not None:
            rows = jnp.where(is_guided, num_slots + jnp.arange(len(slots), dtype=jnp.int32), rows)
    masks = state.token_mask.at[rows].get(mode="fill", fill_value=-1)
    return lax.bitcast_convert_type(jnp.where(any_mask, masks, -1), jnp.uint32)


def _only_rows(token_ids: jax.Array, num_words: int) -> jax.Array:
    """Return masks u32[S, W], W = num_words, that each allow one token: token_ids i32[S], counted from this device's
    first column. A mask is all zeros if the token belongs to another device.
    """
    words = jnp.arange(num_words, dtype=jnp.int32) == (token_ids >> 5)[:, None]
    return jnp.where(words, jnp.uint32(1) << (token_ids & 31).astype(jnp.uint32)[:, None], jnp.uint32(0))


def _suppressing_row(suppressed_tokens: tuple[int, ...], logits: jax.Array) -> jax.Array:
    """Return a token mask u32[1, W] of this device's columns of logits [S, V / n], which allows all tokens but
    suppressed_tokens, ids of the whole vocabulary. Several devices have a multiple of 32 columns each.
    """
    bits = np.ones(-(-vocab_size(logits) // 32) * 32, np.uint8)
    bits[list(suppressed_tokens)] = 0
    words = jnp.asarray(np.packbits(bits, bitorder="little").view("<u4"), jnp.uint32)
    return lax.dynamic_slice_in_dim(words, first_id(logits) // 32, -(-logits.shape[1] // 32))[None]


def _masked(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Return the logits f32[S, V / n] with -inf for the tokens that a row's mask, u32[S, W], does not allow; one mask
    u32[1, W] is that of all rows. A NaN stays NaN, and a forbidden +inf becomes NaN.
    """
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return jnp.where(bits.reshape(len(masks), -1)[:, : logits.shape[1]] > 0, logits, logits - jnp.inf)


def _adjust(
    logits: jax.Array,
    state: SamplingState,
    token_counts: jax.Array,
    slots: jax.Array,
    rows: RowParams,
    assumed: jax.Array | None,
    process: Callable[..., jax.Array] | None,
) -> jax.Array:
    """Return the logits [S, V / n] after bias, then the user's logits processors, then penalties. Rows without any of
    these keep their logits bit for bit.

    token_counts: i32[R, V / n]. slots: i32[S]. assumed: i32[S, k], output tokens that the counts lack, -1 for none;
    None if no row has any. process: (logits, slots, counts i32[S, V / n]) -> logits; None without processors.
    """
    logits = logits + _state_rows(state.logit_bias, slots)
    counts = _state_rows(token_counts, slots)
    if assumed is not None:
        columns = assumed - first_id(counts)
        columns = jnp.where((assumed >= 0) & (columns >= 0), columns, counts.shape[1])
        counts = counts.at[jnp.arange(len(counts))[:, None], columns].add(2, mode="drop")
    if process is not None:
        logits = process(logits, slots, counts)
    return penalized(logits, rows, counts)
