"""Published config.json contents of some large models with layers of several kinds.

They are read like a folder's own. Fields that do not affect shapes are left out.
"""

from __future__ import annotations

from typing import Any


def _yarn(factor: float, **fields: float | bool) -> dict[str, Any]:
    """Return the rope_scaling of YaRN with this factor over 4,096 positions. fields: entries that are added or
    replaced.
    """
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_slow": 1.0,
        **fields,
    }


# Multi-head latent attention with the sizes of arXiv:2412.19437, section 4.2; experts after some dense layers.
_LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "rms_norm_eps": 1e-6,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}

_LLAMA31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
# Quantization configs as tools write them.
_MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "ignore": ["lm_head"]}
_MXFP4: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}

# Name -> config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek-v3": _LATENT
    | {
        "num_attention_heads": 128,
        "vocab_size": 129280,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "rope_theta": 10000.0,
        "rope_scaling": _yarn(40.0, beta_fast=32.0, mscale=1.0, mscale_all_dim=1.0),
        "max_position_embeddings": 163840,
    },
    "deepseek-v3.2": _LATENT
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "num_attention_heads": 128,
        "vocab_size": 129280,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "index_topk": 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "rope_theta": 10000.0,
        "rope_scaling": _yarn(40.0, beta_fast=32.0, mscale=1.0, mscale_all_dim=1.0),
        "max_position_embeddings": 163840,
    },
    "kimi-k2": _LATENT
    | {
        "num_attention_heads": 64,
        "vocab_size": 163840,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0,
        "rope_scaling": _yarn(32.0, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0),
        "max_position_embeddings": 131072,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 36,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": _yarn(32.0, beta_fast=32.0, truncate=False),
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "qwen3-next-80b-a3b": {
        "architectures": ["Qwen3NextForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
    "granite-4.0-h-tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_hidden_layers": 40,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "position_embedding_type": "nope",
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
        "mamba_n_heads": 48,
        "mamba_n_groups": 1,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.0078125,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
        "vocab_size": 100352,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "gemma-3-27b": _GEMMA3
    | {
        "text_config": _GEMMA3["text_config"]
        | {
            "num_hidden_layers": 62,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
        },
    },
    "gemma-3-4b": _GEMMA3
    | {
        "text_config": _GEMMA3["text_config"]
        | {"num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240},
    },
    "qwen2.5-vl-72b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "max_position_embeddings": 128000,
        "tie_word_embeddings": False,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3456,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 8192,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    },
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"],
        "num_hidden_layers": 42,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 256000,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
    },
    "mistral-7b-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
    },
}

# Published in quantised form; the entries above have the same matrices in the model's dtype.
CONFIGS |= {
    "deepseek-v3-fp8": CONFIGS["deepseek-v3"]
    | {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    },
    "gpt-oss-120b-mxfp4": CONFIGS["gpt-oss-120b"]
    | {
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
    },
    "llama-3.1-8b-nvfp4": _LLAMA31_8B | {"quantization_config": {**_MODELOPT, "quant_algo": "NVFP4"}},
    "llama-3.1-8b-mxfp8": _LLAMA31_8B | {"quantization_config": {**_MODELOPT, "quant_algo": "MXFP8"}},
    "llama-3.1-8b-mxfp4": _LLAMA31_8B
    | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": _MXFP4,
                    "input_activations": {**_MXFP4, "dynamic": True},
                }
            },
        }
    },
}
