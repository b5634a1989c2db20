"""config.json of published checkpoints, without what no model reads."""

from __future__ import annotations

from typing import Any

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
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
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
# google/gemma-2b
GEMMA = {
    "architectures": ["GemmaForCausalLM"],
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}
# CohereLabs/c4ai-command-r-plus
COHERE = {
    "architectures": ["CohereForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 12288,
    "intermediate_size": 33792,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.8333333333333334,
    "max_position_embeddings": 8192,
    "num_attention_heads": 96,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rope_theta": 75000000.0,
    "use_qk_norm": True,
    "vocab_size": 256000,
}


def _gemma4(pattern: int, **text: Any) -> dict[str, Any]:
    kinds = ["sliding_attention"] * (pattern - 1) + ["full_attention"]
    common = {
        "model_type": "gemma4_text",
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "layer_types": kinds * (text["num_hidden_layers"] // pattern),
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_global_key_value_heads": None,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "tie_word_embeddings": True,
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma4",
        "text_config": {**common, **text},
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 768},
    }


_SMALL = {"hidden_size_per_layer_input": 256, "sliding_window": 512}
_LARGE = {
    "attention_k_eq_v": True,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
}
# google/gemma-4-E2B-it, -E4B-it, -26B-A4B-it and -31B-it
GEMMA4_E2B = _gemma4(
    5,
    hidden_size=1536,
    intermediate_size=6144,
    num_hidden_layers=35,
    num_key_value_heads=1,
    num_kv_shared_layers=20,
    **{**_SMALL, "use_double_wide_mlp": True},
)
GEMMA4_E4B = _gemma4(
    6,
    hidden_size=2560,
    intermediate_size=10240,
    num_hidden_layers=42,
    num_key_value_heads=2,
    num_kv_shared_layers=18,
    **_SMALL,
)
GEMMA4_26B = _gemma4(
    6,
    hidden_size=2816,
    intermediate_size=2112,
    num_hidden_layers=30,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_global_key_value_heads=2,
    enable_moe_block=True,
    moe_intermediate_size=704,
    num_experts=128,
    top_k_experts=8,
    **_LARGE,
)
GEMMA4_31B = _gemma4(
    6,
    hidden_size=5376,
    intermediate_size=21504,
    num_hidden_layers=60,
    num_attention_heads=32,
    num_key_value_heads=16,
    num_global_key_value_heads=4,
    **_LARGE,
)
