"""Where a step's tokens are in their sequences, and rows that a state keeps of the tokens before them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.rope import Rope
from jaxengine.models.config.state import GatedDelta
from jaxengine.models.layers.base.rope import rope_table
from jaxengine.models.layers.base.step_inputs import StepContext, StepInput


class TokenBlocks(NamedTuple):
    """Location of a step's tokens in their sequences, and the blocks that they complete.

    Attributes:
      token_ids, positions: i32[T].
      seqs, index: i32[T], the row of each token's sequence, and the token's number among that sequence's new ones.
      num_tokens: i32[], tokens of sequences; padding comes after them.
      last: i32[M], indices of the tokens that complete a block, in order, then T; M is 0 without blocks.
      num_blocks: i32[], number of blocks that the step completes.
      rope: cos and sin, f32[M, R / 2] each, at the first position of these blocks; None for a layer without rope.
      places: i32[T, 3], positions of tokens in time, height and width; None for a layer whose rope has no sections.
    """

    token_ids: jax.Array
    positions: jax.Array
    seqs: jax.Array
    index: jax.Array
    num_tokens: jax.Array
    last: jax.Array
    num_blocks: jax.Array
    rope: tuple[jax.Array, jax.Array] | None
    places: jax.Array | None = None


def token_blocks(key: tuple[int | None, Rope | None], step: StepContext) -> TokenBlocks:
    """Return the TokenBlocks of a step. key: (tokens of a block, None for a layer without blocks; rope of the keys)."""
    (rate, rope), batch, ragged = key, step.batch, step.batch.ragged[0]
    num_tokens, num_seqs = batch.token_ids.shape[0], ragged.cu_q_lens.shape[0] - 1
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    seqs = jnp.minimum(jnp.sum(tokens[:, None] >= ragged.cu_q_lens[1:], axis=1, dtype=jnp.int32), num_seqs - 1)
    live = ragged.cu_q_lens[ragged.num_seqs]
    most = min(num_tokens, num_tokens // rate + num_seqs) if rate else 0
    ends = ((batch.positions + 1) % (rate or 1) == 0) & (tokens < live)
    (last,) = jnp.nonzero(ends, size=most, fill_value=num_tokens)
    places = batch.sections.get("mrope_positions", batch.positions)
    first = batch.positions[jnp.minimum(last, num_tokens - 1)] + 1 - (rate or 1)
    return TokenBlocks(
        token_ids=batch.token_ids,
        positions=batch.positions,
        seqs=seqs,
        index=tokens - ragged.cu_q_lens[seqs],
        num_tokens=live,
        last=last.astype(jnp.int32),
        num_blocks=jnp.minimum(jnp.sum(ends, dtype=jnp.int32), most),
        rope=None if rope is None else rope_table(first, rope),
        places=jnp.broadcast_to(places, (3, num_tokens)).T if rope is not None and rope.sections else None,
    )


def _rate_and_rope(attention: LayerAttention, build: Build) -> tuple[int | None, Rope | None] | None:
    """Return the argument `key` of `token_blocks` for a layer, (tokens of a block or None, rope or None); None for a
    layer that has no keys of blocks and does not read n-grams of tokens.
    """
    if attention.blocks is not None:
        return attention.blocks.size, attention.rope
    if attention.compressed is not None:
        return attention.compressed.rate, attention.rope
    state = attention.state
    return (None, None) if isinstance(state, GatedDelta) and state.ngrams is not None else None


BLOCKS = StepInput("token_blocks", _rate_and_rope, token_blocks)


class Recent(NamedTuple):
    """Rows of this step's tokens, followed by the R rows before them that the state of each of the S sequences has.

    Attributes:
      rows: [T + S * R, .].
      kept: R.
      blocks: location of the step's tokens.
    """

    rows: jax.Array
    kept: int
    blocks: TokenBlocks

    def indices(self, tokens: jax.Array, lags: jax.Array) -> jax.Array:
        """Return the index in `rows`, i32, of the token that is `lags` tokens before each of `tokens` in its sequence.
        tokens, lags: i32 of one shape; lags are at most R. Where a sequence has no such token the index is that of an
        arbitrary row, which callers must mask.
        """
        blocks, num_tokens = self.blocks, self.blocks.positions.shape[0]
        tokens = jnp.minimum(tokens, num_tokens - 1)
        index, seqs = blocks.index[tokens], blocks.seqs[tokens]
        before = num_tokens + seqs * self.kept + self.kept + index - lags
        return jnp.where(lags <= index, tokens - lags, before)

    def after(self, state: jax.Array, rows: StateRows) -> jax.Array:
        """Return `state` [rows, R, .] with the last R rows of each sequence written to its row `writes`, and also to
        its row `saves` for sequences with two or more tokens in this step. Sequences without tokens write nothing.
        """
        ends = rows.cu_q_lens[1:]
        counts = jnp.where(jnp.arange(len(ends)) < rows.num_seqs, ends - rows.cu_q_lens[:-1], 0)
        lags = jnp.broadcast_to(jnp.arange(self.kept - 1, -1, -1, dtype=jnp.int32), (len(ends), self.kept))
        new = self.rows[self.indices(jnp.broadcast_to(ends[:, None] - 1, lags.shape), lags)]
        for index, least in ((rows.writes, 1), (rows.saves, 2)):
            state = state.at[jnp.where(counts >= least, index, state.shape[0])].set(new, mode="drop")
        return state


def recent_rows(new: jax.Array, state: jax.Array, rows: StateRows, blocks: TokenBlocks) -> Recent:
    """Return the Recent of new rows [T, .] and the rows in `state` [rows, R, .] that this step reads, in the dtype of
    `state`; zeros for sequences that read none (`reads` < 0).
    """
    kept = state[jnp.clip(rows.reads, 0, state.shape[0] - 1)]
    kept = jnp.where((rows.reads >= 0)[:, None, None], kept, 0)
    return Recent(jnp.concatenate([new.astype(state.dtype), kept.reshape(-1, new.shape[1])]), state.shape[1], blocks)
