"""Attention of a ragged batch of new tokens over paged keys and values: the public operation.

This module validates arguments and chooses the implementation. The arithmetic is in the folder of each implementation,
and its oracle in tests/pallas_kernels/reference.py. Models, layers and requests do not occur here: a layer passes its
own page table.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch, check_batch
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec
from jaxengine.pallas_kernels.registry import backend_of, is_kernel, kernel, platform_of
from jaxengine.pallas_kernels.tuning import Tuning, tuning_of

__all__ = ["AttentionSpec", "RaggedBatch", "attention_schedule", "gathered_by", "ragged_paged_attention"]


def attention_schedule(
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    num_tokens: int,
    page_size: int,
    platform: str | None = None,
    tuning: Tuning | None = None,
    kv_limits: jax.Array | None = None,
    kv_spec: KVSpec | None = None,
    q_dtype: Any = None,
) -> Any:
    """Return the work list of a step's attention, a pytree for `ragged_paged_attention`.

    It should be built once per step: all layers with equal `window`, `chunk` and `causal` share it. It only depends on
    lengths, not on page ids.

    num_tokens: T. platform: one of registry.PLATFORMS; None for that of the default device.
    tuning: tile sizes, which attention uses as well; None takes the chip's sizes from the table.
    kv_limits: i32 [T], for tokens that attend to later keys, the exclusive end of the keys to which they attend; 0 for
        other tokens and padding. A limit past the sequence's keys is clipped. Windows still end at a token's own
        position. With `spec.mutual` these tokens do not see the later keys of tokens with the limit 0. Needs
        causal=True, chunk=None and no slopes or biases. None if there are no such tokens.
    kv_spec, q_dtype: the pool's spec and the dtype of queries, by which a platform chooses between its own work list
        and that of plain XLA; None if they are not known. Plain XLA then builds its list again in each call that the
        platform's own code does not support.
    Raises ValueError for shapes, dtypes or options that do not fit, or that the platform does not support.
    """
    check_batch(batch, num_tokens)
    platform = platform or platform_of(jax.devices()[0])
    build = kernel("attention_schedule", platform)
    sizes: dict[str, Any] = {"num_tokens": num_tokens, "page_size": page_size, "tuning": tuning or tuning_of(platform)}
    sizes |= {"kv_spec": kv_spec, "q_dtype": q_dtype}
    if kv_limits is None:
        return build(batch, spec, **sizes)
    if kv_limits.shape != (num_tokens,) or kv_limits.dtype != jnp.int32:
        raise ValueError(f"kv_limits must be int32[{num_tokens}], got {kv_limits.dtype}{list(kv_limits.shape)}")
    if not spec.causal or spec.chunk is not None or spec.xla_only is not None:
        text = "causal=True, chunk=None, has_slopes=False and bias_extent=0"
        raise ValueError(f"kv_limits needs {text}: it says which later keys a token sees")
    return build(batch, spec, **sizes, kv_limits=kv_limits)


def ragged_paged_attention(
    q: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    *,
    spec: AttentionSpec,
    q_rest: jax.Array | None = None,
    schedule: Any = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    biases: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
    return_lse: bool = False,
    platform: str | None = None,
    tuning: Tuning | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Return the attention output o [T, N, Hv], in q's dtype, of queries q [T, N, H] over the pages of each token's
    sequence, or (o, lse) with `return_lse`.

    If spec.values_in_keys, q is [T, N, Hv], the query for a key's first Hv elements, and `q_rest` [T, N, H - Hv] that
    for the others.

    The step's keys and values must already be in the pool. Token i of a sequence has position kv_len - q_len + i. It
    attends to the keys up to its position (to all keys if not `spec.causal`), and of these only to those less than
    `spec.window` positions away, or to those from the last multiple of `spec.chunk` on and of `spec.lookback` chunks
    before it. For tokens without a sequence or without keys, o is exactly 0 and lse is -inf; for a token of a sequence
    that has no keys, lse is the sink if there are sinks, except on TPUs. Slots to which no token attends may hold NaN.

    schedule: result of `attention_schedule` for the same batch; None to build it here with `tuning`.
    sinks: f32 [N], an additional logit of each head in the softmax denominator, with value 0.
    slopes: f32 [N] if `spec.has_slopes`, otherwise None. After scale and cap, the head's slope times the distance of
        the key's position is subtracted from a logit (ALiBi). Needs causal=True and no tree_mask. TPU and GPU kernels
        leave such calls to plain XLA.
    biases: [T, N, E] in q's dtype if `spec.bias_extent` is E > 0, otherwise None. After scale and cap, the token's and
        head's number for the distance of a key, below E, is added to the logit; nothing for farther keys. Needs no
        tree_mask. TPU and GPU kernels leave such calls to plain XLA.
    tree_mask: u32 [T, ceil(Q / 32)] for sequences of at most Q new tokens. Bit b of a token's row says that it attends
        to new token b of its own sequence. Bits narrow the causal range, so parents must precede their children. Needs
        causal=True, window=None and chunk=None.
    return_lse: whether to return (o, log-sum-exp f32 [T, N]).
    platform: None, or the pool's platform as a check.
    tuning: tile sizes; only allowed if schedule is None. None takes the chip's sizes from the table.
    Raises ValueError for shapes, dtypes or options that do not fit, and for another platform.
    """
    platform = platform or kv.platform
    if platform != kv.platform:
        raise ValueError(f"ragged_paged_attention: platform {platform!r} cannot read a pool of {kv.platform!r}")
    _check_query(q, q_rest, kv, spec)
    num_tokens = q.shape[0]
    check_batch(batch, num_tokens)
    if sinks is not None and (sinks.shape != (spec.num_q_heads,) or sinks.dtype != jnp.float32):
        raise ValueError(f"sinks must be float32[{spec.num_q_heads}], got {sinks.dtype}{list(sinks.shape)}")
    wanted = (spec.num_q_heads,) if spec.has_slopes else None
    if wanted != (None if slopes is None else slopes.shape) or (slopes is not None and slopes.dtype != jnp.float32):
        got = None if slopes is None else f"{slopes.dtype}{list(slopes.shape)}"
        raise ValueError(f"slopes must be {f'float32{list(wanted)}' if wanted else None}, got {got}")
    if slopes is not None and not (spec.causal and tree_mask is None):
        raise ValueError("slopes need causal=True and tree_mask=None: a distance is one of earlier positions")
    _check_biases(biases, q, spec, has_tree=tree_mask is not None)
    if tree_mask is not None:
        _check_tree_mask(tree_mask, num_tokens, spec)
    attend = kernel("ragged_paged_attention", platform)
    if schedule is None:
        sizes: dict[str, Any] = {"num_tokens": num_tokens, "page_size": kv.page_size, "tuning": tuning}
        operands: dict[str, Any] = {"platform": platform, "kv_spec": kv.spec, "q_dtype": q.dtype}
        schedule = attention_schedule(batch, spec, **sizes, **operands)
    elif tuning is not None:
        raise ValueError("ragged_paged_attention: give tuning to attention_schedule: a schedule brings its own")
    rest = {name: each for name, each in (("slopes", slopes), ("biases", biases)) if each is not None}
    o, lse = attend(q, kv, batch, schedule, spec=spec, q_rest=q_rest, sinks=sinks, tree_mask=tree_mask, **rest)
    return (o, lse) if return_lse else o


def _check_query(q: jax.Array, q_rest: jax.Array | None, kv: KVPages, spec: AttentionSpec) -> None:
    """Raise ValueError unless q and q_rest have the shapes of `spec` with T >= 1 and the same dtype, float32, bfloat16
    or float16, and the pool `kv` has the head dims of `spec`. q_rest must be None unless spec.query_dims has a rest.
    """
    width, rest_width = spec.query_dims
    if q.ndim != 3 or q.shape[0] < 1 or q.shape[1:] != (spec.num_q_heads, width):
        raise ValueError(f"q must be [T, {spec.num_q_heads}, {width}] with T >= 1, got {list(q.shape)}")
    wanted = f"{q.dtype}{[*q.shape[:2], rest_width]}" if rest_width else "None"
    if wanted != (got := "None" if q_rest is None else f"{q_rest.dtype}{list(q_rest.shape)}"):
        raise ValueError(f"q_rest must be {wanted}, got {got}")
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"q must be float32, bfloat16 or float16, got {q.dtype}")
    held, asked = (
        f"head dims {one.head_dim}/{one.v_head_dim} (key/value)" + ", values in keys" * one.values_in_keys
        for one in (kv.spec, spec)
    )
    if held != asked:
        raise ValueError(f"the pool holds {held}, AttentionSpec says {asked}")


def _check_biases(biases: jax.Array | None, q: jax.Array, spec: AttentionSpec, *, has_tree: bool) -> None:
    """Raise ValueError unless biases are [T, N, spec.bias_extent] in the dtype of q [T, N, H], or None where this is 0,
    and for a tree mask next to them.
    """
    wanted = f"{q.dtype}{[*q.shape[:2], spec.bias_extent]}" if spec.bias_extent else "None"
    if wanted != (got := "None" if biases is None else f"{biases.dtype}{list(biases.shape)}"):
        raise ValueError(f"biases must be {wanted}, got {got}")
    if biases is not None and has_tree:
        raise ValueError("biases need tree_mask=None: a distance is one of earlier positions")


def _check_tree_mask(tree_mask: jax.Array, num_tokens: int, spec: AttentionSpec) -> None:
    """Raise ValueError unless tree_mask is u32 [num_tokens, words], and `spec` is causal without window and chunk."""
    if tree_mask.ndim != 2 or tree_mask.shape[0] != num_tokens or tree_mask.dtype != jnp.uint32:
        raise ValueError(f"tree_mask must be uint32[{num_tokens}, words], got {tree_mask.dtype}{list(tree_mask.shape)}")
    if not spec.causal or spec.window is not None or spec.chunk is not None:
        text = "tree_mask needs causal=True, window=None and chunk=None"
        raise ValueError(f"{text}: a tree has no single order to count a window in")


def gathered_by(spec: AttentionSpec, platform: str, num_seqs: int, page_size: int) -> int:
    """Return the bytes of keys and values that attention of `num_seqs` single tokens gathers at a time from pages of
    page_size tokens, with two bytes per element.

    They are only counted if a CUDA card uses plain XLA: cards without an attention kernel, and values in keys (latents)
    on "gpu_blackwell". Otherwise 0 is returned.
    """
    has_kernel = is_kernel("ragged_paged_attention", platform)
    if backend_of(platform) != "cuda" or (has_kernel and not (platform == "gpu_blackwell" and spec.values_in_keys)):
        return 0
    sizes = tuning_of(platform).xla_attention
    num_bytes = 2 * spec.stored_width * sizes.block_kv_of(page_size, num_seqs)
    return num_bytes * min(num_seqs, sizes.block_seqs_of(num_bytes))
