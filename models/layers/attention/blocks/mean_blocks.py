"""Grouped-query attention to the blocks of keys that an indexer selects (QSA of Qwen4-Exp).

The indexer's key of a block is the mean of its tokens' keys, normed and rotated as at the block's first position. It is
computed in the step that completes the block, from keys of this step and of slots written before. Slots hold the
indexer's key after the first head's value: a token's own, or, in the slot of a block's last token, that of the block.
No other block needs the key that this replaces, and a prefix that ends within a block has only keys of tokens, so
nothing depends on how a prompt was cut. With M-RoPE the places of a block's tokens are a state of the sequence until
the block is complete. All heads' slots have a copy, because devices may hold different heads. Plain XLA on every
platform.

Further shape letters: m tokens of a block, k selected blocks, I heads of the indexer, J elements of its keys, B tokens
at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.attention import KeyBlocks, LayerAttention
from jaxengine.models.config.compressed import RecentPlaces
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.attention.blocks.compressed import best_blocks
from jaxengine.models.layers.attention.blocks.token_blocks import TokenBlocks, recent, softmax_with
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import OffsetRMSNorm
from jaxengine.models.layers.base.rope import apply_rope, rope_table
from jaxengine.models.params.declare import Source
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.kv.slots import read_heads
from jaxengine.pallas_kernels.kv.update import kv_cache_update
from jaxengine.pallas_kernels.zeros import zeros_in_layer

_TOKENS, _GATHERED = 16, 128  # tokens whose queries attend at a time, and keys that they gather at a time


class _Pages(NamedTuple):
    """Keys and values in the pages of a pool, for reading.

    Attributes:
      kv: the pool.
      ragged: the batch, with page ids counted from the pool's beginning.
      blocks: the layer's configuration.
      num_heads: KV heads of this device.
      head_dim: elements of a key and of a value, without the indexer's key.
    """

    kv: KVPages
    ragged: RaggedBatch
    blocks: KeyBlocks
    num_heads: int
    head_dim: int

    def _slots(self, seqs: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (page ids, slots in the pages) of positions i32[B, b] in sequences i32[B]; those of position 0 for
        positions below.
        """
        size, positions = self.kv.page_size, jnp.maximum(positions, 0)
        columns = jnp.minimum(positions // size, self.ragged.page_table.shape[1] - 1)
        return self.ragged.page_table[seqs[:, None], columns], positions % size

    def keys_and_values(self, seqs: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the keys and the values f32[B, b, K, H] at positions i32[B, b] of sequences i32[B]."""
        slots = *self._slots(seqs, positions), self.num_heads
        return read_heads(self.kv, *slots), read_heads(self.kv, *slots, of_values=True)[..., : self.head_dim]

    def index_keys(self, seqs: jax.Array, positions: jax.Array) -> jax.Array:
        """Return the indexer's keys f32[B, b, J] in the slots of positions i32[B, b] of sequences i32[B]."""
        slots = self._slots(seqs, positions)
        return read_heads(self.kv, *slots, 1, of_values=True, first=self.head_dim)[..., 0, :]

    def read(self, seqs: jax.Array, blocks: jax.Array, *, of_index: bool) -> jax.Array:
        """Return the indexer's keys f32[B, b, J] of blocks i32[B, b] of sequences i32[B]. Where a block is -1 the
        result is arbitrary. of_index: True, as no other keys are of blocks.
        """
        del of_index
        return self.index_keys(seqs, (blocks + 1) * self.blocks.size - 1)

    @property
    def most_blocks(self) -> int:
        """Number of blocks of the longest sequence that the page table can hold, at least 1."""
        return max(self.ragged.page_table.shape[1] * self.kv.page_size // self.blocks.size, 1)


class MeanBlockIndexer(nnx.Module):
    """Projection of an indexer's queries and key from the hidden state, and their norms; whole on every device."""

    def __init__(self, blocks: KeyBlocks, hidden_size: int, *, eps: float, source: str, build: Build):
        self.num_heads, self.head_dim = blocks.num_heads, blocks.head_dim
        joined = Source(f"{source}.index_qk_proj", (blocks.num_heads + 1) * blocks.head_dim)
        self.joined = Linear(hidden_size, (joined,), axes=("embed", "latent"), build=build)
        self.q_norm, self.k_norm = (
            OffsetRMSNorm(blocks.head_dim, eps, source=f"{source}.{name}_layernorm", build=build) for name in "qk"
        )

    def __call__(self, x: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array]:
        """Return normed and rotated queries [T, I, J] and projected keys [T, J] of hidden states x [T, D]."""
        assert step.rope is not None
        heads = self.joined(x, step.rows).reshape(x.shape[0], -1, self.head_dim)
        return apply_rope(self.q_norm(heads[:, :-1]), *step.rope), heads[:, -1]

    def of_blocks(self, means: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Return the keys [M, J] of blocks whose tokens' keys have the means [M, J]. rope: cos and sin, f32[M, R / 2],
        at their first positions.
        """
        return apply_rope(self.k_norm(means)[:, None], *rope)[:, 0]


class MeanBlockAttention(Attention):
    """Attention with a gate and norms of q and k, configured by a LayerAttention with `blocks`. A token attends to the
    blocks that the indexer selects, and to the tokens after its sequence's last whole block, itself included.

    qkv: checkpoint modules of q, k and v. gate, qk_norms: see Attention. Raises ModelConfigError for M-RoPE without a
    state of places, and the reverse.
    """

    def __init__(
        self,
        attention: LayerAttention,
        hidden_size: int,
        *,
        eps: float,
        source: str,
        build: Build,
        qkv: Sequence[Source],
        gate: Source,
        qk_norms: Sequence[nnx.Module],
    ):
        blocks = attention.blocks
        assert blocks is not None and attention.rope is not None
        if isinstance(attention.state, RecentPlaces) != bool(attention.rope.sections):
            raise ModelConfigError("blocks of keys need the places of tokens where rope has sections, and only there")
        own = replace(attention, blocks=None, value_size=None, state=None, beside_state=False)
        shared = {"eps": eps, "build": build}
        super().__init__(own, hidden_size, source=source, qkv=qkv, gate=gate, qk_norms=qk_norms, **shared)
        self.blocks, self.rope = blocks, attention.rope
        self.indexer = MeanBlockIndexer(blocks, hidden_size, source=f"{source}.indexer", **shared)

    def __call__(self, x: jax.Array, kept: Any, located: Any, step: StepInputs) -> tuple[jax.Array, Any]:
        """Map x[T, D] to ([T, D], the pool with this step's keys and values, and the indexer's keys, written). kept:
        the pool; with M-RoPE (the pool, the states), and so is what is returned. located: LayerPages, or (LayerPages,
        StateRows).
        """
        if step.blocks.places is None:
            return self._attended(x, kept, located, step, step.blocks)
        (kv, (state,)), (pages, rows) = kept, located
        with jax.named_scope("places"):
            blocks, state = self._placed(step.blocks, state, rows)
        o, kv = self._attended(x, kv, pages, step, blocks)
        return o, (kv, (state,))

    def _placed(self, blocks: TokenBlocks, state: jax.Array, rows: StateRows) -> tuple[TokenBlocks, jax.Array]:
        """Return `blocks` with the rope at the places of the first tokens of the blocks that the step completes, and
        the state after the step. state: i32[rows, m - 1, 3], places of the last tokens. rows: see StateRows.
        """
        assert blocks.places is not None and self.rope is not None
        kept = recent(blocks.places, state, rows, blocks)
        first = kept.at(blocks.last, jnp.array([self.blocks.size - 1], jnp.int32))[:, 0]
        return blocks._replace(rope=rope_table(first.T, self.rope)), kept.after(state, rows)

    def _attended(
        self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs, blocks: TokenBlocks
    ) -> tuple[jax.Array, KVPages]:
        """Map x[T, D] to ([T, D], the pool with this step's keys and values, and the indexer's keys, written).
        Attention is over the keys of the selected blocks, and is gated before the output projection.
        """
        with jax.named_scope("qkv"):
            q, k, v, gate = self._heads(self.qkv(x, step.rows))
            q, k = self.rotate(q, k, step)
        ragged = pages.in_pool(kv.page_size)
        with jax.named_scope("indexer"):
            index_q, index_k = self.indexer(x, step)
            index_k = self._with_blocks(index_k, self._pages(kv, ragged), blocks)
        with jax.named_scope("kv_cache_update"):
            copies = jnp.broadcast_to(index_k[:, None], (*v.shape[:2], index_k.shape[1]))
            values = jnp.concatenate([v, copies.astype(v.dtype)], axis=-1)
            kv = kv_cache_update(kv, k, values, ragged.slot_mapping, schedule=pages.update_schedule)
        with jax.named_scope("block_sparse_attention"):
            o = self._attend(q, index_q, self._pages(kv, ragged), blocks).astype(x.dtype)
        with jax.named_scope("gate"):
            o = self.gated(o, gate, x, step)
        with jax.named_scope("o_proj"):
            return self.out(o.reshape(x.shape[0], -1), step.rows), kv

    def _pages(self, kv: KVPages, ragged: RaggedBatch) -> _Pages:
        """Return the _Pages of a pool. ragged: the batch, with page ids counted from the pool's beginning."""
        return _Pages(kv, ragged, self.blocks, self.spec.num_kv_heads, self.spec.head_dim)

    def _with_blocks(self, keys: jax.Array, pages: _Pages, blocks: TokenBlocks) -> jax.Array:
        """Return the indexer's keys [T, J] to be written: `keys` of this step's tokens, and the keys of the blocks that
        the step completes in place of those of their last tokens, made of the means of their tokens' keys. pages: the
        pool before this step's write.
        """
        size, num_tokens = self.blocks.size, keys.shape[0]
        last = jnp.minimum(blocks.last, num_tokens - 1)
        lags = jnp.arange(size - 1, -1, -1, dtype=jnp.int32)
        here = lags <= blocks.index[last][:, None]
        own = keys[jnp.maximum(last[:, None] - lags, 0)]
        before = pages.index_keys(blocks.seqs[last], blocks.positions[last][:, None] - lags)
        # As the pool would give them back, so that a step's own keys and earlier ones count alike.
        stored = own.astype(pages.kv.dtype).astype(jnp.float32)
        means = jnp.mean(jnp.where(here[..., None], stored, before), axis=1).astype(keys.dtype)
        assert blocks.rope is not None
        return keys.at[blocks.last].set(self.indexer.of_blocks(means, blocks.rope), mode="drop")

    def _attend(self, q: jax.Array, index_q: jax.Array, pages: _Pages, blocks: TokenBlocks) -> jax.Array:
        """Return the attention output f32[T, N, H] of queries q [T, N, H], computed _TOKENS tokens at a time; zeros for
        padding. index_q: queries [T, I, J] of the indexer.
        """
        num_tokens, size = q.shape[0], min(_TOKENS, q.shape[0])
        pad = (0, -num_tokens % size)
        given = [q, index_q, blocks.positions, blocks.seqs]
        given = [jnp.pad(each, (pad, *((0, 0),) * (each.ndim - 1))) for each in given]

        def attend(tile: jax.Array, o: jax.Array) -> jax.Array:
            rows, of_index, positions, seqs = (lax.dynamic_slice_in_dim(each, tile * size, size) for each in given)
            found = self._seen(of_index, positions, seqs, pages)
            new = self._over_keys(rows, found, seqs, pages)
            return lax.dynamic_update_slice_in_dim(o, new, tile * size, 0)

        o = zeros_in_layer(pages.kv.data, (num_tokens + pad[1], *q.shape[1:]))
        o = lax.fori_loop(0, -(-blocks.num_tokens // size), attend, o)[:num_tokens]
        return jnp.where((jnp.arange(num_tokens) < blocks.num_tokens)[:, None, None], o, 0)

    def _seen(self, index_q: jax.Array, positions: jax.Array, seqs: jax.Array, pages: _Pages) -> jax.Array:
        """Return the positions i32[B, m - 1 + k * m] of the keys that tokens attend to: those after the last whole
        block, then those of the blocks that the indexer selects, with -1 in place of those that a token lacks.
        index_q: queries [B, I, J] of tokens at `positions` of the sequences `seqs`, i32[B] each.
        """
        size, top_k = self.blocks.size, min(self.blocks.top_k, pages.most_blocks)
        counts = (positions + 1) // size
        weights = jnp.full(index_q.shape[:2], self.blocks.head_dim**-0.5, jnp.float32)
        chosen = best_blocks(index_q, weights, seqs, counts, top_k, pages)
        inner = jnp.arange(size, dtype=jnp.int32)
        of_blocks = jnp.where(chosen[..., None] < 0, -1, chosen[..., None] * size + inner).reshape(len(seqs), -1)
        tail = counts[:, None] * size + inner[: size - 1]
        return jnp.concatenate([jnp.where(tail <= positions[:, None], tail, -1), of_blocks], axis=1)

    def _over_keys(self, q: jax.Array, positions: jax.Array, seqs: jax.Array, pages: _Pages) -> jax.Array:
        """Return the attention output f32[B, N, H] of queries q [B, N, H] over the keys at `positions` i32[B, b] of the
        sequences i32[B], without those below 0; at least one is not.
        """
        heads, at_once = self.spec.num_kv_heads, min(_GATHERED, positions.shape[1])
        last = jnp.max(jnp.where(positions >= 0, jnp.arange(1, positions.shape[1] + 1), 0))
        positions = jnp.pad(positions, ((0, 0), (0, -positions.shape[1] % at_once)), constant_values=-1)
        grouped = q.reshape(q.shape[0], heads, -1, q.shape[2])

        def fold(number: jax.Array, softmax: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            own = lax.dynamic_slice_in_dim(positions, number * at_once, at_once, axis=1)
            seen = own >= 0
            keys, values = (
                jnp.where(seen[..., None, None], each, 0).astype(q.dtype) for each in pages.keys_and_values(seqs, own)
            )
            logits = jnp.einsum("bkgh,bskh->bkgs", grouped, keys, preferred_element_type=jnp.float32)
            logits = jnp.where(seen[:, None, None], logits * self.spec.sm_scale, -jnp.inf)

            def weighted(shares: jax.Array) -> jax.Array:
                return jnp.einsum("bkgs,bskh->bkgh", shares.astype(q.dtype), values, preferred_element_type=jnp.float32)

            return softmax_with(softmax, logits, weighted)

        shape = grouped.shape[:3]
        zeros = zeros_in_layer(pages.kv.data, shape)
        start = zeros - jnp.inf, zeros, zeros_in_layer(pages.kv.data, grouped.shape)
        _, total, sums = lax.fori_loop(0, -(-last // at_once), fold, start)
        return (sums / total[..., None]).reshape(q.shape)
