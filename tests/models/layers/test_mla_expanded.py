"""Keys and values expanded from latents against attention to the latents themselves, on plain XLA and the TPU's
kernels.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from jaxengine.check.model.programs import open_stages
from jaxengine.check.model.shapes import model_config
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.adapters import Adapters
from jaxengine.models.build import Build
from jaxengine.models.config.attention import Latent, LayerAttention
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.layers.attention import mla, mla_expanded
from jaxengine.models.layers.attention.attention import StepInputs, attention_spec
from jaxengine.models.layers.attention.mla import LatentAttention
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.quantization.base.plain import PlainWeight
from jaxengine.pallas_kernels.attention.op import RaggedBatch, attention_schedule
from jaxengine.pallas_kernels.kv.pages import KVSpec, alloc, import_pages
from tests.fast_compile import own_traces

LATENT = Latent(kv_lora_rank=32, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=1)
ATTENTION = LayerAttention(num_heads=4, num_kv_heads=1, head_dim=34, rope=None, latent=LATENT)
LEAST = 9  # 4 * 32 * 4 / (2 * 32 - 4), rounded up
NUM_TOKENS, NUM_SEQS, PAGE_SIZE, NUM_PAGES, WIDTH = 73, 9, 8, 60, 14
MIXED = [(1, 12), (1, 39), (LEAST - 1, 5), (LEAST, 0), (11, 70), (20, 32)]  # new tokens and those before
BATCHES = {
    "mixed": (MIXED, 3),
    "decodes and long ones": ([(1, 0), (1, 23), (9, 33), (30, 10)], 2),
    "all the tokens that a long one leaves": ([(LEAST - 1, 10)] * 8 + [(LEAST, 7)], 8),
    "none long": ([(1, 20), (LEAST - 1, 40)], 2),
    "all long": ([(9, 33), (16, 0), (39, 64)], 0),
    "a long one before a short one": ([(12, 40), (2, 9), (30, 17)], 2),
}


@pytest.fixture(params=["cpu", pytest.param("tpu", marks=pytest.mark.thorough("interpreted"))])
def platform(request, monkeypatch):
    monkeypatch.setattr(mla_expanded, "PLATFORMS", ("cpu", "tpu"))
    for name, value in {"PIECE": 32, "BLOCK": 16, "HEADS": 2}.items():
        monkeypatch.setattr(mla_expanded, name, value)
    with pltpu.force_tpu_interpret_mode() if request.param == "tpu" else nullcontext():
        yield request.param


def test_the_break_even_is_of_the_shape():
    deepseek = Latent(512, 128, 64, 128)
    assert mla_expanded.least_tokens(LATENT) == LEAST and mla_expanded.least_tokens(deepseek) == 683
    assert mla_expanded.least_tokens(Latent(16, 16, 8, 16)) is None


WINDOWED = dataclasses.replace(ATTENTION, window=64)


@pytest.mark.parametrize(
    ("change", "attention", "num_tokens", "has_some"),
    [
        ({}, ATTENTION, NUM_TOKENS, True),
        ({}, ATTENTION, LEAST - 1, False),
        ({}, WINDOWED, NUM_TOKENS, False),
        ({"dtype": "int8"}, ATTENTION, NUM_TOKENS, False),
        ({"page_size": 24}, ATTENTION, NUM_TOKENS, False),
        ({"platform": "gpu"}, ATTENTION, NUM_TOKENS, False),
    ],
)
def test_which_rows_are_expanded(monkeypatch, change, attention, num_tokens, has_some):
    monkeypatch.setattr(mla_expanded, "PLATFORMS", ("cpu",))
    wanted = {"page_size": PAGE_SIZE, "dtype": "float32", "platform": "cpu"} | change
    kv = KVSpec(NUM_PAGES, wanted["page_size"], 1, 34, 32, wanted["dtype"], values_in_keys=True)
    pool = jax.eval_shape(lambda: alloc(kv, platform=wanted["platform"]))
    batch, *_ = drawn(np.random.default_rng(0), MIXED)
    rows = partial(
        mla_expanded.expanded_rows, attention, attention_spec(attention), num_tokens=num_tokens, dtype="float32"
    )
    assert (jax.eval_shape(lambda batch, kv: rows(batch=batch, kv=kv), batch, pool) is not None) == has_some


@pytest.mark.parametrize(("name", "expected"), [("mixed T=1024", True), ("mixed T=512", False), ("decode", False)])
def test_steps_that_hold_such_rows_have_them(monkeypatch, name, expected):
    seen = []
    monkeypatch.setattr(mla_expanded, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(mla, "attend_expanded", lambda o, *rest, **sizes: seen.append(o.shape) or o)
    config = EngineConfig(max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=1024)
    (stage,) = open_stages(model_config("deepseek-v3:1"), config, PLATFORMS["cpu"], jax.devices()[:1])
    bucket = next(bucket for bucket in stage.buckets(short=False) if str(bucket).startswith(name))
    program = stage.forward(bucket, 64)
    with own_traces(), jax.set_mesh(program.mesh):
        jax.eval_shape(program.function, *program.arguments)
    assert seen == ([(1024, 128, 128)] if expected else [])


def test_short_rows_before_long_ones_have_few_tokens():
    assert mla_expanded.most_short(LATENT, NUM_TOKENS) == NUM_TOKENS - LEAST == 64
    deepseek = Latent(512, 128, 64, 128)
    assert [mla_expanded.most_short(deepseek, tokens) for tokens in (683, 1024, 2048)] == [16, 352, 1376]


def test_expanded_rows_equal_absorbed_ones(platform):
    rng = np.random.default_rng(0)
    layer = LatentAttention(ATTENTION, 16, source="a", build=Build("float32"))
    for weight in (layer.w_uk, layer.w_uv):
        assert isinstance(weight, PlainWeight)
        weight.values[...] = jnp.asarray(rng.standard_normal(weight.values.shape, np.float32))
    spec = attention_spec(ATTENTION)
    pool = alloc(KVSpec(NUM_PAGES, PAGE_SIZE, 1, 34, 32, "float32", values_in_keys=True), platform=platform)

    @jax.jit
    def attend(q, q_rope, keys, pages, batch):
        kv = import_pages(pool, jnp.arange(NUM_PAGES), pages)
        sizes = {"num_tokens": NUM_TOKENS, "page_size": PAGE_SIZE, "platform": platform}
        step = StepInputs(Rows(batch.slot_mapping >= 0, None), None, attention_schedule(batch, spec, **sizes))
        expanded = mla_expanded.expanded_rows(ATTENTION, spec, batch, kv, NUM_TOKENS, "float32")
        assert expanded is not None
        absorbed, both = (
            layer._attend((q, q_rope), keys, kv, batch, each) for each in (step, step._replace(expanded=expanded))
        )
        return absorbed, both, expanded.num_short

    for rows, num_short in list(BATCHES.values())[: 3 if platform == "tpu" else None]:
        batch, keys, pages = drawn(rng, rows)
        q, q_rope = (rng.standard_normal((NUM_TOKENS, 4, width), np.float32) for width in (3, 2))
        absorbed, both, short = attend(q, q_rope, keys, pages, batch)
        assert int(short) == num_short
        np.testing.assert_allclose(both, absorbed, rtol=2e-5, atol=2e-5)
        num_tokens = sum(new for new, _ in rows)
        assert np.abs(absorbed[:num_tokens]).max() > 0.1 and not np.any(both[num_tokens:])


def test_adapters_of_the_matrix_that_expands(monkeypatch):
    """Rows with one have what merged weights give, in both forms and in one batch with rows that have none."""
    monkeypatch.setattr(mla_expanded, "PLATFORMS", ("cpu",))
    for name, value in {"PIECE": 32, "BLOCK": 16, "HEADS": 2}.items():
        monkeypatch.setattr(mla_expanded, name, value)
    rng, lora = np.random.default_rng(0), LoraSpec(2, 3)
    layer = LatentAttention(ATTENTION, 16, source="a", build=Build("float32", layer=0, lora=lora))
    of_keys, of_values, pools = layer.w_uk, layer.w_uv, layer.lora
    assert pools is not None and isinstance(of_keys, PlainWeight) and isinstance(of_values, PlainWeight)
    weights = of_keys, of_values
    for array in (*(weight.values for weight in weights), pools.a, *pools.b):
        array[...] = jnp.asarray(rng.standard_normal(array.shape, np.float32) / 3)
    batch, keys, pages = drawn(rng, MIXED)
    slots = np.full(NUM_TOKENS, -1, np.int32)
    for row in range(len(MIXED)):
        slots[int(batch.cu_q_lens[row]) : int(batch.cu_q_lens[row + 1])] = row % 3 - 1
    spec, sizes = attention_spec(ATTENTION), {"num_tokens": NUM_TOKENS, "page_size": PAGE_SIZE, "platform": "cpu"}
    pool = alloc(KVSpec(NUM_PAGES, PAGE_SIZE, 1, 34, 32, "float32", values_in_keys=True), platform="cpu")
    kv = import_pages(pool, jnp.arange(NUM_PAGES), jnp.asarray(pages))
    plain, rotated = (jnp.asarray(rng.standard_normal((NUM_TOKENS, 4, width), np.float32)) for width in (3, 2))

    @partial(jax.jit, static_argnames="expands")
    def attend(state, adapters, *, expands: bool):
        rows = Rows(batch.slot_mapping >= 0, adapters)
        step = StepInputs(rows, None, attention_schedule(batch, spec, **sizes))
        if expands:
            step = step._replace(expanded=mla_expanded.expanded_rows(ATTENTION, spec, batch, kv, NUM_TOKENS, "float32"))
        return nnx.merge(graph, state)._attend((plain, rotated), jnp.asarray(keys), kv, batch, step)

    adapters, (graph, state) = Adapters(jnp.asarray(slots), jnp.int32(1)), nnx.split(layer)
    found = [np.asarray(attend(state, adapters, expands=expands)) for expands in (False, True)]
    before = [weight.values[...] for weight in weights]
    for slot in (-1, 0, 1):
        own = slice(slot * 3, slot * 3 + 3)
        for weight, start, b in zip(weights, before, pools.b, strict=True):
            weight.values[...] = start if slot < 0 else start + b[...][own].T @ pools.a[...][own]
        wanted = np.asarray(attend(nnx.state(layer), None, expands=False))
        for each in found:
            np.testing.assert_allclose(each[slots == slot], wanted[slots == slot], rtol=1e-4, atol=1e-4)


def drawn(rng: np.random.Generator, rows: list[tuple[int, int]]) -> tuple[RaggedBatch, np.ndarray, np.ndarray]:
    """A step's batch, its latents [T, 34], and all pages with NaN where nobody has written."""
    free = list(rng.permutation(NUM_PAGES))
    pages = np.full((NUM_PAGES, PAGE_SIZE, 1, 1, 34), np.nan, np.float32)
    keys = np.zeros((NUM_TOKENS, 34), np.float32)
    cu, lens = np.zeros(NUM_SEQS + 1, np.int32), np.zeros(NUM_SEQS, np.int32)
    table, slots = np.full((NUM_SEQS, WIDTH), -1, np.int32), np.full(NUM_TOKENS, -1, np.int32)
    for row, (new, before) in enumerate(rows):
        cu[row + 1 :] += new
        lens[row] = new + before
        count = -(-lens[row] // PAGE_SIZE)
        table[row, :count] = own = [free.pop() for _ in range(count)]
        values = rng.standard_normal((lens[row], 34), np.float32)
        where = np.arange(lens[row])
        pages[np.array(own)[where // PAGE_SIZE], where % PAGE_SIZE, 0, 0] = values
        keys[cu[row] : cu[row + 1]] = values[before:]
        slots[cu[row] : cu[row + 1]] = (np.array(own)[where // PAGE_SIZE] * PAGE_SIZE + where % PAGE_SIZE)[before:]
    decodes = sum(new == 1 for new, _ in rows)
    batch = cu, lens, table, slots, np.int32(len(rows)), np.int32(decodes)
    return RaggedBatch(*map(jnp.asarray, batch)), keys, pages
