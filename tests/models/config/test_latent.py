"""config.json of models with multi-head latent attention: what is read, as published, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from jaxengine.models.config.attention import Latent
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.registry import read_hf
from tests.tables import each_row

DEEPSEEK_V2 = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rope_theta": 500000.0,
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "norm_topk_prob": False,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 128,
    },
}
# deepseek-ai/DeepSeek-V3, but for `quantization_config`
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# moonshotai/Kimi-K2-Instruct, where it differs
KIMI_K2 = DEEPSEEK_V3 | {
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
# openbmb/MiniCPM3-4B, but for the numbers of its rope_scaling
MINICPM3 = {
    "architectures": ["MiniCPM3ForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": [2, 73440],
    "dim_model_base": 256,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "kv_lora_rank": 256,
    "max_position_embeddings": 32768,
    "num_attention_heads": 40,
    "num_hidden_layers": 62,
    "num_key_value_heads": 40,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.05 + 0.5 * index for index in range(16)],
        "original_max_position_embeddings": 32768,
        "short_factor": [1.05 + 0.5 * index for index in range(16)],
        "type": "longrope",
    },
    "scale_depth": 1.4,
    "scale_emb": 12,
    "vocab_size": 73448,
}
# zai-org/GLM-4.7-Flash
GLM_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def test_deepseek_v2():
    config = read_hf(DEEPSEEK_V2)
    (layer,) = set(config.attention)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim) == (4, 1, 48, 40)
    assert layer.values_in_keys and layer.latent == Latent(40, 12, 8, 10, 48)
    # Both mscales are one in rope's tables; the logits get what one of them is, twice: 0.1 * 0.707 * ln 40 + 1.
    rope = layer.rope
    assert rope is not None and rope.interleaved and rope.rotary_dim == 8
    assert rope.scaling is not None and rope.scaling.attention_factor == 1.0
    assert layer.scale == pytest.approx(20**-0.5 * 1.2608037**2, rel=1e-6)
    assert config.experts == ExpertsConfig(
        num_experts=16,
        num_per_token=6,
        intermediate_size=32,
        norm_weights=False,
        dense_layers=(0,),
        num_expert_group=8,
        topk_group=3,
        routed_scaling_factor=16.0,
        shared_intermediate_size=64,
    )
    lite = read_hf({**DEEPSEEK_V2, "q_lora_rank": None, "topk_method": "greedy", "rope_scaling": None, "head_dim": 8})
    (layer,) = set(lite.attention)
    assert layer.latent == Latent(40, 12, 8, 10) and layer.scale == 20**-0.5
    assert lite.experts is not None and (lite.experts.num_expert_group, lite.experts.topk_group) == (1, 1)


def test_a_latent_is_one_key_for_all_heads():
    layer = read_hf(DEEPSEEK_V2).attention[0]
    for changes, message in (
        ({"num_kv_heads": 2}, r"one kv head of kv_lora_rank \+ qk_rope_head_dim = 48, got num_kv_heads 2"),
        ({"head_dim": 40}, "got num_kv_heads 1 and head_dim 40"),
        ({"qk_norm": True}, "latent attention takes no qk_norm"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            dataclasses.replace(layer, **changes)
    with pytest.raises(ModelConfigError, match="v_head_dim must be an integer >= 1 and <= 4096, got 0"):
        Latent(40, 12, 8, 0)


def test_deepseek_v3():
    config = read_hf(DEEPSEEK_V3)
    (layer,) = set(config.attention)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (128, 1, 576)
    assert layer.latent == Latent(512, 128, 64, 128, 1536) and not layer.bias and not layer.output_bias
    assert layer.scale == pytest.approx(192**-0.5 * 1.3688879**2, rel=1e-6)
    assert config.experts == ExpertsConfig(
        num_experts=256,
        num_per_token=8,
        intermediate_size=2048,
        dense_layers=(0, 1, 2),
        scoring_func="sigmoid",
        correction_bias=True,
        num_expert_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        shared_intermediate_size=2048,
    )
    assert config.num_nextn_predict_layers == 1


def test_kimi_k2_and_glm_flash():
    kimi, glm = read_hf(KIMI_K2), read_hf(GLM_FLASH)
    assert kimi.experts is not None and kimi.experts.dense_layers == (0,) and kimi.experts.num_experts == 384
    assert kimi.attention[0].scale == pytest.approx(192**-0.5 * 1.3465736**2, rel=1e-6)
    assert glm.experts is not None and glm.experts.dense_layers == (0,) and glm.num_nextn_predict_layers == 1
    assert glm.attention[0].latent == Latent(512, 192, 64, 256, 768) and glm.attention[0].scale == 256**-0.5
    kinds = ["dense", "sparse", "dense"]
    listed = read_hf({**GLM_FLASH, "num_hidden_layers": 3, "mlp_layer_types": kinds})
    assert listed.experts is not None and listed.experts.dense_layers == (0, 2)


def test_minicpm3():
    config = read_hf(MINICPM3)
    (layer,) = set(config.attention)
    assert layer.latent == Latent(256, 64, 32, 64, 768) and layer.scale == 96**-0.5
    rope = layer.rope
    assert rope is not None and not rope.interleaved and rope.scaling is not None
    assert rope.scaling.rope_type == "longrope" and rope.scaling.attention_factor == 1.0
    assert (config.embedding_multiplier, config.logit_scale) == (12.0, 0.1)
    assert config.residual_multiplier == pytest.approx(1.4 / 62**0.5) and config.tie_word_embeddings


@each_row(
    "raw, message",
    [
        ({**DEEPSEEK_V2, "num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads = 4.*got 2"),
        ({**DEEPSEEK_V2, "norm_topk_prob": True}, "norm_topk_prob must be false or absent, got True"),
        ({**DEEPSEEK_V2, "topk_method": "noaux_tc"}, "topk_method must be 'greedy' or 'group_limited_greedy'"),
        ({**DEEPSEEK_V2, "scoring_func": "sigmoid"}, 'scoring_func must be "softmax" or absent, got'),
        ({**DEEPSEEK_V2, "moe_layer_freq": 2}, "moe_layer_freq must be 1 or absent, got 2"),
        ({**DEEPSEEK_V2, "n_group": 5}, "num_expert_group must divide num_experts = 16"),
        ({**DEEPSEEK_V2, "kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({**DEEPSEEK_V2, "qk_rope_head_dim": 7}, "rotary_dim.*must be even"),
        ({**DEEPSEEK_V3, "topk_method": "greedy"}, "topk_method"),
        ({**DEEPSEEK_V3, "rope_interleave": "yes"}, "rope_interleave must be true or false"),
        ({**DEEPSEEK_V3, "quantization_config": {"quant_method": "quark"}}, "quant_method must be"),
        ({**MINICPM3, "scale_depth": None}, "scale_depth is missing"),
        ({**GLM_FLASH, "mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 47 of dense, sparse"),
    ],
)
def test_unusable(raw, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf(json.loads(json.dumps(raw)))
