"""Checkpoints of models with recurrent states to GGUF files by the rules of llama.cpp's converter, for tests.

Written from those rules (conversion/*.py), like gguf_conversion.py, for the architectures in STATES.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.models.weights.gguf.gguf_conversion import metadata, tensor
from tests.models.weights.gguf.gguf_writer import ARRAY, BOOL, U32, Tensor, Value, gguf_bytes

STATES = {
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
}
_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
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
NAMES = dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _QWEN)
# Called otherwise than `.weight` and `.bias` in checkpoints.
_BARE = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.(weight|bias))?")
_EXPERT = re.compile(r"(?:\w+\.)?experts\.(\d+)\.(\w+)")


def converted_states(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    store: Callable[[str, np.ndarray], Tensor] = tensor,
) -> bytes:
    """As gguf_conversion.converted, for STATES."""
    architecture = STATES[config["architectures"][0]]
    names, written, experts = NAMES[architecture], {}, {}
    for name, values in _MODIFIED[architecture](config, tensors).items():
        if (match := _LAYER.fullmatch(name)) is None:
            module, _, kind = name.rpartition(".")
            written[f"{_GLOBAL[module]}.{kind}"] = values
            continue
        layer, part, kind = match.groups()
        if kind is None:
            written[f"blk.{layer}.{_BARE[part.rpartition('.')[2]]}"] = values
        elif expert := _EXPERT.fullmatch(part):
            module = f"blk.{layer}.{_MLP[f'mlp.{expert[2]}']}_exps.{kind}"
            experts.setdefault(module, {})[int(expert[1])] = values
        else:
            written[f"blk.{layer}.{names[part]}.{kind}"] = values.squeeze()
    written |= {name: np.stack([each[expert] for expert in sorted(each)]) for name, each in experts.items()}
    own = {f"{architecture}.{key}": value for key, value in _METADATA[architecture](config).items()}
    usual = {"num_key_value_heads": 1, "intermediate_size": 0, **config}
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
                modified[name] = reordered(array.squeeze(1), v_size, 2 * keys * k_size)
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
        own["expert_count"], own["expert_used_count"] = (
            (U32, config["num_experts"]),
            (U32, config["num_experts_per_tok"]),
        )
        own["expert_feed_forward_length"] = (U32, config["moe_intermediate_size"])
        own["expert_shared_feed_forward_length"] = (U32, config["shared_expert_intermediate_size"])
    return own


_MODIFIED = dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _qwen)
_METADATA = dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _qwen_metadata)
