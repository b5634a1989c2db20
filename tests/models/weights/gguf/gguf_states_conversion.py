"""Checkpoints of the models in STATES to GGUF files by the rules of llama.cpp's converter, as gguf_conversion does."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.models.weights.gguf.gguf_conversion import latents_apart, metadata, permuted, tensor
from tests.models.weights.gguf.gguf_writer import ARRAY, BOOL, F32, I32, U32, Tensor, Value, gguf_bytes

STATES = {
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "NemotronHForCausalLM": "nemotron_h",
    "FalconH1ForCausalLM": "falcon-h1",
    "KimiLinearForCausalLM": "kimi-linear",
    "JambaForCausalLM": "jamba",
    "MambaForCausalLM": "mamba",
    "Mamba2ForCausalLM": "mamba2",
}
_GLOBAL = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
}
_ATTENTION = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_MLP = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
_QWEN = {
    **_ATTENTION,
    **_MLP,
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_LFM2 = {
    **_ATTENTION,
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
_MAMBA = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}
_NEMOTRON = {
    **{name.replace("self_attn", "mixer"): part for name, part in _ATTENTION.items()},
    **{f"mixer.{name}": part for name, part in _MAMBA.items()},
    "norm": "attn_norm",
    "mixer.gate": "ffn_gate_inp",
    **{f"mixer.{part}_proj": f"ffn_{part}" for part in ("up", "down")},
    **{f"mixer.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("up", "down")},
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
_GRANITE = {
    **_ATTENTION,
    **{f"mamba.{name}": part for name, part in _MAMBA.items()},
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    **{f"shared_mlp.{part}": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"shared_mlp.{part}_shexp": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_FEED_FORWARD = {f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
_FALCON = {
    **_ATTENTION,
    **_FEED_FORWARD,
    **{f"mamba.{name}": part for name, part in _MAMBA.items()},
    "input_layernorm": "attn_norm",
}
_KIMI = {
    **_ATTENTION,
    **_MLP,
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "block_sparse_moe.gate": "ffn_gate_inp",
    **{f"block_sparse_moe.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_SCAN = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "x_proj": "ssm_x", "dt_proj": "ssm_dt", "out_proj": "ssm_out"}
_JAMBA = {
    **_ATTENTION,
    **_FEED_FORWARD,
    **{f"mamba.{name}": part for name, part in _SCAN.items()},
    **{f"mamba.{part}_layernorm": f"ssm_{part}_norm" for part in ("dt", "b", "c")},
    "input_layernorm": "attn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "feed_forward.router": "ffn_gate_inp",
}
NAMES = {
    "falcon-h1": _FALCON,
    "kimi-linear": _KIMI,
    "jamba": _JAMBA,
    "mamba": {"norm": "attn_norm", **{f"mixer.{name}": part for name, part in _SCAN.items()}},
    "mamba2": {"norm": "attn_norm", **{f"mixer.{name}": part for name, part in _MAMBA.items()}},
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _QWEN),
    **dict.fromkeys(("lfm2", "lfm2moe"), _LFM2),
    "granitehybrid": _GRANITE,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON),
}
_EXPERTS = {
    **{f"{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
# Called otherwise than `.weight` and `.bias` in checkpoints.
_BARE = {
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "expert_bias": "exp_probs_b.bias",
    "e_score_correction_bias": "exp_probs_b.bias",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.(weight|bias))?")
_EXPERT = re.compile(r"(?:\w+\.)?experts\.(\d+)\.(\w+)")


def architecture_of(config: Mapping[str, Any]) -> str:
    """llama.cpp's name of the architecture of a config.json."""
    found = STATES[config["architectures"][0]]
    has_experts = found == "nemotron_h" and "E" in config["hybrid_override_pattern"]
    return "nemotron_h_moe" if has_experts else found


def converted_states(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    store: Callable[[str, np.ndarray], Tensor] = tensor,
) -> bytes:
    """As gguf_conversion.converted, for STATES."""
    architecture = architecture_of(config)
    names, written, experts = NAMES[architecture], {}, {}
    for name, values in _MODIFIED[architecture](config, tensors).items():
        if (match := _LAYER.fullmatch(name)) is None:
            module, _, kind = name.rpartition(".")
            written[f"{_GLOBAL[module]}.{kind}"] = values
            continue
        layer, part, kind = match.groups()
        if kind is None:
            written[f"blk.{layer}.{_BARE[part.rpartition('.')[2]]}"] = values  # of Mamba-2 with a further axis
        elif part == "pre_ff_layernorm" and architecture == "falcon-h1":  # the table of names has its end
            written[f"blk.{layer}.ffn_norm"] = values
        elif expert := _EXPERT.fullmatch(part):
            module = f"blk.{layer}.{_EXPERTS[expert[2]]}.{kind}"
            experts.setdefault(module, {})[int(expert[1])] = values
        else:
            written[f"blk.{layer}.{names[part]}.{kind}"] = values
    written |= {name: np.stack([each[expert] for expert in sorted(each)]) for name, each in experts.items()}
    own = {f"{architecture}.{key}": value for key, value in _METADATA[architecture](config).items()}
    if "model_max_length" in config:
        config = {**config, "max_position_embeddings": config["model_max_length"]}
    usual = {"num_key_value_heads": 1, "intermediate_size": 0, "rope_theta": 10000.0, **config}
    return gguf_bytes({**metadata(architecture, usual), **own}, [store(*item) for item in written.items()])


def _qwen(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Qwen3NextModel.modify_tensors, and for Qwen3.5 before it _LinearAttentionVReorderBase.modify_tensors."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    k_size, v_size = config["linear_key_head_dim"], config["linear_value_head_dim"]
    tiled = STATES[config["architectures"][0]] != "qwen3next"

    def reordered(array: np.ndarray, size: int, first: int = 0) -> np.ndarray:
        if not tiled:
            return array
        heads = array[first:].reshape(keys, values // keys, size, *array.shape[1:]).swapaxes(0, 1)
        return np.concatenate([array[:first], heads.reshape(-1, *array.shape[1:])])

    modified = {}
    for name, array in tensors.items():
        match name.partition(".linear_attn.")[2]:
            case "A_log":
                modified[name] = -np.exp(reordered(array, 1))
            case "dt_bias" | "in_proj_a.weight" | "in_proj_b.weight":
                modified[name] = reordered(array, 1)
            case "conv1d.weight":
                modified[name] = reordered(array, v_size, 2 * keys * k_size)
            case "in_proj_qkv.weight":
                modified[name] = reordered(array, v_size, 2 * keys * k_size)
            case "in_proj_z.weight":
                modified[name] = reordered(array, v_size)
            case "out_proj.weight":
                modified[name] = np.ascontiguousarray(reordered(array.T, v_size).T)
            case "in_proj_qkvz.weight":
                per_key = values // keys * v_size
                by_head = array.reshape(keys, -1, array.shape[1])
                parts = np.split(by_head, np.cumsum([k_size, k_size, per_key]), axis=1)
                q, k, v, z = (part.reshape(-1, array.shape[1]) for part in parts)
                modified[name.replace("qkvz", "qkv")] = np.concatenate([q, k, v])
                modified[name.replace("qkvz", "z")] = z
            case "norm.weight":
                modified[name] = array
            case _:
                modified[name] = array + np.float32(1) if name.endswith("norm.weight") else array
                if name.endswith("shared_expert_gate.weight"):  # the base class writes every tensor squeezed
                    modified[name] = array.squeeze()
    return modified


def _qwen_metadata(config: Mapping[str, Any]) -> dict[str, Value]:
    rope = config["rope_parameters"]
    own: dict[str, Value] = {
        "ssm.conv_kernel": (U32, config["linear_conv_kernel_dim"]),
        "ssm.state_size": (U32, config["linear_key_head_dim"]),
        "ssm.group_count": (U32, config["linear_num_key_heads"]),
        "ssm.time_step_rank": (U32, config["linear_num_value_heads"]),
        "ssm.inner_size": (U32, config["linear_value_head_dim"] * config["linear_num_value_heads"]),
        "full_attention_interval": (U32, config.get("full_attention_interval", 4)),
        "rope.dimension_count": (U32, int(config["head_dim"] * rope["partial_rotary_factor"])),
    }
    if "layer_types" in config:
        recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
        own["attention.recurrent_layers"] = (ARRAY, (BOOL, recurrent))
    if "num_experts" in config:
        own |= _experts(config, config["num_experts"])
        own["expert_shared_feed_forward_length"] = (U32, config["shared_expert_intermediate_size"])
    return own


def _lfm2(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return dict(tensors)


def _lfm2_metadata(config: Mapping[str, Any]) -> dict[str, Value]:
    kinds, layers = config.get("layer_types"), range(config["num_hidden_layers"])
    attending = [layer in config["full_attn_idxs"] if kinds is None else kinds[layer] != "conv" for layer in layers]
    own: dict[str, Value] = {
        "attention.head_count_kv": _heads_kv(config, attending),
        "attention.layer_norm_rms_epsilon": (F32, config["norm_eps"]),
        "shortconv.l_cache": (U32, config["conv_L_cache"]),
    }
    if "num_experts" in config:
        own |= _experts(config, config["num_experts"])
        own["leading_dense_block_count"] = (U32, config["num_dense_layers"])
        own["expert_gating_func"] = (U32, 2)
        return own
    size = config["block_multiple_of"]
    wide = int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3))
    return own | {"feed_forward_length": (U32, -(-wide // size) * size)}


def _heads_kv(config: Mapping[str, Any], attending: list[bool]) -> Value:
    return ARRAY, (I32, [config["num_key_value_heads"] * attends for attends in attending])


def _experts(config: Mapping[str, Any], count: int) -> dict[str, Value]:
    return {
        "expert_count": (U32, count),
        "expert_used_count": (U32, config["num_experts_per_tok"]),
        "expert_feed_forward_length": (U32, config["moe_intermediate_size"]),
    }


def _mamba2(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Mamba2Model.modify_tensors, and LlamaModel.permute for attention."""
    heads: dict[str, Any] = {
        "q_proj": config.get("num_attention_heads"),
        "k_proj": config.get("num_key_value_heads"),
    }
    groups = config.get("mamba_n_groups") or config["n_groups"]
    modified = {}
    for name, array in tensors.items():
        part, _, kind = name.rpartition(".")
        part = part.rpartition(".")[2]
        if kind in ("A_log", "D"):
            array = (-np.exp(array) if kind == "A_log" else array).reshape(-1, 1)
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            array = array.reshape(groups, -1)
        elif part in heads and architecture_of(config) != "falcon-h1":
            array = permuted(array, heads[part])
        modified[name] = array
    return modified


def _granite(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """GraniteMoeModel.modify_tensors."""
    end, modified = "_shexp" if config["num_local_experts"] else "", {}
    for name, array in _mamba2(config, tensors).items():
        if name.endswith("shared_mlp.input_linear.weight"):
            for part, half in zip(("gate", "up"), np.split(array, 2), strict=True):
                modified[name.replace("input_linear", f"{part}{end}")] = half
        else:
            modified[name.replace("shared_mlp.output_linear", f"shared_mlp.down{end}")] = array
    return modified


def _granite_metadata(config: Mapping[str, Any]) -> dict[str, Value]:
    attending = "attention", "full_attention"
    return {
        **_state_space(config["mamba_d_conv"], config["mamba_d_state"], config["mamba_n_groups"]),
        "ssm.inner_size": (U32, config["mamba_expand"] * config["hidden_size"]),
        "ssm.time_step_rank": (U32, config["mamba_n_heads"]),
        "attention.head_count_kv": _heads_kv(config, [kind in attending for kind in config["layer_types"]]),
        "rope.scaling.finetuned": (BOOL, config["position_embedding_type"] == "rope"),
        "attention.scale": (F32, config["attention_multiplier"]),
        "embedding_scale": (F32, config["embedding_multiplier"]),
        "residual_scale": (F32, config["residual_multiplier"]),
        "logit_scale": (F32, config["logits_scaling"]),
        "expert_shared_feed_forward_length": (U32, config["shared_intermediate_size"]),
        "expert_count": (U32, config["num_local_experts"]),
        "expert_used_count": (U32, config["num_experts_per_tok"]),
    }


def _state_space(kernel: int, state: int, groups: int) -> dict[str, Value]:
    return {
        "ssm.conv_kernel": (U32, kernel),
        "ssm.state_size": (U32, state),
        "ssm.group_count": (U32, groups),
    }


def _nemotron_metadata(config: Mapping[str, Any]) -> dict[str, Value]:
    pattern, with_experts = config["hybrid_override_pattern"], "E" in config["hybrid_override_pattern"]
    size = config["moe_intermediate_size"] if with_experts else config["intermediate_size"]
    own: dict[str, Value] = {
        **_state_space(config["conv_kernel"], config["ssm_state_size"], config["n_groups"]),
        "ssm.inner_size": (U32, config["mamba_num_heads"] * config["mamba_head_dim"]),
        "ssm.time_step_rank": (U32, config["mamba_num_heads"]),
        "attention.head_count_kv": _heads_kv(config, [kind == "*" for kind in pattern]),
        "attention.layer_norm_rms_epsilon": (F32, config["layer_norm_epsilon"]),
        "feed_forward_length": (ARRAY, (I32, [size * (kind in "-E") for kind in pattern])),
    }
    if with_experts:
        own |= _experts(config, config["n_routed_experts"])
        own |= {
            "expert_shared_feed_forward_length": (U32, config["moe_shared_expert_intermediate_size"]),
            "expert_shared_count": (U32, config["n_shared_experts"]),
            "expert_weights_norm": (BOOL, config["norm_topk_prob"]),
            "expert_weights_scale": (F32, config["routed_scaling_factor"]),
            "expert_group_count": (U32, config["n_group"]),
            "expert_group_used_count": (U32, config["topk_group"]),
        }
        if "moe_latent_size" in config:
            own["moe_latent_size"] = (U32, config["moe_latent_size"])
    return own


def _falcon(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """FalconH1Model.modify_tensors: matrices times multipliers. Biases are those of a model whose multipliers are 1."""
    keys, before = config["key_multiplier"], config["attention_in_multiplier"]
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": keys * before,
        "q_proj": before,
        "v_proj": before,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    inner, state = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = [inner, inner, state, state, config["mamba_n_heads"]]
    modified = _mamba2(config, tensors)
    for name, array in modified.items():
        module, _, kind = name.rpartition(".")
        part = module.rpartition(".")[2]
        if kind == "weight" and part == "in_proj":
            each = np.repeat(np.float32(config["ssm_multipliers"]) * config["ssm_in_multiplier"], sizes)
            modified[name] = array * each[:, None]
        elif kind == "weight" and part in factors:
            modified[name] = array * np.float32(factors[part])
    return modified


def _falcon_metadata(config: Mapping[str, Any]) -> dict[str, Value]:
    return {
        **_state_space(config["mamba_d_conv"], config["mamba_d_state"], config["mamba_n_groups"]),
        "ssm.inner_size": (U32, config["mamba_d_ssm"]),
        "ssm.time_step_rank": (U32, config["mamba_n_heads"]),
    }


def _kimi(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """KimiLinearModel.modify_tensors."""
    modified = {}
    for name, array in latents_apart(config, tensors).items():
        if name.endswith("_conv1d.weight"):
            array = array.reshape(1, len(array), 1, -1)
        modified[name] = -np.exp(array).reshape(1, 1, -1, 1) if name.endswith(".A_log") else array
    return modified


def _kimi_metadata(config: Mapping[str, Any]) -> dict[str, Value]:
    linear, rank, rotated = config["linear_attn_config"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    attending = [layer + 1 in linear["full_attn_layers"] for layer in range(config["num_hidden_layers"])]
    return {
        "attention.head_count_kv": _heads_kv({"num_key_value_heads": 1}, attending),
        "attention.key_length": (U32, rank + rotated),
        "attention.value_length": (U32, config["head_dim"]),
        "attention.key_length_mla": (U32, config["qk_nope_head_dim"] + rotated),
        "attention.value_length_mla": (U32, config["v_head_dim"]),
        "attention.kv_lora_rank": (U32, rank),
        "rope.dimension_count": (U32, rotated),
        "ssm.conv_kernel": (U32, linear["short_conv_kernel_size"]),
        "kda.head_dim": (U32, linear["head_dim"]),
        **_experts({"num_experts_per_tok": config["num_experts_per_token"], **config}, config["num_experts"]),
        "expert_shared_count": (U32, config["num_shared_experts"]),
        "expert_gating_func": (U32, 2),
        "expert_weights_scale": (F32, config["routed_scaling_factor"]),
        "leading_dense_block_count": (U32, config["first_k_dense_replace"]),
    }


def _scan(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """MambaModel.modify_tensors and JambaModel.modify_tensors."""
    return {name: -np.exp(array) if name.endswith(".A_log") else array for name, array in tensors.items()}


def _jamba_metadata(config: Mapping[str, Any]) -> dict[str, Value]:
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    attending = [layer % period == offset for layer in range(config["num_hidden_layers"])]
    return {
        "attention.head_count_kv": _heads_kv(config, attending),
        "ssm.conv_kernel": (U32, config["mamba_d_conv"]),
        "ssm.state_size": (U32, config["mamba_d_state"]),
        "ssm.inner_size": (U32, config["mamba_expand"] * config["hidden_size"]),
        "ssm.time_step_rank": (U32, config["mamba_dt_rank"]),
        "expert_count": (U32, config["num_experts"]),
        "expert_used_count": (U32, config["num_experts_per_tok"]),
    }


def _mamba_metadata(config: Mapping[str, Any]) -> dict[str, Value]:
    own: dict[str, Value] = {
        "feed_forward_length": (U32, 0),
        "attention.head_count": (U32, 0),
        "attention.layer_norm_rms_epsilon": (F32, config["layer_norm_epsilon"]),
        "ssm.inner_size": (U32, int(config["expand"] * config["hidden_size"])),
    }
    if architecture_of(config) == "mamba2":
        return {
            **own,
            **_state_space(config["conv_kernel"], config["state_size"], config["n_groups"]),
            "ssm.time_step_rank": (U32, config["num_heads"]),
        }
    return {
        **own,
        "ssm.conv_kernel": (U32, config["conv_kernel"]),
        "ssm.state_size": (U32, config["state_size"]),
        "ssm.time_step_rank": (U32, config["time_step_rank"]),
        "ssm.dt_b_c_rms": (BOOL, False),
    }


_MODIFIED = {
    "falcon-h1": _falcon,
    "kimi-linear": _kimi,
    **dict.fromkeys(("jamba", "mamba"), _scan),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _qwen),
    **dict.fromkeys(("lfm2", "lfm2moe"), _lfm2),
    "granitehybrid": _granite,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe", "mamba2"), _mamba2),
}
_METADATA = {
    "falcon-h1": _falcon_metadata,
    "kimi-linear": _kimi_metadata,
    "jamba": _jamba_metadata,
    **dict.fromkeys(("mamba", "mamba2"), _mamba_metadata),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _qwen_metadata),
    **dict.fromkeys(("lfm2", "lfm2moe"), _lfm2_metadata),
    "granitehybrid": _granite_metadata,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron_metadata),
}
