"""What attention promises beyond its numbers: same bits again, nothing recompiled, nothing copied, clear refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.attention.op import attention_schedule, ragged_paged_attention
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec
from jaxengine.pallas_kernels.kv.pages import KVSpec, alloc
from jaxengine.pallas_kernels.kv.update import kv_cache_update
from jaxengine.pallas_kernels.registry import kernel
from jaxengine.pallas_kernels.tuning import TpuUpdate, Tuning, XlaAttention
from tests.pallas_kernels.cases import MIXED_KV, MIXED_Q
from tests.pallas_kernels.checks import CHECKS, INVARIANTS
from tests.pallas_kernels.conformance import attend, check_attention, pool, ragged_batch
from tests.pallas_kernels.implementations import CPU, IN_PROCESS
from tests.pallas_kernels.problems import Case, build
from tests.tables import each_row

CASE = Case("mixed", MIXED_Q, MIXED_KV)
SPEC = CASE.spec
LATENT = AttentionSpec(4, 2, 16, 12, 1.0, values_in_keys=True)
SLOPED = replace(SPEC, has_slopes=True)
BIASED = replace(SPEC, bias_extent=8)


# XLA for GPUs is the CPU's code on another layout.
ON_EACH = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(each, id=each.name, marks=pytest.mark.thorough("as on a CPU") if each.name == "gpu_xla" else ())
        for each in IN_PROCESS
    ],
)


@ON_EACH
@pytest.mark.parametrize("check", INVARIANTS, ids=lambda check: check.__name__)
def test_invariant(check, implementation):
    check(implementation)


@ON_EACH
@pytest.mark.parametrize("check", ["splits", "many_parts"])
def test_split_keys_give_the_oracle(check, implementation):
    CHECKS[check](implementation)


@ON_EACH
def test_ten_runs_give_the_same_bits(implementation):
    CHECKS["determinism"](10, implementation)


def layer_step(q, k, v, kv, batch):
    """Write then attend, as a layer does."""
    kv = kv_cache_update(kv, k, v, batch.slot_mapping)
    return ragged_paged_attention(q, kv, batch, spec=SPEC), kv


def memory_of(num_layers, num_tokens, num_seqs, dtype):
    """What a step of layers, each fed by the one before, takes beside its pool; and the pool's bytes."""

    def step(q, k, v, kv, batch):
        for _ in range(num_layers):
            q, kv = layer_step(q, k + q[:, :2], v + q[:, 2:], kv, batch)
        return q, kv

    kv = jax.eval_shape(lambda: alloc(KVSpec(16384, 16, 2, 16, 16, dtype)))
    i32 = jnp.int32
    shapes = [(num_seqs + 1,), (num_seqs,), (num_seqs, 16), (num_tokens,), (), ()]
    batch = type(ragged_batch(build(CASE, "float32", "normal")))(*(jax.ShapeDtypeStruct(s, i32) for s in shapes))
    q, k = (jax.ShapeDtypeStruct((num_tokens, heads, 16), jnp.float32) for heads in (4, 2))
    memory = jax.jit(step, donate_argnums=3).lower(q, k, k, kv, batch).compile().memory_analysis()
    return memory, kv.data.size * kv.data.dtype.itemsize


ANOTHER = pytest.mark.thorough("as in another dtype or size")
MEMORY = [(1, 1, "float32"), (8, 8, "int8"), (64, 8, "bfloat16")]
STEPS = [(1, 1), (8, 8), (64, 8)]
MORE_MEMORY = [(*sizes, dtype) for sizes in STEPS for dtype in ("float32", "bfloat16", "int8")]


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "dtype"),
    [pytest.param(*row, marks=[] if row in MEMORY else ANOTHER) for row in MORE_MEMORY],
)
def test_donated_pool_is_never_copied(num_tokens, num_seqs, dtype):
    """Two layers: temporary memory stays far below the pool's size."""
    memory, pool_bytes = memory_of(2, num_tokens, num_seqs, dtype)
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 4


@pytest.mark.parametrize("num_tokens", [pytest.param(8, marks=ANOTHER), 512])
def test_layers_take_turns_with_their_workspace(num_tokens):
    """What all of them begin with was once copied for each at the start of the step: seven eighths of its workspace."""
    few, many = (memory_of(layers, num_tokens, 8, "float32")[0].temp_size_in_bytes for layers in (2, 6))
    assert many < 1.1 * few


@pytest.mark.parametrize(
    ("block_q", "block_kv", "block_seqs"),
    [(24, 48, 2), pytest.param(8, 32, 3, marks=ANOTHER), pytest.param(64, 256, 8, marks=ANOTHER)],
)
def test_any_block_size_gives_the_oracle(block_q, block_kv, block_seqs):
    tuning = Tuning(xla_attention=XlaAttention(block_seqs, block_q, block_kv))
    implementation = replace(CPU, name=f"blocks {block_q} {block_kv} {block_seqs}", tuning=tuning)
    for family in ("normal", "uniform"):
        check_attention(CASE, "float32", family, implementation)


def test_batch_that_contradicts_itself_ends():
    """A sequence with new tokens but no keys is a caller's mistake; it must not hang the engine."""
    problem = build(CASE, "float32", "normal")
    broken = problem._replace(kv_lens=problem.kv_lens * 0)
    got, _ = attend(CASE, broken, "float32", CPU)
    assert not got[:3].any()


def public(q=(96, 4, 16), q_dtype=jnp.float32, kv_dtype="float32", spec=SPEC, field=None, value=None, **options):
    kv = alloc(KVSpec(8, 16, 2, 16, 16, kv_dtype))
    batch = ragged_batch(build(CASE, "float32", "normal"))
    batch = batch if field is None else batch._replace(**{field: value})
    return ragged_paged_attention(jnp.zeros(q, q_dtype), kv, batch, spec=spec, **options)


@each_row(
    ("call", "message"),
    [
        (lambda: public(q=(96, 3, 16)), r"q must be \[T, 4, 16\] with T >= 1, got \[96, 3, 16\]"),
        (lambda: public(q_rest=jnp.zeros((96, 4, 4))), r"q_rest must be None, got float32\[96, 4, 4\]"),
        (lambda: public(spec=LATENT), r"q must be \[T, 4, 12\] with T >= 1, got \[96, 4, 16\]"),
        (lambda: public(spec=LATENT, q=(96, 4, 12)), r"q_rest must be float32\[96, 4, 4\], got None"),
        (lambda: public(q_dtype=jnp.int32), "q must be float32, bfloat16 or float16, got int32"),
        (lambda: public(q=(95, 4, 16)), r"slot_mapping must have shape \(95,\)"),
        (lambda: public(field="kv_lens", value=jnp.zeros(8)), "RaggedBatch.kv_lens must be int32, got float32"),
        (lambda: public(field="kv_lens", value=jnp.zeros(7, jnp.int32)), r"kv_lens must have shape \(8,\)"),
        (lambda: public(field="page_table", value=jnp.zeros((8, 0), jnp.int32)), "page_table must be"),
        (lambda: public(spec=replace(SPEC, head_dim=8), q=(96, 4, 8)), "the pool holds head dims 16/16"),
        (lambda: public(sinks=jnp.zeros(3)), r"sinks must be float32\[4\], got float32\[3\]"),
        (lambda: public(slopes=jnp.zeros(4)), r"slopes must be None, got float32\[4\]"),
        (lambda: public(spec=SLOPED), r"slopes must be float32\[4\], got None"),
        (lambda: public(spec=SLOPED, slopes=jnp.zeros(3)), r"slopes must be float32\[4\], got float32\[3\]"),
        (lambda: public(spec=replace(SLOPED, causal=False), slopes=jnp.zeros(4)), "slopes need causal=True"),
        (lambda: public(biases=jnp.zeros((96, 4, 8))), r"biases must be None, got float32\[96, 4, 8\]"),
        (lambda: public(spec=BIASED), r"biases must be float32\[96, 4, 8\], got None"),
        (lambda: public(spec=BIASED, biases=jnp.zeros((96, 4, 7))), r"got float32\[96, 4, 7\]"),
        (lambda: public(spec=replace(SPEC, bias_extent=-1)), "AttentionSpec.bias_extent must be at least 0"),
        (lambda: public(tree_mask=jnp.zeros((96, 1), jnp.int32)), r"tree_mask must be uint32\[96, words\]"),
        (lambda: public(tree_mask=jnp.zeros((96, 1), jnp.uint32), spec=replace(SPEC, window=4)), "tree_mask needs"),
        (lambda: public(platform="tpu"), "platform 'tpu' cannot read a pool of 'cpu'"),
        (lambda: kernel("ragged_paged_attention", "abacus"), "not implemented for platform 'abacus', allowed: cpu"),
        (lambda: public(schedule=0, tuning=Tuning()), "give tuning to attention_schedule"),
        (lambda: XlaAttention(block_q=0), "XlaAttention.block_q must be a whole number from 1 on, got 0"),
        (lambda: TpuUpdate(reads_ahead=32), r"reads_ahead must be less than groups_in_flight \(32\), got 32"),
        (lambda: AttentionSpec(6, 4, 8, 8, 1.0), "num_q_heads .6. must be a multiple of num_kv_heads .4."),
        (lambda: AttentionSpec(4, 4, 8, 8, 1.0, window=0), "window must be at least 1 or None, got 0"),
        (lambda: AttentionSpec(4, 4, 8, 8, 1.0, soft_cap=-1.0), "soft_cap must be positive or None, got -1.0"),
    ],
)
def test_errors_name_field_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_public_operation_equals_the_row_it_picks():
    problem = build(CASE, "float32", "normal")
    kv, batch = pool(problem, "cpu"), ragged_batch(problem)
    want = attend(CASE, problem, "float32", CPU)
    schedule = jax.jit(partial(attention_schedule, spec=SPEC, num_tokens=96, page_size=16, platform="cpu"))(batch)
    run = jax.jit(partial(ragged_paged_attention, spec=SPEC, return_lse=True))
    for given in (None, schedule):
        got = run(jnp.asarray(problem.q), kv, batch, schedule=given)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-6, atol=1e-6)
