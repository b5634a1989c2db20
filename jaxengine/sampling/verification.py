"""Verification of drafts: a row's drafts are accepted as long as each equals the token that the sampler itself chooses
at its position.

A draw is a function of the tokens before it: the best of logits / temperature plus noise that depends only on the
request's seed, the position and the token's id (jaxengine.sampling.token_choice). The first draft that does not equal
the drawn token is replaced by it. So the tokens are those of a run without drafts, at every temperature and with all
parameters. A draft is accepted with its own probability, as in rejection sampling, and more often if it was drawn with
the same noise (Daliri, Musco and Suresh 2024).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Verified(NamedTuple):
    """Result of verifying S rows of W positions each, with up to W - 1 drafts.

    Attributes:
      counts: i32[S], number of tokens that each row gets, 0 for rows that do not sample.
      is_kept: bool[S, W], whether each sampled token is one of these.
      last: i32[S], the last token that the row gets; arbitrary for rows that do not sample.
    """

    counts: jax.Array
    is_kept: jax.Array
    last: jax.Array


def assumed_tokens(drafts: jax.Array) -> jax.Array:
    """Return, for each of the W positions of each row, the drafts before that position: i32[S * W, W - 1], -1
    elsewhere.

    drafts: i32[S, W - 1].
    """
    num_rows, count = drafts.shape
    before = jnp.arange(count) < jnp.arange(count + 1)[:, None]
    return jnp.where(before, drafts[:, None], -1).reshape(num_rows * (count + 1), count)


def only_tokens(drafts: jax.Array, num_drafts: jax.Array, is_forced: jax.Array) -> jax.Array:
    """Return the only token allowed at each of the W positions of each row, i32[S * W]; -1 where the mask of the row's
    slot decides.

    drafts: i32[S, W - 1], of which the first num_drafts i32[S] are real. is_forced: bool[S], rows with grammar drafts,
    at whose positions no other token is allowed.
    """
    is_only = is_forced[:, None] & (jnp.arange(drafts.shape[1]) < num_drafts[:, None])
    return jnp.pad(jnp.where(is_only, drafts, -1), ((0, 0), (0, 1)), constant_values=-1).reshape(-1)


def verify(
    chosen: jax.Array, drafts: jax.Array, num_drafts: jax.Array, is_sampled: jax.Array, is_guided: jax.Array
) -> Verified:
    """Return the tokens that each row gets: the sampled ones up to and including the first that differs from its draft.

    chosen: i32[S, W], the sampler's token at each position, -1 for none. drafts: i32[S, W - 1], of which the first
    num_drafts i32[S] are real. is_sampled: bool[S]; other rows get no tokens. is_guided: bool[S], rows with a mask for
    each position. A mask that has not been computed allows no token, so its position has chosen -1; the draft before it
    is then not accepted even if it equals the sampled token.
    """
    width = chosen.shape[1]
    agree = (drafts == chosen[:, :-1]) & (jnp.arange(width - 1) < num_drafts[:, None])
    agree &= (chosen[:, 1:] >= 0) | ~is_guided[:, None]
    num_accepted = jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    counts = jnp.where(is_sampled, 1 + num_accepted, 0)
    last = jnp.take_along_axis(chosen, num_accepted[:, None], axis=1)[:, 0]
    return Verified(counts, jnp.arange(width) < counts[:, None], last)
