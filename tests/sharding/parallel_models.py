"""Configurations of tiny models that eight devices can share in many ways."""

from __future__ import annotations

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Biases of experts and of the router, sinks of heads.
GPT_OSS = MOE | {
    "architectures": ["GptOssForCausalLM"],
    "num_key_value_heads": 4,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "sliding_window": 6,
    "swiglu_limit": 0.5,
}
# A shared MLP, a correction bias and groups of experts, behind a dense layer.
GLM4 = MOE | {
    "architectures": ["Glm4MoeForCausalLM"],
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
# Joined projections, of which every device takes rows of q, k and v; a part of each head is rotated.
PHI3 = DENSE | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.5,
    "sliding_window": 9,
}
GEMMA2 = DENSE | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 24,
    "sliding_window": 6,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 6.0,
}
# Heads of two sizes in one pool, layers that read others' keys, and inputs of single layers, which stages hand on.
GEMMA4 = DENSE | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "num_key_value_heads": 4,
    "global_head_dim": 32,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 300,
    "use_double_wide_mlp": True,
}
# Several hidden states, MLPs of two sizes, and gates whose mean and deviation are those of all devices.
GEMMA3N = GEMMA4 | {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "intermediate_size": [96, 96, 96, 96, 64, 64],
    "activation_sparsity_pattern": [0.7, 0.7, 0.3, 0.0, 0.0, 0.0],
    "vocab_size_per_layer_input": 290,
    "altup_num_inputs": 3,
    "laurel_rank": 6,
}
# Fewer heads in layers that see all keys, whose keys are values as well, and experts beside every MLP.
GEMMA4_MOE = GEMMA4 | {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
# One latent for all heads: devices have sequences of their own or, replicated, heads. Four devices do not divide the
# experts.
LATENT = DENSE | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "topk_method": "group_limited_greedy",
    "n_group": 3,
    "topk_group": 2,
}
# Keys that an indexer selects, in half of the layers one before.
SPARSE = LATENT | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 4,
    "first_k_dense_replace": 2,
    "topk_method": "noaux_tc",
    "index_topk": 9,
    "index_n_heads": 7,
    "index_head_dim": 20,
    "index_topk_pattern": "FSFS",
}
# Norms over all heads of q and of k, which devices share.
OLMO2 = DENSE | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "num_key_value_heads": 2}
# States in the place of keys and values in half of the layers, and experts beside a gated shared MLP in half of them.
STATES = MOE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "mlp_only_layers": [1, 2],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 32,
}
# Windows of convolutions in the place of keys and values in all but one layer.
CONVOLUTIONS = MOE | {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "num_dense_layers": 2,
    "conv_L_cache": 3,
}
# Mamba-2 with two groups of heads in one layer, attention in the other, and experts beside an MLP in both.
MAMBA2 = MOE | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_attention_heads": 8,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "shared_intermediate_size": 48,
}
# Eight bits, also of experts; and groups of 32 inputs, of which two devices share some. (Where activations are rounded
# too, sums in another order may fall to the other side of a tie: tests/sharding/test_split_inputs.py.)
INT8 = MOE | {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            }
        },
    }
}
AWQ = DENSE | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
# States whose beta and decay are not quantised, and so are a product of their own.
GATES_APART = STATES | {
    "quantization_config": AWQ["quantization_config"] | {"modules_to_not_convert": ["in_proj_ba"]},
}
MODELS = {
    "dense": DENSE,
    "tied": DENSE | {"num_hidden_layers": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "kv1": DENSE | {"num_key_value_heads": 1},
    "kv3": DENSE | {"num_attention_heads": 12, "num_key_value_heads": 3},
    "moe": MOE,
    "moe5": MOE | {"num_experts": 5},
    "moe6": MOE | {"num_experts": 6},
    "gpt_oss": GPT_OSS,
    "glm4": GLM4,
    "phi3": PHI3,
    "gemma2": GEMMA2,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "gemma4_moe": GEMMA4_MOE,
    "latent": LATENT,
    "sparse": SPARSE,
    "olmo2": OLMO2,
    "states": STATES,
    "convolutions": CONVOLUTIONS,
    "mamba2": MAMBA2,
    "int8": INT8,
    "awq": AWQ,
    "gates_apart": GATES_APART,
}
