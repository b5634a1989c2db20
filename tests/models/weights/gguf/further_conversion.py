"""Hugging Face checkpoints of further architectures to GGUF files, by the rules of llama.cpp's converters
(conversion/*.py), for tests. Written from those rules, with names of its own, as gguf_conversion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from tests.models.weights.gguf import gguf_conversion as first
from tests.models.weights.gguf.gguf_conversion import NAMES, POST_NORMS, tensor
from tests.models.weights.gguf.gguf_writer import ARRAY, BOOL, F32, U32, Tensor, Value, gguf_bytes

ARCHITECTURES = {
    "Gemma3nForCausalLM": "gemma3n",
    "Glm4MoeForCausalLM": "glm4moe",
}
PARTS = ("gate", "up", "down")
SHARED = {f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in PARTS}
OWN_NAMES: dict[str, Mapping[str, str]] = {
    "gemma3n": {
        **POST_NORMS,
        "pre_feedforward_layernorm": "ffn_norm",
        "altup.correction_coefs": "altup_correct_coef",
        "altup.correct_output_scale": "altup_correct_scale",
        "altup.prediction_coefs": "altup_predict_coef",
        "altup.modality_router": "altup_router",
        "altup.router_norm": "altup_router_norm",
        "laurel.linear_left": "laurel_l",
        "laurel.linear_right": "laurel_r",
        "laurel.post_laurel_norm": "laurel_post_norm",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
    },
    "glm4moe": {"post_attention_layernorm": "post_attention_norm", **SHARED},
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"model\.layers\.(\d+)\..*experts\.(\d+)\.([a-z_0-9]+)\.weight")
_STACKED = {"model.altup_projections": "altup_proj", "model.altup_unembed_projections": "altup_unembd_proj"}
_CORRECTION = re.compile(r"model\.layers\.(\d+)\.(mlp\.gate\.e_score_correction_bias)")


def converted(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    store: Callable[[str, np.ndarray], Tensor] = tensor,
) -> bytes:
    """As gguf_conversion.converted."""
    architecture = ARCHITECTURES[config["architectures"][0]]
    names = {**NAMES, **OWN_NAMES[architecture]}
    written: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if name.endswith("_scale"):  # Gemma3NModel.filter_tensors
            name = f"{name}.weight"
        module, _, kind = name.rpartition(".")
        group, _, number = module.rpartition(".")
        if match := _EXPERT.fullmatch(name):
            layer, expert, part = match.groups()
            stacks.setdefault(f"blk.{layer}.{names[part]}.weight", {})[int(expert)] = values
        elif group in _STACKED:
            stacks.setdefault(f"{_STACKED[group]}.weight", {})[int(number)] = values
        elif match := _CORRECTION.fullmatch(name):
            written[f"blk.{match[1]}.exp_probs_b.bias"] = values
        elif match := _LAYER.fullmatch(name):
            layer, part, kind = match.groups()
            written[f"blk.{layer}.{names[part]}.{kind}"] = values.squeeze()
        else:
            written[f"{names[module]}.{kind}"] = values
    written |= {name: np.stack([each[number] for number in sorted(each)]) for name, each in stacks.items()}
    return gguf_bytes(metadata(architecture, config), [store(name, values) for name, values in written.items()])


def metadata(architecture: str, config: Mapping[str, Any]) -> dict[str, Value]:
    own = _OWN_METADATA.get(architecture, lambda _: {})(config)
    return {**first.metadata(architecture, config), **{f"{architecture}.{key}": value for key, value in own.items()}}


def _gemma3n(config: Mapping[str, Any]) -> dict[str, Value]:
    shares, sizes = config["activation_sparsity_pattern"], config["intermediate_size"]
    quantiles = [NormalDist().inv_cdf(share) if share else -np.inf for share in shares]
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {
        "feed_forward_length": (ARRAY, (U32, sizes)),
        "attention.sliding_window": (U32, config["sliding_window"]),
        "attention.sliding_window_pattern": (ARRAY, (BOOL, sliding)),
        "attention.shared_kv_layers": (U32, config["num_kv_shared_layers"]),
        "altup.active_idx": (U32, config["altup_active_idx"]),
        "altup.num_inputs": (U32, config["altup_num_inputs"]),
        "embedding_length_per_layer_input": (U32, config["hidden_size_per_layer_input"]),
        "final_logit_softcapping": (F32, config["final_logit_softcapping"]),
        "activation_sparsity_scale": (ARRAY, (F32, quantiles)),
    }


def _experts(config: Mapping[str, Any]) -> dict[str, Value]:
    """What TextModel.set_gguf_parameters writes of experts."""
    named = {
        "expert_count": ("n_routed_experts", "num_experts", "moe_num_experts", "num_local_experts"),
        "expert_used_count": ("num_experts_per_tok", "moe_k"),
        "expert_group_count": ("n_group",),
        "expert_group_used_count": ("topk_group",),
        "expert_feed_forward_length": ("moe_intermediate_size",),
    }
    found = {key: next((config[name] for name in names if name in config), None) for key, names in named.items()}
    return {key: (U32, value) for key, value in found.items() if value is not None}


def _glm4moe(config: Mapping[str, Any]) -> dict[str, Value]:
    return {
        **_experts(config),
        "expert_shared_count": (U32, config["n_shared_experts"]),
        "leading_dense_block_count": (U32, config["first_k_dense_replace"]),
        "expert_gating_func": (U32, 2),
        "expert_weights_scale": (F32, config["routed_scaling_factor"]),
        "expert_weights_norm": (BOOL, config["norm_topk_prob"]),
        "block_count": (U32, config["num_hidden_layers"] + config["num_nextn_predict_layers"]),
        "nextn_predict_layers": (U32, config["num_nextn_predict_layers"]),
    }


_OWN_METADATA = {"gemma3n": _gemma3n, "glm4moe": _glm4moe}
