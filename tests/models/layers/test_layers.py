"""Layers against their formulas in float64, and the float32 accumulation that bfloat16 models rely on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.models.build import Build
from jaxengine.models.config.attention import TemperatureTuning
from jaxengine.models.config.rope import Rope, RopeScaling, rope_frequencies
from jaxengine.models.layers.attention.attention import query_temperature
from jaxengine.models.layers.base import embedding
from jaxengine.models.layers.base.embedding import Embedding, own_logits
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import MLP, GatedMLP, _rounded, gelu_tanh, relu_squared
from jaxengine.models.layers.base.norm import (
    HeadsRMSNorm,
    LayerNorm,
    OffsetLayerNorm,
    OffsetRMSNorm,
    RMSNorm,
    UnbiasedLayerNorm,
)
from jaxengine.models.layers.base.rope import apply_rope, rope_table
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.encoder import position_rows
from jaxengine.models.params.declare import ParamDecl, Source, declare, declared_params

FLOAT32 = Build("float32")
RNG = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def test_linear_joins_its_sources():
    linear = Linear(6, (Source("a.q", 4), Source("a.k", 2)), axes=("embed", "heads"), bias=True, build=FLOAT32)
    weight, bias, x = random(6, 6), random(6), random(3, 6)
    linear.weight.values[...], linear.bias[...] = jnp.asarray(weight), jnp.asarray(bias)
    np.testing.assert_allclose(linear(jnp.asarray(x)), x.astype(np.float64) @ weight + bias, rtol=1e-5, atol=1e-6)
    decls = {param.name: param.decl for param in declared_params(linear)}
    weights = decls["weight.values"]
    assert weights.sources == (Source("a.q.weight", 4), Source("a.k.weight", 2)) and weights.transposed
    assert decls["bias"].sources == (Source("a.q.bias", 4), Source("a.k.bias", 2)) and decls["bias"].axes == ("heads",)


def test_products_of_bfloat16_accumulate_in_float32():
    linear = Linear(4096, (Source("a", 1),), axes=("embed", "embed"), build=Build("bfloat16"))
    linear.weight.values[...] = jnp.ones((4096, 1), jnp.bfloat16)
    x = jnp.ones((1, 4096), jnp.bfloat16).at[0, 0].set(3)
    assert float(linear(x, out_dtype=jnp.float32)[0, 0]) == 4098.0
    embedding = Embedding(1, 4096, source="e", build=Build("bfloat16"))
    embedding.weight.values[...] = jnp.ones((1, 4096), jnp.bfloat16)
    assert embedding.logits(x).dtype == jnp.float32 and float(embedding.logits(x)[0, 0]) == 4098.0


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)])
def test_rms_norm(dtype, tolerance):
    norm = RMSNorm(64, 1e-5, source="n", build=Build(dtype))
    norm.weight[...] = jnp.asarray(random(64), dtype)
    # Rows large and small: eps counts only in the latter.
    x = jnp.asarray(random(5, 64) * np.array([100, 1, 1e-2, 1e-3, 1e-4], np.float32)[:, None], dtype)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(norm.weight[...], np.float64)
    assert norm(x).dtype == dtype
    np.testing.assert_allclose(np.asarray(norm(x), np.float64), exact, rtol=tolerance, atol=1e-12)


def test_offset_rms_norm():
    norm, plain = OffsetRMSNorm(64, 1e-5, source="n", build=FLOAT32), RMSNorm(64, 1e-5, source="n", build=FLOAT32)
    weight, x = random(64), jnp.asarray(random(5, 64))
    norm.weight[...], plain.weight[...] = jnp.asarray(weight), jnp.asarray(1 + weight)
    np.testing.assert_allclose(norm(x), plain(x), rtol=1e-6)


@pytest.mark.parametrize("norm_class", [LayerNorm, UnbiasedLayerNorm, OffsetLayerNorm])
def test_layer_norm(norm_class):
    norm = norm_class(64, 1e-5, source="n", build=FLOAT32)
    weight, bias, x = (
        random(64),
        random(64),
        (0.5 + random(5, 64)) * np.array([[100], [1], [1e-2], [1e-3], [0]], np.float32),
    )
    norm.weight[...] = jnp.asarray(weight)
    if norm_class.has_bias:
        norm.bias[...] = jnp.asarray(bias)
    y = x.astype(np.float64) - x.astype(np.float64).mean(-1, keepdims=True)
    exact = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * (weight + (norm_class is OffsetLayerNorm))
    np.testing.assert_allclose(norm(jnp.asarray(x)), exact + bias * norm_class.has_bias, rtol=1e-4, atol=1e-4)
    names = {source.name for param in declared_params(norm) for source in param.decl.sources}
    assert names == ({"n.weight", "n.bias"} if norm_class.has_bias else {"n.weight"})


def test_rms_norm_of_all_heads():
    norm, plain = HeadsRMSNorm(3, 8, 1e-5, source="n", build=FLOAT32), RMSNorm(24, 1e-5, source="n", build=FLOAT32)
    weight, x = random(24), jnp.asarray(random(5, 3, 8))
    norm.weight[...] = plain.weight[...] = jnp.asarray(weight)
    np.testing.assert_allclose(norm(x), plain(x.reshape(5, 24)).reshape(5, 3, 8), rtol=1e-6)


def test_mlp():
    names = {"up": "c_fc", "down": "c_proj"}
    mlp = MLP(8, 12, source="m", activation=relu_squared, bias=True, build=FLOAT32, **names)
    up, down, x, up_bias, down_bias = random(8, 12), random(12, 8), random(3, 8), random(12), random(8)
    mlp.up.weight.values[...], mlp.down.weight.values[...] = jnp.asarray(up), jnp.asarray(down)
    mlp.up.bias[...], mlp.down.bias[...] = jnp.asarray(up_bias), jnp.asarray(down_bias)
    got = mlp(jnp.asarray(x), Rows(jnp.ones(3, bool)))
    exact = np.maximum(x.astype(np.float64) @ up + up_bias, 0) ** 2 @ down + down_bias
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)
    kinds = {source.name for param in declared_params(mlp) for source in param.decl.sources}
    assert kinds == {"m.c_fc.weight", "m.c_fc.bias", "m.c_proj.weight", "m.c_proj.bias"}


def test_gelu_keeps_its_digits_where_it_is_small():
    x = np.linspace(-6, 6, 193, dtype=np.float32)
    wide, scale = x.astype(np.float64), 2 * (2 / np.pi) ** 0.5
    share = 1 / (1 + np.exp(-scale * (wide + 0.044715 * wide**3)))
    slope = share + wide * share * (1 - share) * scale * (1 + 3 * 0.044715 * wide**2)
    found, pull = jax.vjp(gelu_tanh, jnp.asarray(x))
    np.testing.assert_allclose(found, wide * share, rtol=1e-5)
    np.testing.assert_allclose(pull(jnp.ones(x.shape))[0], slope, rtol=1e-4)


def test_gated_mlp():
    mlp = GatedMLP(8, 12, source="m", build=FLOAT32)
    gate, up, down, x = random(8, 12), random(8, 12), random(12, 8), random(3, 8)
    mlp.gate_up.weight.values[...] = jnp.concatenate([gate, up], axis=1)
    mlp.down.weight.values[...] = jnp.asarray(down)
    g = x.astype(np.float64) @ gate
    got = mlp(jnp.asarray(x), Rows(jnp.ones(3, bool)))
    np.testing.assert_allclose(got, (g / (1 + np.exp(-g)) * (x @ up)) @ down, rtol=1e-5, atol=1e-5)


def test_embedding():
    embedding = Embedding(5, 3, source="e", build=FLOAT32)
    table = random(5, 3)
    embedding.weight.values[...] = jnp.asarray(table)
    np.testing.assert_array_equal(embedding(jnp.array([4, 0, 4])), table[[4, 0, 4]])
    np.testing.assert_allclose(embedding.logits(jnp.asarray(table[:2])), table[:2] @ table.T, rtol=1e-6)


def test_padding_has_no_logits(monkeypatch):
    logits = jnp.arange(8.0)[None]
    assert own_logits(logits, 8).tolist() == logits.tolist()
    assert np.flatnonzero(np.isinf(own_logits(logits, 5))).tolist() == [5, 6, 7]
    for number, expected in enumerate(([], [7])):  # the second of two devices has tokens 8 to 14, and padding
        monkeypatch.setattr(embedding, "num_shards", lambda axis: 2)
        monkeypatch.setattr(embedding, "shard_index", lambda axis, number=number: number)
        monkeypatch.setattr(embedding, "exchange_tokens", lambda x, axis: x)
        assert np.flatnonzero(np.isinf(own_logits(logits, 15))).tolist() == expected


def test_declaration_must_fit_its_weight():
    with pytest.raises(ValueError, match="does not fit"):
        declare((4, 6), jnp.float32, ParamDecl(("embed", "heads"), (Source("q", 4), Source("k", 1)), transposed=True))
    with pytest.raises(ValueError, match="does not fit"):
        declare((4, 6), jnp.float32, ParamDecl(("embed",), (Source("q", 6),), transposed=True))


def test_rope_is_a_rotation_of_pairs_half_a_head_apart():
    x, positions = random(4, 2, 8), np.array([0, 1, 7, 1000])
    rotated = np.asarray(apply_rope(jnp.asarray(x), *rope_table(jnp.asarray(positions), Rope(8, 100.0))), np.float64)
    angles = positions[:, None] * 100.0 ** (-np.arange(0, 8, 2) / 8)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, None, :]
    np.testing.assert_allclose(rotated[..., :4], turned.real, atol=1e-3)
    np.testing.assert_allclose(rotated[..., 4:], turned.imag, atol=1e-3)
    np.testing.assert_array_equal(rotated[0], x[0])


def test_a_part_of_each_head_is_rotated():
    x, positions = jnp.asarray(random(4, 2, 10)), jnp.array([0, 1, 7, 1000])
    table = rope_table(positions, Rope(6, 100.0))
    rotated = apply_rope(x, *table)
    np.testing.assert_array_equal(rotated[..., 6:], x[..., 6:])
    np.testing.assert_array_equal(rotated[..., :6], apply_rope(x[..., :6], *table))


def test_rope_of_neighbours():
    """Element 2i is rotated with 2i + 1; what comes out has the first of all pairs before the second ones."""
    x, positions = random(4, 2, 10), np.array([0, 1, 7, 1000])
    table = rope_table(jnp.asarray(positions), Rope(8, 100.0))
    rotated = np.asarray(apply_rope(jnp.asarray(x), *table, interleaved=True), np.float64)
    angles = positions[:, None] * 100.0 ** (-np.arange(0, 8, 2) / 8)
    turned = (x[..., 0:8:2] + 1j * x[..., 1:8:2]) * np.exp(1j * angles)[:, None, :]
    expected = np.concatenate([turned.real, turned.imag, x[..., 8:]], axis=-1)
    np.testing.assert_allclose(rotated, expected, atol=1e-3)


def test_temperature_of_queries():
    positions = np.array([0, 1, 6, 7, 8, 15, 1000])
    for offset in (0, 1):
        exact = 1 + 0.5 * np.log(1 + np.floor((positions + offset) / 8))
        tuning = TemperatureTuning(floor_scale=8, attn_scale=0.5, offset=offset)
        np.testing.assert_allclose(query_temperature(jnp.asarray(positions), tuning), exact, rtol=1e-6)


def test_rope_scalings():
    plain = rope_frequencies(16, 10000.0, None)
    np.testing.assert_allclose(rope_frequencies(16, 10000.0, RopeScaling("linear", 4.0)), plain / 4)
    llama3 = rope_frequencies(16, 10000.0, RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0))
    turns = 64 * plain / (2 * np.pi)
    np.testing.assert_allclose(llama3[turns < 1], plain[turns < 1] / 8)
    np.testing.assert_allclose(llama3[turns > 4], plain[turns > 4])
    assert ((turns >= 1) & (turns <= 4)).sum() == 2 and (np.diff(llama3) < 0).all()
    factors = RopeScaling("factors", factors=tuple(plain / llama3))
    np.testing.assert_allclose(rope_frequencies(16, 10000.0, factors), llama3)


def test_yarn_scales_cos_and_sin():
    yarn = RopeScaling("yarn", 4.0, 32, attention_factor=1.25)
    cos, sin = rope_table(jnp.arange(3), Rope(16, scaling=yarn))
    np.testing.assert_allclose(np.hypot(cos, sin), 1.25, rtol=1e-6)


def test_values_are_rounded_as_a_narrower_dtype_would():
    drawn = np.random.default_rng(0).standard_normal(4096) * 10.0 ** np.arange(-38, 26, 1 / 64)
    ties = np.float32(1) + np.arange(8, dtype=np.float32) * np.float32(2**-8)
    x = jnp.asarray(np.concatenate([drawn, ties, -ties, [0.0, -0.0, np.inf, 3.4e38]]), jnp.float32)
    assert (_rounded(x, jnp.bfloat16) == x.astype(jnp.bfloat16).astype(jnp.float32)).all()
    assert (_rounded(x, jnp.bfloat16) != x).any()


def test_padding_in_a_prompt_has_no_position():
    """Rows of two prompts in one step, as transformers counts each: the n-th token that is no padding has row n + 1."""
    prompts = [[1, 5, 1, 1, 7], [9, 8, 1], [4]]
    ids, places = (np.concatenate(each) for each in (prompts, [np.arange(len(prompt)) for prompt in prompts]))
    rows = [1 + np.cumsum(np.not_equal(prompt, 1)) * np.not_equal(prompt, 1) for prompt in prompts]
    assert position_rows(jnp.array(ids), jnp.array(places), 2).tolist() == np.concatenate(rows).tolist()
    assert position_rows(jnp.array(ids), jnp.array(places), 0).tolist() == places.tolist()
