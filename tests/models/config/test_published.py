"""config.json as published checkpoints have it, in the spellings of transformers 4 and 5: what layers come of it."""

from __future__ import annotations

from typing import Any

import pytest

from models.config.fields import ModelConfigError
from models.config.model_config import ModelConfig
from models.config.rope import Rope, RopeScaling
from models.registry import read_hf

LINEAR = {"factor": 8.0, "rope_type": "linear"}
# google/gemma-3-12b-it, which leaves to transformers what a Gemma 3 has anyway.
GEMMA3_VISION = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": LINEAR,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
# google/gemma-3-1b-it
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
# allenai/OLMo-2-1124-7B
OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
YARN = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}
# allenai/Olmo-3-7B-Instruct
OLMO3 = {
    **OLMO2,
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "rope_scaling": YARN,
    "sliding_window": 4096,
    "vocab_size": 100278,
}
# HuggingFaceTB/SmolLM3-3B
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
# CohereLabs/c4ai-command-r7b-12-2024
COHERE2 = {
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "vocab_size": 256000,
}
# LGAI-EXAONE/EXAONE-4.0-32B, and what the 1.2B has otherwise
EXAONE4 = {
    "architectures": ["Exaone4ForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 361,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
    "vocab_size": 102400,
}
EXAONE4_SMALL = {**EXAONE4, "sliding_window": None, "sliding_window_pattern": None, "tie_word_embeddings": True}
EXAONE4_SMALL |= {"num_hidden_layers": 30, "layer_types": ["full_attention"] * 30, "hidden_size": 2048}
# bigcode/starcoder2-3b
STARCODER2 = {
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "embedding_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
    "use_bias": True,
    "vocab_size": 49152,
}
# nvidia/Nemotron-Mini-4B-Instruct
NEMOTRON = {
    "architectures": ["NemotronForCausalLM"],
    "bos_token_id": 2,
    "eos_token_id": 3,
    "head_dim": 128,
    "hidden_act": "relu2",
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "max_position_embeddings": 4096,
    "norm_eps": 1e-05,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "vocab_size": 256000,
}
# swiss-ai/Apertus-8B-Instruct-2509
APERTUS = {
    "architectures": ["ApertusForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 68,
    "hidden_act": "xielu",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "post_norm": False,
    "qk_norm": True,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 12000000,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}


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
    assert read_hf(unsaid) == config and read_hf({**APERTUS, "rope_scaling": None}).attention[0].rope == Rope(128, 12e6)


def changed(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**raw, **changes}


@pytest.mark.parametrize(
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
        (changed(EXAONE4, layer_types=None), "sliding_window_pattern must be an integer"),
        (changed(STARCODER2, norm_type="rms_norm"), 'norm_type must be "layer_norm" or absent'),
        (changed(NEMOTRON, hidden_act="silu"), "hidden_act must be 'relu2', got 'silu'"),
        (changed(APERTUS, post_norm=True), "post_norm must be false or absent, got True"),
        (changed(APERTUS, qk_norm=False), "qk_norm must be true or absent, got False"),
        (changed(GEMMA3_VISION, quantization_config={"quant_method": "gptq"}), "quantization_config is not supported"),
    ],
)
def test_what_is_not_built_is_refused(raw, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf(raw)
