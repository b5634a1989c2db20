"""The forward pass as a program: one trace per kind of layer, no copy of the pool, pages of each layer kept apart."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import group_layers, pool_spec
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.families import llama
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.registry import build_model
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import alloc, export_pages
from tests.models.tiny import TINY, with_attention, with_windows

CONFIG = with_windows(TINY, *[None] * 6)


def make_batch(num_tokens: int) -> ForwardBatch:
    """One sequence of `num_tokens` - 1 tokens in pages 2, 1, ... and one token of padding."""
    count = num_tokens - 1
    slots = np.append(np.arange(2 * 4, 2 * 4 + count) if count <= 4 else np.arange(count), -1)
    table = np.array([[2, 1, 0]] if count <= 4 else [[0, 1, 2]])
    ragged = RaggedBatch(np.array([0, count]), np.array([count]), table, slots, np.int32(1), np.int32(0))
    batch = ForwardBatch(np.arange(num_tokens), np.append(np.arange(count), 0), np.array([count - 1]), (ragged,))
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.int32), batch)


def forward_of(config: ModelConfig, dtype=jnp.float32):
    """The abstract model, and its forward pass with logits as a jitted function of (state, batch, kv)."""
    model = build_model(config, Build(dtype))
    graph, _ = nnx.split(model)

    def forward(state, batch, kv):
        merged = nnx.merge(graph, state)
        hidden, kv = merged(batch, kv)
        return merged.logits(hidden), kv

    return model, jax.jit(forward, donate_argnums=2)


def random_weights(model) -> nnx.State:
    """The same numbers for each dtype, rounded to it."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) * leaf.shape[0] ** -0.5, leaf.dtype), nnx.state(model)
    )


@pytest.mark.parametrize("windows, traces", [((None,) * 6, 1), ((None, 3) * 3, 2)])
def test_each_kind_of_layer_is_traced_once(monkeypatch, windows, traces):
    calls = []
    original = llama.LlamaLayer.__call__

    def counting(self, *args):
        calls.append(self)
        return original(self, *args)

    monkeypatch.setattr(llama.LlamaLayer, "__call__", counting)
    config = with_windows(replace(CONFIG, hidden_size=24 + 4 * traces), *windows)
    model, forward = forward_of(config)
    forward.lower(nnx.state(model), make_batch(4), alloc(pool_spec(model.cache_groups(4, "float32", hybrid=False), 4)))
    assert len(calls) == traces


@pytest.mark.parametrize("num_tokens", [pytest.param(1 + 1, marks=pytest.mark.thorough("as the other")), 5])
def test_the_pool_is_updated_in_place(num_tokens):
    model, forward = forward_of(with_windows(CONFIG, None, None))
    kv = alloc(pool_spec(model.cache_groups(4, "float32", hybrid=False), 8192))
    memory = forward.lower(nnx.state(model), make_batch(num_tokens), kv).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= kv.data.nbytes
    assert memory.temp_size_in_bytes < kv.data.nbytes / 100


def test_layers_write_to_pages_of_their_own():
    model, forward = forward_of(with_windows(CONFIG, None, None, None))
    pages_per_layer = 5
    kv = alloc(pool_spec(model.cache_groups(4, "float32", hybrid=False), pages_per_layer))
    _, kv = forward(random_weights(model), make_batch(4), kv)
    pages = np.asarray(export_pages(kv, jnp.arange(kv.num_pages)))
    written = np.abs(pages).sum((2, 3, 4)) > 0  # [rows, page_size]
    expected = np.zeros_like(written)
    expected[2::pages_per_layer, :3] = True
    np.testing.assert_array_equal(written, expected)
    firsts = pages[2::pages_per_layer]
    assert all(not np.array_equal(firsts[0], other) for other in firsts[1:])


@pytest.mark.parametrize(
    "name", [pytest.param("Qwen2ForCausalLM", marks=pytest.mark.thorough("as Qwen3")), "Qwen3ForCausalLM"]
)
def test_bfloat16(name):
    is_qwen3 = name == "Qwen3ForCausalLM"
    config = with_attention(replace(CONFIG, architecture=name), qk_norm=is_qwen3, bias=not is_qwen3)
    config = with_windows(config, None, 3)
    results = {}
    for dtype in ("float32", "bfloat16"):
        model, forward = forward_of(config, jnp.dtype(dtype))
        assert type(model).__name__ == name
        logits, kv = forward(
            random_weights(model), make_batch(8), alloc(pool_spec(model.cache_groups(4, dtype, hybrid=False), 3))
        )
        assert logits.dtype == jnp.float32 and kv.dtype == dtype
        results[dtype] = np.asarray(logits)[:7]
    error = np.abs(results["bfloat16"] - results["float32"]).max()
    assert 0 < error < 0.1 * np.abs(results["float32"]).max()


def test_the_pool_of_one_group_is_a_page_of_each_layer():
    spec = pool_spec(build_model(CONFIG, Build(jnp.float32)).cache_groups(16, "bfloat16", hybrid=False), 10)
    assert (spec.num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim) == (60, 16, 2, 6)
    assert spec.v_head_dim == 6 and spec.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ((None,) * 5, [(None, (0, 1, 2, 3, 4))]),
        ((8,) * 3, [(8, (0, 1, 2))]),
        ((8, None) * 3, [(8, (0, 2, 4)), (None, (1, 3, 5))]),
        # Five windowed layers to a full one: groups of two, dealt out so that every run of layers has some of each.
        (((8,) * 5 + (None,)) * 2, [(8, (0, 6)), (8, (1, 7)), (8, (2, 8)), (8, (3, 9)), (8, (4, 10)), (None, (5, 11))]),
        ((4, 8, None), [(4, (0,)), (8, (1,)), (None, (2,))]),
    ],
)
def test_layers_of_one_window_share_a_group(windows, groups):
    assert group_layers(windows) == groups
    assert group_layers(windows, hybrid=False) == [(None, tuple(range(len(windows))))]


def test_a_pool_must_divide_into_layers():
    model, forward = forward_of(CONFIG)
    kv = alloc(replace(pool_spec(model.cache_groups(4, "float32", hybrid=False), 4), num_pages=25))
    with pytest.raises(ValueError, match="num_pages must be a multiple of 6 layers, got 25"):
        forward.lower(nnx.state(model), make_batch(4), kv)


def test_building_allocates_nothing():
    big = replace(CONFIG, hidden_size=8192, intermediate_size=28672, vocab_size=128256)
    leaves = jax.tree.leaves(nnx.state(build_model(big, Build(jnp.bfloat16))))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) > 5 * 10**9
