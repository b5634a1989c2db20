"""config.json as published checkpoints have it, in the spellings of transformers 4 and 5: what layers come of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxengine.models.config.altup import AltUp
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.registry import read_hf
from tests.models.config.published import (
    APERTUS,
    COHERE,
    COHERE2,
    EXAONE4,
    EXAONE4_SMALL,
    GEMMA,
    GEMMA3,
    GEMMA3_VISION,
    GEMMA3N_E2B,
    GEMMA4_26B,
    GEMMA4_31B,
    GEMMA4_E2B,
    GEMMA4_E4B,
    NEMOTRON,
    OLMO2,
    OLMO3,
    SMOLLM3,
    STARCODER2,
    YARN,
)
from tests.tables import each_row


def kinds(config: ModelConfig) -> str:
    """A letter for each layer: L with a window, G without."""
    return "".join("G" if layer.window is None else "L" for layer in config.attention)


def test_gemma3():
    config = read_hf(GEMMA3_VISION)
    local, full = config.attention[0], config.attention[5]
    assert kinds(config) == "LLLLLG" * 8 and config.vocab_size == 262208 and config.eos_token_ids == (1, 106)
    assert config.tie_word_embeddings and config.max_position_embeddings == 131072 and config.logit_soft_cap is None
    assert (local.window, local.head_dim, local.scale) == (1024, 256, 256**-0.5)
    assert local.rope == Rope(256, 1e4) and full.rope == Rope(256, 1e6, RopeScaling("linear", 8.0))
    small = read_hf(GEMMA3)
    assert kinds(small) == ("LLLLLG" * 5)[:26] and small.attention[5].rope == Rope(256, 1e6)
    # transformers 5
    both = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    listed = ["full_attention" if kind == "G" else "sliding_attention" for kind in kinds(small)]
    old = {"rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"}
    new = {name: value for name, value in GEMMA3.items() if name not in old}
    assert read_hf({**new, "rope_parameters": both, "layer_types": listed}) == small


def test_gemma4():
    config = read_hf(GEMMA4_E2B)
    local, full = config.attention[0], config.attention[4]
    assert kinds(config) == "LLLLG" * 7 and config.eos_token_ids == (1, 106) and config.logit_soft_cap == 30.0
    assert (local.window, local.head_dim, local.num_kv_heads, local.scale) == (512, 256, 1, 1.0)
    assert (full.head_dim, full.num_kv_heads) == (512, 1) and local.rope == Rope(256, 1e4)
    turned = full.rope.frequencies() if full.rope else np.zeros(0)
    np.testing.assert_allclose(turned[:64], 1e6 ** (-np.arange(64) / 256))
    assert len(turned) == 256 and not turned[64:].any()
    sources = [layer.kv_source for layer in config.attention]
    assert sources == [None] * 15 + [13, 13, 13, 13, 14] * 4
    assert config.ffn_sizes == (6144,) * 15 + (12288,) * 20 and config.layer_input_size == 256
    larger = read_hf(GEMMA4_E4B)
    assert kinds(larger) == "LLLLLG" * 7 and larger.ffn_sizes == () and larger.attention[41].kv_source == 23
    sparse, dense = read_hf(GEMMA4_26B), read_hf(GEMMA4_31B)
    assert sparse.experts is not None and (sparse.experts.num_experts, sparse.experts.num_per_token) == (128, 8)
    for large, heads in ((sparse, (8, 2)), (dense, (16, 4))):
        local, full = large.attention[0], large.attention[5]
        assert (local.num_kv_heads, full.num_kv_heads) == heads and large.layer_input_size == 0
        assert full.keys_as_values and not local.keys_as_values and not large.ffn_sizes
    assert (sparse.num_kv_heads, dense.num_kv_heads) == (2, 4)  # heads of every layer divide into so many parts


def test_gemma4_towers():
    for raw, both_ways in ((GEMMA4_E2B, False), (GEMMA4_31B, True)):
        tower = read_hf(raw).tower
        assert tower is not None and tower.attends_both_ways == both_ways and (tower.merge, tower.unit) == (9, 288)
    assert read_hf({**GEMMA4_E2B, "vision_config": None}).tower is None


def test_gemma3n():
    config = read_hf(GEMMA3N_E2B)
    local, full = config.attention[0], config.attention[4]
    assert kinds(config) == "LLLLG" * 6 and config.eos_token_ids == (1, 106) and config.tower is None
    assert (local.window, local.rope, full.rope) == (512, Rope(256, 1e4), Rope(256, 1e6)) and full.scale == 1.0
    assert [layer.kv_source for layer in config.attention] == [None] * 20 + [18, 18, 18, 18, 19] * 2
    assert config.altup == AltUp(4, 0, True, 64, (0.95,) * 10 + (0.0,) * 20)
    assert config.layer_input_rows == 262144
    assert config.stream_size == 8192 and config.layer_input_size == 256 and not config.ffn_sizes
    nested = read_hf(GEMMA3N_E2B | {"text_config": GEMMA3N_E2B["text_config"] | {"intermediate_size": [8, 9] * 15}})
    assert nested.ffn_sizes == (8, 9) * 15 and nested.intermediate_size == 9


@each_row(
    ("changes", "message"),
    [
        ({"intermediate_size": [8192] * 29}, "intermediate_size must be an integer >= 1, or a list of 30"),
        (
            {"activation_sparsity_pattern": 0.95},
            "must be a list of 30 numbers >= 0 and < 1, got 0.95",
        ),
        ({"activation_sparsity_pattern": [1.0] * 30}, "activation_sparsity_pattern must be a list of 30 numbers"),
        ({"altup_num_inputs": 1}, "altup_num_inputs must be an integer >= 2"),
        ({"altup_active_idx": 4}, "altup_active_idx must be an integer >= 0 and <= 3"),
        ({"num_kv_shared_layers": 29}, "num_kv_shared_layers must be a number that leaves a layer of each kind"),
    ],
)
def test_gemma3n_refuses(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf(GEMMA3N_E2B | {"text_config": GEMMA3N_E2B["text_config"] | changes})


@each_row(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 34}, "num_kv_shared_layers must be a number that leaves a layer of each kind before"),
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention must be "vision", null or absent'),
        ({"vocab_size_per_layer_input": 1000}, "vocab_size_per_layer_input must be at least vocab_size, 262144"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters must be a mapping that has one for sliding"),
    ],
)
def test_gemma4_refuses(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf(GEMMA4_E2B | {"text_config": GEMMA4_E2B["text_config"] | changes})


def test_gemma4_may_have_layer_inputs_of_more_tokens_than_its_vocabulary():
    """As transformers' class has by default, in a model with a small vocabulary."""
    small = GEMMA4_E2B["text_config"] | {"vocab_size": 1000, "pad_token_id": 0, "eos_token_id": 1}
    rows = [GEMMA4_E2B["text_config"], small, small | {"vocab_size_per_layer_input": 1000}]
    assert [read_hf(GEMMA4_E2B | {"text_config": each, "eos_token_id": 1}).layer_input_rows for each in rows] == [
        0,
        262144,
        0,
    ]


def in_transformers_5(raw: dict[str, Any]) -> dict[str, Any]:
    """The same with rope as transformers 5 writes it, one for all layers."""
    new = {name: value for name, value in raw.items() if name not in ("rope_theta", "rope_scaling")}
    scaling = raw.get("rope_scaling") or {"rope_type": "default"}
    return {**new, "rope_parameters": {**scaling, "rope_theta": raw["rope_theta"]}}


@pytest.mark.parametrize(
    "raw",
    [OLMO2, SMOLLM3, COHERE2, EXAONE4, EXAONE4_SMALL, STARCODER2, NEMOTRON, APERTUS],
    ids=lambda raw: raw["architectures"][0],
)
def test_both_spellings_of_rope(raw):
    assert read_hf(in_transformers_5(raw)) == read_hf(raw)


def test_olmo():
    config = read_hf(OLMO2)
    assert kinds(config) == "G" * 32 and config.attention[0].rope == Rope(128, 500000.0)
    unsaid = {name: value for name, value in OLMO2.items() if name != "rms_norm_eps"}
    assert (
        config.rms_norm_eps == 1e-6 and read_hf(unsaid).rms_norm_eps == 1e-5 and config.max_position_embeddings == 4096
    )
    new = read_hf(OLMO3)
    scaling = RopeScaling("yarn", 8.0, 8192, attention_factor=1.2079441541679836)
    assert kinds(new) == "LLLG" * 8 and new.attention[0].window == 4096
    assert new.attention[0].rope == Rope(128, 500000.0) and new.attention[3].rope == Rope(128, 500000.0, scaling)
    unlisted = {name: value for name, value in OLMO3.items() if name != "layer_types"}
    assert read_hf(unlisted) == new


def test_smollm3():
    config = read_hf(SMOLLM3)
    assert [layer.rope for layer in config.attention] == ([Rope(128, 5e6)] * 3 + [None]) * 9
    assert config.tie_word_embeddings and kinds(config) == "G" * 36
    fields = {name: value for name, value in SMOLLM3.items() if name not in ("no_rope_layers", "layer_types")}
    assert read_hf(fields) == config
    windowed = read_hf({**fields, "use_sliding_window": True, "sliding_window": 100})
    assert kinds(windowed) == "GGGL" * 9
    assert kinds(read_hf({**SMOLLM3, "use_sliding_window": True, "sliding_window": 100})) == "G" * 36


def test_cohere2():
    config = read_hf(COHERE2)
    local = Rope(128, 50000.0, interleaved=True)
    assert [layer.rope for layer in config.attention] == ([local] * 3 + [None]) * 8 and kinds(config) == "LLLG" * 8
    assert config.logit_scale == 0.25 and config.rms_norm_eps == 1e-5 and config.tie_word_embeddings
    assert read_hf({**COHERE2, "logit_scale": None}).logit_scale == 0.0625
    assert {layer.rope for layer in read_hf({**COHERE2, "sliding_window": None}).attention} == {None}


def test_the_first_gemma_and_cohere():
    gemma, cohere = read_hf(GEMMA), read_hf(COHERE)
    assert gemma.attention[0].rope == Rope(256, 10000.0) and gemma.tie_word_embeddings
    assert read_hf({**GEMMA, "hidden_act": "gelu_pytorch_tanh"}) == gemma
    assert {layer.rope for layer in cohere.attention} == {Rope(128, 75e6, interleaved=True)}
    assert cohere.attention[0].qk_norm and cohere.logit_scale == pytest.approx(0.8333333)


def test_exaone4():
    rope = Rope(128, 1e6, RopeScaling("llama3", 16.0, 8192))
    config, small = read_hf(EXAONE4), read_hf(EXAONE4_SMALL)
    assert [layer.rope for layer in config.attention] == ([rope] * 3 + [None]) * 16 and kinds(config) == "LLLG" * 16
    assert {layer.rope for layer in small.attention} == {rope} and kinds(small) == "G" * 30
    unlisted = {name: value for name, value in EXAONE4.items() if name != "layer_types"}
    assert read_hf({**unlisted, "sliding_window_pattern": 4}) == config


def test_starcoder2():
    config = read_hf(STARCODER2)
    layer = config.attention[0]
    assert layer.bias and layer.output_bias and config.mlp_bias and layer.window == 4096 and config.tie_word_embeddings
    plain = read_hf({**STARCODER2, "use_bias": False, "sliding_window": None})
    assert not plain.attention[0].bias and not plain.mlp_bias and plain.attention[0].window is None


def test_nemotron():
    config = read_hf(NEMOTRON)
    assert config.attention[0].rope == Rope(64, 10000.0) and config.rms_norm_eps == 1e-5
    unsaid = {name: value for name, value in NEMOTRON.items() if name != "partial_rotary_factor"}
    assert read_hf(unsaid) == config


def test_apertus():
    config = read_hf(APERTUS)
    assert config.attention[0].rope == Rope(128, 12e6, RopeScaling("llama3", 8.0, 8192)) and config.attention[0].qk_norm
    unsaid = {name: value for name, value in APERTUS.items() if name not in ("rope_scaling", "rope_theta")}
    nothing = {"rope_scaling": None, "rope_theta": 5000.0}  # the scaling that then holds has a base of its own
    assert read_hf(unsaid) == config == read_hf({**unsaid, **nothing}) == read_hf({**unsaid, "rope_parameters": None})


def changed(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**raw, **changes}


@each_row(
    ("raw", "message"),
    [
        (changed(GEMMA3, attn_logit_softcapping=50.0), "attn_logit_softcapping must be absent, got 50.0"),
        (changed(GEMMA3, use_bidirectional_attention=True), "use_bidirectional_attention must be false or absent"),
        (changed(GEMMA3, sliding_window_pattern=0), "sliding_window_pattern must be an integer >= 1"),
        (
            changed(GEMMA3, rope_parameters={"full_attention": {"rope_type": "default"}}),
            "rope_parameters must be a mapping that has one for sliding_attention",
        ),
        (changed(GEMMA3, layer_types=["chunked_attention"] * 26), "layer_types must be a list of 26 of full_attention"),
        (changed(GEMMA3_VISION, text_config=None), "text_config must be a mapping, got None"),
        (changed(OLMO3, rope_parameters=YARN), "rope_parameters must be a mapping that has one for sliding_attention"),
        (changed(OLMO2, clip_qkv=8.0), "clip_qkv must be absent, got 8.0"),
        (changed(SMOLLM3, no_rope_layers=[1, 0]), "no_rope_layers must be a list of at least 36 zeros and ones"),
        (changed(SMOLLM3, no_rope_layers=[2] * 36), "no_rope_layers must be a list of at least 36 zeros and ones"),
        (changed(COHERE2, use_parallel_block=False), "use_parallel_block must be true or absent, got False"),
        (changed(COHERE2, use_qk_norm=True), "use_qk_norm must be false or absent, got True"),
        (changed(COHERE2, position_embedding_type="rope"), 'position_embedding_type must be "rope_gptj" or absent'),
        (changed(GEMMA, hidden_activation="gelu"), 'hidden_activation must be "gelu_pytorch_tanh" or absent'),
        (changed(EXAONE4, layer_types=None), "sliding_window_pattern must be an integer"),
        (changed(STARCODER2, norm_type="rms_norm"), 'norm_type must be "layer_norm" or absent'),
        (changed(NEMOTRON, hidden_act="selu"), "hidden_act must be 'relu2' or 'gelu'"),
        (changed(APERTUS, post_norm=True), "post_norm must be false or absent, got True"),
        (changed(APERTUS, qk_norm=False), "qk_norm must be true or absent, got False"),
        (changed(GEMMA3_VISION, quantization_config={"quant_method": "gptq"}), "quantization_config: bits must be"),
    ],
)
def test_what_is_not_built_is_refused(raw, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf(raw)
