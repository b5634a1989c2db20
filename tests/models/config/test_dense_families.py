"""What published configurations of Llama's relatives give, and what of them is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine.models.config.attention import LayerAttention, TemperatureTuning
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.rope import Rope
from jaxengine.models.registry import read_hf

SHARED: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 1000, "intermediate_size": 96, "rms_norm_eps": 1e-5}
GLM4_9B = {
    **SHARED,
    "architectures": ["Glm4ForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "eos_token_id": [330, 331],
}
HUNYUAN_7B = {
    **SHARED,
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "use_qk_norm": True,
    "use_cla": False,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "dynamic",
        "alpha": 1000.0,
        "factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
ERNIE_300M = {
    **SHARED,
    "architectures": ["Ernie4_5ForCausalLM"],
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "compression_ratio": 1.0,
    "use_bias": False,
}
MINICPM_2B = {
    **SHARED,
    "architectures": ["MiniCPMForCausalLM"],
    "hidden_size": 2304,
    "num_attention_heads": 36,
    "num_key_value_heads": 36,
    "max_position_embeddings": 4096,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
MISTRAL_SMALL_3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": 10,
    "text_config": {
        **SHARED,
        "model_type": "mistral",
        "hidden_size": 5120,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 1e9,
        "sliding_window": None,
    },
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL_3 = {
    **MISTRAL_SMALL_3,
    "text_config": {
        **MISTRAL_SMALL_3["text_config"],
        "model_type": "ministral3",
        "rope_theta": None,
        "rope_parameters": MINISTRAL_ROPE,
        "tie_word_embeddings": True,
        "max_position_embeddings": 262144,
    },
}


def layer(raw: dict[str, Any]) -> LayerAttention:
    return read_hf(raw).attention[1]


def test_glm():
    rope = Rope(64, 10000.0, interleaved=True)
    assert layer(GLM4_9B) == LayerAttention(32, 2, 128, rope)
    glm = {key: value for key, value in GLM4_9B.items() if key not in ("partial_rotary_factor", "attention_bias")}
    assert layer({**glm, "architectures": ["GlmForCausalLM"]}) == LayerAttention(32, 2, 128, rope, bias=True)


def test_hunyuan():
    base = 10000.0 * 1000.0 ** (128 / 126)
    assert layer(HUNYUAN_7B) == LayerAttention(32, 8, 128, Rope(128, base))
    nested = {**HUNYUAN_7B["rope_scaling"], "rope_theta": 10000.0}
    assert layer({**HUNYUAN_7B, "rope_theta": None, "rope_scaling": None, "rope_parameters": nested}) == layer(
        HUNYUAN_7B
    )


def test_ernie():
    config = read_hf(ERNIE_300M)
    assert config.attention[0] == LayerAttention(16, 2, 128, Rope(128, 500000.0, interleaved=True))
    assert config.tie_word_embeddings and not config.mlp_bias


def test_minicpm():
    config = read_hf(MINICPM_2B)
    assert config.tie_word_embeddings and config.embedding_multiplier == 12.0
    assert config.residual_multiplier == pytest.approx(1.4 / 2**0.5) and config.logit_scale == 256 / 2304


def test_mistral_with_pictures():
    plain = LayerAttention(32, 8, 128, Rope(128, 1e9))
    assert layer(MISTRAL_SMALL_3) == plain and not read_hf(MISTRAL_SMALL_3).tie_word_embeddings
    config: ModelConfig = read_hf(MINISTRAL_3)
    assert config.attention[0].temperature == TemperatureTuning(16384.0, 0.1) and config.tie_word_embeddings
    rope = config.attention[0].rope
    assert rope is not None and rope.scaling is not None and rope.scaling.attention_factor == 1.0
    text = {**MINISTRAL_3["text_config"], "architectures": ["Ministral3ForCausalLM"]}
    assert read_hf(text).attention == config.attention


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({**HUNYUAN_7B, "use_cla": True}, "use_cla must be false or absent"),
        ({**HUNYUAN_7B, "use_qk_norm": False}, "use_qk_norm must be true or absent"),
        ({**HUNYUAN_7B, "rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "alpha must be a finite number > 0"),
        ({**HUNYUAN_7B, "rope_scaling": {"type": "dynamic", "alpha": 1e308}}, "finite"),
        ({**HUNYUAN_7B, "head_dim": 2}, "head_dim must be more than 2"),
        ({**ERNIE_300M, "compression_ratio": 2.0}, "compression_ratio must be 1.0 or absent"),
        ({**MINICPM_2B, "sparse_config": {"kernel_size": 32}}, "sparse_config must be null or absent"),
        ({**MINICPM_2B, "num_experts": 8}, "num_experts must be 0 or absent"),
        (
            {**MISTRAL_SMALL_3, "text_config": {"model_type": "t5"}},
            "model_type must be that of a decoder",
        ),
        ({**MISTRAL_SMALL_3, "text_config": []}, "text_config must be a mapping"),
        ({**MINISTRAL_3, "quantization_config": {"quant_method": "quark"}}, "quant_method must be"),
    ],
)
def test_what_is_refused(raw, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf(raw)
