"""Attention as machine code: against the oracle, the same bits in every step, and what it leaves to plain XLA."""

from __future__ import annotations

import ctypes
import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.attention.native import attend
from jaxengine.pallas_kernels.attention.op import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.native import library
from jaxengine.pallas_kernels.registry import (
    EXACT,
    NATIVE_ROOMS,
    attention_rows,
    kernel_kind,
    rows_of,
    without_rows,
)
from jaxengine.pallas_kernels.tuning import tuning_of
from tests.pallas_kernels import conformance, pools
from tests.pallas_kernels.cases import BY_NAME
from tests.pallas_kernels.implementations import NATIVE
from tests.pallas_kernels.machine_code import narrow, without_dots
from tests.pallas_kernels.problems import build
from tests.tables import each_row

IMPLEMENTATIONS = {attend.attention_schedule, attend.ragged_paged_attention}
# Cases that the handlers take, of one program as far as they can be; and those that they leave to plain XLA.
TAKEN = (
    *("mixed", "block edges", "q tile straddles a kv block", "decode bucket", "padded decode bucket"),
    *("infinite unseen slots", "shared prefix", "large logits", "sinks and window", "window on both sides"),
    *("chunks of 45", "pictures", "dims (192, 128)", "one long among many short", "production blocks"),
    *("soft cap 30", "soft cap 50", "window, sinks and soft cap"),
)
# Of other pools than the queries' dtype.
CODES = (
    *("int8 keys and values", "fp8 e4m3 keys and values", "fp8 e5m2 keys and values", "codes of decodes"),
    *("int8 of each token", "fp8 of each token", "tokens' tiny keys, large values"),
)
LEFT = "slopes", "slopes, window, sinks and soft cap", "biases", "tree branches", "mutual pictures", "latent mixed"


@each_row("name", TAKEN)
def test_against_the_oracle(machine_code, name):
    for dtype in ("float32", "bfloat16"):
        conformance.check_attention(BY_NAME[name], dtype, "normal", NATIVE)
        assert runs_a_handler(name, dtype)


@each_row("name", CODES)
def test_codes_against_the_oracle(machine_code, name):
    conformance.check_attention(BY_NAME[name], "float32", "normal", NATIVE)
    assert runs_a_handler(name, "float32")


@each_row("name", LEFT)
def test_what_is_left_to_xla(machine_code, name):
    conformance.check_attention(BY_NAME[name], "float32", "normal", NATIVE)
    assert not runs_a_handler(name, "float32")


def runs_a_handler(name: str, dtype: str) -> bool:
    """Whether the case's program calls a handler, which must be that of its pool."""
    case = NATIVE.adapted(BY_NAME[name])
    arguments = conformance.operands(case, build(case, dtype, "normal"), dtype, NATIVE)
    program = str(conformance.compiled(NATIVE, case.spec).trace(*arguments).jaxpr)
    found = set(re.findall(rf"{library.target_name('attention')}_\w+", program))
    kind = case.pool_dtype(dtype)
    if (dtype, kind) == ("bfloat16", "bfloat16") and library.has_feature("avx512bf16"):
        kind = "words"
    assert found <= {library.target_name(f"attention_{kind}")}
    return bool(found)


@each_row("has_dots", [True, False])
def test_bfloat16_against_the_oracle(machine_code, monkeypatch, has_dots):
    """On processors with products of bfloat16 and on others, whichever this one is."""
    monkeypatch.setattr(attend, "has_feature", lambda name: has_dots)
    implementation = replace(NATIVE, name=f"native, has_dots={has_dots}")  # another key of what is compiled
    for name in ("mixed", "infinite unseen slots", "window on both sides"):
        conformance.check_attention(BY_NAME[name], "bfloat16", "normal", implementation)


@each_row("kv_dtype", [*pools.QUANTIZED, "float16"])
def test_every_code_is_what_it_stands_for(machine_code, kv_dtype):
    """Each query sees one key, the same, and takes one element of it."""
    codes = np.arange(256) if kv_dtype in pools.QUANTIZED else np.arange(256) * 257
    stored = codes.astype(f"u{1 + (kv_dtype == 'float16')}").view(jnp.dtype(pools.PER_TOKEN.get(kv_dtype, kv_dtype)))
    finite = np.isfinite(stored.astype(np.float32))
    k, v = (np.broadcast_to(part, (1, 16, 1, 256)) for part in (np.where(finite, stored, 0), stored))
    shape = (1, 16, 1) if kv_dtype in pools.PER_TOKEN else (1,)
    scales = [np.full(shape, scale, np.float32) if kv_dtype in pools.QUANTIZED else None for scale in (2.0, 0.5)]
    spec, zeros = AttentionSpec(1, 1, 256, 256, 1.0), jnp.zeros(256, jnp.int32)
    batch = RaggedBatch(jnp.arange(257), zeros + 1, zeros[:, None], zeros - 1, jnp.int32(256), None)

    @jax.jit
    def attended(query, pool):
        schedule = attend.attention_schedule(batch, spec, num_tokens=256, page_size=16, tuning=tuning_of("cpu"))
        return attend.ragged_paged_attention(query, pool, batch, schedule, spec=spec, sinks=None, tree_mask=None)

    o, lse = attended(jnp.eye(256)[:, None], pools.make_pool(k, v, "cpu", k_scale=scales[0], v_scale=scales[1]))
    key, value = (pools.values_of(part, scale)[0, 0, 0] for part, scale in zip((k, v), scales, strict=True))
    np.testing.assert_array_equal(np.asarray(lse)[:, 0], key)
    np.testing.assert_array_equal(np.asarray(o), np.broadcast_to(value, o.shape))


@each_row(("kv_dtype", "dtype"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("fp8_per_token_head", "float32")])
def test_bits_do_not_depend_on_the_step(machine_code, kv_dtype, dtype):
    """A prompt at once, in chunks, token by token, alone and beside others; and by one thread or several."""
    spec = AttentionSpec(6, 2, 32, 48, 0.2, window=150)
    kv_len, rng = 200, np.random.default_rng(0)
    pool = drawn_pool(rng, kv_dtype, 26, 2, (32, 48))
    q = jnp.asarray(rng.standard_normal((2, kv_len, 6, 32)), dtype)
    pages = np.arange(26, dtype=np.int32).reshape(2, 13)

    @jax.jit
    def attended(q, batch):
        sizes = {"num_tokens": q.shape[0], "page_size": 16, "tuning": tuning_of("cpu")}
        schedule = attend.attention_schedule(batch, spec, **sizes)
        return attend.ragged_paged_attention(q, pool, batch, schedule, spec=spec, sinks=None, tree_mask=None)

    def step(*rows: tuple[int, int, int]) -> list[np.ndarray]:
        """Outputs of rows (sequence, first position, one past the last), each an array of its tokens."""
        lens = np.cumsum([0, *(end - first for _, first, end in rows)], dtype=np.int32)
        tokens = jnp.concatenate([q[own, first:end] for own, first, end in rows])
        tables, ends = pages[[own for own, *_ in rows]], np.array([end for *_, end in rows], np.int32)
        slots = np.full(len(tokens), -1, np.int32)
        # A row past the last holds garbage.
        cu_q_lens, kv_lens, page_table, slot_mapping = map(
            jnp.asarray,
            (np.append(lens, np.int32(-7)), np.append(ends, np.int32(9)), np.append(tables, tables[:1], axis=0), slots),
        )
        num_seqs = jnp.int32(len(rows))
        o, _ = attended(tokens, RaggedBatch(cu_q_lens, kv_lens, page_table, slot_mapping, num_seqs, None))
        return np.split(np.asarray(o), lens[1:-1])

    (whole,) = step((0, 0, kv_len))
    assert np.isfinite(whole).all() and np.abs(whole).max() > 0.1
    beside = step((1, 3, 77), (0, 31, 120), (1, 180, 181))
    np.testing.assert_array_equal(beside[1], whole[31:120])
    for first in (0, 63, 64, 149, 199):
        (alone,), both = step((0, first, first + 1)), step((1, 199, 200), (0, first, first + 1))
        np.testing.assert_array_equal(alone, whole[first : first + 1])
        np.testing.assert_array_equal(both[1], alone)


def test_width_of_vectors_changes_no_bits(machine_code):
    """The code for a processor without AVX-512."""
    from jaxengine.pallas_kernels.attention.native.code import HANDLERS, JOB

    engines = [narrow(), without_dots()]
    rng = np.random.default_rng(0)
    drawn = {
        "q": rng.standard_normal((5, 6, 48)),
        "scale": rng.random(2) / 16,
        "soft_cap": np.ones(1),
        "sinks": rng.standard_normal(6),
    }
    arrays: dict[str, np.ndarray] = {name: own.astype(np.float32) for name, own in drawn.items()}
    queries = {attend.WORDS: arrays["q"].astype(jnp.bfloat16)}
    arrays["tiles"] = np.array([[0], [0], [5]], np.int32)
    arrays["ranges"] = np.array([[0, 1, 2, 3, 40], [70, 71, 72, 73, 74]], np.int32)
    arrays["page_table"] = np.arange(5, dtype=np.int32)[None]
    numbers = {"blocks": 2, "num_tokens": 5, "heads": 6, "width": 48, "num_pages": 5, "kv_heads": 2, "columns": 5}
    numbers |= {"num_tiles": 1, "value_width": 80, "tiles_in_use": 1, "page_size": 16, "block_q": 5}
    for handler, kv_dtype in HANDLERS.items():
        arrays["soft_cap"][:] = 2.5 * (kv_dtype == "bfloat16")
        arrays["pool"] = np.asarray(drawn_pool(rng, kv_dtype, 5, 2, (48, 80)).data)
        found = []
        for engine in engines:
            arrays["q"] = queries.get(handler, drawn["q"].astype(np.float32))
            arrays |= {name: np.full((5, 6, width), np.nan, np.float32) for name, width in (("o", 80), ("softmax", 2))}
            fields = numbers | {name: own.ctypes.data for name, own in arrays.items()}
            job = (ctypes.c_int64 * len(JOB.fields))(*(fields.get(name, 0) for name in JOB.fields))
            address = engine.get_function_address(f"{handler}_items")
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(job))
            found.append((arrays["o"], arrays["softmax"]))
        assert np.isfinite(found[0][0]).all()
        for each, other in zip(*found, strict=True):
            np.testing.assert_array_equal(each, other)


def test_what_is_no_number_stays_none(machine_code):
    """Whatever bits it has: those of a NaN's mantissa are no exponent. Tokens beside it do not get it."""
    from jaxengine.pallas_kernels.attention.native.code import JOB

    nans = np.array([0x7FC00000, 0xFFC00000, 0x7FC00001, 0x7FA00001, 0x7FC000FF, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    q = np.ones((2 * len(nans), 1, 16), np.float32)
    q.view(np.uint32)[::2, 0, 3] = nans
    tiles = np.array([[0], [0], [len(q)]], np.int32)
    arrays = {"tiles": tiles, "ranges": np.repeat(np.array([[0], [3]], np.int32), len(q), axis=1)}
    arrays |= {"page_table": np.zeros((1, 1), np.int32), "scale": np.ones(1, np.float32) / 16}
    numbers = {"blocks": 1, "num_tokens": len(q), "heads": 1, "width": 16, "num_pages": 1, "kv_heads": 1, "columns": 1}
    numbers |= {"num_tiles": 1, "value_width": 16, "tiles_in_use": 1, "page_size": 16, "block_q": len(q)}
    dtypes = {"attention_float32": np.float32, attend.WORDS: jnp.bfloat16}
    for engine in (narrow(), without_dots(), library.made(NATIVE_ROOMS)[1]):
        for (handler, dtype), cap, sink in itertools.product(dtypes.items(), (0.0, 5.0), (-np.inf, 1.0)):
            upper = (q.view(np.uint32) >> 16).astype(np.uint16).view(jnp.bfloat16)
            arrays |= {"q": q if dtype == np.float32 else upper, "pool": np.ones((1, 1, 512), dtype)}
            arrays |= {"soft_cap": np.float32([cap]), "sinks": np.float32([sink])}
            arrays |= {name: np.zeros((len(q), 1, width), np.float32) for name, width in (("o", 16), ("softmax", 2))}
            fields = numbers | {name: own.ctypes.data for name, own in arrays.items()}
            job = (ctypes.c_int64 * len(JOB.fields))(*(fields.get(name, 0) for name in JOB.fields))
            address = engine.get_function_address(f"{handler}_items")
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(job))
            is_nan = np.isnan(arrays["q"].astype(np.float32)).any(axis=2)
            np.testing.assert_array_equal(np.isnan(arrays["softmax"][..., 1]), is_nan)
            np.testing.assert_array_equal(np.isnan(arrays["o"]), np.broadcast_to(is_nan[..., None], arrays["o"].shape))


def test_64_bit_numbers_by_default(machine_code):
    """Operands have the dtypes that handlers read, also with jax_enable_x64."""
    with jax.enable_x64(True):
        conformance.check_attention(BY_NAME["mixed"], "float32", "normal", replace(NATIVE, name="native, 64 bits"))


def drawn_pool(rng: np.random.Generator, kv_dtype: str, num_pages: int, heads: int, dims: tuple[int, int]) -> KVPages:
    """A pool with pages of 16 tokens, whose numbers are drawn."""
    values = [rng.standard_normal((num_pages, 16, heads, dim)).astype(np.float32) for dim in dims]
    scales = [None if kv_dtype not in pools.QUANTIZED else np.full(heads, 0.03, np.float32)] * 2
    if kv_dtype in pools.PER_TOKEN:
        scales = [pools.token_scale(part, kv_dtype) for part in values]
    k, v = (pools.codes(part, kv_dtype, scale) for part, scale in zip(values, scales, strict=True))
    return pools.make_pool(k, v, "cpu", k_scale=scales[0], v_scale=scales[1])


def test_exact_models_have_none(machine_code, monkeypatch):
    """An engine with rl_exact has the bits of a trainer's forward pass, whose pages have one token."""
    monkeypatch.setattr("jaxengine.pallas_kernels.registry._BUILT", {"native"})
    assert kernel_kind("ragged_paged_attention", "cpu") == "native"
    with rows_of(EXACT):
        assert kernel_kind("ragged_paged_attention", "cpu") == "xla"


def test_attention_backend_xla_has_none(machine_code, monkeypatch):
    monkeypatch.setattr("jaxengine.pallas_kernels.registry._BUILT", {"native"})
    with without_rows(attention_rows("cpu")):
        assert kernel_kind("ragged_paged_attention", "cpu") == kernel_kind("attention_schedule", "cpu") == "xla"
        assert kernel_kind("matmul", "cpu") == "native"
