"""Attention to the keys of the latest tokens, and to keys of blocks that one layer computes for several (DeepSeek-AI
2026, DeepSeek-V4.1).

A layer that owns keys of blocks writes them to its pages, with the indexer's key of each block; layers after it read
them. A layer that selects notes its selection, which the layers after it attend to as well. One layer may note, beside
its selection, candidates: the runs of blocks among which later layers select.

Keys are rounded before they are cached, as they were in training: those of the window to e4m3, those of blocks and
those of the indexer to e2m1, as are its queries. Where a key's elements are no multiple of a group's, as in no
published model, nothing is rounded. bfloat16 has every rounded number.

Further shape letters: W window, m tokens of a block, k selected blocks, c candidates, I heads of the indexer, J
elements of its keys, B tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.compressed import Candidates, SharedKeys
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.attention.blocks.compressed import (
    MERGED,
    SCORED,
    TOKENS,
    BlockIndexer,
    CompressedAttention,
    block_scores,
    first_numbers,
    merged_best,
)
from jaxengine.models.layers.attention.blocks.token_blocks import BlockPages, Recent, TokenBlocks, recent
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.base.section import SelectedKeys
from jaxengine.models.params.declare import Source
from jaxengine.models.quantization.registry import PLAIN
from jaxengine.pallas_kernels.zeros import zeros_in_layer

_KEY_GROUP, _BLOCK_GROUP, _INDEX_GROUP = 32, 16, 32  # elements that are rounded with one scale
_E4M3, _E2M1 = 448.0, 6.0  # largest numbers


def rotated_pairs(x: jax.Array, rope: tuple[jax.Array, jax.Array], *, back: bool = False) -> jax.Array:
    """Return x [T, heads, H] with its last R elements rotated, of which neighbours are a pair, or rotated back. rope:
    cos and sin [T, R / 2].

    Unlike in token_blocks.rotated the elements keep their order.
    """
    cos, sin = (each[:, None] for each in rope)
    sin = -sin if back else sin
    kept, last = jnp.split(x, (x.shape[-1] - 2 * cos.shape[-1],), axis=-1)
    even, odd = last[..., ::2].astype(jnp.float32), last[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return jnp.concatenate([kept, turned.reshape(last.shape).astype(x.dtype)], axis=-1)


def rounded_e4m3(x: jax.Array) -> jax.Array:
    """Return x [..., H] with every 32 elements rounded to e4m3 times a power of two, the least by which none overflows
    and at least 1e-4 / 448; x itself if H is no multiple of 32.
    """
    return _rounded(x, _KEY_GROUP, _to_e4m3, lambda largest: _power_above(jnp.maximum(largest, 1e-4) * (1 / _E4M3)))


def rounded_e2m1(x: jax.Array) -> jax.Array:
    """Return x [..., J] with every 32 elements rounded to e2m1 times a power of two, the least by which none overflows;
    x itself if J is no multiple of 32.
    """
    least = 6 * 2.0**-126
    return _rounded(x, _INDEX_GROUP, _to_e2m1, lambda largest: _power_above(jnp.maximum(largest, least) * (1 / _E2M1)))


def rounded_nvfp4(x: jax.Array) -> jax.Array:
    """Return x [..., H] with every 16 elements rounded to e2m1 times an e4m3 number, the largest of them divided by 6
    and at least 2 ** -9; x itself if H is no multiple of 16.
    """

    def scale(largest: jax.Array) -> jax.Array:
        return (jnp.maximum(largest, 6 * 2.0**-9) / _E2M1).astype(jnp.float8_e4m3fn).astype(jnp.float32)

    return _rounded(x, _BLOCK_GROUP, _to_e2m1, scale)


def _rounded(
    x: jax.Array, group: int, to_grid: Callable[[jax.Array], jax.Array], scale: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Return x [..., H] with each `group` of elements divided by its scale, rounded by `to_grid` and multiplied by the
    scale; x itself if H is no multiple of `group`. scale: maps the largest magnitudes of groups to scales.
    """
    if x.shape[-1] % group:
        return x
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group)
    factor = scale(jnp.max(jnp.abs(groups), axis=-1, keepdims=True))
    return (to_grid(groups / factor) * factor).reshape(x.shape).astype(x.dtype)


def _to_e4m3(x: jax.Array) -> jax.Array:
    """Return x rounded to the nearest numbers of e4m3, even mantissas in the middle, at most 448."""
    return jnp.clip(x, -_E4M3, _E4M3).astype(jnp.float8_e4m3fn).astype(jnp.float32)


def _to_e2m1(x: jax.Array) -> jax.Array:
    """Return x rounded to the nearest numbers of e2m1 (steps of 0.5 to 2, of 1 to 4, of 2 to 6), even mantissas in the
    middle, at most 6.
    """
    size = jnp.minimum(jnp.abs(x), _E2M1)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return jnp.sign(x) * jnp.round(size / step) * step


def _power_above(x: jax.Array) -> jax.Array:
    """Return the least powers of two that are at least x, f32 > 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return lax.bitcast_convert_type(exponents << 23, jnp.float32)


class SharedIndexer(BlockIndexer):
    """BlockIndexer whose queries are rounded and which, in a layer that owns keys of blocks, projects its own keys from
    those before rope.
    """

    def __init__(self, keys: SharedKeys, hidden_size: int, *, eps: float, source: str, build: Build):
        assert keys.index is not None
        super().__init__(keys.index, keys.q_rank, hidden_size, source=source, build=build)
        size = keys.index.head_dim
        if keys.owned:  # stored plain in published checkpoints
            plain = replace(build, scheme=PLAIN)
            self.k = plain.weight((keys.head_dim, size), (Source(f"{source}.wk", size),), ("latent", "latent"))
            self.k_norm = RMSNorm(size, eps, source=f"{source}.k_norm", build=build)

    def __call__(self, x: jax.Array, q_latent: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array]:
        """Return rotated and rounded queries [T, I, J] and the weights of their heads f32[T, I], for hidden states x
        [T, D] and the latent of queries [T, q_rank].
        """
        assert step.rope is not None
        q, weights = self.queries(x, q_latent, step)
        return rounded_e2m1(rotated_pairs(q, step.rope)), weights

    def keys(self, made: jax.Array, blocks: TokenBlocks) -> jax.Array:
        """Return the indexer's keys [M, J] of blocks with keys [M, H] before rope, rotated by the first positions of
        blocks and rounded.
        """
        assert blocks.rope is not None
        found = self.k_norm(self.k.matmul(made, out_dtype=made.dtype))
        return rounded_e2m1(rotated_pairs(found[:, None], blocks.rope)[:, 0])


class SharedKeysAttention(CompressedAttention):
    """Attention configured by a LayerAttention with SharedKeys. Query heads are split over devices; keys, and the
    weights that compute them, are whole on each device. A layer that selects sets the attribute `selected` in each
    call.
    """

    keys: SharedKeys

    def _declare_blocks(
        self, linear: Callable[..., Linear], hidden_size: int, *, eps: float, source: str, build: Build
    ) -> None:
        keys = self.keys
        if keys.owned:
            assert keys.rate is not None
            plain = replace(build, scheme=PLAIN, dtype=jnp.float32 if keys.rate > 1 else build.dtype)
            names = ("wkv",) if keys.rate == 1 else ("wkv", "wgate")
            sources = [Source(f"{source}.compressor.{name}", keys.head_dim) for name in names]
            self.contributed = plain.weight((hidden_size, keys.num_projected), sources, ("embed", "latent"))
            self.block_norm = RMSNorm(keys.head_dim, eps, source=f"{source}.compressor.norm", build=build)
        named = f"{source}.indexer"
        self.indexer = SharedIndexer(keys, hidden_size, eps=eps, source=named, build=build) if keys.selects else None

    def __call__(self, x: jax.Array, kept: Any, located: Any, step: StepInputs) -> tuple[jax.Array, Any]:
        """Map x[T, D] to ([T, D], the pool with the keys of completed blocks and the states after this step's tokens).
        kept: (the pool, the states). located: (LayerPages, StateRows). A layer without blocks gets the states and the
        StateRows alone, and returns the states alone. States of ids are neither read nor returned. Raises
        ModelConfigError for a page size that does not suit the blocks.
        """
        blocks: TokenBlocks = step.blocks
        assert step.rope is not None
        has_blocks = self.keys.rate is not None
        (kv, states), (where, rows) = (kept, located) if has_blocks else ((None, kept), (None, located))
        with jax.named_scope("qkv"):
            q_latent, q, key = self._project(x, step)
            q = rotated_pairs(q, step.rope)
            key = rounded_e4m3(rotated_pairs(key[:, None], step.rope)[:, 0])
        window = recent(key, states[0], rows, blocks)
        left, pages, index = [window.after(states[0], rows)], None, None
        if kv is not None and where is not None:
            pages = BlockPages(kv, where.in_pool(kv.page_size), self.keys.num_slots(kv.page_size), self.keys)
            if self.keys.owned:
                with jax.named_scope("compress"):
                    made, further = self._blocks(x, states[1:], rows, blocks)
                    left += further
                    kv, pages = self._write_blocks(made, blocks, kv, where)
            index = (self._selection(x, q_latent, window, pages, step),)
        with jax.named_scope("compressed_attention"):
            o = self._attend(q, window, pages, index)
        o = self._project_out(rotated_pairs(o, step.rope, back=True).astype(x.dtype), step)
        return o, (kv, tuple(left)) if has_blocks else tuple(left)

    def _blocks(
        self, x: jax.Array, states: tuple[jax.Array, ...], rows: Any, blocks: TokenBlocks
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Return the keys [M, H] before rope of the blocks that the step completes, and the states after it. Keys are
        means of the tokens' values (the value, if a block has one token), weighted in each column by the softmax of
        their gates and RMS normed. x: [T, D]. states: that of contributions first; unused where a block has one token.
        """
        rate = self.keys.rate or 1
        new = self.contributed.matmul(x.astype(jnp.float32) if rate > 1 else x, out_dtype=jnp.float32)
        if rate == 1:
            made = new[jnp.minimum(blocks.last, len(new) - 1)]
            return self.block_norm(made.astype(x.dtype)), []
        contributed = recent(new, states[0], rows, blocks)
        found = contributed.at(blocks.last, jnp.arange(rate - 1, -1, -1, dtype=jnp.int32))
        values, gates = jnp.split(found, 2, axis=-1)
        made = jnp.sum(values * jax.nn.softmax(gates, axis=1), axis=1)
        return self.block_norm(made.astype(x.dtype)), [contributed.after(states[0], rows)]

    def _write_blocks(self, made: jax.Array, blocks: TokenBlocks, kv: Any, where: LayerPages) -> tuple[Any, BlockPages]:
        """Write the keys of blocks and of the indexer to the pool, for keys [M, H] before rope; return the new pool and
        the BlockPages that reads blocks from it.
        """
        assert self.indexer is not None and blocks.rope is not None
        rotated = rounded_nvfp4(rotated_pairs(made[:, None], blocks.rope)[:, 0])
        return self._store([rotated, self.indexer.keys(made, blocks)], blocks, kv, where)

    def _selection(
        self, x: jax.Array, q_latent: jax.Array, window: Recent, pages: BlockPages, step: StepInputs
    ) -> jax.Array:
        """Return the blocks i32[T, k] that each token attends to, -1 for none: those that the layer selects, and then
        notes with the candidates after them, or those that an earlier layer has noted.
        """
        index, wanted = self.keys.index, self.keys.candidates
        assert index is not None
        top_k = min(index.top_k, pages.most_blocks)
        if self.indexer is None:
            assert step.selected is not None
            return step.selected[:, :top_k]
        with jax.named_scope("indexer"):
            given = [*self.indexer(x, q_latent, step), jnp.arange(x.shape[0], dtype=jnp.int32)]
            if wanted is not None and wanted.chosen:
                assert step.selected is not None
                given.append(step.selected[:, -_num_candidates(wanted, pages) :])
            count = top_k + (0 if wanted is None else _num_candidates(wanted, pages))
            choose = partial(_chosen, top_k=top_k, wanted=wanted, pages=pages)
            found = _in_tiles(choose, given, window.blocks, count, pages)
        self.selected = SelectedKeys(found)
        return found[:, :top_k]

    def _fold_blocks(
        self,
        softmax: tuple[jax.Array, ...],
        q: jax.Array,
        tokens: tuple[jax.Array, jax.Array],
        of_index: list[jax.Array],
        pages: BlockPages,
    ) -> tuple[jax.Array, ...]:
        """Return the online softmax `softmax` of queries [B, N, H] after adding the keys of the selected blocks.
        tokens: sequences and positions of the queries, i32[B] each. of_index: blocks, one i32[B, k].
        """
        (seqs, positions), (chosen,) = tokens, of_index
        return self._fold_chosen(softmax, q, (seqs, (positions + 1) // (self.keys.rate or 1)), chosen, pages)


def _num_candidates(wanted: Candidates, pages: BlockPages) -> int:
    """Return c, the number of candidates of a token: `wanted.count`, or all runs of blocks of the longest sequence."""
    return min(wanted.count, -(-pages.most_blocks // wanted.size))


def _in_tiles(
    choose: Callable[..., jax.Array], given: list[jax.Array], blocks: TokenBlocks, count: int, pages: BlockPages
) -> jax.Array:
    """Return i32[T, count], the results of `choose` for TOKENS tokens at a time; rows of padding are arbitrary.

    choose: maps (queries, weights, seqs, counts of complete blocks, candidates or None) of B tokens to i32[B, count].
    given: queries, weights, numbers of tokens and, if there are any, candidates, [T, ...] each.
    """
    num_tokens = blocks.positions.shape[0]
    size = min(TOKENS, num_tokens)
    pad = (0, -num_tokens % size)
    given = [jnp.pad(each, (pad, *((0, 0),) * (each.ndim - 1))) for each in given]
    rate = pages.keys.rate or 1

    def fill(tile: jax.Array, found: jax.Array) -> jax.Array:
        q, weights, tokens, *candidates = (lax.dynamic_slice_in_dim(each, tile * size, size) for each in given)
        counts = (blocks.positions[tokens] + 1) // rate
        own = choose(q, weights, blocks.seqs[tokens], counts, candidates[0] if candidates else None)
        return lax.dynamic_update_slice_in_dim(found, own, tile * size, 0)

    start = zeros_in_layer(pages.kv.data, (num_tokens + pad[1], count), jnp.int32)
    return lax.fori_loop(0, -(-blocks.num_tokens // size), fill, start)[:num_tokens]


def _chosen(
    q: jax.Array,
    weights: jax.Array,
    seqs: jax.Array,
    counts: jax.Array,
    candidates: jax.Array | None,
    *,
    top_k: int,
    wanted: Candidates | None,
    pages: BlockPages,
) -> jax.Array:
    """Return i32[B, k + c]: the k blocks with the highest scores among the first `counts` i32[B] of each sequence and
    within its `candidates` i32[B, c], best first, of equal ones the lowest; then c runs of blocks, ascending, if
    `wanted`. -1 stands for none and comes last. A run's score is that of its best block; that with the latest block
    comes before all others. c is 0 if nothing is wanted. q, weights, seqs: as in `best_blocks`. top_k: k.
    """
    size = 1 if wanted is None else wanted.size
    num_runs = 0 if wanted is None else _num_candidates(wanted, pages)
    runs_at_once = -(-min(MERGED * top_k, SCORED, pages.most_blocks) // size)
    # Up to so many blocks, all are selected, and all runs are candidates.
    bound = top_k if wanted is None else min(top_k, num_runs * size)
    most = jnp.max(counts)
    if candidates is None:
        num_tiles = -(-most // (runs_at_once * size))
    else:
        candidates = jnp.pad(candidates, ((0, 0), (0, -num_runs % runs_at_once)), constant_values=-1)
        num_tiles = jnp.int32(candidates.shape[1] // runs_at_once)

    def merge(number: jax.Array, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Return the best scores and blocks, and those of runs, after adding tile `number`."""
        if candidates is None:
            runs = jnp.broadcast_to(number * runs_at_once + jnp.arange(runs_at_once), (len(seqs), runs_at_once))
        else:
            runs = lax.dynamic_slice_in_dim(candidates, number * runs_at_once, runs_at_once, axis=1)
        blocks = (runs[..., None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(len(seqs), -1)
        seen = (blocks < counts[:, None]) & (blocks >= 0)
        keys = jnp.where(seen[..., None], pages.read(seqs, jnp.where(seen, blocks, 0), of_index=True), 0)
        scores = block_scores(q, weights, keys, seen)
        new = merged_best(best[:2], scores, blocks)
        if candidates is not None or not num_runs:
            return *new, *best[2:]
        of_runs = jnp.max(scores.reshape(len(seqs), -1, size), axis=-1)
        of_runs = jnp.where(runs == (counts[:, None] - 1) // size, jnp.inf, of_runs)
        return *new, *merged_best(best[2:], of_runs, runs)

    own = pages.kv.data
    start = [
        (zeros_in_layer(own, (len(seqs), n)) - jnp.inf, zeros_in_layer(own, (len(seqs), n), jnp.int32) - 1)
        for n in (top_k, num_runs)
    ]
    found = lax.fori_loop(0, jnp.where(most > bound, num_tiles, 0), merge, (*start[0], *start[1]))
    selected = jnp.where(
        counts[:, None] > bound, jnp.where(found[0] > -jnp.inf, found[1], -1), first_numbers(top_k, counts)
    )
    if not num_runs:
        return selected
    if candidates is not None:
        return jnp.concatenate([selected, candidates[:, :num_runs]], axis=1)
    last = jnp.int32(1 << 30)
    runs = jnp.sort(jnp.where(found[2] > -jnp.inf, found[3], last), axis=1)
    runs = jnp.where(
        counts[:, None] > num_runs * size, jnp.where(runs < last, runs, -1), first_numbers(num_runs, -(-counts // size))
    )
    return jnp.concatenate([selected, runs], axis=1)
