"""Attention of whole prompts, whose keys are all in the step: the public operation. Nothing is read from pages.

A platform without an implementation runs such prompts by ragged_paged_attention.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec
from jaxengine.pallas_kernels.registry import KERNELS, kernel


def has_whole_prompts(spec: AttentionSpec, platform: str) -> bool:
    """Return whether `whole_prompt_attention` supports layers of `spec` on a platform: the attention must not be
    causal, no keys may be in pages, the values must not lie in keys, there must be no sinks, and the platform must have
    an implementation. Callers give the slopes of a layer that has them as biases.
    """
    plain = not (spec.causal or spec.paged or spec.values_in_keys or spec.has_sinks)
    return plain and ("whole_prompt_attention", platform) in KERNELS


def whole_prompt_schedule(cu_q_lens: jax.Array, num_seqs: jax.Array, *, num_tokens: int, platform: str) -> Any:
    """Return the work list that all layers of a step share, a pytree for `whole_prompt_attention`.

    cu_q_lens: i32 [S + 1], the first token of each prompt, then the end. num_seqs: i32 [], number of prompts; entries
    past them may hold garbage. num_tokens: T. Raises ValueError for a platform without an implementation.
    """
    return kernel("whole_prompt_schedule", platform)(cu_q_lens, num_seqs, num_tokens=num_tokens)


def whole_prompt_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    schedule: Any,
    *,
    spec: AttentionSpec,
    platform: str,
    biases: jax.Array | None = None,
    relative: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Compute the attention of q [T, N, H] over the keys k [T, K, H] and values v [T, K, Hv] of each token's own
    prompt; return [T, N, Hv] in q's dtype.

    A token sees the keys of its prompt less than `spec.window` positions away, or all without a window. Tokens of no
    prompt get 0. A token's result does not depend on other prompts, bit for bit. schedule: result of
    `whole_prompt_schedule` for this step. biases: f32 [N, 2 R + 1], added to a head's logits by the distance, the
    position of the key minus that of the query, from -R to R; greater distances use the nearest bias. relative: (keys,
    queries) of the distances, [2 R + 1, N, H] each and of q's dtype; needs K = N. To the product of a query and a key
    are added, before the scale, the products of the query with its distance's key and of the key with its distance's
    query. Raises ValueError for shapes and dtypes that do not fit, and for a spec or platform without
    `has_whole_prompts`.
    """
    if not has_whole_prompts(spec, platform):
        raise ValueError(f"whole_prompt_attention does not run {spec} on platform {platform!r}")
    num_tokens = q.shape[0]
    wanted = (
        (num_tokens, spec.num_q_heads, spec.head_dim),
        (num_tokens, spec.num_kv_heads, spec.head_dim),
        (num_tokens, spec.num_kv_heads, spec.v_head_dim),
    )
    if (got := (q.shape, k.shape, v.shape)) != wanted:
        raise ValueError(f"q, k and v must be {wanted}, got {got}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"q, k and v must share float32, bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}")
    if biases is not None and (biases.shape[0] != spec.num_q_heads or biases.ndim != 2 or biases.shape[1] % 2 == 0):
        raise ValueError(f"biases must be [{spec.num_q_heads}, an odd number], got {biases.shape}")
    for each in relative or ():
        if each.ndim != 3 or each.shape[1:] != (spec.num_q_heads, spec.head_dim) or each.shape[0] % 2 == 0:
            allowed = f"[an odd number, {spec.num_q_heads}, {spec.head_dim}]"
            raise ValueError(f"keys and queries of distances must be {allowed}, got {each.shape}")
        if spec.num_q_heads != spec.num_kv_heads:
            raise ValueError(
                f"keys and queries of distances need as many kv heads as heads, got {spec.num_kv_heads} of "
                f"{spec.num_q_heads}"
            )
    function = kernel("whole_prompt_attention", platform)
    return function(q, k, v, schedule, spec=spec, biases=biases, relative=relative)
