"""Multi-head latent attention with expanded (non-absorbed) keys and values (section 2.1.1 of arXiv:2405.04434).

Attention over latents needs no expansion of keys, but more operations for each pair of a query and a key. So if a row
(a sequence of the step) has at least `least_tokens` new tokens, the keys and values of its heads are expanded from the
latents, for a few heads at a time: first those of its new tokens, then those of earlier tokens, in pieces whose results
are merged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.attention import Latent, LayerAttention
from jaxengine.models.layers.attention.attention import attention_spec
from jaxengine.models.layers.attention.mla_adapters import LatentAdapters
from jaxengine.models.layers.base.step_inputs import StepContext, StepInput
from jaxengine.models.quantization.base.scheme import Weight
from jaxengine.pallas_kernels.attention.op import AttentionSpec, RaggedBatch, attention_schedule, ragged_paged_attention
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec, export_pages, is_quantized, pages_of
from jaxengine.pallas_kernels.tuning import Tuning, tuning_of

# Platforms on which rows are expanded. Hopper's kernels need values as wide as keys; on CPUs it has not paid off.
PLATFORMS = ("tpu",)
PAGE = 16  # tokens of a page of expanded keys; each row begins with a new page
PIECE = 2048  # earlier keys that are attended to at a time
BLOCK = 512  # earlier keys that are expanded at a time
HEADS = 8  # most heads whose keys and values are expanded at a time


class ExpandedRows(NamedTuple):
    """Rows of a step whose keys and values are expanded, computed once for all layers. They are the last rows, at most
    L, of a step of S rows and T tokens.

    Attributes:
      num_short: i32[], number of rows before them, which attend to latents.
      schedule: attention schedule of the earlier rows, over the step's first `most_short` tokens.
      decode_schedule: attention schedule of the earlier rows, over the first S tokens, for when all are decodes.
      short_form: i32[], 0 if there are no earlier rows, 1 if they are all decodes, otherwise 2.
      rows: batch of only the new tokens of expanded rows, in pages of PAGE tokens.
      own_schedule: schedule of attention among these new tokens.
      token_row: i32[T], index of a token's row among the L, -1 for other tokens.
      slot_tokens: i32[n], the token in each slot of the pages of `rows`, -1 in empty slots.
      num_before: i32[L], number of keys before the new tokens.
      piece_schedules: [2 * L, ...], attention schedules: of each row for a full piece of earlier keys, then of each row
        for its last piece.
    """

    num_short: jax.Array
    schedule: Any
    decode_schedule: Any
    short_form: jax.Array
    rows: RaggedBatch
    own_schedule: Any
    token_row: jax.Array
    slot_tokens: jax.Array
    num_before: jax.Array
    piece_schedules: Any


def least_tokens(latent: Latent) -> int | None:
    """Return the number of new tokens from which on a row's keys and values are expanded; None if rows are never
    expanded.

    Expanding a key costs C * U operations, where C = kv_lora_rank and U = qk_nope_head_dim + v_head_dim. Each query
    then saves 2 C - U operations on the key, since both products of attention are narrower; None is returned if that is
    not positive. The threshold is four times the number of queries whose savings equal the cost.
    """
    width = latent.qk_nope_head_dim + latent.v_head_dim
    saved = 2 * latent.kv_lora_rank - width
    return -(-4 * latent.kv_lora_rank * width // saved) if saved > 0 else None


def may_expand(attention: LayerAttention, kv: KVPages, num_tokens: int) -> bool:
    """Return whether a step of `num_tokens` tokens may have rows with expanded keys and values, given a pool like `kv`.

    This requires a platform in PLATFORMS, a pool that is not quantised and whose page size divides BLOCK, latent
    attention to all keys (no indexer, window or chunk), and at least `least_tokens` tokens.
    """
    latent = attention.latent
    if latent is None or attention.index is not None or (least := least_tokens(latent)) is None or num_tokens < least:
        return False
    return (
        kv.platform in PLATFORMS and not is_quantized(kv.spec) and BLOCK % kv.page_size == 0 and attention.reach is None
    )


def num_expanded_elements(attention: LayerAttention, num_heads: int, num_tokens: int) -> int:
    """Return the number of elements that are read and written on a device to expand the keys and values of `num_heads`
    heads for `num_tokens` keys.

    Latents are read once for each group of heads that is expanded together; expanded keys and values are written.
    attention: must have a latent.
    """
    latent = attention.latent
    assert latent is not None
    groups = num_heads // _heads_at_once(num_heads)
    read = latent.kv_lora_rank + latent.qk_rope_head_dim
    written = latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim
    return num_tokens * (groups * read + num_heads * written)


def most_short(latent: Latent, num_tokens: int) -> int:
    """Return the most tokens that all rows before an expanded row can have in a step of `num_tokens` tokens, num_tokens
    - least_tokens, rounded up to a multiple of PAGE, but at most `num_tokens`.
    """
    least = least_tokens(latent)
    assert least is not None
    return min(-(-max(num_tokens - least, 1) // PAGE) * PAGE, num_tokens)


def expanded_spec(latent: Latent, spec: AttentionSpec, *, causal: bool) -> AttentionSpec:
    """Return the AttentionSpec for expanded keys, with the number of heads that are expanded at a time on a device.

    spec: the spec of attention over latents, which has the same scale and soft cap. causal: whether a token attends
    only to its own and earlier positions; False for keys that all precede it.
    """
    heads = _heads_at_once(spec.num_q_heads)
    return AttentionSpec(
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=latent.qk_nope_head_dim + latent.qk_rope_head_dim,
        v_head_dim=latent.v_head_dim,
        sm_scale=spec.sm_scale,
        soft_cap=spec.soft_cap,
        causal=causal,
    )


def _heads_at_once(num_heads: int) -> int:
    """Return the largest divisor of `num_heads` that is at most HEADS."""
    return max(count for count in range(1, min(HEADS, num_heads) + 1) if num_heads % count == 0)


def expanded_rows(
    attention: LayerAttention, spec: AttentionSpec, batch: RaggedBatch, kv: KVPages, num_tokens: int, dtype: Any
) -> ExpandedRows | None:
    """Return the ExpandedRows of a step of T = num_tokens tokens; None if `may_expand` is False for it.

    Expanded rows are those after the last row with fewer new tokens than `least_tokens`. spec: the spec of attention
    over latents. batch: the step's rows, with `num_decode`. kv: the pool. dtype: that of queries, expanded keys and
    expanded values.
    """
    if not may_expand(attention, kv, num_tokens):
        return None
    latent, num_seqs = attention.latent, batch.kv_lens.shape[0]
    assert latent is not None and batch.num_decode is not None
    least = least_tokens(latent)
    assert least is not None
    most = min(num_seqs, num_tokens // least)
    index = jnp.arange(num_seqs, dtype=jnp.int32)
    q_lens = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    is_short = (index < batch.num_seqs) & (q_lens < least)
    num_short = jnp.max(jnp.where(is_short, index + 1, 0))
    num_rows = batch.num_seqs - num_short

    def of_rows(column: jax.Array, count: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(jnp.pad(column, (0, most), mode="edge"), num_short, count)

    cu_q_lens = of_rows(batch.cu_q_lens, most + 1)
    live = jnp.arange(most, dtype=jnp.int32) < num_rows
    q_lens = jnp.where(live, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    num_before = jnp.where(live, of_rows(batch.kv_lens, most) - q_lens, 0)
    ends = jnp.cumsum(-(-q_lens // PAGE), dtype=jnp.int32)
    starts = ends - -(-q_lens // PAGE)
    num_pages = -(-num_tokens // PAGE) + most
    slots = jnp.arange(num_pages * PAGE, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(slots[:, None] >= ends * PAGE, axis=1, dtype=jnp.int32), most - 1)
    offset = slots - starts[row] * PAGE
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    in_rows = (tokens >= cu_q_lens[0]) & (tokens < cu_q_lens[0] + jnp.sum(q_lens))
    own = RaggedBatch(
        cu_q_lens=cu_q_lens,
        kv_lens=q_lens,
        page_table=starts[:, None] + jnp.arange(-(-num_tokens // PAGE), dtype=jnp.int32),
        slot_mapping=jnp.full((num_tokens,), -1, jnp.int32),
        num_seqs=num_rows,
        num_decode=None,
    )

    tuning = _tuning(kv.platform)

    def schedule(batch: RaggedBatch, *, causal: bool) -> Any:
        each = expanded_spec(latent, spec, causal=causal)
        sizes: dict[str, Any] = {"num_tokens": num_tokens, "page_size": PAGE, "platform": kv.platform, "tuning": tuning}
        held = KVSpec(1, PAGE, each.num_kv_heads, each.head_dim, each.v_head_dim, jnp.dtype(dtype).name)
        return attention_schedule(batch, each, **sizes, kv_spec=held, q_dtype=dtype)

    last = num_before - (-(-num_before // PIECE) - 1) * PIECE
    pieces = jax.vmap(lambda row, count: schedule(_piece(own, row, count), causal=False))(
        jnp.tile(jnp.arange(most, dtype=jnp.int32), 2), jnp.concatenate([jnp.full_like(last, PIECE), last])
    )

    def of_first(count: int) -> Any:
        short = batch._replace(num_seqs=num_short, slot_mapping=batch.slot_mapping[:count])
        sizes: dict[str, Any] = {"num_tokens": count, "page_size": kv.page_size, "platform": kv.platform}
        return attention_schedule(short, spec, **sizes, kv_spec=kv.spec, q_dtype=dtype)

    return ExpandedRows(
        num_short=num_short,
        schedule=of_first(most_short(latent, num_tokens)),
        decode_schedule=of_first(num_seqs),
        short_form=jnp.where(num_short == 0, 0, jnp.where(num_short <= batch.num_decode, 1, 2)),
        rows=own,
        own_schedule=schedule(own, causal=True),
        token_row=jnp.where(in_rows, jnp.sum(tokens[:, None] >= cu_q_lens[1:], axis=1, dtype=jnp.int32), -1),
        slot_tokens=jnp.where(offset < q_lens[row], cu_q_lens[row] + offset, -1),
        num_before=num_before,
        piece_schedules=pieces,
    )


def _tuning(platform: str) -> Tuning:
    """Return the platform's default tile sizes, but with larger tiles of tokens: heads do not share keys here, so
    reading a key must be amortised over many tokens.
    """
    tuning = tuning_of(platform)
    return replace(tuning, tpu_attention=replace(tuning.tpu_attention, max_block_q=256, run_tiles=2))


def _piece(rows: RaggedBatch, row: jax.Array, count: jax.Array) -> RaggedBatch:
    """Return a batch that has only row `row` of the expanded rows, which attends to a piece of `count` earlier keys.

    row, count: i32[]; count is at most PIECE. The piece has been expanded into the first pages of a pool, in order.
    """
    return rows._replace(
        cu_q_lens=lax.dynamic_slice_in_dim(rows.cu_q_lens, row, 2),
        kv_lens=count[None],
        page_table=jnp.arange(PIECE // PAGE, dtype=jnp.int32)[None],
        num_seqs=jnp.ones_like(count),
    )


def attend_expanded(
    o: jax.Array,
    q: tuple[jax.Array, jax.Array],
    keys: jax.Array,
    weights: tuple[Weight, Weight],
    kv: KVPages,
    page_table: jax.Array,
    expanded: ExpandedRows,
    *,
    latent: Latent,
    spec: AttentionSpec,
    adapters: LatentAdapters | None = None,
) -> jax.Array:
    """Return o [T, N, Hv], in which tokens of expanded rows get their attention over expanded keys and values: those of
    their row's new tokens up to their own, and of all earlier tokens. Other tokens' results, which o has, stay.

    q: the queries' parts without and with rope, each [T, N, .]. keys: the step's latents and their rotated parts, [T, C
    + R]. weights: W^UK and W^UV, which expand keys and values. kv: the pool of latents, which is only read. page_table:
    i32[S, W], page table of all rows of the step. expanded: result of `expanded_rows`. spec: the spec of attention over
    latents. adapters: those of the step's tokens for W^UK and W^UV; None if no token can have one.
    """
    own_spec, piece_spec = (expanded_spec(latent, spec, causal=causal) for causal in (True, False))
    heads, dtype = own_spec.num_q_heads, o.dtype
    most = expanded.num_before.shape[0]
    slots, own_tokens = expanded.slot_tokens[:, None], jnp.maximum(expanded.slot_tokens, 0)
    own_keys = jnp.where(slots >= 0, keys.astype(kv.dtype).astype(dtype)[own_tokens], 0)
    columns = BLOCK // kv.page_size
    table = jnp.pad(page_table, ((0, most), (0, -page_table.shape[1] % columns)))
    table = lax.dynamic_slice_in_dim(table, expanded.num_short, most)
    table = jnp.clip(table, 0, kv.num_pages - 1)
    num_pieces = -(-expanded.num_before // PIECE)
    ends = jnp.cumsum(num_pieces, dtype=jnp.int32)

    def some_heads(carry: tuple[jax.Array, jax.Array], group: jax.Array):
        """Return ((o, rows), None), where the results of one group of heads for expanded rows are replaced in o. `rows`
        is a buffer for expanded keys.
        """
        o, rows = carry
        first = group * heads
        q_group = jnp.concatenate([lax.dynamic_slice_in_dim(part, first, heads, axis=1) for part in q], axis=-1)
        joined = _joined(weights, first, latent, heads)

        def expand(latents: jax.Array, tokens: jax.Array) -> jax.Array:
            made = jnp.matmul(latents, joined, preferred_element_type=jnp.float32)
            if adapters is not None:
                made = adapters.add_to_expanded(made, latents, adapters.slots_of(tokens), first, heads)
            return made.astype(dtype)

        def attend(rows: jax.Array, batch: RaggedBatch, spec: AttentionSpec, schedule: Any):
            pool = pages_of(rows.reshape(len(rows), heads, -1), spec.head_dim, PAGE, kv.platform)
            result, lse = ragged_paged_attention(q_group, pool, batch, spec=spec, schedule=schedule, return_lse=True)
            return result.astype(jnp.float32), lse

        def piece(carry):
            """Expand one piece of earlier keys, attend to it, and return the new carry: (number of the next piece,
            results, log-sum-exps, buffer of expanded keys).
            """
            number, total, lse, rows = carry
            row = jnp.sum(number >= ends, dtype=jnp.int32)
            index = number - (ends - num_pieces)[row]
            count = jnp.minimum(expanded.num_before[row] - index * PIECE, PIECE)

            def expand_block(block, rows):
                ids = lax.dynamic_slice(table, (row, index * (PIECE // kv.page_size) + block * columns), (1, columns))
                latents = export_pages(kv, ids[0]).reshape(BLOCK, -1)
                there = block * BLOCK + jnp.arange(BLOCK)[:, None] < count
                new = expand(jnp.where(there, latents.astype(dtype), 0), jnp.full(BLOCK, expanded.rows.cu_q_lens[row]))
                return lax.dynamic_update_slice_in_dim(rows, new, block * BLOCK, axis=0)

            rows = lax.fori_loop(0, -(-count // BLOCK), expand_block, rows)
            which = row + jnp.where(index == num_pieces[row] - 1, most, 0)
            schedule = jax.tree.map(lambda each: each[which], expanded.piece_schedules)
            part = attend(rows, _piece(expanded.rows, row, count), piece_spec, schedule)
            return number + 1, *_merged((total, lse), part, (expanded.token_row == row)[:, None]), rows

        total, lse = attend(expand(own_keys, own_tokens), expanded.rows, own_spec, expanded.own_schedule)
        start = jnp.int32(0), total, lse, rows
        _, total, _, rows = lax.while_loop(lambda carry: carry[0] < ends[-1], piece, start)
        before = lax.dynamic_slice_in_dim(o, first, heads, axis=1)
        new = jnp.where((expanded.token_row >= 0)[:, None, None], total.astype(dtype), before)
        return (lax.dynamic_update_slice_in_dim(o, new, first, axis=1), rows), None

    rows = jnp.zeros((PIECE, heads * (own_spec.head_dim + own_spec.v_head_dim)), dtype)
    (o, _), _ = lax.scan(some_heads, (o, rows), jnp.arange(spec.num_q_heads // heads, dtype=jnp.int32))
    return o


def _joined(weights: tuple[Weight, Weight], first: jax.Array, latent: Latent, heads: int) -> jax.Array:
    """Return the matrix [C + R, heads * (H + Hv)] that expands a latent and its rotated part to the key and value of
    each of `heads` heads.

    weights: W^UK and W^UV. first: i32[], index on this device of the first of these heads. The matrix copies the
    rotated part, which all heads share, into each key.
    """
    sizes = latent.qk_nope_head_dim, latent.v_head_dim
    of_keys, of_values = (
        weight.rows(first * size + jnp.arange(heads * size)).reshape(heads, size, -1)
        for weight, size in zip(weights, sizes, strict=True)
    )
    rope = latent.qk_rope_head_dim
    nothing = jnp.zeros((heads, rope, latent.kv_lora_rank), of_keys.dtype)
    above = jnp.concatenate([of_keys, nothing, of_values], axis=1)
    as_it_is = jnp.pad(jnp.eye(rope, dtype=of_keys.dtype), (sizes, (0, 0)))
    below = jnp.broadcast_to(as_it_is, (heads, *as_it_is.shape))
    return jnp.concatenate([above, below], axis=2).reshape(-1, latent.kv_lora_rank + rope).T


def _merged(all_before: tuple[jax.Array, jax.Array], part: tuple[jax.Array, jax.Array], member: jax.Array):
    """Return (attention results [T, N, Hv], log-sum-exps [T, N]) over the union of two disjoint sets of keys.
    all_before, part: (results, log-sum-exps) over each of the sets. All are f32. member: bool[T, 1]; tokens for which
    it is False attend to the first set only.
    """
    (o, lse), (more, more_lse) = all_before, part
    more_lse, more = jnp.where(member, more_lse, -jnp.inf), jnp.where(member[..., None], more, 0.0)
    largest = jnp.maximum(lse, more_lse)
    shift = jnp.where(largest == -jnp.inf, 0.0, largest)
    weight, more_weight = jnp.exp(lse - shift), jnp.exp(more_lse - shift)
    total = weight + more_weight
    share = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1.0), 0.0)
    merged = o * (weight * share)[..., None] + more * (more_weight * share)[..., None]
    return merged, shift + jnp.log(total)


def _attention_and_spec(attention: LayerAttention, build: Build) -> tuple[LayerAttention, AttentionSpec] | None:
    """Return (attention, its AttentionSpec), the key of `_of_step`, for a layer; None for a layer without attention or
    with an indexer.
    """
    attends = attention.attends and attention.index is None
    return (attention, attention_spec(attention, build.mesh)) if attends else None


def _of_step(key: tuple[LayerAttention, AttentionSpec], step: StepContext) -> ExpandedRows | None:
    """Return `expanded_rows` of a step; None if no row has more than one token, or if some tokens attend to keys after
    their own (`key_limits`).
    """
    attention, spec = key
    if step.key_limits is not None or len(step.batch.logits_indices) >= len(step.batch.token_ids):
        return None
    num_tokens, dtype = step.batch.token_ids.shape[0], step.build.dtype
    return expanded_rows(attention, spec, step.batch.ragged[0], step.kv, num_tokens, dtype)


EXPANDED_ROWS = StepInput("expanded_rows", _attention_and_spec, _of_step)
