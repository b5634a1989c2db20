"""Metadata of architectures of named_conversion, by the rules of llama.cpp's converters (set_gguf_parameters)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.models.weights.gguf.gguf_writer import ARRAY, BOOL, F32, U32, Value

Config = Mapping[str, Any]


def mixture(config: Config) -> dict[str, Value]:
    """Return the metadata of experts as TextModel.set_gguf_parameters and most of its subclasses write them."""
    named = {
        "expert_count": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
        "expert_used_count": ("num_experts_per_tok", "moe_top_k"),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_count": ("n_shared_experts", "num_shared_experts"),
        "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
    }
    found = {key: next((config[name] for name in names if name in config), None) for key, names in named.items()}
    own: dict[str, Value] = {key: (U32, value) for key, value in found.items() if value is not None}
    if "norm_topk_prob" in config:
        own["expert_weights_norm"] = (BOOL, config["norm_topk_prob"])
    return own


def laguna(config: Config) -> dict[str, Value]:
    """LagunaModel, which leaves the kinds of layers to its reader."""
    ropes, heads = config["rope_parameters"], config.get("num_attention_heads_per_layer")
    sizes = {kind: int(config["head_dim"] * rope["partial_rotary_factor"]) for kind, rope in ropes.items()}
    window: dict[str, Value] = {}
    if config.get("sliding_window"):
        window["attention.sliding_window"] = (U32, config["sliding_window"])
    return {
        **mixture({**config, "first_k_dense_replace": config["mlp_layer_types"].count("dense")}),
        **window,
        "attention.head_count": (ARRAY, (U32, heads or [config["num_attention_heads"]] * config["num_hidden_layers"])),
        "rope.freq_base_swa": (F32, ropes["sliding_attention"]["rope_theta"]),
        "rope.dimension_count": (U32, sizes["full_attention"]),
        "rope.dimension_count_swa": (U32, sizes["sliding_attention"]),
        "expert_shared_feed_forward_length": (U32, config["shared_expert_intermediate_size"]),
        "expert_weights_norm": (BOOL, True),
        "expert_weights_scale": (F32, config["moe_routed_scaling_factor"]),
        "expert_gating_func": (U32, 2),
    }


def minimax(config: Config) -> dict[str, Value]:
    """MiniMaxM3Model, which leaves the layers that select blocks, and the activation's bounds, to its reader."""
    indexer = {"head_count": "n_heads", "key_length": "head_dim", "top_k": "topk_blocks"}
    indexer |= {name: name for name in ("block_size", "local_blocks")}
    return {
        **mixture({**config, "first_k_dense_replace": config["mlp_layer_types"].count("dense")}),
        "feed_forward_length": (U32, config["dense_intermediate_size"]),
        "expert_feed_forward_length": (U32, config["intermediate_size"]),
        "expert_shared_count": (U32, 1),
        "expert_weights_scale": (F32, config["routed_scaling_factor"]),
        "expert_weights_norm": (BOOL, True),
        "expert_gating_func": (U32, 2),
        "rope.dimension_count": (U32, config["head_dim"]),
        **{f"attention.indexer.{key}": (U32, config[f"index_{name}"]) for key, name in indexer.items()},
    }


def ling(config: Config) -> dict[str, Value]:
    rank, rotated, count = config["kv_lora_rank"], config["qk_rope_head_dim"], config["num_hidden_layers"]
    whole = count - count % config["layer_group_size"]
    attending = [layer >= whole or (layer + 1) % config["layer_group_size"] == 0 for layer in range(count)]
    limits = {"swiglu_clamp_exp": "expert_swiglu_limit_list", "swiglu_clamp_shexp": "share_expert_swiglu_limit_list"}
    return {
        **mixture(config),
        "attention.head_count_kv": (ARRAY, (U32, list(map(int, attending)))),
        "attention.key_length": (U32, rank + rotated),
        "attention.value_length": (U32, config["head_dim"]),
        "attention.key_length_mla": (U32, config["qk_nope_head_dim"] + rotated),
        "attention.value_length_mla": (U32, config["v_head_dim"]),
        "attention.kv_lora_rank": (U32, rank),
        "rope.dimension_count": (U32, rotated),
        "ssm.conv_kernel": (U32, config["short_conv_kernel_size"]),
        "kda.head_dim": (U32, config["head_dim"]),
        "kda.safe_gate": (BOOL, True),
        "kda.gate_lower_bound": (F32, config["kda_lower_bound"]),
        "expert_group_count": (U32, config["n_group"]),
        "expert_group_used_count": (U32, config["topk_group"]),
        "expert_gating_func": (U32, 2),
        "expert_weights_scale": (F32, config["routed_scaling_factor"]),
        **{key: (ARRAY, (F32, [each or 0.0 for each in config[name]])) for key, name in limits.items()},
    }


def muse(config: Config) -> dict[str, Value]:
    return {
        "final_logit_softcapping": (F32, config["final_logit_softcapping"]),
        "logit_scale": (F32, config["output_multiplier"]),
        "attention.sliding_window": (U32, config["sliding_window"]),
        "attention.sliding_window_pattern": (
            ARRAY,
            (BOOL, [kind == "sliding_attention" for kind in config["layer_types"]]),
        ),
    }
