"""Rules of a transcript's tokens, applied to logits inside samplers: no blank transcript, and timestamps in order.

A timestamp is a token, and with timestamps a transcript is a sequence of segments between two of them. Timestamps
therefore come in pairs, except at the end; they never decrease; the first token is one; and if timestamps together are
likelier than any text token, one of them is chosen (Radford et al. 2022, arXiv:2212.04356, and its published code).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxengine.sampling.top_tokens import VOCAB, first_id, row_extreme
from jaxengine.scheduler.base.media import MAX_BEGIN
from jaxengine.sharding.collectives import gather_parts

_NONE = -1


class RuleRow(NamedTuple):
    """Columns of one slot's rules, int32 (of several slots: i32[S, 1] each), in this order; MAX_BEGIN further ones hold
    the tokens that no transcript begins with, -1 for none.

    Attributes:
      is_timed: 1 if the transcript has timestamps.
      first_timestamp: the token of 0.00 seconds; all from it on are timestamps.
      eos: the token that ends the transcript; text tokens are those before it.
      most_initial: last timestamp that a transcript may begin with, -1 for no limit.
      count: tokens chosen so far; last, previous: the latest two of them, -1 where there is none.
      latest: the latest timestamp, -1 before the first.
    """

    is_timed: Any
    first_timestamp: Any
    eos: Any
    most_initial: Any
    count: Any = 0
    last: Any = _NONE
    previous: Any = _NONE
    latest: Any = _NONE


WIDTH = len(RuleRow._fields) + MAX_BEGIN


def rule_words(row: RuleRow, begin: Sequence[int], chosen: Sequence[int]) -> np.ndarray:
    """Return the columns i32[WIDTH] of a slot after the tokens `chosen`. row: the columns before the first of them.
    begin: at most MAX_BEGIN tokens that no transcript begins with.
    """
    for token in chosen:
        row = row._replace(count=row.count + 1, last=token, previous=row.last)
        row = row._replace(latest=token if token >= row.first_timestamp else row.latest)
    words = np.full(WIDTH, _NONE, np.int32)
    words[: len(row)] = row
    words[len(row) : len(row) + len(begin)] = begin
    return words


def after_tokens(rows: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Return the columns i32[S, WIDTH] of slots after each has got one more token, i32[S]."""
    column = RuleRow._fields.index
    is_timestamp = token_ids >= rows[:, column("first_timestamp")]
    latest = jnp.where(is_timestamp, token_ids, rows[:, column("latest")])
    changed = rows.at[:, column("count")].add(1).at[:, column("previous")].set(rows[:, column("last")])
    return changed.at[:, column("last")].set(token_ids).at[:, column("latest")].set(latest)


def ruled(logits: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the logits f32[S, V / n] with -inf for tokens that the rules forbid: at the start the tokens in `begin`,
    and with timestamps those out of order, and text where timestamps together are likelier than any text token.

    rows: i32[S, WIDTH], columns of RuleRow and `begin`; a row of zeros has no rules.
    """
    token = first_id(logits) + jnp.arange(logits.shape[1], dtype=jnp.int32)
    row = RuleRow(*(rows[:, at : at + 1] for at in range(len(RuleRow._fields))))
    has_rules, at_start = row.first_timestamp > 0, row.count == 0
    logits = _without(logits, jnp.where(at_start & has_rules, rows[:, len(row) :], _NONE))
    is_timed = row.is_timed > 0
    logits = jnp.where(is_timed & _out_of_order(row, token, at_start), -jnp.inf, logits)
    is_timestamp = token >= row.first_timestamp
    text = row_extreme(jnp.max, jnp.where(is_timestamp, -jnp.inf, logits))
    times = jnp.where(is_timestamp, logits, -jnp.inf)
    most = row_extreme(jnp.max, times)
    # Where no timestamp is allowed, `most` is -inf and its difference to itself NaN.
    shares = jnp.where(times > -jnp.inf, jnp.exp(times - jnp.where(most > -jnp.inf, most, 0.0)), 0.0)
    total = gather_parts(shares.sum(axis=1, keepdims=True), VOCAB, dimension=1).sum(axis=1, keepdims=True)
    likelier = most + jnp.log(total) > text
    return jnp.where(is_timed & likelier & ~is_timestamp, -jnp.inf, logits)


def _without(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the logits f32[S, V / n] with -inf for each slot's `tokens` i32[S, K], where _NONE stands for none."""

    def forbidden(logits: jax.Array) -> jax.Array:
        column = tokens - first_id(logits)
        column = jnp.where((tokens >= 0) & (column >= 0), column, logits.shape[1])
        return logits.at[jnp.arange(len(logits))[:, None], column].set(-jnp.inf, mode="drop")

    # Most steps begin no transcript.
    return lax.cond(jnp.any(tokens >= 0), forbidden, lambda logits: logits, logits)


def _out_of_order(row: RuleRow, token: jax.Array, at_start: jax.Array) -> jax.Array:
    """Return bool[S, V / n]: tokens that may not follow the latest tokens of a slot by the order of timestamps.

    <|notimestamps|> may never follow, nor a timestamp before the latest one, nor one equal to it except as the second
    of a pair. The first token of a slot must be a timestamp, of at most `most_initial` unless that is negative. A pair
    of timestamps, the end of a segment and the beginning of the next, may have equal times and must be followed by
    text; after a single timestamp no text may follow, only the second of the pair or the end. The first token of a
    slot, although alone, counts as the second of a pair.

    token: i32[V / n], ids of the columns. at_start: bool[S, 1], whether a slot has no tokens.
    """
    first, is_time = row.first_timestamp, token >= row.first_timestamp
    after_time = (row.count >= 1) & (row.last >= first)
    after_two = (row.count < 2) | (row.previous >= first)
    unpaired = after_time & ~after_two
    # The end of a segment may be the beginning of the next one; no other timestamp comes twice.
    least = jnp.where(row.latest < 0, first, row.latest + jnp.where(unpaired, 0, 1))
    return (
        (token == first - 1)  # <|notimestamps|>
        | (after_time & after_two & is_time)
        | (unpaired & (token < row.eos))
        | (is_time & (token < least))
        | (at_start & ~is_time)
        | (at_start & (row.most_initial >= 0) & (token > row.most_initial))
    )
