"""Pallas-Triton kernels of paged attention: split-KV attention of rows of few tokens, and the merge of cut rows.

Contains two kernels over `attention.hopper.schedule.DecodeItems`. A program of the first computes one item: the queries
of a row's tokens and of all query heads that share a KV head, over a range of blocks of keys. If the item is all of its
(row, kv head) pair, the program writes the result; else it writes a partial softmax. The second kernel merges these by
log-sum-exp, in order, so that the result is the same on every run. Queries, pages and results are read and written in
place, without copies into another layout. A prefill is cut into rows as well.

Latents (values that are the first columns of keys) are read once, for both products; the other columns of a key meet an
operand of queries of their own. Query heads that are too many for one program are tiles, which count as KV heads.

Triton requires powers of two, so shapes are padded to them by masks: masked elements are neither read nor written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxengine.pallas_kernels.attention.hopper.schedule import (
    DECODE_BEGIN,
    DECODE_END,
    DECODE_END_BLOCK,
    DECODE_FIRST_BLOCK,
    DECODE_HEAD,
    DECODE_KEYS,
    DECODE_PAIR,
    DECODE_POSITION,
    DECODE_SEQ,
    DecodeItems,
)
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec
from jaxengine.pallas_kernels.triton import LEAST, padded, widened
from jaxengine.pallas_kernels.tuning import TritonAttention

LOG2E = 1.4426950408889634
NOTHING = -1e30  # maximum of a row that has seen nothing, and the logit of an absent sink
NARROW = 128  # widest head whose blocks are 64 keys and 64 rows of queries; those of wider ones are half as long


def most_rows(spec: AttentionSpec) -> int:
    """Return the most query rows that share keys in a program, and the number of keys that it has at a time: 64, or 32
    if a head dim of `spec` is above NARROW. With two blocks of keys these fit the shared memory of Ada, 99 KiB.
    """
    return DECODE_KEYS if max(spec.head_dim, spec.v_head_dim) <= NARROW else DECODE_KEYS // 2


def keys_at_once(spec: AttentionSpec, dtype: Any) -> int:
    """Return the number of keys of a pool of `dtype` that a program multiplies at a time: `most_rows`, or half as many
    of latents in one-byte codes, which are widened in registers and stored for the second product.
    """
    return most_rows(spec) // (2 if spec.values_in_keys and jnp.dtype(dtype).itemsize == 1 else 1)


@dataclass(frozen=True)
class Shape:
    """Static shape parameters of the kernels. `spec` counts the heads that this device holds, and each tile of query
    heads as a KV head.

    Attributes:
      page_size: tokens of a page.
      tokens: most new tokens of a row.
      dtype: dtype of queries, results and operands of products.
      tiles: tiles of query heads that share a KV head of the pool.
    """

    spec: AttentionSpec
    page_size: int
    tokens: int
    dtype: Any
    tiles: int = 1

    @property
    def rows(self) -> int:
        """Number M of query rows of a (row, kv head) pair: `tokens` times the query heads of a kv head, padded to a
        power of two.
        """
        return padded(self.tokens * self.spec.group_size)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Columns of a key that each operand of queries meets: the first one, and their number."""
        key, value = self.spec.head_dim, self.spec.v_head_dim
        return ((0, value), (value, key - value)) if self.spec.values_in_keys else ((0, key),)


class _Refs(NamedTuple):
    """References that the first kernel (`_attend`) gets, in order: operands, initial results, results, partial
    results.

    Attributes:
      q: [T, N, columns] for each of Shape.parts.
      pool: [P, K, page * (H + Hv)], of latents page * H.
      page_table: i32 [S, W].
      scale: f32 [K] factor of the products.
      v_scale: f32 [K] factor of the output.
      sinks: f32 [N] in base 2.
      items, pair_items, item_parts, row_tokens: i32 [I, ITEM_FIELDS], [R * K + 1], [I] and [R, Q], see DecodeItems.
      empty_o, empty_lse: the results' initial values, in the same memory.
      o: [T, N, Hv].
      lse: f32 [T, N].
      part_o: f32 [parts, M, Hv].
      part_largest, part_total: f32 [parts, M].
    """

    q: tuple[Any, ...]
    pool: Any
    page_table: Any
    scale: Any
    v_scale: Any
    sinks: Any
    items: Any
    pair_items: Any
    item_parts: Any
    row_tokens: Any
    empty_o: Any
    empty_lse: Any
    o: Any
    lse: Any
    part_o: Any
    part_largest: Any
    part_total: Any


class _CutRefs(NamedTuple):
    """References that the second kernel (`_merge`) gets, in order: partial results, other operands, initial results,
    results.

    Attributes:
      sums: f32 [parts, M, Hv].
      largest, total: f32 [parts, M].
      pairs, bounds: i32 [C] and [C + 1], see Cuts.
      row_tokens: i32 [R, Q].
      v_scale: f32 [K].
      sinks: f32 [N] in base 2.
      whole_o, whole_lse: the first kernel's results, in the same memory.
      o: [T, N, Hv].
      lse: f32 [T, N].
    """

    sums: Any
    largest: Any
    total: Any
    pairs: Any
    bounds: Any
    row_tokens: Any
    v_scale: Any
    sinks: Any
    whole_o: Any
    whole_lse: Any
    o: Any
    lse: Any


def rows_attention(
    q: tuple[jax.Array, ...],
    pool: jax.Array,
    page_table: jax.Array,
    scales: tuple[jax.Array, jax.Array],
    sinks: jax.Array,
    items: DecodeItems,
    shape: Shape,
    sizes: TritonAttention,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute the attention of the tokens in rows of `items`: return o [T, N, Hv] in q's dtype and lse f32 [T, N]; 0
    and -inf for other tokens.

    q: [T, N, columns] for each of `shape.parts`. pool: [P, K, page * (H + Hv)], or page * H of latents, of any dtype of
    attend.KV_DTYPES. page_table: i32 [S, W]. scales: two
    f32 [K], the factor of the product of query and key code, and of the sum of value codes. sinks: f32 [N], -inf for a
    head without one. shape: static shape parameters. sizes: tile sizes. interpret: whether to run on the CPU. Calls two
    kernels: one over the items, then the merge of cut pairs.
    """
    num_tokens, num_heads, _ = q[0].shape
    rows, width = shape.rows, shape.spec.v_head_dim
    num_cuts = items.cuts.pairs.shape[0]
    parts = 2 * num_cuts  # a pair that n cuts fall into has n + 1 parts
    sinks = jnp.maximum(sinks * LOG2E, NOTHING)
    results = _structs(shape.dtype, (num_tokens, num_heads), width)
    partials = _structs(jnp.float32, (parts, rows), width)
    empty = jnp.zeros(results[0].shape, shape.dtype), jnp.full(results[1].shape, -jnp.inf, jnp.float32)
    o, lse, *partial = pl.pallas_call(
        lambda *refs: _attend(shape, _Refs(refs[: len(q)], *refs[len(q) :])),
        out_shape=(*results, *partials, partials[1]),
        grid=(items.items.shape[0],),
        input_output_aliases={len(q) + 9: 0, len(q) + 10: 1},
        compiler_params=_compiler_params(shape, sizes),
        interpret=interpret,
        name="paged_attention_rows",
    )(
        *(*q, pool, page_table, *scales, sinks),
        *(items.items, items.pair_items, items.cuts.item_parts, items.row_tokens, *empty),
    )
    return tuple(
        pl.pallas_call(
            lambda *refs: _merge(shape, sizes.merged_parts, _CutRefs(*refs)),
            out_shape=results,
            grid=(num_cuts, shape.tokens * shape.spec.group_size),
            input_output_aliases={8: 0, 9: 1},
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name="paged_attention_cuts",
        )(*partial, items.cuts.pairs, items.cuts.bounds, items.row_tokens, scales[1], sinks, o, lse)
    )


def _compiler_params(shape: Shape, sizes: TritonAttention) -> plt.CompilerParams:
    """Return Triton's options of the first kernel: 8 warps for more than 32 query rows, or LEAST over latents, else 4,
    and the stages of `sizes`.
    """
    if shape.spec.values_in_keys:
        return plt.CompilerParams(num_warps=8 if shape.rows > LEAST else 4, num_stages=sizes.selected_stages)
    return plt.CompilerParams(num_warps=8 if shape.rows > 32 else 4, num_stages=sizes.num_stages)


def _structs(dtype: Any, shape: tuple[int, int], width: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return two shapes for pallas_call: ShapeDtypeStruct [*shape, width] of `dtype`, and float32 `shape`."""
    return jax.ShapeDtypeStruct((*shape, width), dtype), jax.ShapeDtypeStruct(shape, jnp.float32)


def _attend(shape: Shape, refs: _Refs) -> None:
    """Compute the attention of the item whose index is the program's number. Writes its result, sinks included, to
    refs.o and refs.lse, or its partial softmax to refs.part_* if its pair is cut. Does nothing past the last item.
    """
    item = pl.program_id(0)

    @pl.when(item < refs.pair_items[refs.pair_items.shape[0] - 1])
    def _():
        spec, group, rows = shape.spec, shape.spec.group_size, shape.rows
        pair, head = refs.items[item, DECODE_PAIR], refs.items[item, DECODE_HEAD]
        lane = jnp.arange(rows, dtype=jnp.int32)
        index, query_head = lane // group, head * group + lane % group
        in_row = index < shape.tokens
        token = plt.load(refs.row_tokens.at[pair // spec.num_kv_heads, index], mask=in_row, other=refs.o.shape[0])
        live = token < refs.o.shape[0]
        q = []
        for operand, each in zip(refs.q, shape.parts, strict=True):
            columns, mask = masked_columns(each[1], live)
            q.append(plt.load(operand.at[token[:, None], query_head[:, None], columns], mask=mask, other=0))
        largest, total, acc = _softmax(shape, refs, item, q, index)
        part = refs.item_parts[item]
        columns, mask = masked_columns(spec.v_head_dim, live)

        @pl.when(part < 0)
        def _():
            sink = plt.load(refs.sinks.at[query_head])
            out, lse = _finished(largest, total, acc, sink, refs.v_scale[head // shape.tiles])
            plt.store(refs.o.at[token[:, None], query_head[:, None], columns], out.astype(shape.dtype), mask=mask)
            plt.store(refs.lse.at[token, query_head], lse, mask=live)

        @pl.when(part >= 0)
        def _():
            plt.store(refs.part_o.at[part, lane[:, None], columns], acc, mask=mask)
            plt.store(refs.part_largest.at[part, lane], largest)
            plt.store(refs.part_total.at[part, lane], total)


def _softmax(shape: Shape, refs: _Refs, item, q, index):
    """Return the partial softmax of an item: maxima in base 2 and denominators, f32 [M] each, and sums of value codes
    f32 [M, padded Hv].

    q: [M, padded columns] for each of `shape.parts`. index: i32 [M], index in the item's row of the token of each query
    row. The item's blocks are read from the pool; masked keys and slots that are not in use contribute nothing.
    """
    spec, page_size, num_keys = shape.spec, shape.page_size, keys_at_once(shape.spec, refs.pool.dtype)
    seq, head = refs.items[item, DECODE_SEQ], refs.items[item, DECODE_HEAD]
    begin, end = refs.items[item, DECODE_BEGIN], refs.items[item, DECODE_END]
    last, scale = (refs.items[item, DECODE_POSITION] + index)[:, None], refs.scale[head // shape.tiles]

    def attend_block(block, carry):
        largest, total, acc = carry
        key = block * num_keys + jnp.arange(num_keys, dtype=jnp.int32)
        in_use, offset = (key >= begin) & (key < end), key % page_size
        if page_size % num_keys == 0:
            # The last step of a block of the schedule may begin past the table.
            last_column = refs.page_table.shape[1] - 1
            page = refs.page_table[seq, jnp.minimum(block // (page_size // num_keys), last_column)]
        else:
            page = plt.load(refs.page_table.at[seq, key // page_size], mask=in_use, other=0)[:, None]

        def tile(start, width: int):
            return tile_of(shape.dtype, refs.pool, page, head // shape.tiles, start, width, in_use)

        keys = [tile(offset[:, None] * spec.head_dim + column, width) for column, width in shape.parts]
        at = page_size * spec.head_dim + offset[:, None] * spec.v_head_dim
        values = keys[0] if spec.values_in_keys else tile(at, spec.v_head_dim)
        products = reduce(add, (plt.dot(rows, own, trans_b=True) for rows, own in zip(q, keys, strict=True)))
        logits = jnp.where(_seen(spec, key[None], last, begin, end), _logits(spec, products, scale), -jnp.inf)
        new_largest = jnp.maximum(largest, jnp.max(logits, axis=1))
        decay = jnp.exp2(largest - new_largest)
        weights = jnp.exp2(logits - new_largest[:, None])
        total = total * decay + jnp.sum(weights, axis=1)
        acc = acc * decay[:, None] + plt.dot(weights.astype(shape.dtype), values)
        return new_largest, total, acc

    steps = DECODE_KEYS // num_keys
    first, stop = refs.items[item, DECODE_FIRST_BLOCK], refs.items[item, DECODE_END_BLOCK]
    return lax.fori_loop(first * steps, stop * steps, attend_block, no_keys(shape.rows, spec.v_head_dim))


def tile_of(dtype: Any, pool, page, head, start, width: int, in_use):
    """Load the keys or values of a block as operands [keys, padded width]. Slots that are not in use give 0: they may
    hold NaN, and 0 * NaN is not 0.

    dtype: dtype of the operands. page: page of the block, or i32 [keys, 1] of each key. start: i32 [keys, 1], offset of
    each key in the page's elements for kv head `head`. width: elements of a key or value. in_use: bool [keys].
    """
    columns, mask = masked_columns(width, in_use)
    source = pool.at[page, head, start + columns]
    if pool.dtype == dtype:
        return plt.load(source, mask=mask, other=0)
    return jnp.where(mask, widened(plt.load(source, mask=mask), dtype), 0)


def _logits(spec: AttentionSpec, products, scale):
    """Return the logits in base 2, soft cap applied, of query-key products f32 [M, keys]. scale: factor of the
    products, applied before a soft cap.
    """
    if (cap := spec.soft_cap) is None:
        return products * (scale * LOG2E)
    # tanh(x) = 1 - 2 / (1 + e^2x): the card's own tanh is accurate to 11 bits only.
    return (cap * LOG2E) - (2 * cap * LOG2E) / (1.0 + jnp.exp2(products * (scale * (2 * LOG2E / cap))))


def _seen(spec: AttentionSpec, key, last, begin, end):
    """Return bool [M, keys], whether each query row sees each key, by causal range, window (on both sides without
    `causal`) and chunk.

    key: i32 [1, keys] positions. last: i32 [M, 1], position of the row's token. begin, end: range of keys of the item.
    """
    seen = (key >= begin) & (key < end)
    if spec.causal:
        seen = seen & (key <= last)
    if spec.window is not None:
        seen = seen & (key > last - spec.window)
        if not spec.causal:
            seen = seen & (key < last + spec.window)
    if spec.chunk is not None:
        seen = seen & (key >= last // spec.chunk * spec.chunk)
    return seen


def _finished(largest, total, acc, sink, v_scale):
    """Return the output [M, Hv] and the natural log-sum-exp [M] of a softmax joined with a sink logit; 0 and -inf for
    rows with neither keys nor sink.

    largest, total, sink: f32 [M], maximum and sink in base 2. acc: f32 [M, Hv], sums of value codes. v_scale: factor of
    acc.
    """
    new_largest = jnp.maximum(largest, sink)
    decay = jnp.exp2(largest - new_largest)
    total = total * decay + jnp.where(sink > NOTHING, jnp.exp2(sink - new_largest), 0.0)
    divisor = jnp.where(total == 0, 1.0, total)  # NaN stays NaN
    lse = jnp.where(total == 0, -jnp.inf, (new_largest + jnp.log2(divisor)) / LOG2E)
    return acc * (decay * v_scale / divisor)[:, None], lse


def _merge(shape: Shape, most: int, refs: _CutRefs) -> None:
    """Merge the parts of one query of a cut pair, `most` parts at a time, in order, and write its result, sink
    included, to refs.o and refs.lse. The program's numbers are (cut, row). Writes nothing for an unused cut or a row
    without a token.
    """
    spec, cut, lane = shape.spec, pl.program_id(0), pl.program_id(1)
    pair = refs.pairs[cut]

    @pl.when(pair < refs.row_tokens.shape[0] * spec.num_kv_heads)
    def _():
        token = refs.row_tokens[pair // spec.num_kv_heads, lane // spec.group_size]
        kv_head = pair % spec.num_kv_heads
        head = kv_head * spec.group_size + lane % spec.group_size
        first, end = refs.bounds[cut], refs.bounds[cut + 1]

        def merge_parts(step, carry):
            largest, total, acc = carry
            part = first + step * most + jnp.arange(most, dtype=jnp.int32)
            live = part < end
            columns, mask = masked_columns(spec.v_head_dim, live)
            part_largest = plt.load(refs.largest.at[part, lane], mask=live, other=NOTHING)
            part_total = plt.load(refs.total.at[part, lane], mask=live, other=0)
            sums = plt.load(refs.sums.at[part[:, None], lane, columns], mask=mask, other=0)
            new_largest = jnp.maximum(largest, jnp.max(part_largest, keepdims=True))
            weight, decay = jnp.exp2(part_largest - new_largest), jnp.exp2(largest - new_largest)
            total = total * decay + jnp.sum(part_total * weight, keepdims=True)
            acc = acc * decay[:, None] + jnp.sum(sums * weight[:, None], axis=0, keepdims=True)
            return new_largest, total, acc

        nothing = no_keys(1, spec.v_head_dim)
        largest, total, acc = lax.fori_loop(0, pl.cdiv(end - first, most), merge_parts, nothing)
        tokens = jnp.full((1,), token)
        columns, mask = masked_columns(spec.v_head_dim, tokens < refs.o.shape[0])
        sink = jnp.full((1,), refs.sinks[head])
        o, lse = _finished(largest, total, acc, sink, refs.v_scale[kv_head // shape.tiles])
        plt.store(refs.o.at[token, head, columns], o.astype(shape.dtype), mask=mask)
        plt.store(refs.lse.at[tokens, head], lse, mask=tokens < refs.o.shape[0])


def no_keys(rows: int, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the running softmax of no keys: maxima NOTHING f32 [rows], denominators 0 f32 [rows], and sums of values 0
    f32 [rows, padded width].
    """
    zeros = jnp.zeros((rows,), jnp.float32)
    return jnp.full((rows,), NOTHING, jnp.float32), zeros, jnp.zeros((rows, padded(width)), jnp.float32)


def masked_columns(width: int, live):
    """Return the column numbers i32 [1, padded width], and a mask bool [len(live), padded width] that is True in
    columns below `width` of rows where `live`, bool [n], is.
    """
    columns = jnp.arange(padded(width), dtype=jnp.int32)[None]
    return columns, live[:, None] & (columns < width)
