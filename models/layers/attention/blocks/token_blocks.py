"""Parts of layers with keys of blocks: places of a step's tokens and blocks, rows of recent tokens, and pages of keys
(DeepSeek-AI 2026, DeepSeek-V4).

Further shape letters: W window, C contributions of a token, b blocks, B tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.compressed import CompressedKeys
from jaxengine.models.config.rope import Rope
from jaxengine.models.layers.base.rope import apply_rope, rope_table
from jaxengine.models.layers.base.step_inputs import StepContext, StepInput
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.kv.slots import read_slots


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
    return None if attention.ngrams is None else (None, None)


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

    def at(self, tokens: jax.Array, lags: jax.Array) -> jax.Array:
        """Return the rows [B, L, .] of the tokens that are `lags` i32[L] tokens before each of `tokens` i32[B] in its
        sequence; lags are at most R. Where a sequence has no such token the row is an arbitrary one, which callers must
        mask.
        """
        blocks, num_tokens = self.blocks, self.blocks.positions.shape[0]
        tokens = jnp.minimum(tokens, num_tokens - 1)[:, None]
        index, seqs = blocks.index[tokens], blocks.seqs[tokens]
        before = num_tokens + seqs * self.kept + self.kept + index - lags
        return self.rows[jnp.where(lags <= index, tokens - lags, before)]

    def after(self, state: jax.Array, rows: StateRows) -> jax.Array:
        """Return `state` [rows, R, .] with the last R rows of each sequence written to its row `writes`, and also to
        its row `saves` for sequences with two or more tokens in this step. Sequences without tokens write nothing.
        """
        ends = rows.cu_q_lens[1:]
        counts = jnp.where(jnp.arange(len(ends)) < rows.num_seqs, ends - rows.cu_q_lens[:-1], 0)
        new = self.at(ends - 1, jnp.arange(self.kept - 1, -1, -1, dtype=jnp.int32))
        for index, least in ((rows.writes, 1), (rows.saves, 2)):
            state = state.at[jnp.where(counts >= least, index, state.shape[0])].set(new, mode="drop")
        return state


def recent(new: jax.Array, state: jax.Array, rows: StateRows, blocks: TokenBlocks) -> Recent:
    """Return the Recent of new rows [T, .] and the rows in `state` [rows, R, .] that this step reads, in the dtype of
    `state`; zeros for sequences that read none (`reads` < 0).
    """
    kept = state[jnp.clip(rows.reads, 0, state.shape[0] - 1)]
    kept = jnp.where((rows.reads >= 0)[:, None, None], kept, 0)
    return Recent(jnp.concatenate([new.astype(state.dtype), kept.reshape(-1, new.shape[1])]), state.shape[1], blocks)


def rotated(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return x [T, heads, H] with its last R elements rotated. rope: cos and sin [T, R / 2]. Neighbouring elements are
    a pair; in the result the first elements of all pairs come before the second ones.
    """
    kept, last = jnp.split(x, (x.shape[-1] - 2 * rope[0].shape[-1],), axis=-1)
    return jnp.concatenate([kept, apply_rope(last, *rope, interleaved=True)], axis=-1)


def rotated_back(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return x [T, heads, H], weighted sums of keys that `rotated` returned, with its last R elements rotated back by
    the rope (cos and sin, [T, R / 2]) of the queries. In the result the elements of each pair are neighbours again.
    """
    cos, sin = rope
    kept, last = jnp.split(x, (x.shape[-1] - 2 * cos.shape[-1],), axis=-1)
    halves = jnp.split(apply_rope(last, cos, -sin), 2, axis=-1)
    return jnp.concatenate([kept, jnp.stack(halves, axis=-1).reshape(last.shape)], axis=-1)


class BlockPages(NamedTuple):
    """Keys of blocks in the pages of a pool, for reading.

    Attributes:
      kv: the pool.
      ragged: the batch, with page ids counted from the pool's beginning.
      slots: number of slots of a page that the key of a block fills.
      keys: the layer's configuration.
    """

    kv: KVPages
    ragged: RaggedBatch
    slots: int
    keys: CompressedKeys

    def read(self, seqs: jax.Array, blocks: jax.Array, *, of_index: bool = False) -> jax.Array:
        """Return the keys f32[B, b, H] of blocks i32[B, b] of the sequences i32[B]; with `of_index`, the indexer's
        keys. Where a block is -1 the result is that of an arbitrary block, which callers must mask.
        """
        page_size, rate = self.kv.page_size, self.keys.rate or 1
        last = (jnp.maximum(blocks, 0) + 1) * rate - 1
        columns = jnp.minimum(last // page_size, self.ragged.page_table.shape[1] - 1)
        pages, first = self.ragged.page_table[seqs[:, None], columns], last % page_size - (self.slots - 1)
        return read_slots(self.kv, pages, first, self.slots, of_values=of_index)[..., : self.keys.widths[of_index]]

    @property
    def most_blocks(self) -> int:
        """Number of blocks of the longest sequence that the page table can hold, at least 1."""
        return max(self.ragged.page_table.shape[1] * self.kv.page_size // (self.keys.rate or 1), 1)


def folded(
    softmax: tuple[jax.Array, ...], q: jax.Array, keys: jax.Array, seen: jax.Array, scale: float
) -> tuple[jax.Array, ...]:
    """Return the online softmax `softmax` of queries [B, N, H] after adding keys [B, b, H], which are values as well;
    those not `seen`, bool[B, b], are left out. softmax: largest logits and totals, f32[B, N] each, and weighted sums of
    values f32[B, N, H]. scale: factor of logits.
    """
    keys = jnp.where(seen[..., None], keys.astype(q.dtype), 0)
    logits = jnp.einsum("bnh,bkh->bnk", q, keys, preferred_element_type=jnp.float32) * scale

    def weighted(shares: jax.Array) -> jax.Array:
        return jnp.einsum("bnk,bkh->bnh", shares.astype(q.dtype), keys, preferred_element_type=jnp.float32)

    return softmax_with(softmax, jnp.where(seen[:, None], logits, -jnp.inf), weighted)


def softmax_with(
    softmax: tuple[jax.Array, ...], logits: jax.Array, weighted: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, ...]:
    """Return the online softmax `softmax` after adding keys with these logits, f32[..., b], -inf for those left out.

    softmax: largest logits and totals, f32[...] each, and weighted sums of values f32[..., H]; a query that has seen no
    key yet has -inf, 0 and 0. weighted: returns the sums, f32[..., H], of the keys' values times the given shares.
    """
    largest, total, sums = softmax
    new_largest = jnp.maximum(largest, jnp.max(logits, axis=-1))
    shift = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)
    shares, decay = jnp.exp(logits - shift[..., None]), jnp.exp(largest - shift)
    return new_largest, total * decay + jnp.sum(shares, axis=-1), sums * decay[..., None] + weighted(shares)
