"""The checks by name, with arguments that fit a line of JSON; the last argument is the implementation under test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.tuning import HopperAttention, TritonAttention, Tuning
from tests.pallas_kernels import conformance, reference
from tests.pallas_kernels.cases import BY_NAME, MIXED_KV, MIXED_Q
from tests.pallas_kernels.conformance import attend, check_attention, check_update, compiled, operands, pool, watched
from tests.pallas_kernels.hopper_products import hopper_gated, hopper_grouped, hopper_product
from tests.pallas_kernels.implementations import Implementation
from tests.pallas_kernels.lora_products import lora_product
from tests.pallas_kernels.microscaled import microscaled
from tests.pallas_kernels.pools import codes, make_pool, read_pool, unsigned
from tests.pallas_kernels.problems import Case, build, expected
from tests.pallas_kernels.products import gated_product, grouped_product, product
from tests.pallas_kernels.selections import attention_to_selected, selected_by_indexer
from tests.pallas_kernels.triton_products import triton_product

MIXED = Case("mixed", MIXED_Q, MIXED_KV)
NUM_SLOTS = 7 * 16  # of the pool of conformance.update_problem


def attention(name: str, dtype: str, *families_and_implementation) -> None:
    """One case over input families, which share the compiled program."""
    *families, implementation = families_and_implementation
    if implementation.refuses(implementation.adapted(BY_NAME[name]), dtype) is None:
        conformance.check_runs_kernels(BY_NAME[name], dtype, implementation)
    for family in families:
        check_attention(BY_NAME[name], dtype, family, implementation)


def _scattered(num_tokens: int) -> np.ndarray:
    slots = np.random.default_rng(num_tokens).permutation(NUM_SLOTS)[:num_tokens].astype(np.int32)
    slots[::3] = -1  # token 0 is padding: a clamped -1 would hit slot 0 or the last one
    slots[1:2] = NUM_SLOTS - 1
    return slots


SLOTS = {
    "one token": np.asarray([37], np.int32),
    "one padding token": np.asarray([-1], np.int32),
    "scattered 2": _scattered(2),
    "scattered 40": _scattered(40),
    "all padding": np.full(40, -1, np.int32),
    # A prefill across page borders that starts and ends inside groups of eight, then decodes, then padding.
    "runs": np.asarray([*range(13, 36), 96, 65, 50, 111, *range(80, 88), *[-1] * 5], np.int32),
    # Several runs in one group of eight, out of order: what one writes, the next must not undo.
    "runs that meet": np.asarray([3, 0, 1, 7, 5, 4, 20, 18, 16, 17, *[-1] * 20, 63, 62, 2, 21, 19, -1, 61, 60, 6, 23]),
    "outside the pool": np.asarray([NUM_SLOTS, 5, 2**30, -1, NUM_SLOTS - 1, -7, *range(40, 74)], np.int32),
}


def update(dtype: str, pattern: str, implementation: Implementation) -> None:
    check_update(dtype, SLOTS[pattern].astype(np.int32), implementation)


def update_sizes(
    dtype: str, page_size: int, heads: int, head_dim: int, v_head_dim: int, aligned: bool, implementation
) -> None:
    """aligned: whether values are aligned in the pool."""
    slots = np.asarray([*range(page_size - 3, page_size + 9), 6 * page_size, -1, 3 * page_size + 5, 7], np.int32)
    check_update(dtype, slots, implementation, aligned, page_size=page_size, heads=heads, dims=(head_dim, v_head_dim))


def update_keys(dtype: str, pattern: str, heads: int, head_dim: int, v_head_dim: int, implementation) -> None:
    """Keys with their values in them."""
    slots = SLOTS[pattern].astype(np.int32)
    check_update(dtype, slots, implementation, heads=heads, dims=(head_dim, v_head_dim), values_in_keys=True)


def determinism(runs: int, implementation: Implementation) -> None:
    """The same bits every time."""
    case = implementation.adapted(MIXED)
    problem = build(case, "bfloat16", "normal")
    first = attend(case, problem, "bfloat16", implementation)
    for _ in range(runs - 1):
        for want, got in zip(first, attend(case, problem, "bfloat16", implementation), strict=True):
            np.testing.assert_array_equal(got, want)


def page_ids(implementation: Implementation) -> None:
    """Where pages lie does not matter, to the bit."""
    case = implementation.adapted(MIXED)
    problem = build(case, "bfloat16", "normal")
    num_pages = len(problem.k_pages)
    moved = np.random.default_rng(5).permutation(num_pages).astype(np.int32)  # old id -> new id
    back = np.argsort(moved)
    live = (problem.page_table >= 0) & (problem.page_table < num_pages)
    other = problem._replace(
        page_table=np.where(live, moved[np.where(live, problem.page_table, 0)], problem.page_table),
        k_codes=problem.k_codes[back],
        v_codes=problem.v_codes[back],
    )
    want, got = (attend(case, one, "bfloat16", implementation)[0] for one in (problem, other))
    np.testing.assert_array_equal(got, want)


def neighbours(implementation: Implementation) -> None:
    """A sequence gives the same rows alone as among others."""
    case = implementation.adapted(MIXED)
    problem = build(case, "bfloat16", "normal")
    together, _ = attend(case, problem, "bfloat16", implementation)
    for seq, (first, end) in enumerate(pairwise(problem.cu_q_lens[: problem.num_seqs + 1])):
        cu_q_lens = problem.cu_q_lens * 0 + np.asarray([0] + [end - first] * (len(problem.cu_q_lens) - 1), np.int32)
        alone = problem._replace(
            q=np.roll(problem.q, -first, axis=0),
            cu_q_lens=cu_q_lens,
            kv_lens=np.roll(problem.kv_lens, -seq),
            page_table=np.roll(problem.page_table, -seq, axis=0),
            num_seqs=1,
            num_decode=int(end - first == 1),
        )
        got, _ = attend(case, alone, "bfloat16", implementation)
        np.testing.assert_allclose(got[: end - first], together[first:end], rtol=2**-7, atol=2**-7)


def order(implementation: Implementation) -> None:
    """Sequences of a decode batch in another order give the same rows in that order."""
    case = implementation.adapted(BY_NAME["decode bucket"])
    problem = build(case, "bfloat16", "normal")
    want, _ = attend(case, problem, "bfloat16", implementation)
    shuffled = np.random.default_rng(1).permutation(case.num_tokens)
    other = problem._replace(
        q=problem.q[shuffled], kv_lens=problem.kv_lens[shuffled], page_table=problem.page_table[shuffled]
    )
    got, _ = attend(case, other, "bfloat16", implementation)
    np.testing.assert_allclose(got, want[shuffled], rtol=2**-7, atol=2**-7)


def splits(implementation: Implementation) -> None:
    """However the keys are split over workers, the result is the oracle's, and a sink counts once."""
    case = replace(implementation.adapted(BY_NAME["split decodes"]), sinks="mixed")
    problem = build(case, "bfloat16", "normal")
    want = expected(case, problem)
    for num_ctas in (1, 7):
        sizes = {"hopper_attention": HopperAttention(num_ctas), "triton_attention": TritonAttention(num_ctas)}
        split = replace(implementation, tuning=Tuning(**sizes))
        with watched(split, f"{num_ctas} splits"):
            got = attend(case, problem, "bfloat16", split)
        conformance.check_close(got, want, problem, "bfloat16", f"{num_ctas} splits")


def many_parts(implementation: Implementation) -> None:
    """More partial results for one row than the merge has in flight: its ring is filled again."""
    sizes = {"num_ctas": 14, "pair_cost": 1, "min_part_cost": 1}
    parts = Tuning(hopper_attention=HopperAttention(**sizes), triton_attention=TritonAttention(**sizes, merged_parts=4))
    split = replace(implementation, tuning=parts)
    sizes = {"num_tokens": 2, "max_seqs": 2, "max_pages": 40, "heads": (2, 1)}
    case = implementation.adapted(Case("many parts", (1, 1), (640, 70), **sizes))
    problem = build(case, "bfloat16", "normal")
    most = {"gpu": parts.hopper_attention.merge_stages, "gpu_triton": parts.triton_attention.merged_parts}
    if implementation.platform in most:
        batch = conformance.ragged_batch(problem)
        schedule = split.schedule(batch, case.spec, num_tokens=case.num_tokens, page_size=case.page_size)
        items = schedule.decode if implementation.platform == "gpu" else schedule.items
        counts = np.diff(items.pair_items)
        assert counts.max() > most[implementation.platform], f"{counts.max()} parts fit at once"
    with watched(split, "many parts"):
        got = attend(case, problem, "bfloat16", split)
    conformance.check_close(got, expected(case, problem), problem, "bfloat16", "many parts")


def halves(implementation: Implementation) -> None:
    """Softmax over all keys is the lse-weighted mean of softmaxes over parts: what split contexts rely on."""
    case = implementation.adapted(Case("halves", (1, 1), (96, 200), num_tokens=8))
    problem = build(case, "bfloat16", "normal")
    parts = []
    for first_page, kv_lens in ((0, (48, 96)), (3, (48, 0)), (6, (0, 104))):
        q_lens = [int(kv_len > 0) for kv_len in kv_lens]
        part = problem._replace(
            q=problem.q if q_lens[0] else problem.q[[1, 0, *range(2, 8)]],
            cu_q_lens=np.asarray([0, *np.cumsum(q_lens), *[sum(q_lens)] * 6], np.int32),
            page_table=np.roll(problem.page_table, -first_page, axis=1),
            kv_lens=np.asarray(kv_lens + (0,) * 6, np.int32),
            num_decode=2 if all(q_lens) else q_lens[0],
        )
        o, lse = attend(case, part, "bfloat16", implementation)
        parts.append((o[:2], lse[:2]) if q_lens[0] else (o[[1, 0]], lse[[1, 0]]))
    out, lse = (np.stack(arrays) for arrays in zip(*parts, strict=True))
    weights = np.exp(lse - lse.max(0))[..., None]
    want, _ = expected(case, problem)
    got = (out * weights).sum(0) / weights.sum(0)
    np.testing.assert_allclose(got, want[:2], rtol=2**-6, atol=2**-6)


def update_then_attend(implementation: Implementation) -> None:
    """A step as a layer does it: write, then attend; the rest of the pool keeps its bits."""
    case = implementation.adapted(MIXED)
    problem = build(case, "bfloat16", "normal")
    rng = np.random.default_rng(3)
    shapes = [(case.num_tokens, case.heads[1], dim) for dim in case.dims]
    new = [codes(rng.standard_normal(shape), "bfloat16", None) for shape in shapes]
    k, v = reference.kv_cache_update(problem.k_codes, problem.v_codes, *new, problem.slot_mapping)
    after = problem._replace(k_codes=k, v_codes=v, k_pages=k.astype(np.float32), v_pages=v.astype(np.float32))
    q, kv, batch, *_ = operands(case, problem, "bfloat16", implementation)

    @jax.jit
    def step(q, k, v, kv, batch):
        kv = implementation.update(kv, k, v, batch.slot_mapping)
        schedule = implementation.schedule(batch, case.spec, num_tokens=q.shape[0], page_size=kv.page_size)
        options = {"spec": case.spec, "sinks": None, "tree_mask": None}
        return implementation.attend(q, kv, batch, schedule, **options), kv

    with watched(implementation, "update then attend"):
        (o, lse), kv = step(q, *map(jnp.asarray, new), kv, batch)
        got = np.asarray(o, np.float32), np.asarray(lse)
    conformance.check_close(got, expected(case, after), after, "bfloat16", "update then attend")
    for got_codes, want_codes in zip(read_pool(kv), (k, v), strict=True):
        np.testing.assert_array_equal(got_codes, unsigned(want_codes))


def one_program_per_bucket(implementation: Implementation) -> None:
    """Lengths, sequence counts and scales are data: no batch of a bucket and no scale compiles again."""
    traces = []

    def noted(*arguments, **options):
        traces.append(1)
        return original(*arguments, **options)

    original = implementation._kernel("ragged_paged_attention")
    counted = conformance.replaced(implementation, ragged_paged_attention=noted)
    cases = [implementation.adapted(BY_NAME[name]) for name in ("mixed", "prefill", "first token", "no sequences")]
    run = compiled(counted, cases[0].spec)
    for case in cases:
        jax.block_until_ready(run(*operands(case, build(case, "bfloat16", "normal"), "bfloat16", counted)))
    assert len(traces) == 1, f"{len(traces)} programs for one bucket"
    for scales in ((1.0, 1.0), (1e-4, 1e3)):
        case = replace(cases[0], kv_dtype="float8_e4m3fn", scales=scales)
        problem = build(case, "bfloat16", "normal")
        q, kv, batch, *rest = operands(case, problem, "bfloat16", counted)
        got = run(q, kv, batch, *rest)
        conformance.check_close(
            (np.asarray(got[0], np.float32), np.asarray(got[1])), expected(case, problem), problem, "bfloat16", "scales"
        )
    assert len(traces) == 2, "another scale compiles another program"


def local_heads(implementation: Implementation) -> None:
    """Inside shard_map a pool holds fewer heads than its spec says; what counts is what it holds."""
    case = implementation.adapted(Case("local heads", MIXED_Q, MIXED_KV, heads=(2, 1)))
    problem = build(case, "bfloat16", "normal")
    whole = pool(problem, implementation.platform)
    kv = replace(whole, spec=replace(whole.spec, num_kv_heads=4))
    q, _, batch, *rest = operands(case, problem, "bfloat16", implementation)
    with watched(implementation, "local heads"):
        o, lse = compiled(implementation, case.spec)(q, kv, batch, *rest)
        got = np.asarray(o, np.float32), np.asarray(lse)
    conformance.check_close(got, expected(case, problem), problem, "bfloat16", "local heads")


def exchange(source: str, dtype: str, *in_keys_and_implementation) -> None:
    """Pages taken out of a pool of platform `source` and put into this implementation's are the same bits.

    in_keys: whether values are the first five elements of their keys.
    """
    *in_keys, implementation = in_keys_and_implementation
    from jaxengine.pallas_kernels.kv.pages import export_pages, import_pages

    rng = np.random.default_rng(0)
    old = [codes(rng.standard_normal((6, 16, 3, 8)) * 30, dtype, None) for _ in "kv"]
    new = [codes(rng.standard_normal((5, 16, 3, 8)), dtype, None) for _ in "kv"]
    ids, places = jnp.asarray([4, 1, 5]), jnp.asarray([0, -1, 3])
    if any(in_keys):
        old[1], new[1] = (codes[0][..., :5] for codes in (old, new))
    pages = export_pages(make_pool(*old, source, values_in_keys=any(in_keys)), ids)
    kv = import_pages(make_pool(*new, implementation.platform, values_in_keys=any(in_keys)), places, pages)
    for got, old_codes, new_codes in zip(read_pool(kv), old, new, strict=True):
        want = unsigned(new_codes).copy()
        want[[0, 3]] = unsigned(old_codes)[[4, 5]]
        np.testing.assert_array_equal(got, want)


def quantized(number: int, implementation: Implementation) -> None:
    """One of the cases of products with quantised matrices, for all implementations: each compiles for the CPU."""
    from tests.pallas_kernels.matmul.test_quantized import CASES, test_against_float64

    del implementation
    test_against_float64(CASES[number])


def rounded_rows(number: int, implementation: Implementation) -> None:
    """The same of rows that have been rounded."""
    from tests.pallas_kernels.matmul.test_quantized import ROUNDED, test_rounded_rows

    del implementation
    test_rounded_rows(ROUNDED[number], "int8")


def native(number: int, implementation: Implementation) -> None:
    """One of the cases of products as machine code."""
    from tests.pallas_kernels import machine_code
    from tests.pallas_kernels.matmul.test_native import CASES, check

    del implementation
    machine_code.install()
    check(CASES[number])


INVARIANTS = [page_ids, neighbours, order, halves, update_then_attend, one_program_per_bucket, local_heads]
CHECKS: dict[str, Callable[..., None]] = {
    check.__name__: check
    for check in (
        *(attention, update, update_sizes, update_keys, determinism, splits, many_parts, exchange),
        *(quantized, rounded_rows, native),
        *(product, grouped_product, gated_product, hopper_product, hopper_grouped, hopper_gated, lora_product),
        *(triton_product, microscaled, attention_to_selected, selected_by_indexer),
        *INVARIANTS,
    )
}
