"""Merge of the partial softmaxes of decode.py and latent.py into results of split-KV attention on a GPU.

Contains one Mosaic GPU kernel. A unit of work merges 8 rows of a (row, kv head) pair by log-sum-exp, in item order, so
that the result is the same on every run, unlike that of XLA's scatter-add. The sink logits are added here, once per
row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxengine.pallas_kernels.attention.hopper.schedule import DecodeItems
from jaxengine.pallas_kernels.mosaic_gpu import BOX_ROWS, LOG2E, launch
from jaxengine.pallas_kernels.tuning import HopperAttention

BOX_COLUMNS = 256  # most columns of a TMA box
NOTHING = -1e30  # maximum of a row that has seen nothing, and the logit of an absent sink


class _Refs(NamedTuple):
    """References that the merge kernel gets, in launch order: operands and results in global memory, then shared memory
    and barriers.

    Attributes:
      o: [I, M, H].
      largest, total: f32 [I, M].
      pair_items: i32 [R * K + 1].
      sinks: f32 [K, M] in base 2.
      v_scale: f32 [K].
      out: [R * K, M, H].
      out_largest, out_total: f32 [R * K, M].
      o_smem: [stages, 8, H].
      largest_smem, total_smem: f32 [stages, 8].
      out_smem: [8, H].
      full: barrier per stage: its copies have arrived.
    """

    o: Any
    largest: Any
    total: Any
    pair_items: Any
    sinks: Any
    v_scale: Any
    out: Any
    out_largest: Any
    out_total: Any
    o_smem: Any
    largest_smem: Any
    total_smem: Any
    out_smem: Any
    full: Any


def merge_partials(
    o: jax.Array,
    largest: jax.Array,
    total: jax.Array,
    pair_items: jax.Array,
    sinks: jax.Array | None,
    v_scale: jax.Array,
    dtype: Any,
    *,
    sizes: HopperAttention,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Merge the items of every (row, kv head) pair: return outputs [R * K, M, H] of `dtype` and natural log-sum-exps
    f32 [R * K, M].

    o, largest, total: the results of `decode_partials`; or means of values, their log-sum-exps in base 2, and ones.
    pair_items: i32 [R * K + 1], the first item of each pair, then the end of the last. sinks: f32 [K, M] logits, or
    None. v_scale: f32 [K] multiplies the output. sizes: number of stages and CTAs. interpret: see `mosaic_gpu.launch`.
    A row that saw no key gets output 0, and log-sum-exp -inf unless it has a sink.
    """
    stages = sizes.merge_stages
    num_pairs, num_rows, width = pair_items.shape[0] - 1, largest.shape[1], o.shape[2]
    base2 = jnp.full((v_scale.shape[0], num_rows), NOTHING) if sinks is None else jnp.maximum(sinks * LOG2E, NOTHING)
    # A row that is wider than a TMA box becomes several rows with the same statistics.
    parts = pl.cdiv(width, BOX_COLUMNS)
    largest, total, base2 = (jnp.repeat(x, parts, axis=1) for x in (largest, total, base2))
    rows, head_dim = num_rows * parts, width // parts
    o = o.reshape(o.shape[0], -1, head_dim)
    out, largest, total = launch(
        lambda *refs: _body(_Refs(*refs)),
        *(o, largest, total, pair_items, base2, v_scale),
        name="paged_attention_merge",
        outputs=[
            jax.ShapeDtypeStruct((num_pairs, rows, head_dim), dtype),
            jax.ShapeDtypeStruct((num_pairs, rows), jnp.float32),
            jax.ShapeDtypeStruct((num_pairs, rows), jnp.float32),
        ],
        scratch=[
            plgpu.SMEM((stages, BOX_ROWS, head_dim), o.dtype),
            plgpu.SMEM((stages, BOX_ROWS), jnp.float32),
            plgpu.SMEM((stages, BOX_ROWS), jnp.float32),
            plgpu.SMEM((BOX_ROWS, head_dim), dtype),
            plgpu.Barrier(num_barriers=stages, num_arrivals=3),
        ],
        num_ctas=min(sizes.merge_ctas_per_sm * sizes.num_ctas, num_pairs * rows // BOX_ROWS),
        num_warpgroups=1,
        interpret=interpret,
    )
    return out.reshape(num_pairs, num_rows, width), (largest / LOG2E + jnp.log(total))[:, ::parts]


def merge_parts(
    whole: tuple[jax.Array, jax.Array],
    parts: tuple[jax.Array, jax.Array],
    items: DecodeItems,
    sinks: jax.Array | None,
    *,
    sizes: HopperAttention,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Merge the parts of cut pairs into the results of the others: return outputs [R * K, M, H] in o's dtype and
    natural log-sum-exps f32 [R * K, M] of every pair.

    whole, parts: the two results of `latent_attention`. sinks: f32 [K, M] logits, or None. sizes: number of stages and
    CTAs. interpret: see `mosaic_gpu.launch`. A pair without items gets output 0, and log-sum-exp -inf unless it has a
    sink. Only cut pairs, which are few, go through the merge kernel; their results are scattered into `whole`.
    """
    cuts, (o, lse), (part_o, part_lse) = items.cuts, whole, parts
    merged_o, merged_lse = merge_partials(
        *(part_o, part_lse, jnp.ones_like(part_lse), cuts.bounds, None, jnp.ones((1,), jnp.float32), o.dtype),
        sizes=sizes,
        interpret=interpret,
    )
    present = (items.pair_items[1:] > items.pair_items[:-1])[:, None]
    o = jnp.where(present[..., None], o.at[cuts.pairs].set(merged_o, mode="drop"), 0)
    lse = jnp.where(present, (lse / LOG2E).at[cuts.pairs].set(merged_lse, mode="drop"), -jnp.inf)
    if sinks is None:
        return o, lse
    with_sink = jnp.logaddexp(lse, jnp.tile(sinks, (lse.shape[0] // sinks.shape[0], 1)))
    share = jnp.exp(lse - jnp.where(with_sink > -jnp.inf, with_sink, 0.0))
    return (o * share[..., None]).astype(o.dtype), with_sink


def _body(refs: _Refs) -> None:
    """Run one CTA: merge and store units of work cta, cta + num_ctas, ..., where a unit is 8 rows of a pair. Returns
    once the stores are complete.
    """
    cta, num_ctas = lax.axis_index("cta"), lax.axis_size("cta")
    num_groups = refs.out.shape[1] // BOX_ROWS
    num_units = refs.out.shape[0] * num_groups

    def merge_unit(index, step):
        unit = cta + index * num_ctas
        return _merge(refs, lax.div(unit, jnp.int32(num_groups)), lax.rem(unit, jnp.int32(num_groups)), step)

    lax.fori_loop(0, lax.div(num_units - cta + num_ctas - 1, jnp.int32(num_ctas)), merge_unit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _merge(refs: _Refs, pair, group, step):
    """Merge the items of a pair in rows [8 * group, 8 * group + 8), add the sinks, and store the normalised output
    times v_scale, the maxima in base 2 and the sums of weights.

    step: number of partials that this CTA has merged before; returns the number after this call. The copy of the output
    may still be under way on return.
    """
    first, end = refs.pair_items[pair], refs.pair_items[pair + 1]
    head = lax.rem(pair, jnp.int32(refs.v_scale.shape[0]))
    rows = pl.ds(group * BOX_ROWS, BOX_ROWS)
    shape, stages = refs.out_smem.shape, refs.o_smem.shape[0]
    row = lax.broadcasted_iota(jnp.int32, shape, 0)

    def spread(scalars):
        """Return scalars [8] broadcast over columns: f32 [8, H] whose row r holds scalars[r]."""
        rows = jnp.full(shape, scalars[0], jnp.float32)
        for r in range(1, BOX_ROWS):
            rows = jnp.where(row == r, scalars[r], rows)
        return rows

    def load(item):
        @pl.when(item < end)
        def _():
            slot = lax.rem(step + item - first, jnp.int32(stages))
            full = refs.full.at[slot]
            plgpu.copy_gmem_to_smem(refs.o.at[item, rows], refs.o_smem.at[slot], full)
            plgpu.copy_gmem_to_smem(refs.largest.at[item, rows], refs.largest_smem.at[slot], full)
            plgpu.copy_gmem_to_smem(refs.total.at[item, rows], refs.total_smem.at[slot], full)

    for ahead in range(stages - 1):
        load(first + ahead)

    def merge_item(item, carry):
        acc, largest, total = carry
        slot = lax.rem(step + item - first, jnp.int32(stages))
        plgpu.commit_smem()  # every warp has read the slot of the last iteration, which the next copy overwrites
        load(item + stages - 1)
        plgpu.barrier_wait(refs.full.at[slot])
        item_largest = [refs.largest_smem[slot, r] for r in range(BOX_ROWS)]
        new_largest = [jnp.maximum(a, b) for a, b in zip(largest, item_largest, strict=True)]
        decay = [jnp.exp2(a - b) for a, b in zip(largest, new_largest, strict=True)]
        weight = [jnp.exp2(a - b) for a, b in zip(item_largest, new_largest, strict=True)]
        total = [total[r] * decay[r] + refs.total_smem[slot, r] * weight[r] for r in range(BOX_ROWS)]
        acc = acc * spread(decay) + refs.o_smem[slot].astype(jnp.float32) * spread(weight)
        return acc, new_largest, total

    sinks = [refs.sinks[head, group * BOX_ROWS + r] for r in range(BOX_ROWS)]
    present = [jnp.where(sink > NOTHING, 1.0, 0.0) for sink in sinks]
    carry = jnp.zeros(shape, jnp.float32), sinks, present
    acc, largest, total = lax.fori_loop(first, end, merge_item, carry)
    factor = [refs.v_scale[head] / jnp.where(x > 0, x, 1.0) for x in total]
    plgpu.wait_smem_to_gmem(0)
    refs.out_smem[...] = (acc * spread(factor)).astype(refs.out_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.out_smem, refs.out.at[pair, rows])
    for r in range(BOX_ROWS):
        refs.out_largest[pair, group * BOX_ROWS + r] = largest[r]
        refs.out_total[pair, group * BOX_ROWS + r] = total[r]
    return step + end - first
