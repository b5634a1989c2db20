"""Sparse attention: the keys of each token's sequence that an indexer scores highest, and attention to these alone.

The public operations of DeepSeek Sparse Attention (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp"), and those of MiniMax M3,
where each KV head of a token selects blocks of keys. Their arithmetic is in the folder of each implementation, their
oracles in tests/pallas_kernels/reference.py. Pages hold latents as keys; where blocks are selected, the keys and values
of each head joined. In place of values they hold the indexer's keys, of KVSpec.v_head_dim elements.

Further shape letters: I heads of the indexer, J elements of its keys, k keys or blocks that are selected, m tokens of a
group where one key is pooled for a group.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch, check_batch, tokens_of
from jaxengine.pallas_kernels.kv.pages import KVPages, is_quantized
from jaxengine.pallas_kernels.registry import kernel
from jaxengine.pallas_kernels.tuning import Tuning, tuning_of

__all__ = [
    "block_attention",
    "positions_of_groups",
    "select_blocks",
    "select_keys",
    "selected_attention",
    "selection_schedule",
]


def selection_schedule(
    batch: RaggedBatch, *, num_tokens: int, page_size: int, platform: str, tuning: Tuning | None = None
) -> Any:
    """Return the work list of a step's `select_keys` or `select_blocks`, a pytree that all layers share.

    It depends on lengths only. num_tokens: T. page_size: tokens of a page. platform: one of registry.PLATFORMS. tuning:
    tile sizes, None for the chip's sizes from the table. Raises ValueError for a batch whose arrays do not fit.
    """
    check_batch(batch, num_tokens)
    sizes: dict[str, Any] = {"num_tokens": num_tokens, "page_size": page_size, "tuning": tuning or tuning_of(platform)}
    return kernel("selection_schedule", platform)(batch, **sizes)


def select_keys(
    q: jax.Array,
    weights: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    *,
    count: int,
    schedule: Any = None,
    pooling: jax.Array | None = None,
) -> jax.Array:
    """Return, for each token, the positions i32 [T, k] of the k = count keys with the highest scores among those it
    sees.

    The score of a key k_s is the sum over i of weights[t, i] * relu(q[t, i] . k_s), in float32, of queries q [T, I, J]
    and weights f32 [T, I]. A token sees its own key and those before it, which must be in the pool. Of equal scores the
    lowest position comes first, whatever the step's shape. A token that sees k keys or fewer selects all, in order,
    followed by -1; a token of no sequence gets -1 alone. Slots that no token sees may hold NaN. A pool of codes has one
    scale for all keys of the head; it does not change their order and is not applied.

    pooling: f32 [m, J] for one key of each group of m tokens, counted from the first; the result is then the numbers of
    groups, of which a token sees those that end with its own key or before. The pool then holds keys and after each of
    them as many gates, and no codes. A group's key is the mean of its tokens' keys, weighted in each element by the
    softmax of gates plus `pooling`. None for the tokens' own keys.

    schedule: result of `selection_schedule` for the same batch, None to build it here. Raises ValueError for shapes and
    dtypes that do not fit, a pool without exactly one kv head of an indexer's keys, and a `count` below 1.
    """
    width, num_tokens = kv.spec.v_head_dim // (1 if pooling is None else 2), q.shape[0]
    if q.ndim != 3 or num_tokens < 1 or q.shape[2] != width:
        raise ValueError(f"select_keys: q must be [T, I, {width}] with T >= 1, got {list(q.shape)}")
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"select_keys: q must be float32, bfloat16 or float16, got {q.dtype}")
    if weights.shape != q.shape[:2] or weights.dtype != jnp.float32:
        raise ValueError(
            f"select_keys: weights must be float32{list(q.shape[:2])}, got {weights.dtype}{list(weights.shape)}"
        )
    if kv.spec.values_in_keys or kv.spec.num_kv_heads != 1:
        raise ValueError("select_keys: the pool must have one kv head with keys of an indexer, got one without")
    if pooling is not None and (pooling.shape[1:] != (width,) or pooling.dtype != jnp.float32 or is_quantized(kv.spec)):
        text = f"pooling must be float32[m, {width}] over a pool without codes"
        raise ValueError(f"select_keys: {text}, got {pooling.dtype}{list(pooling.shape)} over {kv.dtype}")
    if count < 1:
        raise ValueError(f"select_keys: count must be at least 1, got {count}")
    check_batch(batch, num_tokens)
    if schedule is None:
        sizes = {"num_tokens": num_tokens, "page_size": kv.page_size, "platform": kv.platform}
        schedule = selection_schedule(batch, **sizes)
    return kernel("select_keys", kv.platform)(q, weights, kv, batch, schedule, count=count, pooling=pooling)


def positions_of_groups(groups: jax.Array, batch: RaggedBatch, size: int) -> jax.Array:
    """Return the positions i32 [T, G * m + m - 1] that each token attends to: those that it sees after its last whole
    group, then those of the tokens of its groups i32 [T, G], which `select_keys` has returned with `pooling`, then -1.
    size: m. Tokens of no sequence get -1 alone.
    """
    ends = tokens_of(batch, groups.shape[0])[1][:, None]
    places = jnp.arange(groups.shape[1] * size + size - 1, dtype=jnp.int32) - ends % size
    inner = jnp.clip(places, 0, groups.shape[1] * size - 1)
    chosen = jnp.take_along_axis(groups, inner // size, axis=1)
    of_groups = jnp.where((chosen >= 0) & (places == inner), chosen * size + inner % size, -1)
    return jnp.where(places < 0, ends + places, of_groups)


def selected_attention(
    q: jax.Array,
    q_rest: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    positions: jax.Array,
    *,
    spec: AttentionSpec,
    sinks: jax.Array | None = None,
    tuning: Tuning | None = None,
) -> jax.Array:
    """Compute the attention of q [T, N, Hv] with q_rest [T, N, H - Hv] over the keys at `positions` alone; return o
    [T, N, Hv] in q's dtype.

    positions: i32 [T, k] in each token's own sequence, distinct, with -1 after a token's last one. A token without any,
    or of no sequence, gets exactly 0. Of the pool these keys are read, on TPUs also those next to them, with weight 0:
    all of a sequence's keys must be finite. spec: must have values in keys, one kv head, and no window, chunk or soft
    cap. sinks: f32 [N], an additional logit of each head in the softmax denominator, with value 0; None for none.
    tuning: tile sizes, None for the chip's sizes from the table. Raises ValueError for shapes, dtypes or options that
    do not fit.
    """
    num_tokens, (width, rest) = q.shape[0], spec.query_dims
    for name, array, columns in (("q", q, width), ("q_rest", q_rest, rest)):
        if array.shape != (num_tokens, spec.num_q_heads, columns) or array.dtype != q.dtype:
            wanted = f"{q.dtype}[T, {spec.num_q_heads}, {columns}]"
            raise ValueError(f"selected_attention: {name} must be {wanted}, got {array.dtype}{list(array.shape)}")
    if positions.ndim != 2 or positions.shape[0] != num_tokens or positions.dtype != jnp.int32:
        raise ValueError(
            f"selected_attention: positions must be int32[{num_tokens}, k], got "
            f"{positions.dtype}{list(positions.shape)}"
        )
    if not spec.values_in_keys or spec.num_kv_heads != 1 or (spec.window, spec.chunk, spec.soft_cap) != (None,) * 3:
        raise ValueError("selected_attention: needs values in keys of one kv head, no window, chunk or soft cap")
    if kv.spec.head_dim != spec.head_dim:
        raise ValueError(f"selected_attention: the pool holds head dim {kv.spec.head_dim}, not {spec.head_dim}")
    if sinks is not None and (sinks.shape != (spec.num_q_heads,) or sinks.dtype != jnp.float32):
        wanted = f"float32[{spec.num_q_heads}]"
        raise ValueError(f"selected_attention: sinks must be {wanted}, got {sinks.dtype}{list(sinks.shape)}")
    check_batch(batch, num_tokens)
    options: dict[str, Any] = {"spec": spec, "sinks": sinks, "tuning": tuning or tuning_of(kv.platform)}
    return kernel("selected_attention", kv.platform)(q, q_rest, kv, batch, positions, **options)


def select_blocks(
    q: jax.Array, kv: KVPages, batch: RaggedBatch, *, size: int, count: int, local: int, schedule: Any = None
) -> jax.Array:
    """Return, for each token and KV head, the numbers i32 [T, K, k] of the k = count blocks with the highest scores
    among those of which the token sees a key. A block has `size` keys, counted from the sequence's first one.

    The score of a block is the largest product, in float32, of the head's query q [T, K, J] and a key of the indexer in
    the block. A token sees its own key and those before it, which must be in the pool, the same for all heads. The last
    `local` blocks that it sees come first, in order, then the others by their scores; of equal ones the lowest number
    comes first, whatever the step's shape. If a token sees at most k blocks, all are selected, in order, followed by
    -1; a token of no sequence gets -1 alone. Slots that no token sees may hold NaN.

    schedule: result of `selection_schedule` for the same batch, None to build it here. Raises ValueError for shapes and
    dtypes that do not fit, a pool of codes, sizes below 1, and more local blocks than `count`.
    """
    num_tokens = q.shape[0]
    if q.ndim != 3 or num_tokens < 1 or q.shape[2] != kv.spec.v_head_dim:
        raise ValueError(f"select_blocks: q must be [T, K, {kv.spec.v_head_dim}] with T >= 1, got {list(q.shape)}")
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"select_blocks: q must be float32, bfloat16 or float16, got {q.dtype}")
    _check_joined("select_blocks", kv)
    if size < 1 or not 0 <= local <= count or count < 1:
        text = "size and count must be at least 1, and local from 0 to count"
        raise ValueError(f"select_blocks: {text}, got {size}, {count} and {local}")
    check_batch(batch, num_tokens)
    if schedule is None:
        sizes = {"num_tokens": num_tokens, "page_size": kv.page_size, "platform": kv.platform}
        schedule = selection_schedule(batch, **sizes)
    return kernel("select_blocks", kv.platform)(q, kv, batch, schedule, size=size, count=count, local=local)


def _check_joined(name: str, kv: KVPages) -> None:
    """Raise ValueError, for the operation `name`, for a pool without keys of an indexer, or of codes."""
    if kv.spec.values_in_keys or is_quantized(kv.spec):
        raise ValueError(f"{name}: the pool must have keys of an indexer and no codes, got one of {kv.dtype}")


def block_attention(
    q: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    blocks: jax.Array,
    *,
    spec: AttentionSpec,
    size: int,
    tuning: Tuning | None = None,
) -> jax.Array:
    """Compute the attention of q [T, N, H] over those keys of `blocks` that a token sees, its own and earlier ones;
    return o [T, N, Hv] in q's dtype.

    blocks: i32 [T, K, k], for each token and KV head the numbers of blocks of `size` tokens, distinct, with -1 after
    the last one. A token without any, or of no sequence, gets exactly 0. Only these blocks of the pool are read, whose
    keys have H + Hv elements: a key followed by its value. spec: must have no window, chunk, soft cap or slopes, and be
    causal. tuning: tile sizes, None for the chip's sizes from the table. Raises ValueError for shapes, dtypes or
    options that do not fit, and a pool of codes.
    """
    num_tokens, shape = q.shape[0], (spec.num_q_heads, spec.head_dim)
    if q.ndim != 3 or num_tokens < 1 or q.shape[1:] != shape:
        raise ValueError(f"block_attention: q must be [T, {shape[0]}, {shape[1]}] with T >= 1, got {list(q.shape)}")
    if blocks.ndim != 3 or blocks.shape[:2] != (num_tokens, spec.num_kv_heads) or blocks.dtype != jnp.int32:
        wanted = f"int32[{num_tokens}, {spec.num_kv_heads}, k]"
        raise ValueError(f"block_attention: blocks must be {wanted}, got {blocks.dtype}{list(blocks.shape)}")
    limits = spec.window, spec.chunk, spec.soft_cap
    if spec.values_in_keys or spec.has_slopes or not spec.causal or limits != (None,) * 3:
        raise ValueError("block_attention: needs causal attention without window, chunk, soft cap, slopes or a latent")
    if kv.spec.head_dim != spec.head_dim + spec.v_head_dim:
        wanted = f"{spec.head_dim} + {spec.v_head_dim}"
        raise ValueError(f"block_attention: the pool must hold keys of {wanted} elements, got {kv.spec.head_dim}")
    _check_joined("block_attention", kv)
    check_batch(batch, num_tokens)
    options: dict[str, Any] = {"spec": spec, "size": size, "tuning": tuning or tuning_of(kv.platform)}
    return kernel("block_attention", kv.platform)(q, kv, batch, blocks, **options)
