"""config.json as published mixtures of experts have it: what layers come of it, and what is refused by its name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxengine.models.config.attention import TemperatureTuning
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.registry import read_hf
from tests.models.config.test_published import in_transformers_5
from tests.tables import each_row

# openai/gpt-oss-20b
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
# zai-org/GLM-4.5-Air
GLM4: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
# rednote-hilab/dots.llm1.inst
DOTS1: dict[str, Any] = {
    "architectures": ["Dots1ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 32768,
    "max_window_layers": 62,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "noaux_tc",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
# Qwen/Qwen1.5-MoE-A2.7B-Chat
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# allenai/OLMoE-1B-7B-0924
OLMOE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 50304,
}
# MiniMaxAI/MiniMax-M2, but for its quantization_config
MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
# baidu/ERNIE-4.5-21B-A3B-PT
ERNIE: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "vocab_size": 103424,
}
# tencent/Hunyuan-A13B-Instruct
HUNYUAN: dict[str, Any] = {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": [3072] * 32,
    "moe_layer_num_skipped": 0,
    "moe_topk": [8] * 32,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_shared_expert": [1] * 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "vocab_size": 128167,
}
# meta-llama/Llama-4-Scout-17B-16E-Instruct
LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "bos_token_id": 200000,
        "eos_token_id": [200001, 200007, 200008],
        "floor_scale": 8192,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "moe_layers": list(range(48)),
        "no_rope_layers": [1, 1, 1, 0] * 12,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "vision_config": {
        "hidden_act": "gelu",
        "hidden_size": 1408,
        "image_size": 336,
        "intermediate_size": 5632,
        "multi_modal_projector_bias": False,
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 34,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
        "rope_theta": 10000,
        "vision_feature_select_strategy": "default",
        "vision_output_dim": 4096,
    },
}
DEEPSEEK = {"scoring_func": "sigmoid", "correction_bias": True}
EXPERTS = {
    "gpt-oss": (GPT_OSS, ExpertsConfig(32, 4, 2880, bias=True)),
    "glm4": (GLM4, ExpertsConfig(128, 8, 1408, dense_layers=(0,), shared_intermediate_size=1408, **DEEPSEEK)),
    "dots1": (
        DOTS1,
        ExpertsConfig(
            *(128, 6, 1408), dense_layers=(0,), shared_intermediate_size=2816, routed_scaling_factor=2.5, **DEEPSEEK
        ),
    ),
    "qwen2": (QWEN2, ExpertsConfig(60, 4, 1408, norm_weights=False, shared_intermediate_size=5632, shared_gate=True)),
    "olmoe": (OLMOE, ExpertsConfig(64, 8, 1024, norm_weights=False)),
    "minimax": (MINIMAX, ExpertsConfig(256, 8, 1536, **DEEPSEEK)),
    "ernie": (
        ERNIE,
        ExpertsConfig(
            *(64, 6, 1536), dense_layers=(0,), correction_bias=True, min_weight_sum=1e-12, shared_intermediate_size=3072
        ),
    ),
    "hunyuan": (HUNYUAN, ExpertsConfig(64, 8, 3072, shared_intermediate_size=3072)),
    "llama4": (
        LLAMA4,
        ExpertsConfig(
            *(16, 1, 8192),
            norm_weights=False,
            scoring_func="sigmoid",
            apply_router_weight_on_input=True,
            shared_intermediate_size=8192,
        ),
    ),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name):
    raw, experts = EXPERTS[name]
    assert read_hf(raw).experts == experts


def test_attention():
    yarn = RopeScaling("yarn", 32.0, 4096, attention_factor=0.1 * math.log(32) + 1, truncate=False)
    first, second = read_hf(GPT_OSS).attention[:2]
    assert (first.window, second.window, first.sinks, first.bias, first.output_bias) == (128, None, True, True, True)
    assert first.rope == Rope(64, 150000.0, yarn)
    glm4 = read_hf(GLM4)
    assert glm4.attention[0].rope == Rope(64, 1000000.0) and glm4.num_nextn_predict_layers == 1
    assert glm4.attention[0].bias and not glm4.attention[0].output_bias and not glm4.attention[0].qk_norm
    assert read_hf(DOTS1).attention[0].qk_norm and read_hf(DOTS1).attention[61].window is None
    assert read_hf(QWEN2).attention[0].bias and not read_hf(QWEN2).attention[0].output_bias
    assert read_hf(MINIMAX).attention[0].rope == Rope(64, 5000000.0)
    assert read_hf(ERNIE).attention[0].rope == Rope(128, 500000.0, interleaved=True)
    assert read_hf(HUNYUAN).attention[0].rope == Rope(128, 10000.0 * 1000.0 ** (128 / 126))


def test_attention_of_llama4():
    config = read_hf(LLAMA4)
    chunked, whole = config.attention[2:4]
    assert (chunked.chunk, chunked.qk_norm, chunked.temperature, chunked.reach) == (8192, True, None, 8192)
    assert chunked.rope == Rope(128, 500000.0, RopeScaling("llama3", 16.0, 8192, 1.0, 1.0), interleaved=True)
    assert (whole.chunk, whole.qk_norm, whole.rope) == (None, False, None)
    assert whole.temperature == TemperatureTuning(8192.0, 0.1, offset=1)
    assert config.intermediate_size == 16384 and config.eos_token_ids == (200001, 200007, 200008)


@pytest.mark.parametrize("raw", [GPT_OSS, GLM4, DOTS1, QWEN2, OLMOE, MINIMAX, ERNIE, HUNYUAN])
def test_both_spellings_of_rope(raw):
    assert read_hf(in_transformers_5(raw)) == read_hf(raw)


def in_text(**changes: Any) -> dict[str, Any]:
    return LLAMA4 | {"text_config": LLAMA4["text_config"] | changes}


@each_row(
    ("raw", "message"),
    [
        (
            GPT_OSS | {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config: bits must be 2 or 3 or 4 or 8, got None",
        ),
        (GPT_OSS | {"swiglu_limit": 0}, "swiglu_limit must be a finite number > 0"),
        (GLM4 | {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid' or absent, got 'softmax'"),
        (GLM4 | {"topk_method": "greedy"}, "topk_method must be 'noaux_tc' or absent, got 'greedy'"),
        (GLM4 | {"n_group": 3}, "num_expert_group must divide num_experts = 128"),
        (GLM4 | {"n_group": 64, "topk_group": 2}, "num_per_token must be at most the 4 of topk_group groups, got 8"),
        (GLM4 | {"num_nextn_predict_layers": 2000}, "num_nextn_predict_layers must be an integer >= 0 and <= 1024"),
        (QWEN2 | {"use_sliding_window": True}, "layer_types must be given where use_sliding_window is true"),
        (OLMOE | {"clip_qkv": -8.0}, "clip_qkv must be a finite number > 0, got -8.0"),
        (MINIMAX | {"attn_type_list": [0] + [1] * 61}, "attn_type_list must be ones"),
        (MINIMAX | {"attn_type_list": 1}, "attn_type_list must be ones"),
        (MINIMAX | {"qk_norm_type": "per_head"}, 'qk_norm_type must be "per_layer" or absent'),
        (MINIMAX | {"rotary_dim": 256}, "partial_rotary_factor must be a number > 0 and <= 1"),
        (MINIMAX | {"shared_intermediate_size": 8}, "shared_intermediate_size must be 0 or absent"),
        (ERNIE | {"use_bias": 1}, "use_bias must be true or false, got 1"),
        (HUNYUAN | {"moe_topk": [8] * 31 + [4]}, "moe_topk must be an integer, or a list of the same one"),
        (HUNYUAN | {"num_shared_expert": 2}, "num_shared_expert must be 1 in every layer"),
        (HUNYUAN | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "alpha is missing"),
        (HUNYUAN | {"rope_scaling": {"type": "dynamic", "alpha": 1e38}}, "alpha must be a number > 0 and <="),
        (in_text(moe_layers=[48]), "moe_layers must be a list of layer indices from 0 to 47"),
        (in_text(no_rope_layers=[1]), "no_rope_layers must be a list of 48 of 0, 1"),
        (in_text(layer_types=["sliding_attention"] * 48), "layer_types must be a list of 48 of chunked_attention"),
        (in_text(attention_chunk_size=0), "attention_chunk_size must be an integer >= 1"),
    ],
)
def test_what_is_refused(raw, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf(raw)
