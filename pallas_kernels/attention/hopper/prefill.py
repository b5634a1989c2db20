"""Attention of runs of new tokens over paged keys and values, for Hopper, in Mosaic GPU.

The division of labour is FlashAttention-3's (Shah et al. 2024, arXiv 2407.08608), over pages. CTAs are persistent and
have three warpgroups: one moves data (prefill_load.py), and two compute in turns, so that one uses the tensor cores
while the other computes its softmax. The call and the computation are here; schedule.py decides which tokens form an
item.

A tile is 128 query rows: the tokens of an item times as many heads of one kv head as make 128 rows. Queries and outputs
are not copied into another layout. A TMA box must begin at a multiple of 8 tokens, so a tile loads from the last such
multiple up to its first token. It may compute up to 7 rows of other tiles, whose results it does not store.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxengine.pallas_kernels.attention.hopper.prefill_load import (
    NUM_OPERANDS,
    Refs,
    Tile,
    load_row,
    part_origin,
    produce,
    read_tile,
    scratch,
    tile_count,
)
from jaxengine.pallas_kernels.attention.hopper.prefill_shape import Shape
from jaxengine.pallas_kernels.attention.hopper.schedule import PREFILL_TOKEN, PrefillItems, prefill_block_q
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.mosaic_gpu import BOX_ROWS, LOG2E, WARPGROUP_ROWS, launch
from jaxengine.pallas_kernels.tuning import HopperAttention

PRODUCER = 2  # the warpgroup after the two that compute
# A kernel of three warpgroups begins with 168 registers per lane: 65,536 divided by 384 lanes, rounded down to a
# multiple of 8. A warpgroup may take registers that another gives up; if it asks for more than are free it waits for
# ever (PTX ISA, setmaxnreg).
REGISTERS = 3 * 168
NOTHING = -1e30  # running maximum of a row that has seen no key: finite, so that its weights are 0 and not NaN


def prefill_attention(
    q: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    items: PrefillItems,
    *,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    sizes: HopperAttention,
    interpret: Any = False,
    body: Callable[[Shape, Refs], None] | None = None,
    most_rows: int = 2 * WARPGROUP_ROWS,
) -> tuple[jax.Array, jax.Array]:
    """Compute the attention of the tokens in `items`: return o [T, N, H] in q's dtype and the natural log-sum-exp f32
    [T, N]; both are undefined for other tokens.

    q: [T, N, H] of bfloat16 or float16. kv: a pool in HEAD_TILES, of q's dtype or one-byte codes. spec: counts the
    heads that this device holds. sinks: f32 [N] or None. sizes: number of CTAs and stages. interpret: see
    `mosaic_gpu.launch`. body: function (shape, refs) that runs one warpgroup of a CTA with products in tensor memory;
    None for `_body`, which uses wgmma. most_rows: most query rows of a tile, the same as the schedule was built with.
    Raises ValueError if shared memory does not hold two blocks of keys and values.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_q = prefill_block_q(spec, most_rows)
    padded = max(block_q, -(-num_tokens // BOX_ROWS) * BOX_ROWS)
    q = q if padded == num_tokens else jnp.pad(q, ((0, padded - num_tokens), (0, 0), (0, 0)))
    shape = Shape(
        spec,
        padded,
        kv.page_size,
        block_q,
        q.dtype,
        kv.data.dtype,
        sizes.num_ctas,
        sinks is not None,
        sizes.prefill_stages,
        most_rows // 2,
        tensor_memory=body is not None,
    )
    num_items, rows = items.items.shape[0], (shape.num_groups, shape.tile_rows)
    memory = scratch(shape)
    ones = jnp.ones((spec.num_kv_heads,), jnp.float32)
    scales = [ones if scale is None else scale for scale in (kv.k_scale, kv.v_scale)]
    base2 = jnp.full((num_heads,), NOTHING) if sinks is None else jnp.maximum(sinks * LOG2E, NOTHING)

    def run(*given: Any) -> None:
        allocated = iter(given[NUM_OPERANDS:])
        (body or _body)(shape, Refs(*given[:NUM_OPERANDS], *(each and next(allocated) for each in memory)))

    o, lse = launch(
        run,
        *(q, kv.data.reshape(-1, head_dim), batch.page_table, batch.cu_q_lens, batch.kv_lens),
        *(items.items, items.num_items, jnp.concatenate(scales), jnp.repeat(base2, block_q).reshape(rows)),
        name="paged_attention_prefill",
        outputs=[
            jax.ShapeDtypeStruct((padded, num_heads, shape.output_width), q.dtype),
            jax.ShapeDtypeStruct((num_items, *rows), jnp.float32),
        ],
        scratch=[each for each in memory if each is not None],
        num_ctas=sizes.num_ctas,
        num_warpgroups=shape.computing + 1,
        interpret=interpret,
    )
    item = jnp.minimum(items.token_item, num_items - 1)
    column = jnp.arange(num_tokens) - load_row(shape, items.items[item, PREFILL_TOKEN]) * BOX_ROWS
    lse = lse.reshape(num_items, num_heads, block_q)[item, :, jnp.clip(column, 0, block_q - 1)]
    return o[:num_tokens, :, :head_dim], lse


def registers(shape: Shape) -> tuple[int, int]:
    """Return the registers per lane of the producer warpgroup and of each computing warpgroup, chosen to avoid spills
    where possible: the producer has most if it widens or accumulators are in tensor memory, fewest for a head dim over
    192, whose accumulators need them. The two computing warpgroups share the rest.
    """
    producer = 88 if shape.widens or shape.tensor_memory else 72 if shape.spec.head_dim <= 192 else 56
    return producer, (REGISTERS - producer) // 2


def _body(shape: Shape, refs: Refs) -> None:
    """Run the program of one warpgroup of a CTA over all of the CTA's tiles: warpgroup 2 (PRODUCER) loads their data
    and gives up registers; warpgroups 0 and 1, which take them, each compute and store half of every tile's rows.
    """
    (producer, compute), cta = registers(shape), lax.axis_index("cta")
    warpgroup = lax.axis_index("wg")

    @pl.when(warpgroup == PRODUCER)
    def _():
        plgpu.set_max_registers(producer, action="decrease")
        produce(shape, refs, cta)

    @pl.when(warpgroup < PRODUCER)
    def _():
        plgpu.set_max_registers(compute, action="increase")
        # The second warpgroup stays half a block behind the first: each has the tensor cores to itself.
        pl.when(warpgroup == 1)(lambda: _take_turn(refs))
        count = tile_count(shape, refs, cta)
        nothing = jnp.zeros((WARPGROUP_ROWS, shape.spec.head_dim), jnp.float32)
        attend = partial(_attend_block, shape, refs, warpgroup)

        def attend_next(index, step):
            return attend_tile(shape, refs, cta, warpgroup, index, step, nothing, attend, _columns)

        lax.fori_loop(0, count, attend_next, jnp.int32(0))
        pl.when(warpgroup == 0)(lambda: _take_turn(refs))
        plgpu.wait_smem_to_gmem(0)


def _take_turn(refs: Refs) -> None:
    """End this computing warpgroup's turn at the tensor cores, and wait for its next one."""
    plgpu.barrier_arrive(refs.turn)
    plgpu.barrier_wait(refs.turn)


def _columns(acc, first: int, end: int):
    """Return columns [first, end) of the sums `acc`, f32 [64, H]."""
    return acc[:, first:end]


def attend_tile(
    shape: Shape, refs: Refs, cta, warpgroup, index, step, nothing, attend_block: Callable, columns: Callable
):
    """Compute and store a warpgroup's rows of the CTA's index-th tile by online softmax (Milakov & Gimelshein 2018,
    arXiv 1805.02867), and return `step` plus the number of the tile's blocks.

    step: number of blocks that the CTA has done before this tile. Blocks that all rows see in full need no mask; those
    at the edges of the causal range and of the window do. nothing: sums of values before the first block. Waits for the
    tile's queries, and frees their buffer before the results are stored.
    attend_block(step, tile, block, (sums, largest, total), scale, mask): adds a block and returns the new triple, see
    `_attend_block`. columns(sums, first, end): columns [first, end) of the final sums, f32 [rows, end - first].
    """
    tile = read_tile(shape, refs, cta, index)
    whole_from, whole_to = _whole_blocks(shape, tile)
    scale = jnp.float32(shape.spec.sm_scale * LOG2E)
    if shape.widens:
        scale = scale * refs.scales[tile.kv_head]
    plgpu.barrier_wait(refs.q_full.at[warpgroup])

    def visible(block):
        # Read again, here and below, because registers are scarcer than loads.
        return _visible(shape, read_tile(shape, refs, cta, index), warpgroup, block)

    def attend(masked: bool):
        mask = visible if masked else None
        return lambda block, carry: attend_block(step, tile, block, carry, scale, mask)

    rows = shape.warpgroup_rows
    carry = nothing, jnp.full((rows,), NOTHING, jnp.float32), jnp.zeros((rows,), jnp.float32)
    if shape.spec.window is not None:
        carry = lax.fori_loop(0, whole_from, attend(True), carry)
    carry = lax.fori_loop(whole_from, whole_to, attend(False), carry)
    sums, largest, total = lax.fori_loop(whole_to, tile.num_blocks, attend(True), carry)
    weight = 1 / jnp.maximum(total, 1e-30)  # a row that has seen nothing: 0 / 1e-30
    if shape.has_sinks:
        largest, total, weight = _join_sink(shape, refs, warpgroup, largest, total)
        plgpu.commit_smem()  # the next tile's sinks are copied where these were read
    plgpu.barrier_arrive(refs.q_free.at[warpgroup])
    results = partial(columns, sums), largest, total, weight
    _store(shape, refs, read_tile(shape, refs, cta, index), warpgroup, *results)
    return step + tile.num_blocks


def _whole_blocks(shape: Shape, tile: Tile) -> tuple[Any, Any]:
    """Return the range [from, to) of the tile's blocks that all of its rows see in full, as two i32 []. Both bounds lie
    within the tile's blocks, also if the range is empty.
    """
    spec, block_kv, begin = shape.spec, jnp.int32(shape.block_kv), tile.begin(shape)
    seen_by_all = (tile.position + 1 if spec.causal else tile.end) - begin
    whole_from, whole_to = jnp.int32(0), lax.div(seen_by_all, block_kv)
    if spec.window is not None:
        hidden = jnp.maximum(tile.position + tile.num_rows - spec.window - begin, 0)
        whole_from = jnp.minimum(lax.div(hidden + (block_kv - 1), block_kv), tile.num_blocks)
        whole_to = jnp.maximum(whole_from, whole_to)
    return whole_from, whole_to


def _join_sink(shape: Shape, refs: Refs, warpgroup, largest, total):
    """Add the attention sink's logit, in refs.sink_smem, to the softmax of each row of a warpgroup. Return (largest,
    total, weight), f32 [rows] each: the new maximum in base 2, the new denominator, and the factor that normalises the
    row's sum of values. A sink of NOTHING is absent.
    """
    sink = refs.sink_smem[pl.ds(warpgroup * shape.warpgroup_rows, shape.warpgroup_rows)]
    new_largest = jnp.maximum(largest, sink)
    decay = jnp.exp2(largest - new_largest)
    total = total * decay + jnp.where(sink > NOTHING, jnp.exp2(sink - new_largest), 0.0)
    return new_largest, total, decay / jnp.maximum(total, 1e-30)


def _attend_block(shape: Shape, refs: Refs, warpgroup, step, _tile: Tile, block, carry, scale, mask):
    """Add one block of a tile to the running softmax and return the new (acc, largest, total), `largest` in base 2.

    step: blocks done before the tile; block: index within it. carry: (acc f32 [64, H], largest and total f32 [64]).
    scale: factor of the products of queries and keys, log2(e) included. mask: function of the block's index that
    returns bool [64, block_kv], the keys that each row sees; None if the rows see all.

    Waits for the block's keys and values and frees their buffers. Takes turns at the tensor cores with the other
    computing warpgroup.
    """
    acc, largest, total = carry
    slot = lax.rem(step + block, jnp.int32(shape.stages))
    if shape.spec.head_dim > 192:
        # The queries are made to depend on the block (the term added is 0): their descriptors for 16 instructions would
        # otherwise be kept in registers from block to block, and others spilled for them.
        warpgroup = warpgroup + lax.div(block, jnp.int32(1 << 30))
    queries = refs.q_smem.at[pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)]
    plgpu.barrier_wait(refs.k_full.at[slot])

    def multiply(products):
        plgpu.wgmma(products, queries, refs.k_smem.at[slot].transpose((1, 0)))
        _take_turn(refs)
        return products[...]

    products = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, shape.block_kv), jnp.float32))
    plgpu.barrier_arrive(refs.k_free.at[slot])
    weights, decay, new_largest, total = softmax(shape, products, largest, total, scale, mask and mask(block))
    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
    weights = weights.astype(shape.dtype)
    # The barrier keeps the softmax from sinking below it, into this warpgroup's turn at the tensor cores.
    acc, new_largest, total, weights = lax.optimization_barrier((acc, new_largest, total, weights))
    plgpu.barrier_arrive(refs.turn)
    plgpu.barrier_wait(refs.v_full.at[slot])
    plgpu.barrier_wait(refs.turn)
    add = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, refs.v_smem.at[slot]))
    acc = add(plgpu.WGMMAAccumulatorRef.init(acc))
    plgpu.barrier_arrive(refs.v_free.at[slot])
    return acc, new_largest, total


def softmax(shape: Shape, products, largest, total, scale, mask):
    """Add a block's products to the running softmax: return (weights f32 [rows, block_kv], decay, new largest, new
    total), the last three f32 [rows]. decay is the factor of the sums of values so far.

    products: f32 [rows, block_kv] of queries and keys. largest (in base 2), total: f32 [rows] of the blocks so far.
    scale: factor of the products, log2(e) included. mask: bool [rows, block_kv], the keys that rows see; None if they
    see all.
    """
    logits, scale = _logits(shape.spec, products, scale)
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    new_largest = jnp.maximum(largest, logits.max(axis=1) * scale)
    decay = jnp.exp2(largest - new_largest)
    weights = jnp.exp2(logits * scale - lax.broadcast_in_dim(new_largest, logits.shape, [0]))
    return weights, decay, new_largest, total * decay + weights.sum(axis=1)


def _logits(spec: AttentionSpec, products, scale):
    """Return (x, factor) such that x * factor is the logits in base 2, soft cap applied, of products f32 [rows,
    block_kv].

    scale: factor of the products, log2(e) included. If it is positive and there is no cap, x is the products and factor
    is `scale`, which the caller's multiply-add then applies. factor is never negative, so maxima may be taken of x.
    """
    if (cap := spec.soft_cap) is not None:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): the card's own tanh is accurate to 11 bits only, and its division is slow.
        grown = jnp.exp2(products * (scale * (2 / cap)))
        return 1 - jnp.exp2(1 - jnp.log(1 + grown) * LOG2E), jnp.float32(cap * LOG2E)
    return (products, scale) if spec.sm_scale > 0 else (products * scale, jnp.float32(1))


def _visible(shape: Shape, tile: Tile, warpgroup, block):
    """Return bool [rows, block_kv], whether each row of a warpgroup sees each key of the tile's block-th block, by the
    causal range and the window. Without `causal`, every row sees all keys before tile.end.
    """
    spec, area = shape.spec, (shape.warpgroup_rows, shape.block_kv)
    key = lax.broadcasted_iota(jnp.int32, area, 1) + (tile.begin(shape) + block * shape.block_kv)
    if not spec.causal:
        return key < tile.end
    row = lax.broadcasted_iota(jnp.int32, area, 0) + warpgroup * shape.warpgroup_rows
    position = (row & (shape.block_q - 1)) + (tile.position - tile.token + tile.load_row * BOX_ROWS)
    visible = key <= position
    return visible if spec.window is None else visible & (key > position - spec.window)


def _store(shape: Shape, refs: Refs, tile: Tile, warpgroup, sums, largest, total, weight) -> None:
    """Write the warpgroup's rows of the tile to the results: the output for the tile's own tokens, the natural
    log-sum-exp for all rows. The copies go through shared memory, which the last ones may still be reading on return.

    sums(first, end): columns of the sums of values, f32 [rows, end - first]. weight: f32 [rows], factor of the sums;
    the pool's value scale, if any, is multiplied in here. largest (in base 2), total: f32 [rows].
    """
    rows, head_dim = pl.ds(warpgroup * shape.warpgroup_rows, shape.warpgroup_rows), shape.spec.head_dim
    if shape.widens:
        weight = weight * refs.scales[shape.spec.num_kv_heads + tile.kv_head]
    lse = largest * (1 / LOG2E) + jnp.log(total)
    columns = shape.output_columns
    for column in range(0, head_dim, columns):
        piece = sums(column, min(column + columns, head_dim))
        piece = (piece * lax.broadcast_in_dim(weight, piece.shape, [0])).astype(shape.dtype)
        plgpu.wait_smem_to_gmem(0)
        if column == 0:
            refs.lse_smem[rows] = lse
        refs.o_smem[rows, pl.ds(0, piece.shape[1])] = piece
        plgpu.commit_smem()
        if column == 0:
            plgpu.copy_smem_to_gmem(refs.lse_smem.at[rows], refs.lse.at[tile.item, tile.group, rows])
        _store_rows(shape, refs, tile, warpgroup, pl.ds(column, columns))


def _store_rows(shape: Shape, refs: Refs, tile: Tile, warpgroup, columns) -> None:
    """Start the copies from o_smem to `columns` (a slice) of the output, for the warpgroup's rows that belong to the
    tile's own tokens.

    A TMA box has a fixed size, so the number of rows is split into powers of two, one copy each.
    """
    for index in range(shape.parts):
        part = warpgroup * shape.parts + index
        head, offset = part_origin(shape, part)
        head = tile.group * shape.heads + head
        first = tile.load_row * BOX_ROWS + offset
        low = jnp.clip(tile.token - first, 0, shape.part)
        count = jnp.clip(tile.token + tile.num_rows - first, 0, shape.part) - low
        size = shape.part
        while size:

            @pl.when((count & size) > 0)
            def _(low=low, size=size, part=part, head=head, first=first):
                source = refs.o_smem.at[pl.ds(part * shape.part + low, size)]
                plgpu.copy_smem_to_gmem(source, refs.o.at[pl.ds(first + low, size), head, columns])

            low = low + (count & size)
            size //= 2
