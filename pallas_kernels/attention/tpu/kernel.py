"""Body of the TPU attention kernel: one walk over segments and blocks of keys, for single tokens and runs alike.

Online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867; FlashAttention, Dao et al. 2022, arXiv 2205.14135) over
the segments of schedule.py. One flat walk over all sequences, so that copies never pause between them, is the idea of
jax's and tpu-inference's ragged paged attention (arXiv 2604.15464).

Rows of a tile are ordered (head of the group, token), so that the tokens of one head are neighbours in memory and in
the mask. Where all heads are one large group, they are ordered (token, head), as the incoming queries are. Only the
arithmetic is here: pages.py loads the pages, attend.py arranges queries, and all sizes are in the `Plan`.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxengine.pallas_kernels.attention.tpu import words
from jaxengine.pallas_kernels.attention.tpu.pages import (
    FETCH_BLOCK,
    FETCH_SEGMENT,
    SLOT,
    Item,
    Part,
    Plan,
    Refs,
    Segment,
    fetch,
    is_last_block,
    next_item,
    read_segment,
    segments_before,
    start_walk,
    wait_for,
    zero_unseen_values,
)
from jaxengine.pallas_kernels.attention.tpu.tiles import LANES, Window

LOG2E = math.log2(math.e)
# Finite stand-ins for -inf: exp2(MASKED - NOTHING_SEEN) is 0 where inf - inf would be NaN.
NOTHING_SEEN = -1e30
MASKED = -3e38


def attention_kernel(*refs, plan: Plan) -> None:
    """Run one grid step: compute the attention of the segments of `plan.blocks.tiles` tiles. Grid: (cores, steps of a
    core).

    refs: the fields of `Refs`, in order, of which this writes o, lse and the scratch.
    """
    _grid_step(Refs(*refs), plan)


def _grid_step(refs: Refs, plan: Plan) -> None:
    """Compute the attention of all items of the grid step's tiles in order, and start the copies of the items that
    follow, `buffers - 1` ahead.

    Writes o and lse of these tiles (0 and -inf for tiles without tokens) and refs.cursor, with which the next step
    continues. A core's first step also starts its copies.
    """
    buffers, tiles = plan.blocks.buffers, plan.blocks.tiles
    core, step = pl.program_id(0), pl.program_id(1)
    first_tile = (step * plan.cores + core) * tiles
    begin, end = segments_before(refs, first_tile), segments_before(refs, first_tile + tiles)
    end_of_all = segments_before(refs, refs.walk.tile_start.shape[0])

    # Tiles with tokens are adjacent: if the first and the last tile have some, all have.
    has_empty = (segments_before(refs, first_tile + 1) == begin) | (
        segments_before(refs, first_tile + tiles - 1) == end
    )

    @pl.when(has_empty)
    def _():
        refs.o[...] = jnp.zeros_like(refs.o)
        refs.lse[...] = jnp.full_like(refs.lse, -jnp.inf)

    pl.when(step == 0)(lambda: start_walk(refs, plan, begin, end_of_all))

    def work(carry):
        item, fetched, slot = carry
        fetched = fetch(refs, plan, fetched, lax.rem(slot + buffers - 1, buffers), end_of_all)
        segment = read_segment(refs, item)
        wait_for(refs, plan, segment, item, slot)
        _work_item(refs, plan, segment, item, slot, segment.tile - first_tile)
        return next_item(refs, plan, segment, item), fetched, lax.rem(slot + 1, buffers)

    cursor = refs.cursor
    carry = ((begin, jnp.int32(0)), (cursor[FETCH_SEGMENT], cursor[FETCH_BLOCK]), cursor[SLOT])
    _end, (segment, block), slot = lax.while_loop(lambda carry: carry[0][0] < end, work, carry)
    cursor[FETCH_SEGMENT], cursor[FETCH_BLOCK], cursor[SLOT] = segment, block, slot


def _work_item(refs: Refs, plan: Plan, segment: Segment, item: Item, slot, sub) -> None:
    """Fold one item's block of keys, which is in buffer `slot`, into the running softmax of the grid step's tile `sub`.

    The first item of a tile also initialises the running softmax, the last one writes the tile's results. Values in the
    buffer that the segment does not see are overwritten with 0. Only as many parts of the block are folded as hold
    visible keys.
    """
    index, block = item
    first_key = segment.first_page * plan.page_size + block * plan.block_kv
    tile_start = refs.walk.tile_start

    @pl.when((block == 0) & (index == tile_start[segment.tile]))
    def _():
        refs.largest[...] = jnp.full_like(refs.largest, NOTHING_SEEN)
        refs.total[...] = jnp.zeros_like(refs.total)
        refs.acc[...] = jnp.zeros_like(refs.acc)

    counts, live = _counts(plan), _live_parts(plan, segment, first_key)
    zero_unseen_values(refs, plan, segment, first_key, slot, live * (plan.blocks.pages // counts[-1]))
    if len(counts) > 1:
        for count in counts:
            fold = functools.partial(_fold_block, refs, plan, segment, first_key, slot, sub, masked=True, parts=count)
            pl.when(live == count)(fold)
    elif plan.block_q == 1:  # one row: its mask costs less than a second copy of the program
        _fold_block(refs, plan, segment, first_key, slot, sub, masked=True)
    else:
        whole = _is_whole(plan, segment, first_key)
        pl.when(whole)(lambda: _fold_block(refs, plan, segment, first_key, slot, sub, masked=False))
        pl.when(~whole)(lambda: _fold_block(refs, plan, segment, first_key, slot, sub, masked=True))

    @pl.when(is_last_block(segment, item, plan) & (index + 1 == tile_start[segment.tile + 1]))
    def _():
        for head in range(len(plan.keys)):
            _close_head(refs, plan, sub, head)


def _counts(plan: Plan) -> list[int]:
    """Return, in ascending order, the numbers of leading parts of a block's pages that the kernel has separate code
    for; the last is all parts.
    """
    parts = plan.parts if plan.block_q == 1 else 1
    return [count for count in range(1, parts + 1) if parts % count == 0]


def _live_parts(plan: Plan, segment: Segment, first_key) -> jax.Array | int:
    """Return the least of `_counts` whose parts hold all keys that the segment sees of the block from position
    `first_key` on. It is an int if there is only one count.
    """
    *counts, parts = _counts(plan)
    live = pl.cdiv((segment.end_key - first_key) * parts, plan.block_kv)
    return functools.reduce(lambda most, count: jnp.where(live <= count, count, most), reversed(counts), parts)


def _is_whole(plan: Plan, segment: Segment, first_key) -> jax.Array:
    """Return whether every row of the segment's tile sees every key of the block from position `first_key` on; False
    for blocks to which a tree mask applies.
    """
    seen_by_all = segment.position + 1 if plan.spec.causal else segment.end_key
    whole = (segment.first_row == 0) & (segment.end_row == plan.block_q) & (first_key + plan.block_kv <= seen_by_all)
    if plan.spec.window is not None:
        whole &= first_key >= segment.position + plan.block_q - plan.spec.window
    if (chunk := plan.spec.chunk) is not None:
        whole &= first_key >= (segment.position + plan.block_q - 1) // chunk * chunk
    if plan.num_tree_words:
        whole &= first_key + plan.block_kv <= segment.num_computed
    return whole


def _visible(refs: Refs, plan: Plan, segment: Segment, first_key, sub) -> tuple[jax.Array, jax.Array]:
    """Return (visible, member). visible: bool [block_q, block_kv], whether each token of tile `sub` sees each key of
    the block from position `first_key` on, by the causal range, window, chunk, tree mask and refs.seen; False for
    tokens of other segments. member: bool [block_q, 1], whether the token belongs to the segment.
    """
    spec, shape = plan.spec, (plan.block_q, plan.block_kv)
    row = lax.broadcasted_iota(jnp.int32, (plan.block_q, 1), 0)
    key = lax.broadcasted_iota(jnp.int32, shape, 1)
    member = (row >= segment.first_row) & (row < segment.end_row)
    end = (segment.position + row + 1 if spec.causal else segment.end_key) - first_key
    visible = key < jnp.where(member, end, 0)
    if spec.window is not None:
        visible &= key >= end - spec.window
    if spec.chunk is not None:
        # From the chunk of the segment's first token on; rows after a later border start at that border.
        start = (segment.position + segment.first_row) // spec.chunk * spec.chunk
        starts = jnp.broadcast_to(start, row.shape)
        for number in range(1, pl.cdiv(plan.block_q - 1, spec.chunk) + 1):
            border = start + number * spec.chunk
            starts = jnp.where(segment.position + row >= border, border, starts)
        visible &= key >= starts - first_key
    if plan.num_tree_words:
        words = refs.tree[pl.ds(sub * plan.block_q, plan.block_q)]
        bit = key + (first_key - segment.num_computed)
        for index in range(plan.num_tree_words):
            word = jnp.broadcast_to(words[:, index : index + 1], shape)
            seen = lax.shift_right_logical(word, bit & 31) & 1
            visible &= (bit < 32 * index) | (bit >= 32 * (index + 1)) | (seen == 1)
    if plan.has_seen:
        visible &= refs.seen[pl.ds(sub, 1), pl.ds(pl.multiple_of(first_key, LANES), plan.block_kv)] != 0
    return visible, member


def _fold_block(
    refs: Refs, plan: Plan, segment: Segment, first_key, slot, sub, *, masked: bool, parts: int | None = None
) -> None:
    """Fold a block of keys, in buffer `slot` and from position `first_key` on, into the running softmax of tile `sub`.

    The scores of a phase (one of `plan.phases`) are computed before the softmax and values of the previous phase.
    masked: whether some row may not see some key. parts: number of phases to fold, None for all; later ones hold no
    visible key.
    """
    visible = member = None
    if masked:
        visible, member = _visible(refs, plan, segment, first_key, sub)
    scores, waiting = {}, ()
    for phase in (*plan.phases[:parts], ()):
        scores |= {part: _scores(refs, plan, slot, sub, part, visible) for part in phase}
        _fold_scores(refs, plan, slot, {part: scores.pop(part) for part in waiting}, member)
        waiting = phase


def _fold_scores(refs: Refs, plan: Plan, slot, scores: dict[Part, jax.Array], member) -> None:
    """Fold the scores f32 [rows, keys] of some parts, in base 2, and their values in buffer `slot`, into the running
    softmax: refs.largest, refs.total and refs.acc.

    member: bool [block_q, 1], the tokens of the segment, to which alone values are added; None if that is all tokens.
    """
    rows = {part: (part.head, slice(part.first_row, part.end_row)) for part in scores}
    largest = {
        part: jnp.maximum(refs.largest[rows[part]], jnp.max(score, axis=1, keepdims=True))
        for part, score in scores.items()
    }
    weights, sums, decay = {}, {}, {}
    for part, score in scores.items():
        num_keys = score.shape[1]
        weight = jnp.exp2(score - _across(largest[part], num_keys))
        decay[part] = jnp.exp2(refs.largest[rows[part]] - largest[part])
        if not plan.sums_with_values(part.head):
            sums[part] = sum(weight[:, lane : lane + LANES] for lane in range(0, num_keys, LANES))
        refs.largest[rows[part]] = largest[part]
        weights[part] = weight.astype(plan.operand_dtype)
    for part, weight in weights.items():
        window = plan.values[part.head]
        values = _operand(refs, plan, slot, window, part)
        if plan.sums_with_values(part.head):
            values = jnp.concatenate([values, _ones_in_first_lane(values)], axis=1)
        product = lax.dot(weight, values, precision=_precision(plan), preferred_element_type=jnp.float32)
        if plan.sums_with_values(part.head):
            product, sums[part] = product[:, : window.size], product[:, window.size :]
        refs.total[rows[part]] = decay[part] * refs.total[rows[part]] + sums[part]
        if member is not None and plan.block_q > 1:
            # A value that is not finite stays with the sequence it belongs to: 0 * inf is NaN.
            product = _where_token(plan, part, member, product, 0.0)
        index = (*rows[part], slice(0, window.size))
        refs.acc[index] = _across(decay[part], window.size) * refs.acc[index] + product


def _scores(refs: Refs, plan: Plan, slot, sub, part: Part, visible) -> jax.Array:
    """Return the logits f32 [rows, keys] of a part, in base 2, of the queries of tile `sub` and the keys in buffer
    `slot`, after the scale and the soft cap.

    visible: bool [block_q, block_kv]; where it is False, logits are MASKED. None if all keys are visible.
    """
    window, q = plan.keys[part.head], _queries(refs, plan, sub, part)
    keys = _operand(refs, plan, slot, window, part)
    contract_last = (((1,), (1,)), ((), ()))
    scores = lax.dot_general(
        q[:, : window.size], keys, contract_last, _precision(plan), preferred_element_type=jnp.float32
    )
    scores *= refs.logit_scale[part.head]
    if (cap := plan.spec.soft_cap) is not None:
        scores = jnp.tanh(scores / cap) * (cap * LOG2E)
    if visible is None:
        return scores
    first_key = part.first_page * plan.page_size
    return _where_token(plan, part, visible[:, first_key : first_key + scores.shape[1]], scores, MASKED)


def _queries(refs: Refs, plan: Plan, sub, part: Part) -> jax.Array:
    """Return the queries [rows, width] of a part of tile `sub`, `q_rest` joined to them if there is one, padded with
    zeros at the end if the key window is wider.
    """

    def rows_of(ref):
        if plan.block_q == 1:
            return ref[sub, part.head]
        if plan.by_token:
            tokens = ref[part.first_row // plan.group : part.end_row // plan.group, part.head]
            return tokens.reshape(part.end_row - part.first_row, -1)
        heads = ref[part.head, part.first_row // plan.block_q : part.end_row // plan.block_q]
        return heads.reshape(part.end_row - part.first_row, -1)

    pieces = [rows_of(ref) for ref in (refs.q, refs.q_rest) if ref is not None]
    missing = plan.keys[part.head].size - sum(piece.shape[1] for piece in pieces)
    if missing > 0:
        pieces.append(jnp.zeros((pieces[0].shape[0], missing), pieces[0].dtype))
    return jnp.concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0]


def _operand(refs: Refs, plan: Plan, slot, window: Window, part: Part) -> jax.Array:
    """Return the columns of `window` of a part's pages in buffer `slot`, its keys or values, as [keys, window.size] of
    plan.operand_dtype.
    """
    if plan.in_words:
        return words.load(refs.buffer.at[slot, part.first_page : part.end_page], window.start, window.size).astype(
            plan.operand_dtype
        )
    tile = refs.buffer[slot, part.first_page : part.end_page, :, :, window.start : window.start + window.size]
    return tile.reshape(-1, window.size).astype(plan.operand_dtype)


def _ones_in_first_lane(values: jax.Array) -> jax.Array:
    """Return an array [keys, LANES] of ones in lane 0 and zeros elsewhere, of the dtype of values [keys, ...]."""
    lane = lax.broadcasted_iota(jnp.int32, (values.shape[0], LANES), 1)
    return jnp.where(lane == 0, 1.0, 0.0).astype(values.dtype)


def _precision(plan: Plan) -> lax.Precision:
    """Return the precision for products of queries with keys and of weights with values: HIGHEST for float32 operands,
    else the default.
    """
    # The matrix unit rounds float32 operands to bfloat16 by default.
    return lax.Precision.HIGHEST if plan.operand_dtype == jnp.float32 else lax.Precision.DEFAULT


def _where_token(plan: Plan, part: Part, condition: jax.Array, x: jax.Array, otherwise: float) -> jax.Array:
    """Return x [rows of the part, n] where the condition [block_q, n or 1] holds for the row's token, and `otherwise`
    elsewhere.
    """
    if plan.block_q == 1:
        return jnp.where(condition, x, otherwise)
    if plan.by_token:
        condition = condition[part.first_row // plan.group : part.end_row // plan.group, None]
        by_token = x.reshape(-1, plan.group, x.shape[1])
        return jnp.where(condition, by_token, otherwise).reshape(x.shape)
    by_head = x.reshape(-1, plan.block_q, x.shape[1])
    return jnp.where(condition[None], by_head, otherwise).reshape(x.shape)


def _across(x: jax.Array, size: int) -> jax.Array:
    """Return lane-replicated x [n, LANES] as [n, size], by repeating or cutting off registers; broadcasting a column
    would shuffle lanes.
    """
    if size <= LANES:
        return x[:, :size]
    repeats = -(-size // LANES)
    return jnp.concatenate([x] * repeats, axis=1)[:, :size]


def _close_head(refs: Refs, plan: Plan, sub, head: int) -> None:
    """Write the results of kv head `head` of finished tile `sub`: the output times value_scale to refs.o, and the
    natural log-sum-exp, sinks included, to refs.lse. Rows that saw no key get 0 and -inf, also with sinks.
    """
    largest = refs.largest[head]
    seen = jnp.broadcast_to(jnp.sum(refs.total[head], axis=1, keepdims=True), largest.shape)
    total, decay = seen, jnp.ones_like(seen)
    if plan.has_sinks:
        sink = _sink_rows(refs, plan, head)
        with_sink = jnp.maximum(largest, sink)
        decay = jnp.exp2(largest - with_sink)
        total, largest = seen * decay + jnp.exp2(sink - with_sink), with_sink
    lse = jnp.where(seen > 0, largest / LOG2E + jnp.log(jnp.where(seen > 0, total, 1.0)), -jnp.inf)
    scale = jnp.where(seen > 0, decay / jnp.where(seen > 0, total, 1.0), 0.0) * refs.value_scale[head]
    window, width = plan.values[head], plan.spec.v_head_dim
    o = refs.acc[head, :, : window.size] * _across(scale, window.size)
    o = o[:, window.offset : window.offset + width].astype(refs.o.dtype)
    if plan.block_q == 1:
        refs.o[sub, head] = o
    elif plan.by_token:
        refs.o[:, head] = o.reshape(plan.block_q, plan.group, width)
    else:
        refs.o[head] = o.reshape(plan.group, plan.block_q, width)
    _store_lse(refs, sub, head, lse)


def _sink_rows(refs: Refs, plan: Plan, head: int) -> jax.Array:
    """Return f32 [rows, LANES]: the sink, in base 2, of the query head (of kv head `head`) of each row, equal in all
    lanes; NOTHING_SEEN for rows of padded heads.
    """
    row = lax.broadcasted_iota(jnp.int32, (plan.rows, LANES), 0)
    member = row % plan.group if plan.by_token else row // plan.block_q
    sink = jnp.full((plan.rows, LANES), NOTHING_SEEN, jnp.float32)
    for index in range(plan.spec.group_size):
        sink = jnp.where(member == index, refs.sinks[head, index], sink)
    return sink


def _store_lse(refs: Refs, sub, head: int, lse: jax.Array) -> None:
    """Write lane-replicated `lse` [rows, LANES] of a kv head to row refs.lse[sub, head], one lane per row. In a column,
    each row would take a lane tile of HBM.
    """
    for first in range(0, lse.shape[0], LANES):
        part = lse[first : first + LANES]
        row, lane = (lax.broadcasted_iota(jnp.int32, part.shape, axis) for axis in (0, 1))
        diagonal = jnp.sum(jnp.where(row == lane, part, 0.0), axis=0, keepdims=True)
        refs.lse[sub, pl.ds(head, 1), first : first + LANES] = diagonal
