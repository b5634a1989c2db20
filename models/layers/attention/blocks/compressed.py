"""Attention to the keys of the latest tokens, and to compressed keys, one for each block of tokens (DeepSeek-AI 2026,
DeepSeek-V4).

A block's key is the mean of what its tokens contribute, weighed for each element by a softmax of gates; in some layers
the tokens of the previous block contribute, too, and an indexer with keys of its own, made alike, selects the blocks
that a token attends to. A key is its value as well, one for all heads.

What a token of the next step may need is a state of its sequence, the latest token last: the window's keys, and the
contributions to blocks that are not complete. It is read from copies of the same numbers whether a token before is in
this step or in an earlier one, so nothing depends on how a prompt was cut. Keys of blocks are in pages, in slots that
end with the block's last token: they are written in the step that completes the block, to a page that this step fills,
and a prefix that ends within a block has none of it. Plain XLA on every platform.

Further shape letters: W window, C contributions of a token, m tokens of a block, k selected blocks, I heads of the
indexer, J elements of its keys, B tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.compressed import BlockIndex, CompressedKeys
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs, attention_spec
from jaxengine.models.layers.attention.blocks.token_blocks import (
    BlockPages,
    Recent,
    TokenBlocks,
    folded,
    recent,
    rotated,
    rotated_back,
)
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import FixedRMSNorm, RMSNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.quantization.registry import PLAIN
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.kv.update import kv_cache_update
from jaxengine.pallas_kernels.zeros import zeros_in_layer

# Tokens whose queries attend at a time, blocks whose keys they gather at a time, and blocks whose keys are computed at
# a time.
TOKENS, _GATHERED, _MADE = 16, 128, 8
# Blocks whose scores are merged at a time into the best so far: MERGED * k, but at most SCORED.
MERGED, SCORED = 4, 4096


class Compressor(nnx.Module):
    """Weights that compute keys of blocks from the contributions of their tokens: a bias of the gates by a token's
    position in its block, and the norm of the result.
    """

    def __init__(self, width: int, keys: CompressedKeys, *, eps: float, source: str, build: Build):
        assert keys.rate is not None
        self.overlapping, columns = keys.overlapping, width * keys.num_series
        bias = ParamDecl((None, None), (Source(f"{source}.ape", keys.rate),), init_std=0.3)
        self.bias = declare((keys.rate, columns), jnp.float32, bias)
        self.norm = RMSNorm(width, eps, source=f"{source}.norm", build=build)

    def __call__(self, values: jax.Array, gates: jax.Array, seen: jax.Array) -> jax.Array:
        """Return keys f32[B, H] of B blocks: norms of averages of their tokens' `values` [B, span, columns], weighted
        in each column by the softmax of `gates` plus bias. Tokens that are not `seen`, bool[B, span], are left out.
        """
        gates, values, bias = gates.astype(jnp.float32), values.astype(jnp.float32), self.bias[...]
        if self.overlapping:  # the first columns are for the block after a token's own
            halves = zip(jnp.split(values, 2, axis=1), jnp.split(gates, 2, axis=1), (0, 1), strict=True)
            parts = [(_half(value, at), _half(gate + bias, at)) for value, gate, at in halves]
            values, gates = (jnp.concatenate(part, axis=1) for part in zip(*parts, strict=True))
        else:
            gates = gates + bias
        shares = jax.nn.softmax(jnp.where(seen[..., None], gates, -jnp.inf), axis=1)
        return self.norm(jnp.sum(jnp.where(seen[..., None], values, 0) * shares, axis=1))


def _half(x: jax.Array, at: int) -> jax.Array:
    """Return the first half (at = 0) or the second half (at = 1) of x along its last axis."""
    return jnp.split(x, 2, axis=-1)[at]


class BlockIndexer(nnx.Module):
    """Projections of an indexer's queries and of the weights of its heads; whole on every device."""

    def __init__(self, index: BlockIndex, q_rank: int, hidden_size: int, *, source: str, build: Build):
        self.num_heads, self.head_dim = index.num_heads, index.head_dim
        heads = (Source(f"{source}.wq_b", index.num_heads * index.head_dim),)
        self.q = Linear(q_rank, heads, axes=("latent", "latent"), build=build)
        # Stored plain and multiplied in float32: the result ranks blocks.
        plain = replace(build, scheme=PLAIN, dtype=jnp.float32)
        weights = (Source(f"{source}.weights_proj", index.num_heads),)
        self.weights = Linear(hidden_size, weights, axes=("embed", "latent"), build=plain)

    def __call__(self, x: jax.Array, q_latent: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array]:
        """Return rotated queries [T, I, J] and the weights of their heads f32[T, I], for hidden states x [T, D] and the
        latent of queries [T, q_rank].
        """
        assert step.rope is not None
        q, weights = self.queries(x, q_latent, step)
        return rotated(q, step.rope), weights

    def queries(self, x: jax.Array, q_latent: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array]:
        """Return queries [T, I, J] before rope and the weights of their heads f32[T, I], divided by sqrt(I * J)."""
        q = self.q(q_latent, step.rows).reshape(x.shape[0], self.num_heads, self.head_dim)
        weights = self.weights(x.astype(jnp.float32), step.rows)
        return q, weights * (self.num_heads * self.head_dim) ** -0.5


def block_scores(q: jax.Array, weights: jax.Array, keys: jax.Array, seen: jax.Array) -> jax.Array:
    """Return the indexer's scores f32[B, b] of blocks with `keys` [B, b, J]: sums of relu(q . key) over heads, with
    their `weights` f32[B, I]; a zero without a sign; -inf for blocks that are not `seen`, bool[B, b]. q: [B, I, J].
    """
    products = jnp.einsum("bij,bkj->bik", q.astype(jnp.float32), keys, preferred_element_type=jnp.float32)
    scores = jnp.sum(weights[..., None] * jax.nn.relu(products), axis=1)
    return jnp.where(seen, jnp.where(scores == 0, 0.0, scores), -jnp.inf)  # zero has no sign


def best_blocks(
    q: jax.Array, weights: jax.Array, seqs: jax.Array, counts: jax.Array, top_k: int, pages: Any
) -> jax.Array:
    """Return the blocks i32[B, k] with the highest indexer scores among the first `counts` i32[B] of each sequence,
    best first, of equal ones the lowest block first. A sequence with at most k blocks has all of them, ascending, then
    -1. q, weights: queries [B, I, J] and weights f32[B, I] of the indexer. seqs: i32[B], sequences' rows. top_k: k.
    pages: BlockPages, or others with `kv`, `most_blocks` and `read`.
    """
    at_once = min(MERGED * top_k, SCORED, pages.most_blocks)
    places, size = jnp.arange(at_once, dtype=jnp.int32), len(seqs)

    def merge(number: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        blocks = jnp.broadcast_to(number * at_once + places, (size, at_once))
        seen = blocks < counts[:, None]
        keys = jnp.where(seen[..., None], pages.read(seqs, blocks, of_index=True), 0)
        return merged_best(best, block_scores(q, weights, keys, seen), blocks)

    own = pages.kv.data
    start = zeros_in_layer(own, (size, top_k)) - jnp.inf, zeros_in_layer(own, (size, top_k), jnp.int32) - 1
    most = jnp.max(counts)
    _, found = lax.fori_loop(0, jnp.where(most > top_k, -(-most // at_once), 0), merge, start)
    return jnp.where(counts[:, None] > top_k, found, first_numbers(top_k, counts))


def merged_best(best: tuple[jax.Array, ...], scores: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the highest of the scores `best[0]` and `scores` [B, n], as many as `best[0]` has, and their numbers in
    `best[1]` or `numbers`, best first; of equal ones those in `best` come first, then that at the lowest index.
    """
    top, which = lax.top_k(jnp.concatenate([best[0], scores], axis=1), best[0].shape[1])
    return top, jnp.take_along_axis(jnp.concatenate([best[1], numbers], axis=1), which, axis=1)


def first_numbers(size: int, counts: jax.Array) -> jax.Array:
    """Return i32[B, size]: the numbers from 0 below `counts` i32[B], ascending, then -1."""
    numbers = jnp.arange(size, dtype=jnp.int32)
    return jnp.where(numbers < counts[:, None], numbers, -1)


class CompressedAttention(nnx.Module):
    """Attention configured by a LayerAttention with CompressedKeys. Query heads are split over devices; keys, and the
    weights that compute them, are whole on each device.
    """

    def __init__(self, attention: LayerAttention, hidden_size: int, *, eps: float, source: str, build: Build):
        keys, heads, dim = attention.compressed, attention.num_heads, attention.head_dim
        assert keys is not None
        q_rank, out_groups, out_rank = keys.q_rank, keys.out_groups, keys.out_rank
        self.keys, self.spec, self.group_width = keys, attention_spec(attention, build.mesh), heads // out_groups * dim

        def linear(names: dict[str, int], axis: str = "latent", inputs: int = hidden_size, group: int = 1) -> Linear:
            sources = [Source(f"{source}.{name}", size, group=group) for name, size in names.items()]
            return Linear(inputs, sources, axes=("embed", axis), build=build)

        self.down = linear({"wq_a": q_rank, "wkv": dim})
        self.q_norm = RMSNorm(q_rank, eps, source=f"{source}.q_norm", build=build)
        self.kv_norm = RMSNorm(dim, eps, source=f"{source}.kv_norm", build=build)
        self.q_b = linear({"wq_b": heads * dim}, "heads", q_rank, dim)
        self.head_norm = FixedRMSNorm(dim, eps, source="", build=build)
        sinks = ParamDecl(("heads",), (Source(f"{source}.attn_sink", heads),), init_std=1.0)
        self.sinks = declare((heads,), jnp.float32, sinks)
        rows = Source(f"{source}.wo_a", out_groups * out_rank, group=out_rank)
        shape = out_groups * out_rank, self.group_width
        self.out_a = build.weight(shape, (rows,), ("heads", "latent"), table=True)
        out = (Source(f"{source}.wo_b", hidden_size),)
        self.out_b = Linear(shape[0], out, axes=("heads", "embed"), build=build)
        if keys.rate is not None:
            self._declare_blocks(linear, hidden_size, eps=eps, source=source, build=build)

    def _declare_blocks(
        self, linear: Callable[..., Linear], hidden_size: int, *, eps: float, source: str, build: Build
    ) -> None:
        """Declare the weights that compute keys of blocks and select blocks. linear: makes the Linear of hidden states
        whose outputs are those of modules of `source`, by name.
        """
        # For the layer's keys and the indexer's: the name of their compressor, and their width.
        keys = self.keys
        inner, factor = dict(zip(("compressor", "indexer.compressor"), keys.widths, strict=False)), keys.num_series
        contributed = {f"{name}.{kind}": factor * width for name, width in inner.items() for kind in ("wkv", "wgate")}
        self.contributed = linear(contributed)
        self.compressors = nnx.List(
            [Compressor(width, keys, eps=eps, source=f"{source}.{name}", build=build) for name, width in inner.items()]
        )
        index = keys.index
        self.indexer = (
            None
            if index is None
            else BlockIndexer(index, keys.q_rank, hidden_size, source=f"{source}.indexer", build=build)
        )

    def __call__(self, x: jax.Array, kept: Any, located: Any, step: StepInputs) -> tuple[jax.Array, Any]:
        """Map x[T, D] to ([T, D], the pool with the keys of completed blocks and the states after this step's tokens).
        kept: (the pool, the states). located: (LayerPages, StateRows). A layer without blocks gets the states and the
        StateRows alone, and returns the states alone. Raises ModelConfigError for a page size that does not suit the
        blocks.
        """
        blocks: TokenBlocks = step.blocks
        assert step.rope is not None
        has_blocks = self.keys.rate is not None
        (kv, states), (where, rows) = (kept, located) if has_blocks else ((None, kept), (None, located))
        with jax.named_scope("qkv"):
            q_latent, q, key = self._project(x, step)
            q, key = rotated(self.head_norm(q), step.rope), rotated(key[:, None], step.rope)[:, 0]
        window = recent(key, states[0], rows, blocks)
        left = [window.after(states[0], rows)]
        pages = index = None
        if kv is not None and where is not None:
            contributed = recent(self.contributed(x, step.rows), states[1], rows, blocks)
            left.append(contributed.after(states[1], rows))
            with jax.named_scope("compress"):
                kv, pages = self._write(contributed, kv, where)
            if self.indexer is not None:
                with jax.named_scope("indexer"):
                    index = self.indexer(x, q_latent, step)
        with jax.named_scope("compressed_attention"):
            o = self._attend(q, window, pages, index)
        o = self._project_out(rotated_back(o, step.rope).astype(x.dtype), step)
        return o, (kv, tuple(left)) if has_blocks else tuple(left)

    def _project(self, x: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return, for x [T, D], the latent of queries [T, q_rank], queries [T, N, H] and normed keys [T, H], the two
        before rope.
        """
        q_latent, key = jnp.split(self.down(x, step.rows), (self.q_norm.weight.shape[0],), axis=1)
        q_latent = self.q_norm(q_latent)
        q = self.q_b(q_latent, step.rows).reshape(x.shape[0], -1, self.spec.head_dim)
        return q_latent, q, self.kv_norm(key)

    def _project_out(self, o: jax.Array, step: StepInputs) -> jax.Array:
        """Return the layer's output [T, D] for the outputs of its heads, o [T, N, H]: out_b of out_a of each group."""
        with jax.named_scope("o_proj"):
            o = self.out_a.batched_matmul(o.reshape(o.shape[0], -1, self.group_width), contract=1).astype(o.dtype)
            return self.out_b(o.reshape(o.shape[0], -1), step.rows)

    def _write(self, contributed: Recent, kv: KVPages, where: LayerPages) -> tuple[KVPages, BlockPages]:
        """Compute the keys of the blocks that this step completes and write them to the pool; return the new pool and
        the BlockPages that reads blocks from it. contributed: contributions of tokens. where: the layer's pages. Raises
        ModelConfigError for a page size that does not suit the blocks.
        """
        blocks, keys = contributed.blocks, self.keys
        assert blocks.rope is not None
        num_tokens, most = blocks.positions.shape[0], len(blocks.last)
        padded = jnp.pad(blocks.last, (0, -most % _MADE), constant_values=num_tokens)
        rope = tuple(jnp.pad(each, ((0, -most % _MADE), (0, 0))) for each in blocks.rope)
        lags = jnp.arange(keys.span - 1, -1, -1, dtype=jnp.int32)

        def make(tile: jax.Array, made: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """Return the arrays of keys `made` with the keys of blocks number `tile` * _MADE and the following _MADE -
            1 written.
            """
            first = tile * _MADE
            last, cos, sin = (lax.dynamic_slice_in_dim(each, first, _MADE) for each in (padded, *rope))
            rows = contributed.at(last, lags)
            seen = blocks.positions[jnp.minimum(last, num_tokens - 1)][:, None] >= lags
            new = []
            for compressor, (values, gates), done in zip(self.compressors, self._parts(rows), made, strict=True):
                own = rotated(compressor(values, gates, seen)[:, None], (cos, sin))[:, 0].astype(done.dtype)
                new.append(lax.dynamic_update_slice_in_dim(done, own, first, 0))
            return tuple(new)

        start = tuple(zeros_in_layer(kv.data, (len(padded), width), contributed.rows.dtype) for width in keys.widths)
        made = lax.fori_loop(0, -(-blocks.num_blocks // _MADE), make, start)
        return self._store([each[:most] for each in made], blocks, kv, where)

    def _store(
        self, made: Sequence[jax.Array], blocks: TokenBlocks, kv: KVPages, where: LayerPages
    ) -> tuple[KVPages, BlockPages]:
        """Write the keys of the blocks that the step completes, [M, H] each, to the pool; return the new pool and the
        BlockPages that reads blocks from it. made: the layer's keys and, with an indexer, its keys. Raises
        ModelConfigError for a page size that does not suit the blocks.
        """
        slots, ragged = self.keys.num_slots(kv.page_size), where.in_pool(kv.page_size)
        ends = ragged.slot_mapping.at[blocks.last].get(mode="fill", fill_value=-1)
        places = ends[:, None] - (slots - 1) + jnp.arange(slots, dtype=jnp.int32)
        places = jnp.where(ends[:, None] < 0, -1, places).reshape(-1)
        pieces = [self._in_slots(each, slots) for each in made]
        kv = kv_cache_update(kv, pieces[0], pieces[1] if len(pieces) > 1 else None, places)
        return kv, BlockPages(kv, ragged, slots, self.keys)

    def _parts(self, rows: jax.Array) -> list[tuple[jax.Array, ...]]:
        """Return (values, gates) for the layer's keys and, with an indexer, (values, gates) for the indexer's keys,
        split from contributions [B, span, C].
        """
        sizes = [self.keys.num_series * width for width in self.keys.widths for _ in range(2)]
        ends = np.cumsum(sizes)[:-1]
        parts = jnp.split(rows, ends, axis=-1)
        return [tuple(parts[at : at + 2]) for at in range(0, len(parts), 2)]

    def _in_slots(self, made: jax.Array, slots: int) -> jax.Array:
        """Return keys [M, H] cut into `slots` equal pieces each, [M * slots, 1, .]; zeros fill the last piece of a
        key."""
        made = jnp.pad(made, ((0, 0), (0, -made.shape[1] % slots)))
        return made.reshape(made.shape[0] * slots, 1, -1)

    def _attend(
        self, q: jax.Array, window: Recent, pages: BlockPages | None, index: tuple[jax.Array, ...] | None
    ) -> jax.Array:
        """Return the attention output f32[T, N, H] of queries q [T, N, H] over the window's keys and the complete
        blocks, computed TOKENS tokens at a time. Rows of padding are arbitrary. window: keys of this step and of the
        states. pages: None for a layer without blocks. index: arrays [T, ...] that `_fold_blocks` gets rows of: queries
        and weights of the indexer; None without one.
        """
        blocks, (num_tokens, num_heads, dim) = window.blocks, q.shape
        size = min(TOKENS, num_tokens)
        pad = (0, -num_tokens % size)
        given = [q, jnp.arange(num_tokens, dtype=jnp.int32), *(index or ())]
        given = [jnp.pad(each, (pad, *((0, 0),) * (each.ndim - 1))) for each in given]
        lags = jnp.arange(self.keys.window - 1, -1, -1, dtype=jnp.int32)
        fold = partial(folded, scale=self.spec.sm_scale)

        def attend(tile: jax.Array, o: jax.Array) -> jax.Array:
            rows, tokens, *of_index = (lax.dynamic_slice_in_dim(each, tile * size, size) for each in given)
            positions, seqs = blocks.positions[tokens], blocks.seqs[tokens]
            # A head's sink is a logit without a value.
            sinks = jnp.broadcast_to(self.sinks[...], (size, num_heads))
            softmax = sinks, jnp.ones_like(sinks), jnp.zeros((size, num_heads, dim))
            softmax = fold(softmax, rows, window.at(tokens, lags), lags <= positions[:, None])
            if pages is not None:
                softmax = self._fold_blocks(softmax, rows, (seqs, positions), of_index, pages)
            _, total, sums = softmax
            return lax.dynamic_update_slice_in_dim(o, sums / total[..., None], tile * size, 0)

        o = zeros_in_layer(window.rows, (num_tokens + pad[1], num_heads, dim))
        return lax.fori_loop(0, -(-blocks.num_tokens // size), attend, o)[:num_tokens]

    def _fold_blocks(
        self,
        softmax: tuple[jax.Array, ...],
        q: jax.Array,
        tokens: tuple[jax.Array, jax.Array],
        of_index: list[jax.Array],
        pages: BlockPages,
    ) -> tuple[jax.Array, ...]:
        """Return the online softmax `softmax` of queries [B, N, H] after adding the keys of all complete blocks, or of
        those that the indexer selects. tokens: sequences and positions of the queries, i32[B] each. of_index: queries
        and weights of the indexer; [] without one.
        """
        (seqs, positions), index = tokens, self.keys.index
        counts = (positions + 1) // (self.keys.rate or 1)
        if index is None:
            most, at_once = jnp.max(counts), min(_GATHERED, pages.most_blocks)

            def fold(number: jax.Array, softmax: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                """Return the online softmax after adding block group `number`, of `at_once` blocks."""
                own = number * at_once + jnp.arange(at_once, dtype=jnp.int32)
                own = jnp.broadcast_to(own, (len(seqs), at_once))
                return folded(softmax, q, pages.read(seqs, own), own < counts[:, None], self.spec.sm_scale)

            return lax.fori_loop(0, -(-most // at_once), fold, softmax)
        index_q, weights = of_index
        chosen = best_blocks(index_q, weights, seqs, counts, min(index.top_k, pages.most_blocks), pages)
        return self._fold_chosen(softmax, q, (seqs, counts), chosen, pages)

    def _fold_chosen(
        self,
        softmax: tuple[jax.Array, ...],
        q: jax.Array,
        tokens: tuple[jax.Array, jax.Array],
        chosen: jax.Array,
        pages: BlockPages,
    ) -> tuple[jax.Array, ...]:
        """Return the online softmax `softmax` of queries [B, N, H] after adding the keys of blocks `chosen` i32[B, k],
        in which -1 stands for none; there are none after the first n of a query that has n complete blocks. tokens:
        sequences and numbers of complete blocks of the queries, i32[B] each.
        """
        (seqs, counts), top_k = tokens, chosen.shape[1]
        at_once = min(_GATHERED, top_k)
        most = jnp.minimum(jnp.max(counts), top_k)
        chosen = jnp.pad(chosen, ((0, 0), (0, -top_k % at_once)), constant_values=-1)

        def fold(number: jax.Array, softmax: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """Return the online softmax after adding group `number` of `at_once` blocks."""
            own = lax.dynamic_slice_in_dim(chosen, number * at_once, at_once, axis=1)
            return folded(softmax, q, pages.read(seqs, own), own >= 0, self.spec.sm_scale)

        return lax.fori_loop(0, -(-most // at_once), fold, softmax)
