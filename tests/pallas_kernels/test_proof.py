"""Proof of kernels: calls are found by tracing, inputs are valid and telling, and each planted fault is found."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels import registry
from jaxengine.pallas_kernels.attention.op import AttentionSpec, RaggedBatch, ragged_paged_attention
from jaxengine.pallas_kernels.interpreted import interpreted
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec, pool_shape, storage_dtype
from jaxengine.pallas_kernels.kv.update import kv_cache_update
from jaxengine.pallas_kernels.matmul import dense, quantized
from jaxengine.pallas_kernels.matmul.gated import say_once
from jaxengine.pallas_kernels.matmul.grouped import gated_matmul, grouped_matmul
from jaxengine.pallas_kernels.matmul.lora import lora_product, lora_visits
from jaxengine.pallas_kernels.matmul.microscaled import microscaled_rows
from jaxengine.pallas_kernels.proof.calls import Call, recorded_calls
from jaxengine.pallas_kernels.proof.judge import (
    _CASES,
    Compiler,
    Verdict,
    compare,
    compiled_trial,
    judged_calls,
    lowered_trial,
    too_slow,
    verdict_of,
)
from jaxengine.pallas_kernels.proof.products import product_case
from jaxengine.pallas_kernels.proof.ragged import MIXES, Sizes, least_pages, ragged_batch
from jaxengine.runner.compile_watch import CompileWatch
from tests.jaxengine.runner.planted_kernels import plant
from tests.pallas_kernels.cases import BY_NAME
from tests.pallas_kernels.checks import SLOTS
from tests.pallas_kernels.conformance import check_attention, check_update
from tests.pallas_kernels.implementations import Implementation
from tests.pallas_kernels.selections import programs_of

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
SPEC = AttentionSpec(4, 2, 64, 64, 0.125)


def judge(call: Call, *, thorough: bool, timed: bool, compile_lowered: Compiler) -> Verdict:
    """Lower, compile and run a call's programs on jax's default device, and return its verdict. Arguments are those of
    `lowered_trial`, `compiled_trial` and `verdict_of`; both programs are compiled alike. Never raises.
    """
    trial = compiled_trial(lowered_trial(call, thorough=thorough), compile_lowered, compile_lowered)
    return verdict_of(trial, timed=timed)


judged = partial(judge, thorough=False, timed=False, compile_lowered=lambda lowered: lowered.compile())


def shape(dtype, *sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def layer(spec: AttentionSpec, platform: str, dtype: str = "bfloat16", num_tokens: int = 16, num_seqs: int = 3):
    """A layer's write and attention, and the shapes of its arguments."""
    pool = KVSpec(20, 16, spec.num_kv_heads, spec.head_dim, spec.v_head_dim, dtype)
    layout = registry.layout_of(platform)
    kv = KVPages(shape(storage_dtype(pool, layout), *pool_shape(pool, layout)), None, None, pool, platform)
    batch = (shape(I32, num_seqs + 1), shape(I32, num_seqs), shape(I32, num_seqs, 8), shape(I32, num_tokens))
    new = shape(dtype, num_tokens, spec.num_kv_heads, spec.head_dim)

    def run(q, kv, batch, k, v):
        return ragged_paged_attention(q, kv_cache_update(kv, k, v, batch.slot_mapping), batch, spec=spec)

    q = shape(dtype, num_tokens, spec.num_q_heads, spec.head_dim)
    return run, (q, kv, RaggedBatch(*batch, shape(I32), shape(I32)), new, new)


def test_faults_of_planted_kernels_are_found(monkeypatch):
    """By kernel, fault and what is said of it; with no fault nothing is."""
    attend = layer(SPEC, "cpu", "float32")
    multiply = dense.matmul, (shape(F32, 32, 64), shape(F32, 64, 64))
    for faults, program, wanted in (
        ({}, attend, {"kv_cache_update": "", "ragged_paged_attention": ""}),
        ({"attention": "wrong scale"}, attend, {"kv_cache_update": "", "ragged_paged_attention": "is wrong: row"}),
        ({"update": "does not compile"}, attend, {"kv_cache_update": "does not compile", "ragged_paged_attention": ""}),
        ({"matmul": "NaN at one shape"}, multiply, {"matmul": "is wrong: 1 values are NaN"}),
    ):
        with monkeypatch.context() as patched:
            plant(patched, **faults)
            calls = judged_calls(recorded_calls(*program, {"cpu"}))
            found = {call.op: judged(call) for call in calls}
        assert {op: verdict.note for op, verdict in found.items()} == dict.fromkeys(wanted, "")
        for op, error in wanted.items():
            assert found[op].error[: len(error) or None] == error, (faults, found[op])


def test_a_call_is_traced_on_shapes(monkeypatch):
    """Its inputs are drawn when it runs; to trace it, a matrix of gigabytes need not be on the device."""
    plant(monkeypatch)
    (call,) = recorded_calls(dense.matmul, (shape(F32, 32, 64), shape(F32, 64, 64)), {"cpu"})
    case, drawn = product_case(call), []

    def inputs(mix, rng):
        drawn.append(case.inputs(mix, rng))
        return drawn[-1]

    monkeypatch.setitem(_CASES, "matmul", lambda _: case._replace(inputs=inputs))
    with monkeypatch.context() as patched:
        patched.setattr(np, "resize", None)  # nor in host memory
        trial = lowered_trial(call, thorough=False)
    assert all(isinstance(each, jax.stages.Lowered) for each in (trial.plain, trial.kernel))
    assert all(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(drawn)) and drawn


def test_inputs_are_drawn_without_a_compiler(monkeypatch):
    """A program for each shape of an input would take longer than the proof."""
    plant(monkeypatch)
    (call,) = recorded_calls(dense.matmul, (shape(F32, 33, 65), shape(F32, 65, 67)), {"cpu"})
    case, watch = product_case(call), CompileWatch()
    with watch.watch():
        x, _ = case.inputs("ragged", np.random.default_rng(7))
    assert watch.count == 0 and isinstance(x, jax.Array)


def test_a_slow_kernel_is_found_over_all_shapes(monkeypatch):
    plant(monkeypatch, matmul="slow")
    (call,) = recorded_calls(dense.matmul, (shape(F32, 32, 64), shape(F32, 64, 64)), {"cpu"})
    clock = SimpleNamespace(now=0.0, calls=0, perf_counter=lambda: clock.now)
    monkeypatch.setattr("jaxengine.pallas_kernels.proof.judge.time", clock)

    def compile_lowered(lowered):
        compiled, seconds = lowered.compile(), 200.0 if "while" in lowered.as_text() else 1.0

        def run(*arguments):
            clock.calls += 1
            clock.now += seconds + 1e6 * (clock.calls % 15 == 0)  # now and then another process has the core
            return compiled(*arguments)

        return run

    verdict = judge(call, thorough=False, timed=True, compile_lowered=compile_lowered)
    assert (verdict.error, verdict.seconds, verdict.plain_seconds) == ("", 200.0, 1.0)
    assert "takes" in too_slow([verdict])
    # What counts is the sum: short calls may take somewhat longer if long ones do not.
    assert too_slow([verdict, Verdict(seconds=1000.0, plain_seconds=5000.0)]) == ""
    assert too_slow([Verdict()]) == ""


def test_values_are_compared_by_rows():
    want = np.ones((3, 4), np.float32)
    want[1, 0] = np.nan  # is compared as such, and hides nothing else
    want[2] = [-np.inf, 0, 1, 2]
    for row, column, value, found in (
        (0, 1, 1.01, ""),
        (0, 1, 1.03, "row 0"),
        (1, 1, 1.03, "row 1"),
        (2, 1, np.nan, "1 values are NaN"),
        (1, 0, 1, "1 values are not NaN"),
        (1, 0, np.inf, "1 values are not NaN"),
        (2, 0, np.inf, "row 2"),
        (0, 1, -np.inf, "row 0"),
    ):
        got = want.copy()
        got[row, column] = value
        assert found in compare(got, want)[1] and bool(found) == bool(compare(got, want)[1]), (row, column, value)
    with pytest.raises(ValueError, match="shape"):
        compare(want[:1], want)
    assert compare({"o": want, "lse": want}, {"o": want, "lse": want}) == (0.0, "")
    assert "row 2" in compare(np.where(np.isinf(want), 0, want), want)[1]


def test_batches_are_those_of_a_scheduler():
    """Each mix and form of attention: lengths fit, pages that are read are alive, and NaN is where nobody looks."""
    forms = (SPEC, AttentionSpec(4, 2, 64, 64, 0.125, window=20), AttentionSpec(4, 2, 64, 64, 0.125, chunk=32))
    for num_tokens, num_seqs in ((4, 4), (64, 8), (1, 1), (7, 40)):
        sizes = Sizes(num_tokens, num_seqs, 16, 16, least_pages(num_seqs))
        for mix in MIXES:
            for spec in forms:
                made = ragged_batch(mix, sizes, spec, np.random.default_rng(3))
                count, q_lens = int(made.num_seqs), np.diff(made.cu_q_lens)
                assert 1 <= count <= num_seqs and made.cu_q_lens[-1] <= num_tokens and (q_lens[:count] > 0).all()
                assert (q_lens[: int(made.num_decode)] == 1).all() and not q_lens[count:].any()
                assert (made.kv_lens[:count] >= q_lens[:count]).all() and made.kv_lens.max() <= 256
                assert made.unseen.any()
                for seq in range(count):
                    end = int(made.kv_lens[seq])
                    first = end - int(q_lens[seq])
                    least = {20: max(first - 19, 0), 32: first // 32 * 32}.get(spec.window or spec.chunk or 0, 0)
                    seen = np.arange(least, end)
                    assert not made.unseen[made.page_table[seq, seen // 16], seen % 16].any(), (mix, spec, seq)
                slots = made.slot_mapping[made.slot_mapping >= 0]
                assert len(slots) == made.cu_q_lens[-1]


def test_an_observed_trace_is_made_anew_and_whole(monkeypatch):
    """A call inside of a function that jax has traced before is found; a kernel that fails in a trace, too."""
    plant(monkeypatch, update="does not compile")
    program, arguments = layer(SPEC, "cpu", "float32")
    calls = [{call.op for call in recorded_calls(jax.jit(program), arguments, {"cpu"})} for _ in range(2)]
    assert calls[0] == calls[1] == {*registry._TOGETHER[0], *registry._TOGETHER[1]}
    plant(monkeypatch)
    assert not recorded_calls(program, arguments, {"tpu"})


def test_rows_that_are_not_used(monkeypatch):
    """Operations that share a work list leave a kind together, and each has something in its place."""
    with registry.without_rows([("ragged_paged_attention", "tpu")]):
        assert registry.kernel_module("attention_schedule", "tpu") == "attention.xla.schedule"
        assert registry.kernel_module("kv_cache_update", "tpu") == "kv.update_tpu"
        with registry.without_rows([("lora_product", "tpu"), ("grouped_matmul", "tpu")]):
            assert registry.kernel_module("ragged_paged_attention", "tpu") == "attention.xla.attend"
            assert registry.kernel_module("lora_product", "tpu") == "matmul.xla.lora"
            assert not registry.adds_bias("grouped_matmul", "tpu")
    assert registry.kernel_module("attention_schedule", "tpu") == "attention.tpu.attend"
    assert registry.adds_bias("grouped_matmul", "tpu")
    # What runs in place of a kernel is part of the programs' sources.
    assert "jaxengine.pallas_kernels.attention.xla.attend" in registry.kernel_modules("tpu")
    every = [(op, kind) for op, kind in registry._ROWS if kind not in registry.PLAIN_KINDS]
    fused = {"gated_matmul", "quantized_gated_matmul"}  # the product, and then what follows it
    with registry.without_rows(every):
        for op, platform in registry.KERNELS:
            assert not registry.is_kernel(op, platform)
            assert op in fused or registry.kernel(op, platform), (op, platform)


def test_plain_xla_reads_and_writes_the_pages_of_tpus():
    """What runs in place of TPU kernels, over their layout of pages, against the float64 oracle."""
    plain = Implementation("plain XLA over TPU pages", "tpu", default_dims=(64, 64))
    with registry.without_rows([("ragged_paged_attention", "tpu"), ("kv_cache_update", "tpu")]):
        for name in ("mixed", "latent decodes", "fp8 e4m3 keys and values", "window 17"):
            check_attention(BY_NAME[name], "bfloat16", "needle", plain)
        for dtype, in_keys in (("bfloat16", False), ("int8", False), ("float32", True)):
            slots = SLOTS["runs"]
            check_update(dtype, slots, plain, values_in_keys=in_keys)


def _silu(gate, up):
    return jax.nn.silu(gate) * up


def product_programs():
    """By operation: a function that calls it, and shapes that TPU kernels take."""
    x, codes, scales = shape(BF16, 16, 256), shape(jnp.uint8, 2, 128, 256), shape(BF16, 2, 2, 256)
    sizes, bias = shape(I32, 2), shape(BF16, 2, 256)

    def adapted(y, x, a, b, slots):
        visits = lora_visits(slots, num_slots=4, rank=16)
        return lora_product(y, x, a, [b], visits, modules=(0,), rank=16)

    return {
        "quantized_matmul": (quantized.quantized_matmul, (x, shape(jnp.uint8, 128, 256), *[shape(BF16, 2, 256)] * 2)),
        "grouped_matmul": (grouped_matmul, (x, shape(BF16, 2, 256, 256), sizes, bias)),
        "gated_matmul": (partial(gated_matmul, activation=_silu), (x, shape(BF16, 2, 256, 256), sizes, bias)),
        "quantized_grouped_matmul": (quantized.quantized_grouped_matmul, (x, codes, scales, scales, sizes, bias)),
        "quantized_gated_matmul": (
            partial(quantized.quantized_gated_matmul, activation=_silu),
            (x, codes, scales, scales, sizes, bias),
        ),
        "lora_product": (
            adapted,
            (shape(F32, 16, 256), x, shape(BF16, 64, 256), shape(BF16, 64, 256), shape(I32, 16)),
        ),
        "microscaled_rows": (partial(microscaled_rows, group=32, dtype="float8_e4m3fn", kind="e8m0"), (x,)),
    }


def _of_tpu(program, arguments) -> Call:
    with interpreted("tpu"):
        calls = judged_calls(recorded_calls(program, arguments, {"tpu"}))
    return calls[-1]


QUICK = ("quantized_matmul",)


def _refuse(y):
    raise NotImplementedError("no lowering of this primitive")


# What a fault makes of a kernel's result, by what is said of it. Rows of no group are last, and zero in both.
FAULTS = {
    "is wrong: row": lambda y: y.at[-2, -1].add(7),
    "does not compile: NotImplementedError": _refuse,
}


def _plant(patch, module: str, change) -> None:
    """Let kernels that a module of proofs looks up return what `change` makes of their results."""
    original = registry.kernel

    def kernel(op, platform):
        if not registry.is_kernel(op, platform) or op.endswith("schedule"):
            return original(op, platform)
        return lambda *arguments, **options: change(original(op, platform)(*arguments, **options))

    patch.setattr(f"jaxengine.pallas_kernels.proof.{module}.kernel", kernel)


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=() if op in QUICK else pytest.mark.thorough) for op in product_programs()]
)
def test_tpu_products_pass_and_faults_do_not(op, monkeypatch):
    """In the interpreter: the kernel is plain XLA's equal, and slower; each planted fault is found."""
    say_once.cache_clear()
    call = _of_tpu(*product_programs()[op])
    assert (call.op, call.kind) == (op, "tpu")
    with interpreted("tpu"):
        verdict = judged(call, timed=op in QUICK)
        assert (verdict.error, verdict.note) == ("", "") and verdict.difference < 0.02, verdict
        assert op not in QUICK or "takes" in too_slow([verdict]), "an interpreter is not as fast as machine code"
        for said, change in FAULTS.items():
            with monkeypatch.context() as patched:
                _plant(patched, "products", change)
                assert judged(call).error.startswith(said), said


def test_a_fault_at_one_shape_is_found_there(monkeypatch):
    """In the interpreter: of two calls of a kernel, one has a NaN."""
    multiply, (_, *weight) = product_programs()["quantized_matmul"]
    calls = [_of_tpu(multiply, (shape(BF16, rows, 256), *weight)) for rows in (8, 16)]
    _plant(monkeypatch, "products", lambda y: y.at[0, 0].set(jnp.nan) if len(y) == 8 else y)
    with interpreted("tpu"):
        assert ["NaN" in judged(call).error for call in calls] == [True, False]


@pytest.mark.thorough
@pytest.mark.parametrize("window", [None, 20])
def test_tpu_attention_passes_over_pages_with_nan_and_faults_do_not(window, monkeypatch):
    """In the interpreter: write and attention of a mixed step are those of plain XLA over the same pool."""
    program = layer(AttentionSpec(4, 2, 64, 64, 0.125, window=window), "tpu")
    with interpreted("tpu"):
        for call in judged_calls(recorded_calls(*program, {"tpu"})):
            verdict = judged(call, thorough=True)
            assert (verdict.error, verdict.note) == ("", "") and verdict.difference < 0.02, (call.op, verdict)
        _plant(monkeypatch, "attention", partial(jax.tree.map, lambda y: 1.3 * y))
        assert call.op == "ragged_paged_attention" and "is wrong: row" in judged(call).error


@pytest.mark.thorough("each is interpreted for all mixes")
@pytest.mark.parametrize("platform", ["tpu", "gpu_triton"])
def test_sparse_attention_passes_and_faults_do_not(monkeypatch, platform):
    with interpreted(platform):
        for program in programs_of(platform):
            call = judged_calls(recorded_calls(*program, {platform}))[-1]
            verdict = judged(call, thorough=True)
            assert (verdict.error, verdict.note) == ("", "") and verdict.difference < 0.02, (call.op, verdict)
            with monkeypatch.context() as patched:
                _plant(patched, "selected", lambda y: y * 2 + 1)
                assert judged(call).error.startswith("is wrong: row"), call.op
