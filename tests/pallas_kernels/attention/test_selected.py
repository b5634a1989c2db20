"""Selection of keys by an indexer's scores, and attention to these alone, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.kernels.sparse_attention import MODELS, copied_bytes, copies_of, needed_bytes, shapes_of
from jaxengine.check.compiled.hlo import parse
from jaxengine.pallas_kernels.attention.op import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.selected import (
    positions_of_groups,
    select_keys,
    selected_attention,
    selection_schedule,
)
from jaxengine.pallas_kernels.attention.xla.largest import largest
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec, pool_shape, storage_dtype
from jaxengine.pallas_kernels.registry import KERNELS, kernel
from jaxengine.pallas_kernels.tuning import Tuning, XlaSelection
from jaxengine.pallas_kernels.zeros import zeros_in_layer
from tests.pallas_kernels import reference
from tests.pallas_kernels.pools import PER_TOKEN, codes, make_pool, token_scale, values_of
from tests.tables import each_row

OPS = ("selection_schedule", "select_keys", "selected_attention")
IMPLEMENTATIONS = {kernel(op, platform) for op, platform in KERNELS if op in OPS}
PLATFORMS = sorted({platform for op, platform in KERNELS if op == "select_keys"})
PAGE, PAGES, COLUMNS, HEADS, WIDTH, RANK, REST = 4, 40, 12, 5, 6, 12, 5
TUNING = Tuning(xla_selection=XlaSelection(block_seqs=2, block_q=3, block_kv=8, block_tokens=3, gathered_keys=4))
SPEC = AttentionSpec(3, 1, RANK + REST, RANK, 0.3, values_in_keys=True)
# New tokens of each sequence, and its keys; T, of which the last may be padding, and S.
BATCHES = {
    "decodes": ([(1, 41), (1, 7), (1, 3), (1, 22)], 6, 6),
    "chunks and decodes": ([(1, 30), (1, 2), (9, 9), (0, 0), (7, 33)], 20, 6),
    "one prompt": ([(17, 40)], 17, 3),
}


def batch_of(name: str) -> tuple[RaggedBatch, int]:
    rows, num_tokens, num_seqs = BATCHES[name]
    rng = np.random.default_rng(3)
    cu, lens = np.zeros(num_seqs + 1, np.int32), np.full(num_seqs, 99, np.int32)
    cu[1 : len(rows) + 1] = np.cumsum([new for new, _ in rows])
    cu[len(rows) + 1 :] = 77  # rows past num_seqs may hold garbage
    lens[: len(rows)] = [keys for _, keys in rows]
    table, free = np.full((num_seqs, COLUMNS), 10**6, np.int32), list(rng.permutation(PAGES))
    for row, (_, keys) in enumerate(rows):
        for column in range(-(-keys // PAGE)):
            table[row, column] = free.pop()
    decodes = sum(new == 1 for new, _ in rows)
    slots = np.full(num_tokens, -1, np.int32)
    return RaggedBatch(*map(jnp.asarray, (cu, lens, table, slots, np.int32(len(rows)), np.int32(decodes)))), num_tokens


def pool_of(batch: RaggedBatch, dtype: str, platform: str, keys=None, width: int = WIDTH):
    """A pool that holds NaN wherever no token sees anything, and its latents and keys, float32."""
    rng = np.random.default_rng(5)
    parts = rng.standard_normal((PAGES, PAGE, 1, RANK + REST)), rng.standard_normal((PAGES, PAGE, 1, width))
    latents, own = (part.astype(np.float32) for part in parts)
    own = own if keys is None else keys(own)
    if dtype != "int8":
        unseen = np.ones((PAGES, PAGE), bool)
        for row in range(int(batch.num_seqs)):
            seen = np.arange(int(batch.kv_lens[row]))
            unseen[np.asarray(batch.page_table)[row, seen // PAGE], seen % PAGE] = False
        latents[unseen], own[unseen] = np.nan, np.nan
    scales = [None, None]
    if dtype in PER_TOKEN:
        scales = [token_scale(np.nan_to_num(part), dtype) for part in (latents, own)]
    elif dtype == "int8":
        scales = [np.full(1, 0.03, np.float32), np.full(1, 0.02, np.float32)]
    stored = [codes(*each) for each in zip((latents, own), [dtype] * 2, scales, strict=True)]
    held = [values_of(*each)[:, :, 0] for each in zip(stored, scales, strict=True)]
    return make_pool(*stored, platform, *scales, aligned_values=True), held


def check(name: str, dtype: str, platform: str, count: int, keys=None, num_heads: int = HEADS) -> None:
    batch, num_tokens = batch_of(name)
    kv, (latents, own) = pool_of(batch, dtype, platform, keys)
    rng = np.random.default_rng(7)
    q_dtype = "bfloat16" if dtype == "bfloat16" else "float32"
    index_q = jnp.asarray(rng.standard_normal((num_tokens, num_heads, WIDTH)), q_dtype)
    weights = jnp.asarray(rng.standard_normal((num_tokens, num_heads)), jnp.float32)
    q = jnp.asarray(rng.standard_normal((num_tokens, SPEC.num_q_heads, RANK + REST)), q_dtype)
    sinks = np.array([-np.inf, 0.5, 2.0], np.float32) if dtype == "float32" else None

    @jax.jit
    def run(index_q, weights, q, kv, batch):
        sizes = {"num_tokens": num_tokens, "page_size": PAGE, "platform": platform, "tuning": TUNING}
        schedule = selection_schedule(batch, **sizes)
        found = select_keys(index_q, weights, kv, batch, count=count, schedule=schedule)
        parts = jnp.split(q, (RANK,), axis=-1)
        given = None if sinks is None else jnp.asarray(sinks)
        return found, selected_attention(*parts, kv, batch, found, spec=SPEC, sinks=given, tuning=TUNING)

    found, o = map(np.asarray, run(index_q, weights, q, kv, batch))
    rows = np.asarray(batch.cu_q_lens), np.asarray(batch.kv_lens), np.asarray(batch.page_table), int(batch.num_seqs)
    inputs = (np.asarray(each, np.float32) for each in (index_q, weights))
    np.testing.assert_array_equal(found, reference.select_keys(*inputs, own, *rows, count))
    sizes: dict[str, Any] = {"v_head_dim": RANK, "sm_scale": SPEC.sm_scale, "sinks": sinks}
    cu, _, table, live = rows
    exact = reference.selected_attention(np.asarray(q, np.float32), latents, cu, table, live, found, **sizes)
    near = 3e-2 if q_dtype == "bfloat16" else 3e-5
    np.testing.assert_allclose(o.astype(np.float32), exact, atol=near)
    assert not o[int(cu[live]) :].any()


CASES = [
    ("chunks and decodes", "float32", "cpu"),
    ("decodes", "bfloat16", "tpu"),
]
FURTHER = [
    *((name, dtype, platform) for name in BATCHES for platform in PLATFORMS for dtype in ("float32", "bfloat16")),
    *((name, dtype, "cpu") for name in BATCHES for dtype in ("int8", "fp8_per_token_head")),
]


@each_row(("name", "dtype", "platform"), CASES)
def test_against_float64(name, dtype, platform):
    check(name, dtype, platform, 6)


@pytest.mark.thorough("further batches and dtypes, and other counts")
@each_row(("name", "dtype", "platform"), FURTHER)
def test_further_against_float64(name, dtype, platform):
    for count in (1, 60):
        check(name, dtype, platform, count)


@each_row(("name", "platform", "size", "count"), [("chunks and decodes", "cpu", 3, 2), ("decodes", "tpu", 6, 3)])
def test_groups_of_keys_against_float64(name, platform, size, count):
    batch, num_tokens = batch_of(name)
    kv, (_, own) = pool_of(batch, "float32", platform, width=2 * WIDTH)
    rng = np.random.default_rng(7)
    shapes = (num_tokens, HEADS, WIDTH), (num_tokens, HEADS), (size, WIDTH)
    q, weights, pooling = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)

    @jax.jit
    def run(q, weights, pooling, kv, batch):
        sizes = {"num_tokens": num_tokens, "page_size": PAGE, "platform": platform, "tuning": TUNING}
        schedule = selection_schedule(batch, **sizes)
        groups = select_keys(q, weights, kv, batch, count=count, schedule=schedule, pooling=pooling)
        return groups, positions_of_groups(groups, batch, size)

    groups, positions = map(np.asarray, run(q, weights, pooling, kv, batch))
    cu, lens, table = (np.asarray(each) for each in (batch.cu_q_lens, batch.kv_lens, batch.page_table))
    live = int(batch.num_seqs)
    exact = reference.select_keys(q, weights, own, cu, lens, table, live, count, pooling)
    np.testing.assert_array_equal(groups, exact)
    ends = [int(lens[seq]) - int(cu[seq + 1]) + 1 + t for seq in range(live) for t in range(cu[seq], cu[seq + 1])]
    for found, of_token, end in zip(positions, exact, ends, strict=False):
        wanted = [*range(end - end % size, end)]
        wanted += [group * size + token for group in of_token if group >= 0 for token in range(size)]
        assert found.tolist() == wanted + [-1] * (len(found) - len(wanted))
    assert (positions[len(ends) :] == -1).all()


@each_row(("size", "count", "kinds"), [(40, 5, 3), (300, 300, 4), (97, 1, 1), (1000, 257, 900), (1001, 17, 9)])
def test_largest_numbers_of_a_row_are_those_of_top_k(size, count, kinds):
    """Few kinds of numbers, so that many are equal; both zeros, both infinities. Long rows: blocks come first."""
    rng = np.random.default_rng(3)
    rows = np.float32(rng.standard_normal(kinds))[rng.integers(kinds, size=(4, size))]
    rows[0, ::3], rows[1, ::2], rows[2, 1::2], rows[3, ::7] = -np.inf, 0.0, -0.0, np.inf
    for found, wanted in zip(jax.jit(largest, static_argnums=1)(rows, count), lax.top_k(rows, count), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_of_equal_scores_the_lowest_position_comes_first():
    """Keys of few values and one head: most scores are zero, of either sign, and many others are equal."""
    check("chunks and decodes", "float32", "cpu", 6, keys=np.sign, num_heads=1)


@pytest.mark.thorough("compiles a step of a published size")
def test_a_decode_at_128k_reads_the_indexers_keys_and_the_selected_latents_alone():
    """Counted in the compiled program: what each gather of the pool returns, times the trips of its loop."""
    context, page, num_seqs, count, block, gathered = 131072, 16, 8, 2048, 512, 256
    spec = KVSpec(num_seqs * context // page + 1, page, 1, 576, 128, "bfloat16")
    attention = AttentionSpec(16, 1, 576, 512, 0.1, values_in_keys=True)
    data = jax.ShapeDtypeStruct(pool_shape(spec), storage_dtype(spec))

    def run(index_q, weights, q, q_rest, kv, batch):
        found = select_keys(index_q, weights, kv, batch, count=count)
        return selected_attention(q, q_rest, kv, batch, found, spec=attention)

    def shape(*sizes: int, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    sizes = (num_seqs + 1,), (num_seqs,), (num_seqs, context // page), (num_seqs,), (), ()
    queries = (shape(num_seqs, *each, dtype=jnp.bfloat16) for each in ((64, 128), (16, 512), (16, 64)))
    index_q, q, q_rest = queries
    arguments = index_q, shape(num_seqs, 64, dtype=jnp.float32), q, q_rest, KVPages(data, None, None, spec)
    compiled = jax.jit(run).lower(*arguments, RaggedBatch(*(shape(*each) for each in sizes))).compile()
    reads = []
    for body in parse(compiled.as_text()).computations.values():
        by_name = {each.name: each.elements for each in body}
        pool = {name for name, elements in by_name.items() if elements == math.prod(data.shape)}
        reads += [each.elements for each in body if each.opcode == "gather" and each.operands[0] in pool]
    trips = {num_seqs * block * 128: context // block, num_seqs * gathered * 576: count // gathered}
    assert sorted(reads) == sorted(trips)
    moved = sum(2 * elements * trips[elements] for elements in reads)
    assert moved <= 1.01 * 2 * num_seqs * (context * 128 + count * 576)
    # Nor does memory follow the context.
    assert compiled.memory_analysis().temp_size_in_bytes < 16 << 20


def test_a_decode_at_128k_on_a_tpu_copies_few_bytes_besides_the_selected_ones():
    """Where no two selected keys share a copy, from the traced kernels: of bfloat16 twice the selected keys."""
    model, moved, needed = MODELS["DeepSeek-V3.2, 16 heads"], 0, 0
    for op in model.operations:
        function, arguments = shapes_of(model, op, "tpu")
        with copied_bytes(next(each for each in arguments if isinstance(each, KVPages)).data) as sizes:
            jax.eval_shape(function, *arguments)
        moved, needed = moved + sum(sizes) * copies_of(model, op), needed + needed_bytes(model, op)[0]
        assert len(sizes) == 1
    assert needed <= moved <= 1.1 * needed


def test_zeros_of_a_layer_come_from_a_whole_tile_of_one_byte_elements():
    """XLA for TPUs would copy a pool to read a single one."""
    for dtype, least in (("int8", 32 * 128), ("float8_e4m3fn", 32 * 128), ("bfloat16", 1)):
        own = jnp.full((2, 64, 256), 3, dtype)
        np.testing.assert_array_equal(zeros_in_layer(own, (2, 3)), np.zeros((2, 3), np.float32))
        program = jax.make_jaxpr(lambda own: zeros_in_layer(own, (2, 3)))(own)
        widened = next(each for each in program.jaxpr.eqns if each.primitive.name == "convert_element_type")
        assert widened.invars[0].aval.size >= least


def test_shapes_that_do_not_fit():
    batch, num_tokens = batch_of("decodes")
    kv, _ = pool_of(batch, "float32", "cpu")
    q, weights = jnp.zeros((num_tokens, HEADS, WIDTH)), jnp.zeros((num_tokens, HEADS))
    latents = replace(kv, spec=replace(kv.spec, values_in_keys=True))
    for change, said in (
        ({"q": q[..., :-1]}, "q must be"),
        ({"weights": weights.astype(jnp.bfloat16)}, "weights must be"),
        ({"kv": latents}, "the pool must have"),
        ({"count": 0}, "count must be"),
        ({"pooling": jnp.zeros((2, WIDTH // 2 + 1)), "q": q[..., : WIDTH // 2]}, "pooling must be"),
    ):
        with pytest.raises(ValueError, match=f"select_keys: {said}"):
            select_keys(**{"q": q, "weights": weights, "kv": kv, "batch": batch, "count": 3} | change)
    parts, found = (jnp.zeros((num_tokens, 3, RANK)), jnp.zeros((num_tokens, 3, REST))), jnp.zeros((num_tokens, 3), int)
    for change, said in (
        ({"q_rest": parts[0]}, "q_rest must be"),
        ({"positions": found.astype(float)}, "positions must be"),
        ({"spec": replace(SPEC, window=3)}, "needs values in keys"),
        ({"sinks": jnp.zeros(2)}, "sinks must be"),
        ({"spec": replace(SPEC, head_dim=RANK + 1), "q_rest": parts[1][..., :1]}, "the pool holds"),
    ):
        given = {"q": parts[0], "q_rest": parts[1], "kv": kv, "batch": batch, "positions": found, "spec": SPEC}
        with pytest.raises(ValueError, match=f"selected_attention: {said}"):
            selected_attention(**given | change)
