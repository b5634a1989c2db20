"""Hugging Face checkpoints to GGUF files, by the rules of llama.cpp's converters (conversion/*.py), for tests: those of
architectures that a table of names and some metadata describe. Written from those rules, with names of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tests.models.weights.gguf.gguf_conversion import NAMES, latents_apart, permuted, tensor
from tests.models.weights.gguf.gguf_metadata import metadata
from tests.models.weights.gguf.gguf_writer import ARRAY, BOOL, STRING, U32, Tensor, Value, gguf_bytes

Config = Mapping[str, Any]
Tensors = Mapping[str, np.ndarray]
PARTS = ("gate", "up", "down")


class Conversion(NamedTuple):
    """Rules of one architecture.

    names: llama.cpp's names of a layer's modules, or of whole tensors, where they differ from NAMES; "#" stands for an
    expert's number. like: architecture whose metadata it has, too. own: further metadata. modified: tensors before they
    are named.
    """

    architecture: str
    names: Mapping[str, str]
    own: Callable[[Config], dict[str, Value]] = lambda config: {}
    like: str = ""
    modified: Callable[[Config, Tensors], Tensors] = lambda config, tensors: tensors


def _experts(within: str = "mlp", shared: str = "shared_experts") -> dict[str, str]:
    return {
        **{f"{within}.experts.#.{part}_proj": f"ffn_{part}_exps" for part in PARTS},
        **{f"{within}.{shared}.{part}_proj": f"ffn_{part}_shexp" for part in PARTS},
    }


_LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **_experts(),
}
_INDEXER = {
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}


def _indexer(config: Config) -> dict[str, Value]:
    own: dict[str, Value] = {
        "expert_gating_func": (U32, 2),
        "attention.indexer.head_count": (U32, config["index_n_heads"]),
        "attention.indexer.key_length": (U32, config["index_head_dim"]),
        "attention.indexer.top_k": (U32, config["index_topk"]),
    }
    if "indexer_types" in config:
        own["attention.indexer.types"] = (ARRAY, (BOOL, [kind == "full" for kind in config["indexer_types"]]))
    return own


def _shared_granite(config: Config, tensors: Tensors) -> Tensors:
    """GraniteMoeModel.modify_tensors."""
    modified = {}
    for name, values in tensors.items():
        if name.endswith("shared_mlp.input_linear.weight"):
            halves = zip(("gate", "up"), np.split(values, 2), strict=True)
            modified |= {name.replace("input_linear", part): half for part, half in halves}
        else:
            modified[name] = _permuted(config, name, values)
    return modified


def _permuted(config: Config, name: str, values: np.ndarray) -> np.ndarray:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    return permuted(values, heads[part]) if part in heads else values


CONVERSIONS = {
    "DeepseekV32ForCausalLM": Conversion("deepseek32", {**_LATENT, **_INDEXER}, _indexer, "deepseek2", latents_apart),
    "GlmMoeDsaForCausalLM": Conversion("glm-dsa", {**_LATENT, **_INDEXER}, _indexer, "deepseek2", latents_apart),
    "GraniteMoeSharedForCausalLM": Conversion(
        "granitemoe",
        {
            "block_sparse_moe.router.layer": "ffn_gate_inp",
            **{f"block_sparse_moe.experts.#.{part}_proj": f"ffn_{part}_exps" for part in PARTS},
            "shared_mlp.gate": "ffn_gate_shexp",
            "shared_mlp.up": "ffn_up_shexp",
            "shared_mlp.output_linear": "ffn_down_shexp",
        },
        lambda config: {"expert_shared_feed_forward_length": (U32, config["shared_intermediate_size"])},
        "granitemoe",
        _shared_granite,
    ),
}
ARCHITECTURES = {name: each.architecture for name, each in CONVERSIONS.items()}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NUMBER = re.compile(r"\.experts\.(\d+)\.")


def converted(config: Config, tensors: Tensors, store: Callable[[str, np.ndarray], Tensor] = tensor) -> bytes:
    """As gguf_conversion.converted, for CONVERSIONS."""
    own = CONVERSIONS[config["architectures"][0]]
    config = {"rope_theta": 10000.0, **{key: value for key, value in config.items() if value is not None}}
    names, written, stacks = {**NAMES, **own.names}, {}, {}
    for name, values in own.modified(config, tensors).items():
        match = _LAYER.fullmatch(name)
        number = _NUMBER.search(name)
        part = _NUMBER.sub(".experts.#.", match[2] if match else name)
        module, _, kind = part.rpartition(".")
        named = names[part] if part in names else f"{names[module]}.{kind}"
        named = f"blk.{match[1]}.{named}" if match else named
        if number is None:
            written[named] = values
        else:
            stacks.setdefault(named, {})[int(number[1])] = values
    written |= {name: np.stack([each[number] for number in sorted(each)]) for name, each in stacks.items()}
    about = metadata(own.like or own.architecture, config)
    about = {key.replace(f"{own.like}.", f"{own.architecture}.", 1): value for key, value in about.items()}
    about |= {"general.architecture": (STRING, own.architecture)}
    about |= {f"{own.architecture}.{key}": value for key, value in own.own(config).items()}
    return gguf_bytes(about, [store(name, values) for name, values in written.items()])
