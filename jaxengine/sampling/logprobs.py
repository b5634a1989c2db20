"""Log-probabilities that the engine reports: of a sampled token, its rank, the best `max_logprobs` tokens, and given
ones.

Traced inside the jitted step, for sampled tokens and for prompt tokens. Callers decide which logits are reported. If
the vocabulary is split over n devices, each has logits [S, V / n], and all return the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.sampling.fixed_order import VOCAB, row_counts, row_sums
from jaxengine.sampling.top_tokens import row_extreme, take_tokens, top_tokens, vocab_size
from jaxengine.sharding.collectives import any_device, gather_parts

# Rows of logits alive at once while prompts are scored: 32 x 150k x 4 bytes = 19 MB, and enough rows to feed a matmul.
PROMPT_BLOCK_ROWS = 32
# Columns of the result of `sampling_mass`.
NUM_MASS_SCORES = 3


class TokenLogprobs(NamedTuple):
    """Log-probabilities reported for each row; Kl = min(max_logprobs, V). A row whose token is negative has logprob
    -inf and rank 0; its other columns need not be meaningful.

    Attributes:
      logprob: f32[S], of the chosen token (its logit in the *_logits modes).
      rank: i32[S], 1 + number of tokens strictly better.
      top_ids: i32[S, Kl], best first, equal values by ascending id.
      top_logprobs: f32[S, Kl].
      given_logprobs: f32[S, G], of the tokens that a row names, -inf where it names none.
      support: u32[S, W], see `support_words`; None in an engine that does not report it.
    """

    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    given_logprobs: jax.Array
    support: jax.Array | None = None


def no_logprobs(num_rows: int, num_top: int, num_given: int = 0) -> TokenLogprobs:
    """Return TokenLogprobs for num_rows rows that no request needs: all logprobs are -inf, all ranks and ids 0.

    num_top, num_given: number of columns for the best tokens and for given ones.
    """
    return TokenLogprobs(
        jnp.full(num_rows, -jnp.inf, jnp.float32),
        jnp.zeros(num_rows, jnp.int32),
        jnp.zeros((num_rows, num_top), jnp.int32),
        jnp.full((num_rows, num_top), -jnp.inf, jnp.float32),
        jnp.full((num_rows, num_given), -jnp.inf, jnp.float32),
    )


def token_logprobs(
    logits: jax.Array, token_ids: jax.Array, given_ids: jax.Array | None = None, *, num_top: int, normalize: bool
) -> TokenLogprobs:
    """Return the log-probabilities of `token_ids` i32[S] and of `given_ids` i32[S, G] under `logits` f32[S, V / n], the
    rank of each of the former, and the `num_top` <= V best tokens of each row.

    given_ids: -1 stands for no token; None for G = 0. normalize: True reports log-softmax, False the logits themselves.
    A token outside [0, V) gets -inf and rank 0. If n devices share the vocabulary, each has V / n columns of the
    logits, and all return the same.
    """
    if given_ids is None:
        given_ids = jnp.zeros((logits.shape[0], 0), jnp.int32)
    # Taken together, which is one exchange if devices share the vocabulary.
    taken_ids = jnp.concatenate([token_ids[:, None], given_ids], axis=1)
    valid = (taken_ids >= 0) & (taken_ids < vocab_size(logits))
    taken = take_tokens(logits, jnp.where(valid, taken_ids, 0))
    chosen = taken[:, :1]
    rank = 1 + row_counts(logits > chosen)[:, 0]
    shift = log_sum_exp(logits) if normalize else jnp.zeros_like(chosen)
    if num_top:
        best, top_ids = top_tokens(logits, num_top)
        top = best - shift
    else:
        top_ids, top = jnp.zeros((logits.shape[0], 0), jnp.int32), jnp.zeros((logits.shape[0], 0), jnp.float32)
    scores = jnp.where(valid, taken - shift, -jnp.inf)
    return TokenLogprobs(
        scores[:, 0], jnp.where(valid[:, 0], rank, 0), top_ids.astype(jnp.int32), top, given_logprobs=scores[:, 1:]
    )


def sampling_mass(logits: jax.Array, adjusted: jax.Array, kept: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Return three scores of each sampled token in token_ids i32[S], f32[S, NUM_MASS_SCORES]: its log-probability under
    `logits`, its log-probability under `kept`, and the log of the share of the probability of `adjusted` that
    truncation left.

    Args:
      logits: the model's, f32[S, V / n], as are the next two.
      adjusted: logits after bias, penalties and temperature, before truncation.
      kept: `adjusted` with -inf for the tokens that truncation dropped.

    A token outside [0, V) gets -inf in all three.
    """
    valid = (token_ids >= 0) & (token_ids < vocab_size(logits))
    ids = jnp.where(valid, token_ids, 0)[:, None]
    # One after the other: all devices that share a vocabulary must make their exchanges in the same order.
    raw, whole, left = (log_sum_exp(each) for each in (logits, adjusted, kept))
    # The two sums are rounded separately: without the bound a share could be a little more than 1.
    share = jnp.minimum(left - whole, 0.0)
    scores = [take_tokens(logits, ids) - raw, take_tokens(kept, ids) - left, share]
    return jnp.where(valid[:, None], jnp.concatenate(scores, axis=1), -jnp.inf)


def support_words(kept: jax.Array) -> jax.Array:
    """Return which tokens each row could get, u32[S, W], W = ceil(V / 32): bit t % 32 of word t / 32 stands for token
    t. These are the tokens of `kept` f32[S, V / n], the logits that are sampled from, that are not -inf.

    If n devices share the vocabulary, each has a multiple of 32 columns, and all return the same.
    """
    columns = jnp.pad(kept > -jnp.inf, ((0, 0), (0, -kept.shape[1] % 32)))
    bits = columns.reshape(len(columns), -1, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)
    return gather_parts(jnp.sum(bits, axis=2, dtype=jnp.uint32), VOCAB, dimension=1)


def log_sum_exp(logits: jax.Array) -> jax.Array:
    """Return the log of the sum of exponentials of each row over the whole vocabulary, f32[S, V / n] -> f32[S, 1]. The
    order of the additions does not depend on other rows or on n.
    """
    best = row_extreme(jnp.max, logits)
    return best + jnp.log(row_sums(jnp.exp(logits - best)))


def prompt_logprobs(
    hidden: jax.Array,
    targets: jax.Array,
    logits_fn: Callable[[jax.Array], jax.Array],
    *,
    max_logprobs: int,
    logprobs_mode: str,
    slots: jax.Array | None = None,
    given_ids: jax.Array | None = None,
) -> TokenLogprobs:
    """Return the log-probabilities of prompt tokens: row t is the log-probability of `targets[t]` given hidden state t.
    T rows.

    hidden: [T, D], T >= 1. targets: i32[T]; -1 requests nothing, and such a row has logprob -inf, rank 0 and arbitrary
    other columns. logits_fn: hidden states [B, D] -> f32[B, V / n]. max_logprobs: best tokens listed for each row, at
    most V. given_ids: i32[R, G], token ids to score in addition, -1 for none. slots: i32[T], the row of given_ids for
    each token. Both are None if no token ids are to be scored in addition. Logits exist for PROMPT_BLOCK_ROWS rows at a
    time, never [T, V], and blocks without a target are skipped. As nothing is sampled here, logprobs_mode "processed_*"
    reports the raw values; the "*_logits" modes report logits.
    """
    num_tokens, width = hidden.shape
    if slots is None or given_ids is None:
        slots, given_ids = jnp.zeros(num_tokens, jnp.int32), jnp.zeros((1, 0), jnp.int32)
    rows = min(PROMPT_BLOCK_ROWS, num_tokens)
    num_blocks = -(-num_tokens // rows)
    padding = num_blocks * rows - num_tokens
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(num_blocks, rows, width)
    targets = jnp.pad(targets, (0, padding), constant_values=-1).reshape(num_blocks, rows)
    slots = jnp.pad(slots, (0, padding)).reshape(num_blocks, rows)
    num_top = min(max_logprobs, vocab_size(jax.eval_shape(logits_fn, hidden[0])))
    # One exchange for all blocks: if one device needs the logits of a block, all compute them.
    needed = any_device(jnp.any(targets >= 0, axis=1))

    normalize = logprobs_mode.endswith("logprobs")

    def score(block: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> TokenLogprobs:
        states, tokens, own_slots, scored = block

        def found() -> TokenLogprobs:
            given = given_ids.at[own_slots].get(mode="fill", fill_value=-1)
            return token_logprobs(logits_fn(states), tokens, given, num_top=num_top, normalize=normalize)

        return lax.cond(scored, found, lambda: no_logprobs(rows, num_top, given_ids.shape[1]))

    blocks = lax.map(score, (hidden, targets, slots, needed))
    return jax.tree.map(lambda leaf: leaf.reshape(num_blocks * rows, *leaf.shape[2:])[:num_tokens], blocks)
