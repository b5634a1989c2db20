"""Metadata of GGUF files for tests, by the rules of llama.cpp's convert_hf_to_gguf.py (set_gguf_parameters).

Written from those rules, as gguf_conversion is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.models.weights.gguf.gguf_writer import ARRAY, BOOL, F32, STRING, U32, Value

_EPSILONS = {
    "rms_norm_eps": "layer_norm_rms_epsilon",
    **dict.fromkeys(["layer_norm_eps", "norm_epsilon", "norm_eps"], "layer_norm_epsilon"),
}


def metadata(architecture: str, config: Mapping[str, Any]) -> dict[str, Value]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    own: dict[str, Value] = {
        "block_count": (U32, config["num_hidden_layers"]),
        "context_length": (U32, config["max_position_embeddings"]),
        "embedding_length": (U32, config["hidden_size"]),
        "feed_forward_length": (U32, config["intermediate_size"]),
        "attention.head_count": (U32, config["num_attention_heads"]),
        "attention.head_count_kv": (U32, config["num_key_value_heads"]),
        **{f"attention.{key}": (F32, config[name]) for name, key in _EPSILONS.items() if name in config},
        "rope.freq_base": (F32, rope.get("rope_theta") or config["rope_theta"]),
        "rope.dimension_count": (U32, int(head_dim * rope.get("partial_rotary_factor", 1.0))),
        "vocab_size": (U32, config["vocab_size"]),
    }
    if "head_dim" in config:
        own |= {f"attention.{kind}_length": (U32, head_dim) for kind in ("key", "value")}
    own |= _OWN_METADATA.get(architecture, lambda _: {})(config)
    return {
        "general.architecture": (STRING, architecture),
        **{f"{architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.tokens": (ARRAY, (STRING, [str(token) for token in range(config["vocab_size"])])),
        "tokenizer.ggml.bos_token_id": (U32, config["bos_token_id"]),
        "tokenizer.ggml.eos_token_id": (U32, config["eos_token_id"]),
    }


def _ministral3(config: Mapping[str, Any]) -> dict[str, Value]:
    rope, named = config["rope_parameters"], {"yarn_beta_fast": "beta_fast", "yarn_log_multiplier": "mscale_all_dim"}
    scaling: dict[str, Value] = {f"rope.scaling.{key}": (F32, rope[name]) for key, name in named.items()}
    return {**_yarn(rope), **scaling, "attention.temperature_scale": (F32, rope["llama_4_scaling_beta"])}


def _experts(config: Mapping[str, Any]) -> dict[str, Value]:
    if "num_experts_per_tok" not in config:
        return {}
    experts: dict[str, Value] = {
        "expert_count": (U32, config["num_local_experts"]),
        "expert_used_count": (U32, config["num_experts_per_tok"]),
    }
    if "moe_intermediate_size" in config:
        experts["expert_feed_forward_length"] = (U32, config["moe_intermediate_size"])
    return experts


def _shared_experts(config: Mapping[str, Any]) -> dict[str, Value]:
    """DeepseekV2Model and Dots1Model."""
    if "n_routed_experts" not in config:
        return {"expert_shared_count": (U32, 0)}
    own: dict[str, Value] = {
        "expert_count": (U32, config["n_routed_experts"]),
        "expert_used_count": (U32, config["num_experts_per_tok"]),
        "expert_feed_forward_length": (U32, config["moe_intermediate_size"]),
        "expert_shared_count": (U32, config["n_shared_experts"]),
        "expert_weights_scale": (F32, config["routed_scaling_factor"]),
        "expert_weights_norm": (BOOL, config["norm_topk_prob"]),
        "leading_dense_block_count": (U32, config["first_k_dense_replace"]),
    }
    if "scoring_func" in config:
        own["expert_gating_func"] = (U32, 2)
    if config["n_group"]:
        own["expert_group_count"] = (U32, config["n_group"])
        own["expert_group_used_count"] = (U32, config["topk_group"])
    return own


def _yarn(rope: Mapping[str, Any]) -> dict[str, Value]:
    if rope.get("rope_type") != "yarn":
        return {}
    return {
        "rope.scaling.type": (STRING, "yarn"),
        "rope.scaling.factor": (F32, rope["factor"]),
        "rope.scaling.original_context_length": (U32, rope["original_max_position_embeddings"]),
    }


def _deepseek2(config: Mapping[str, Any]) -> dict[str, Value]:
    rope, rank, rotated = config["rope_parameters"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    own: dict[str, Value] = {
        "attention.head_count_kv": (U32, 1),
        "attention.key_length": (U32, rank + rotated),
        "attention.value_length": (U32, rank),
        "attention.key_length_mla": (U32, config["qk_nope_head_dim"] + rotated),
        "attention.value_length_mla": (U32, config["v_head_dim"]),
        "attention.kv_lora_rank": (U32, rank),
        "rope.dimension_count": (U32, rotated),
    }
    if config["q_lora_rank"] is not None:
        own["attention.q_lora_rank"] = (U32, config["q_lora_rank"])
    if "mscale_all_dim" in rope:
        own["rope.scaling.yarn_log_multiplier"] = (F32, 0.1 * rope["mscale_all_dim"])
    return own | _yarn(rope) | _shared_experts(config)


def _qwen2moe(config: Mapping[str, Any]) -> dict[str, Value]:
    size = config["shared_expert_intermediate_size"]
    return {
        **_experts({"num_local_experts": config["num_experts"], **config}),
        "expert_shared_feed_forward_length": (U32, size),
    }


def _gpt_oss(config: Mapping[str, Any]) -> dict[str, Value]:
    return {
        **_experts({**config, "moe_intermediate_size": config["intermediate_size"]}),
        **_yarn(config["rope_parameters"]),
        "attention.sliding_window": (U32, config["sliding_window"]),
    }


def _llama4(config: Mapping[str, Any]) -> dict[str, Value]:
    return {
        **_experts({**config, "moe_intermediate_size": config["intermediate_size"]}),
        "feed_forward_length": (U32, config["intermediate_size_mlp"]),
        "interleave_moe_layer_step": (U32, config["interleave_moe_layer_step"]),
    }


def _minimax(config: Mapping[str, Any]) -> dict[str, Value]:
    own = _experts({**config, "moe_intermediate_size": config["intermediate_size"]})
    return {**own, "expert_gating_func": (U32, 2)}


def _hunyuan_moe(config: Mapping[str, Any]) -> dict[str, Value]:
    return {
        **_hunyuan(config),
        "expert_count": (U32, config["num_experts"]),
        "expert_used_count": (U32, config["moe_topk"]),
        "expert_feed_forward_length": (U32, config["intermediate_size"]),
        "expert_shared_feed_forward_length": (U32, config["intermediate_size"]),
        "expert_shared_count": (U32, 1),
    }


def _hunyuan(config: Mapping[str, Any]) -> dict[str, Value]:
    rope, size = config["rope_parameters"], config["head_dim"]
    base = rope["rope_theta"] * rope["alpha"] ** (size / (size - 2))
    return {"rope.freq_base": (F32, base), "rope.scaling.type": (STRING, "none"), "rope.scaling.factor": (F32, 1.0)}


def _phi3(config: Mapping[str, Any]) -> dict[str, Value]:
    longest, original = config["max_position_embeddings"], config.get("original_max_position_embeddings")
    own: dict[str, Value] = {"attention.sliding_window": (U32, config.get("sliding_window") or 0)}
    if original is not None:
        own["rope.scaling.original_context_length"] = (U32, original)
        factor = np.sqrt(1 + np.log(longest / original) / np.log(original))
        own["rope.scaling.attn_factor"] = (F32, factor if longest > original else 1.0)
    return own


def _granite(config: Mapping[str, Any]) -> dict[str, Value]:
    return {
        "attention.scale": (F32, config["attention_multiplier"]),
        "embedding_scale": (F32, config["embedding_multiplier"]),
        "residual_scale": (F32, config["residual_multiplier"]),
        "logit_scale": (F32, config["logits_scaling"]),
    }


def _minicpm(config: Mapping[str, Any]) -> dict[str, Value]:
    return {
        "embedding_scale": (F32, config["scale_emb"]),
        "residual_scale": (F32, config["scale_depth"] / config["num_hidden_layers"] ** 0.5),
        "logit_scale": (F32, config["hidden_size"] / config["dim_model_base"]),
    }


def _gemma(config: Mapping[str, Any]) -> dict[str, Value]:
    rope = (config.get("rope_parameters") or {}).get("full_attention", {})
    scaling: dict[str, Value] = {}
    if rope.get("rope_type") == "linear":
        scaling = {"rope.scaling.type": (STRING, "linear"), "rope.scaling.factor": (F32, rope["factor"])}
    caps = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
    return {
        "attention.sliding_window": (U32, config["sliding_window"]),
        **{key: (F32, config[name]) for name, key in caps.items() if config.get(name)},
        **scaling,
    }


def _gemma4(config: Mapping[str, Any]) -> dict[str, Value]:
    sliding, shared = [kind == "sliding_attention" for kind in config["layer_types"]], config["num_kv_shared_layers"]
    full, local, ffn = config["global_head_dim"], config["head_dim"], config["intermediate_size"]
    own: dict[str, Value] = {
        **_gemma(config),
        "attention.shared_kv_layers": (U32, shared),
        "attention.sliding_window_pattern": (ARRAY, (BOOL, sliding)),
        **{f"attention.{kind}_length": (U32, full) for kind in ("key", "value")},
        **{f"attention.{kind}_length_swa": (U32, local) for kind in ("key", "value")},
        "rope.dimension_count": (U32, full),
        "rope.dimension_count_swa": (U32, local),
        "rope.freq_base_swa": (F32, config["rope_parameters"]["sliding_attention"]["rope_theta"]),
        "embedding_length_per_layer_input": (U32, config["hidden_size_per_layer_input"]),
    }
    if config["use_double_wide_mlp"]:
        sizes = [ffn * (1 + (layer >= len(sliding) - shared)) for layer in range(len(sliding))]
        own["feed_forward_length"] = (ARRAY, (U32, sizes))
    if config.get("num_global_key_value_heads"):
        heads = config["num_key_value_heads"], config["num_global_key_value_heads"]
        own["attention.head_count_kv"] = (ARRAY, (U32, [heads[not windowed] for windowed in sliding]))
    if config["enable_moe_block"]:
        own["expert_count"], own["expert_used_count"] = (U32, config["num_experts"]), (U32, config["top_k_experts"])
        own["expert_feed_forward_length"] = (U32, config["moe_intermediate_size"])
    return own


def _cohere2(config: Mapping[str, Any]) -> dict[str, Value]:
    return {
        "attention.sliding_window": (U32, config["sliding_window"]),
        "logit_scale": (F32, config["logit_scale"]),
    }


def _exaone4(config: Mapping[str, Any]) -> dict[str, Value]:
    if config.get("sliding_window") is None:
        return {}
    sliding, rope = [kind == "sliding_attention" for kind in config["layer_types"]], config["rope_parameters"]
    return {
        "attention.sliding_window": (U32, config["sliding_window"]),
        "attention.sliding_window_pattern": (ARRAY, (BOOL, sliding)),
        **_yarn(rope.get("full_attention", {})),
        **({"rope.freq_base_swa": (F32, own["rope_theta"])} if (own := rope.get("sliding_attention")) else {}),
    }


_OWN_METADATA = {
    **dict.fromkeys(["gemma2", "gemma3"], _gemma),
    "gemma4": _gemma4,
    "cohere2": _cohere2,
    "command-r": lambda config: {"logit_scale": (F32, config["logit_scale"])},
    **dict.fromkeys(["exaone4", "olmo2"], _exaone4),
    "glm4": lambda config: {
        "rope.dimension_sections": (ARRAY, (U32, config["rope_parameters"].get("mrope_section", [0, 0, 0, 0])))
    },
    **dict.fromkeys(["llama", "qwen3moe"], _experts),
    "qwen2moe": _qwen2moe,
    "olmoe": lambda config: _experts({"num_local_experts": config["num_experts"], **config}),
    "dots1": _shared_experts,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan_moe,
    "minimax-m2": _minimax,
    "phi3": _phi3,
    "granite": _granite,
    "gptneox": lambda config: {"use_parallel_residual": (BOOL, config["use_parallel_residual"])},
    "granitemoe": lambda config: _granite(config) | _experts(config),
    "olmo": lambda config: {
        "attention.layer_norm_epsilon": (F32, 1e-5),
        **({"attention.clamp_kqv": (F32, config["clip_qkv"])} if config.get("clip_qkv") else {}),
    },
    "minicpm": _minicpm,
    "mistral3": _ministral3,
}
