"""Attention of whole prompts beside the float64 oracle, and that no prompt sees another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec
from jaxengine.pallas_kernels.attention.whole_prompts import (
    has_whole_prompts,
    whole_prompt_attention,
    whole_prompt_schedule,
)
from jaxengine.pallas_kernels.attention.xla.whole_prompts import BLOCK, LENGTHS
from jaxengine.pallas_kernels.registry import PLATFORMS, kernel
from tests.pallas_kernels import reference

IMPLEMENTATIONS = {kernel(op, "cpu") for op in ("whole_prompt_schedule", "whole_prompt_attention")}
SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, sm_scale=0.3, causal=False)
SHORT = (16, 1, 17, 5, 48, 100, 3, 15)
CASES = {
    "short": (SPEC, SHORT, 224),
    "every head its own keys": (replace(SPEC, num_kv_heads=4, v_head_dim=6), SHORT, 224),
    "window": (replace(SPEC, window=5), SHORT, 224),
    "soft cap": (replace(SPEC, soft_cap=1.5), SHORT, 224),
    "blocks": (SPEC, (3, BLOCK + 1, BLOCK, 20), 1100),
    "window over blocks": (replace(SPEC, window=30), (2 * BLOCK + 40, 9), 1200),
    "window of a block": (replace(SPEC, window=BLOCK + 3), (2 * BLOCK + 1,), 1100),
    "no prompt": (SPEC, (), 20),
}


def drawn(spec: AttentionSpec, num_tokens: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)

    def of(num_heads: int, width: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((num_tokens, num_heads, width)), dtype)

    keys = spec.num_kv_heads
    return of(spec.num_q_heads, spec.head_dim), of(keys, spec.head_dim), of(keys, spec.v_head_dim)


def attended(spec: AttentionSpec, lengths, q, k, v, num_seqs: int = 12, **added) -> np.ndarray:
    """Outputs of prompts of these lengths, in rows of a step for `num_seqs`; what is past the last is garbage."""

    @jax.jit
    def run(cu_q_lens, count, q, k, v):
        schedule = whole_prompt_schedule(cu_q_lens, count, num_tokens=len(q), platform="cpu")
        return whole_prompt_attention(q, k, v, schedule, spec=spec, platform="cpu", **added)

    cu_q_lens = np.full(num_seqs + 1, 7, np.int32)
    cu_q_lens[: len(lengths) + 1] = np.cumsum([0, *lengths])
    return np.asarray(run(cu_q_lens, np.int32(len(lengths)), q, k, v))


def expected(spec: AttentionSpec, lengths, q, k, v) -> np.ndarray:
    cu_q_lens = np.cumsum([0, *lengths])
    q, k, v = (np.asarray(part, np.float64) for part in (q, k, v))
    table = np.zeros((max(1, len(lengths)), max(lengths, default=1)), int)
    for row, (first, length) in enumerate(zip(cu_q_lens, lengths, strict=False)):
        table[row, :length] = first + np.arange(length)
    options: dict[str, Any] = {name: getattr(spec, name) for name in ("sm_scale", "causal", "window", "soft_cap")}
    args = q, k[:, None], v[:, None], cu_q_lens, np.array(lengths), table, len(lengths)
    return reference.ragged_paged_attention(*args, **options)[0]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name):
    spec, lengths, num_tokens = CASES[name]
    q, k, v = drawn(spec, num_tokens)
    wanted = expected(spec, lengths, q, k, v)
    # What belongs to no prompt may hold anything.
    garbage = np.arange(num_tokens) >= sum(lengths)
    q, k, v = (jnp.where(garbage[:, None, None], jnp.nan, part) for part in (q, k, v))
    found = attended(spec, lengths, q, k, v)
    assert found.shape == wanted.shape and np.abs(found - wanted).max() < 2e-6


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.02), ("float16", 0.002)])
def test_narrow_dtypes(dtype, most):
    q, k, v = drawn(SPEC, 224, dtype)
    found = attended(SPEC, SHORT, q, k, v)
    assert found.dtype == dtype
    assert np.abs(found.astype(np.float64) - expected(SPEC, SHORT, q, k, v)).max() < most


@pytest.mark.parametrize(("lengths", "num_tokens"), [((16, 1, 17, 5, 48), 100), ((BLOCK + 37, 3), 600)])
def test_biases_keys_and_queries_of_distances(lengths, num_tokens):
    spec, reach = replace(SPEC, num_kv_heads=4), 20
    q, k, v = drawn(spec, num_tokens)
    rng = np.random.default_rng(1)
    biases = rng.standard_normal((4, 2 * reach + 1)).astype(np.float32)
    relative = rng.standard_normal((2, 2 * reach + 1, 4, 8)).astype(np.float32)
    tables = jnp.asarray(relative[0]), jnp.asarray(relative[1])
    found = attended(spec, lengths, q, k, v, biases=jnp.asarray(biases), relative=tables)
    for first, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        own = slice(first, first + length)
        qs, ks, vs = (np.asarray(part[own], np.float64) for part in (q, k, v))
        distance = np.clip(np.arange(length)[None] - np.arange(length)[:, None], -reach, reach) + reach
        logits = np.einsum("qnh,snh->nqs", qs, ks)
        for head, (of_keys, of_queries) in enumerate(relative.astype(np.float64).transpose(2, 0, 1, 3)):
            logits[head] += np.take_along_axis(qs[:, head] @ of_keys.T, distance, axis=1)
            logits[head] += np.take_along_axis(ks[:, head] @ of_queries.T, distance.T, axis=1).T
        logits = logits * spec.sm_scale + biases[:, distance]
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        wanted = np.einsum("nqs,snh->qnh", weights / weights.sum(axis=-1, keepdims=True), vs)
        assert np.abs(found[own] - wanted).max() < 5e-6
    for added, match in (
        ({"biases": jnp.zeros((4, 4))}, "biases must be"),
        ({"relative": (jnp.zeros((4, 4, 8)),) * 2}, "keys and queries of distances must be"),
    ):
        with pytest.raises(ValueError, match=match):
            attended(spec, lengths, q, k, v, **added)
    with pytest.raises(ValueError, match="as many kv heads as heads, got 2"):
        attended(SPEC, lengths, q, k[:, :2], v[:, :2], relative=tables)


def test_a_prompt_is_to_the_bit_what_it_is_alone():
    for window, lengths in ((None, (LENGTHS[2], 7, BLOCK + 9)), (20, (70, BLOCK + 100))):
        spec = replace(SPEC, window=window)
        q, k, v = drawn(spec, 1152)
        found = attended(spec, lengths, q, k, v)
        ends = np.cumsum(lengths)
        for length, end in zip(lengths, ends, strict=True):
            own = slice(end - length, end)
            alone = attended(spec, [length], *(part[own] for part in (q, k, v)), num_seqs=1)
            assert np.array_equal(alone, found[own]), (window, length)


def test_which_layers_have_it():
    assert {platform for platform in PLATFORMS if has_whole_prompts(SPEC, platform)} == {"cpu"}
    assert not has_whole_prompts(replace(SPEC, causal=True), "cpu")
    assert not has_whole_prompts(replace(SPEC, values_in_keys=True), "cpu")
    assert not has_whole_prompts(replace(SPEC, has_sinks=True), "cpu")


def test_what_does_not_fit():
    q, k, v = drawn(SPEC, 32)
    schedule = whole_prompt_schedule(jnp.array([0, 32]), jnp.int32(1), num_tokens=32, platform="cpu")
    for arguments, spec, match in (
        ((q, k, v), replace(SPEC, causal=True), "does not run AttentionSpec"),
        ((q, k[:31], v), SPEC, "must be"),
        ((q, k, v.astype(jnp.bfloat16)), SPEC, "must share float32, bfloat16 or float16"),
    ):
        with pytest.raises(ValueError, match=match):
            whole_prompt_attention(*arguments, schedule, spec=spec, platform="cpu")
    with pytest.raises(ValueError, match="whole_prompt_schedule is not implemented for platform 'tpu', allowed: cpu"):
        whole_prompt_schedule(jnp.array([0, 32]), jnp.int32(1), num_tokens=32, platform="tpu")
