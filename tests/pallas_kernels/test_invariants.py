"""What attention promises beyond its numbers: same bits again, nothing recompiled, nothing copied, clear refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention_schedule, reference
from pallas_kernels.kv_pages import KVPages, KVSpec, alloc
from pallas_kernels.kv_update import kv_cache_update
from pallas_kernels.paged_attention import attention_schedule, ragged_paged_attention
from pallas_kernels.ragged_batch import AttentionSpec
from pallas_kernels.registry import kernel
from tests.pallas_kernels.cases import BATCHES, MIXED_KV, MIXED_Q
from tests.pallas_kernels.conformance import Implementation, attend, check_attention, compiled, pool, ragged_batch
from tests.pallas_kernels.mutations import ORIGINAL
from tests.pallas_kernels.problems import Case, build, expected

CASE = Case("mixed", MIXED_Q, MIXED_KV)
SPEC = CASE.spec


def layer_step(q, k, v, kv, batch):
    """Write then attend, as a layer does."""
    kv = kv_cache_update(kv, k, v, batch.slot_mapping)
    return ragged_paged_attention(q, kv, batch, spec=SPEC), kv


def test_ten_runs_give_the_same_bits():
    problem = build(CASE, "float32", "normal")
    first = attend(CASE, problem, "float32", ORIGINAL)
    for _ in range(9):
        np.testing.assert_array_equal(first[0], attend(CASE, problem, "float32", ORIGINAL)[0])


def test_rows_do_not_depend_on_their_neighbours():
    problem = build(CASE, "float32", "normal")
    together, _ = attend(CASE, problem, "float32", ORIGINAL)
    for seq, (first, end) in enumerate(pairwise(problem.cu_q_lens[: problem.num_seqs + 1])):
        cu_q_lens = problem.cu_q_lens * 0 + np.asarray([0] + [end - first] * (len(problem.cu_q_lens) - 1), np.int32)
        alone = problem._replace(
            q=np.roll(problem.q, -first, axis=0),
            cu_q_lens=cu_q_lens,
            kv_lens=np.roll(problem.kv_lens, -seq),
            page_table=np.roll(problem.page_table, -seq, axis=0),
            num_seqs=1,
        )
        got, _ = attend(CASE, alone, "float32", ORIGINAL)
        np.testing.assert_allclose(got[: end - first], together[first:end], rtol=1e-6, atol=1e-6)


def test_page_ids_do_not_matter():
    problem = build(CASE, "float32", "normal")
    num_pages = len(problem.k_pages)
    moved = np.random.default_rng(5).permutation(num_pages).astype(np.int32)  # old id -> new id
    back = np.argsort(moved)
    live = (problem.page_table >= 0) & (problem.page_table < num_pages)
    table = np.where(live, moved[np.where(live, problem.page_table, 0)], problem.page_table)
    other = problem._replace(k_pages=problem.k_pages[back], v_pages=problem.v_pages[back], page_table=table)
    want, got = (attend(CASE, one, "float32", ORIGINAL)[0] for one in (problem, other))
    np.testing.assert_array_equal(got, want)


def test_log_sum_exp_merges_two_halves_of_the_keys():
    """Softmax over all keys is the lse-weighted mean of softmaxes over parts: what split contexts rely on."""
    case = Case("halves", (1, 1), (96, 200), num_tokens=8)
    problem = build(case, "float32", "normal")
    halves = []
    for first_page, kv_lens in ((0, (48, 96)), (3, (48, 0)), (6, (0, 104))):
        part = problem._replace(
            page_table=np.roll(problem.page_table, -first_page, axis=1),
            kv_lens=np.asarray(kv_lens + (0,) * 6, np.int32),
        )
        halves.append(attend(case, part, "float32", ORIGINAL))
    out = np.stack([o for o, _ in halves])[:, :2]
    lse = np.stack([lse for _, lse in halves])[:, :2]
    weights = np.exp(lse - lse.max(0))[..., None]
    want, _ = expected(case, problem)
    np.testing.assert_allclose((out * weights).sum(0) / weights.sum(0), want[:2], rtol=1e-4, atol=1e-5)


def test_update_then_attend_reads_what_was_written():
    problem = build(CASE, "float32", "normal")
    rng = np.random.default_rng(3)
    k, v = (rng.standard_normal((CASE.num_tokens, 2, 16)).astype(np.float32) for _ in range(2))
    k_pages, v_pages = reference.kv_cache_update(problem.k_pages, problem.v_pages, k, v, problem.slot_mapping)
    want, _ = expected(CASE, problem._replace(k_pages=k_pages, v_pages=v_pages))
    kv = pool(CASE, problem, "float32", "cpu")
    got, _ = jax.jit(layer_step)(jnp.asarray(problem.q), jnp.asarray(k), jnp.asarray(v), kv, ragged_batch(problem))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_one_executable_serves_every_batch_of_a_bucket():
    traces = []
    run = compiled(counting(traces), SPEC)
    for case in BATCHES:
        problem = build(case, "float32", "normal")
        run(jnp.asarray(problem.q), pool(case, problem, "float32", "cpu"), ragged_batch(problem), None, None)
    assert len(traces) == 1


def counting(traces: list) -> Implementation:
    """The implementation, which notes every time it is traced."""

    def attend_noted(*args, **options):
        traces.append(options)
        return ORIGINAL.attend(*args, **options)

    return replace(ORIGINAL, attend=attend_noted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(1, 1), (8, 8), (64, 8)])
def test_donated_pool_is_never_copied(num_tokens, num_seqs, dtype):
    """Two layers, the second fed by the first: temporary memory stays far below the pool's size."""

    def step(q, k, v, kv, batch):
        for _ in range(2):
            q, kv = layer_step(q, k + q[:, :2], v + q[:, 2:], kv, batch)
        return q, kv

    kv = jax.eval_shape(lambda: alloc(KVSpec(16384, 16, 2, 16, 16, dtype)))
    i32 = jnp.int32
    shapes = [(num_seqs + 1,), (num_seqs,), (num_seqs, 16), (num_tokens,), (), ()]
    batch = type(ragged_batch(build(CASE, "float32", "normal")))(*(jax.ShapeDtypeStruct(s, i32) for s in shapes))
    q, k = (jax.ShapeDtypeStruct((num_tokens, heads, 16), jnp.float32) for heads in (4, 2))
    memory = jax.jit(step, donate_argnums=3).lower(q, k, k, kv, batch).compile().memory_analysis()
    pool_bytes = kv.data.size * kv.data.dtype.itemsize
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 4


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_quantized_pool_with_traced_scales(dtype):
    """Codes times scale is what the oracle sees; another scale is another result from the same executable."""
    case = Case("quantized", (1, 9, 1), (130, 19, 16), num_tokens=24, max_seqs=4)
    problem = build(case, "float32", "normal")
    problem = problem._replace(k_pages=np.nan_to_num(problem.k_pages), v_pages=np.nan_to_num(problem.v_pages))
    base = alloc(KVSpec(len(problem.k_pages), 16, 2, 16, 16, dtype))
    slots = jnp.arange(len(problem.k_pages) * 16, dtype=jnp.int32)
    traces = []
    run = compiled(counting(traces), case.spec)
    largest = 127.0 if dtype == "int8" else 8.0
    for spread in (1.0, 1e-4, 1e3):
        k_scale, v_scale = np.asarray([[4, 2], [8, 16]], np.float32) / largest
        kv = KVPages(base.data, jnp.asarray(k_scale), jnp.asarray(v_scale * spread), base.spec)
        values = problem.v_pages * np.float32(spread)
        keys = jnp.asarray(problem.k_pages).reshape(-1, 2, 16)
        kv = kv_cache_update(kv, keys, jnp.asarray(values).reshape(-1, 2, 16), slots)
        k_pages, v_pages = (
            quantized(x / scale[:, None], dtype) * scale[:, None]
            for x, scale in ((problem.k_pages, k_scale), (values, v_scale * np.float32(spread)))
        )
        want, _ = expected(case, problem._replace(k_pages=k_pages, v_pages=v_pages))
        got, _ = run(jnp.asarray(problem.q), kv, ragged_batch(problem), None, None)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * spread)
    assert len(traces) == 1


def quantized(array: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest codes, in numpy."""
    if dtype == "int8":
        return np.clip(np.rint(array), -127, 127)
    limit = float(jnp.finfo(dtype).max)
    return np.clip(array, -limit, limit).astype(jnp.dtype(dtype)).astype(np.float32)


@pytest.mark.parametrize(("block_q", "block_kv", "block_seqs"), [(8, 32, 3), (24, 48, 2), (64, 256, 8)])
def test_any_block_size_gives_the_oracle(monkeypatch, block_q, block_kv, block_seqs):
    monkeypatch.setattr(paged_attention_schedule, "BLOCK_Q", block_q)
    monkeypatch.setattr(paged_attention_schedule, "BLOCK_KV", block_kv)
    monkeypatch.setattr(paged_attention_schedule, "BLOCK_SEQS", block_seqs)
    implementation = replace(ORIGINAL, name=f"blocks {block_q} {block_kv} {block_seqs}")
    for family in ("normal", "uniform"):
        check_attention(CASE, "float32", family, implementation)


def test_batch_that_contradicts_itself_ends():
    """A sequence with new tokens but no keys is a caller's mistake; it must not hang the engine."""
    problem = build(CASE, "float32", "normal")
    broken = problem._replace(kv_lens=problem.kv_lens * 0)
    got, _ = attend(CASE, broken, "float32", ORIGINAL)
    assert not got[:3].any()


def public(q=(96, 4, 16), q_dtype=jnp.float32, kv_dtype="float32", spec=SPEC, field=None, value=None, **options):
    kv = alloc(KVSpec(8, 16, 2, 16, 16, kv_dtype))
    batch = ragged_batch(build(CASE, "float32", "normal"))
    batch = batch if field is None else batch._replace(**{field: value})
    return ragged_paged_attention(jnp.zeros(q, q_dtype), kv, batch, spec=spec, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: public(q=(96, 3, 16)), r"q must be \[T, 4, 16\] with T >= 1, got \[96, 3, 16\]"),
        (lambda: public(q_dtype=jnp.int32), "q must be float32, bfloat16 or float16, got int32"),
        (lambda: public(q=(95, 4, 16)), r"slot_mapping must have shape \(95,\)"),
        (lambda: public(field="kv_lens", value=jnp.zeros(8)), "RaggedBatch.kv_lens must be int32, got float32"),
        (lambda: public(field="kv_lens", value=jnp.zeros(7, jnp.int32)), r"kv_lens must have shape \(8,\)"),
        (lambda: public(field="page_table", value=jnp.zeros((8, 0), jnp.int32)), "page_table must be"),
        (lambda: public(spec=replace(SPEC, head_dim=8), q=(96, 4, 8)), "the pool holds head dims 16/16"),
        (lambda: public(sinks=jnp.zeros(3)), r"sinks must be float32\[4\], got float32\[3\]"),
        (lambda: public(tree_mask=jnp.zeros((96, 1), jnp.int32)), r"tree_mask must be uint32\[96, words\]"),
        (lambda: public(tree_mask=jnp.zeros((96, 1), jnp.uint32), spec=replace(SPEC, window=4)), "tree_mask needs"),
        (lambda: public(platform="tpu"), "platform 'tpu' cannot read a pool of layout 'cpu'"),
        (lambda: kernel("ragged_paged_attention", "abacus"), "not implemented for platform 'abacus', allowed: cpu"),
        (lambda: AttentionSpec(6, 4, 8, 8, 1.0), "num_q_heads .6. must be a multiple of num_kv_heads .4."),
        (lambda: AttentionSpec(4, 4, 8, 8, 1.0, window=0), "window must be at least 1 or None, got 0"),
        (lambda: AttentionSpec(4, 4, 8, 8, 1.0, soft_cap=-1.0), "soft_cap must be positive or None, got -1.0"),
        (lambda: AttentionSpec(4, 4, 8, 8, 1.0, window=3, causal=False), "window needs causal=True"),
    ],
)
def test_errors_name_field_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_public_operation_equals_the_row_it_picks():
    problem = build(CASE, "float32", "normal")
    kv, batch = pool(CASE, problem, "float32", "cpu"), ragged_batch(problem)
    want = attend(CASE, problem, "float32", ORIGINAL)
    schedule = attention_schedule(batch, SPEC, num_tokens=96, page_size=16, platform="cpu")
    for given in (None, schedule):
        got = ragged_paged_attention(jnp.asarray(problem.q), kv, batch, spec=SPEC, schedule=given, return_lse=True)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-6, atol=1e-6)
