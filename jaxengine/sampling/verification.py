"""Which drafts are right: those that the sampler chooses itself, one behind the other. Traced inside `verify`.

A draw is a function of what stands before it: the best of logits / temperature plus noise that depends on the request's
seed, the position and the token's id alone (jaxengine.sampling.token_choice). So the token at each draft's place, drawn
as if all drafts before were right, is what would have come there if they are; drafts count as long as each is that
token, and the first one that is not is replaced by it. By induction the tokens are those that come without drafts, at
every temperature and under every parameter. Nothing is lost by it: a draft is accepted with its own probability, as in
rejection sampling (Leviathan et al. 2023), and one that was drawn with the same noise more often (Daliri, Musco and
Suresh 2024).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Verified(NamedTuple):
    """Outcome of verifying S rows of W positions each, with up to W - 1 drafts.

    Attributes:
      counts: i32[S], tokens that each row has got, 0 for rows that do not sample.
      is_kept: bool[S, W], which of the chosen tokens these are.
      last: i32[S], the last of them.
    """

    counts: jax.Array
    is_kept: jax.Array
    last: jax.Array


def assumed_tokens(drafts: jax.Array) -> jax.Array:
    """The drafts i32[S, W - 1] that stand before each of the W tokens to choose, i32[S * W, W - 1], -1 for none."""
    num_rows, count = drafts.shape
    before = jnp.arange(count) < jnp.arange(count + 1)[:, None]
    return jnp.where(before, drafts[:, None], -1).reshape(num_rows * (count + 1), count)


def only_tokens(drafts: jax.Array, num_drafts: jax.Array, is_forced: jax.Array) -> jax.Array:
    """The token that alone is allowed in each of the W places, i32[S * W], -1 where the mask of the row's slot tells.

    drafts i32[S, W - 1], of which num_drafts i32[S] are real; is_forced bool[S]: nothing else may stand in their place.
    """
    is_only = is_forced[:, None] & (jnp.arange(drafts.shape[1]) < num_drafts[:, None])
    return jnp.pad(jnp.where(is_only, drafts, -1), ((0, 0), (0, 1)), constant_values=-1).reshape(-1)


def verify(
    chosen: jax.Array, drafts: jax.Array, num_drafts: jax.Array, is_sampled: jax.Array, is_guided: jax.Array
) -> Verified:
    """Finds the tokens that each row has got: the chosen ones up to and including the first that is not its draft.

    chosen i32[S, W], the sampler's token in each place, -1 for none; drafts i32[S, W - 1], of which the first
    num_drafts i32[S] are real. is_sampled bool[S]: the other rows get no tokens. is_guided bool[S]: rows with a mask
    for each place, which allows nothing where it is not known: a place then has chosen -1, and the draft in front of it
    is not accepted, though right.
    """
    width = chosen.shape[1]
    agree = (drafts == chosen[:, :-1]) & (jnp.arange(width - 1) < num_drafts[:, None])
    agree &= (chosen[:, 1:] >= 0) | ~is_guided[:, None]
    num_accepted = jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    counts = jnp.where(is_sampled, 1 + num_accepted, 0)
    last = jnp.take_along_axis(chosen, num_accepted[:, None], axis=1)[:, 0]
    return Verified(counts, jnp.arange(width) < counts[:, None], last)
