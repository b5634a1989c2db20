"""What it means for an implementation to conform: the checks that tests and the mutation gate both run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import kv_update, reference
from pallas_kernels.kv_pages import KVPages, KVSpec, alloc, to_storage
from pallas_kernels.ragged_batch import RaggedBatch
from pallas_kernels.registry import KERNELS, kernel
from tests.pallas_kernels.problems import Case, Problem, build, expected

ROW_RMS = {"float32": 2e-5, "bfloat16": 8e-3}
MAX_OF_V = {"float32": 2e-5, "bfloat16": 2.0**-7}
LSE = {"float32": 1e-4, "bfloat16": 1e-3}


@dataclass(frozen=True)
class Implementation:
    """The functions under test, as the registry holds them, and the pool layout they read."""

    name: str
    schedule: Callable[..., Any]
    attend: Callable[..., Any]
    update: Callable[..., KVPages] = kv_update.kv_cache_update
    layout: str = "cpu"


IMPLEMENTATIONS = [
    Implementation(platform, kernel("attention_schedule", platform), kernel(op, platform), layout=platform)
    for op, platform in KERNELS
    if op == "ragged_paged_attention" and platform == jax.default_backend()
]


@functools.cache
def compiled(implementation: Implementation, spec):
    """The jitted attention of one layer; shapes and dtypes are left to jit's own cache."""

    @jax.jit
    def run(q, kv, batch, sinks, tree_mask):
        schedule = implementation.schedule(batch, spec, num_tokens=q.shape[0], page_size=kv.page_size)
        return implementation.attend(q, kv, batch, schedule, spec=spec, sinks=sinks, tree_mask=tree_mask)

    return run


def pool(case: Case, problem: Problem, dtype: str, layout: str) -> KVPages:
    """A pool that holds the problem's pages, written token by token through the storage functions alone."""
    num_pages, page_size, num_kv_heads, head_dim = problem.k_pages.shape
    kv = alloc(KVSpec(num_pages, page_size, num_kv_heads, head_dim, case.dims[1], dtype), layout=layout)
    slots = jnp.arange(num_pages * page_size, dtype=jnp.int32)
    keys, values = (jnp.asarray(x).reshape(-1, *x.shape[2:]) for x in (problem.k_pages, problem.v_pages))
    return kv_update.kv_cache_update(kv, keys, values, slots)


def ragged_batch(problem: Problem) -> RaggedBatch:
    arrays = (problem.cu_q_lens, problem.kv_lens, problem.page_table, problem.slot_mapping)
    return RaggedBatch(*map(jnp.asarray, arrays), jnp.int32(problem.num_seqs), jnp.int32(problem.num_decode))


def attend(case: Case, problem: Problem, dtype: str, implementation: Implementation) -> tuple[np.ndarray, np.ndarray]:
    """Run the implementation: o in float32, lse."""
    o, lse = compiled(implementation, case.spec)(
        jnp.asarray(problem.q, dtype),
        pool(case, problem, dtype, implementation.layout),
        ragged_batch(problem),
        None if problem.sinks is None else jnp.asarray(problem.sinks),
        None if problem.tree_mask is None else jnp.asarray(problem.tree_mask),
    )
    return np.asarray(o, np.float32), np.asarray(lse)


def check_attention(case: Case, dtype: str, family: str, implementation: Implementation) -> None:
    """AssertionError unless output and log-sum-exp match the oracle row by row and padding is exactly 0."""
    problem = build(case, dtype, family)
    want_o, want_lse = expected(case, problem)
    got_o, got_lse = attend(case, problem, dtype, implementation)
    label = f"{case.name} {dtype} {family}"
    num_live = int(problem.cu_q_lens[problem.num_seqs])
    assert not got_o[num_live:].any(), f"{label}: padding tokens are not exactly 0"
    assert np.isfinite(got_o).all(), f"{label}: not finite"
    error = np.sqrt(np.mean((got_o - want_o) ** 2, axis=-1))
    scale = np.sqrt(np.mean(want_o**2, axis=-1))
    largest = np.nanmax(np.abs(np.where(np.isinf(problem.v_pages), np.nan, problem.v_pages)), initial=0.0)
    bad = (error > ROW_RMS[dtype] * scale) & (error > ROW_RMS[dtype] * 0.02 * largest)
    assert not bad.any(), f"{label}: rows {np.argwhere(bad)[:4].tolist()}, worst {np.max(error / (scale + 1e-30)):.2e}"
    worst = np.max(np.abs(got_o - want_o), initial=0.0)
    assert worst <= MAX_OF_V[dtype] * largest, f"{label}: max error {worst:.2e} of max |V| {largest:.2e}"
    np.testing.assert_allclose(got_lse, want_lse, rtol=1e-5, atol=LSE[dtype], err_msg=f"{label}: lse")


def check_update(dtype: str, num_tokens: int, implementation: Implementation) -> None:
    """AssertionError unless new tokens land in their slots and every other slot keeps its bits."""
    rng = np.random.default_rng(num_tokens)
    num_pages, page_size, num_heads, head_dim, v_head_dim = 7, 16, 3, 8, 12
    kv = alloc(KVSpec(num_pages, page_size, num_heads, head_dim, v_head_dim, dtype), layout=implementation.layout)
    slots = jnp.arange(num_pages * page_size, dtype=jnp.int32)
    old_k = rng.standard_normal((num_pages, page_size, num_heads, head_dim)).astype(jnp.dtype(dtype))
    old_v = rng.standard_normal((num_pages, page_size, num_heads, v_head_dim)).astype(jnp.dtype(dtype))
    kv = kv_update.kv_cache_update(kv, *(jnp.asarray(x).reshape(-1, *x.shape[2:]) for x in (old_k, old_v)), slots)
    k = rng.standard_normal((num_tokens, num_heads, head_dim)).astype(jnp.dtype(dtype))
    v = rng.standard_normal((num_tokens, num_heads, v_head_dim)).astype(jnp.dtype(dtype))
    slot_mapping = rng.permutation(num_pages * page_size)[:num_tokens].astype(np.int32)
    slot_mapping[::3] = -1  # token 0 is padding: a clamped -1 would hit slot 0 or the last one
    slot_mapping[1:2] = num_pages * page_size - 1
    want_k, want_v = reference.kv_cache_update(old_k, old_v, k, v, slot_mapping)
    updated = implementation.update(kv, jnp.asarray(k), jnp.asarray(v), jnp.asarray(slot_mapping))
    got = np.asarray(updated.data).reshape(num_pages, num_heads, -1)
    want = [
        np.asarray(to_storage(jnp.asarray(x), kv.spec, kv.layout)).transpose(0, 2, 1, 3).reshape(num_pages, num_heads, -1)
        for x in (want_k, want_v)
    ]
    np.testing.assert_array_equal(got, np.concatenate(want, axis=-1), err_msg=f"update {dtype} T={num_tokens}")
