"""jaxengine.rl.tunix_names: recorded checkpoints, written as Tunix's models keep them and read back."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxengine.rl.tunix_names import named_tensors
from tests.fixtures.drawn_weights import checkpoint
from tests.tables import each_row

LLAMA = {
    "input_layernorm.weight": "input_layernorm.w",
    "post_attention_layernorm.weight": "post_attention_layernorm.w",
    "self_attn.q_norm.weight": "attn.q_norm.w",
    "self_attn.k_norm.weight": "attn.k_norm.w",
}
GEMMA = {
    "input_layernorm.weight": "pre_attention_norm.scale",
    "post_attention_layernorm.weight": "post_attention_norm.scale",
    "pre_feedforward_layernorm.weight": "pre_ffw_norm.scale",
    "post_feedforward_layernorm.weight": "post_ffw_norm.scale",
    "self_attn.q_norm.weight": "attn._query_norm.scale",
    "self_attn.k_norm.weight": "attn._key_norm.scale",
}


def written(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A checkpoint by Hugging Face names, and as Tunix keeps it: by the rules of its loaders."""
    config = json.loads((checkpoint(name) / "config.json").read_text())
    tensors = {key: each for file in checkpoint(name).glob("*.safetensors") for key, each in load_file(file).items()}
    is_gemma, width = "gemma" in name, config["head_dim"] if config.get("head_dim") else None
    width = width or config["hidden_size"] // config["num_attention_heads"]
    found: dict[str, Any] = {}
    for key, array in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", key)
        if match is None:
            norm = "final_norm.scale" if is_gemma else "final_norm.w"
            top = {"model.embed_tokens.weight": "embedder.input_embedding", "model.norm.weight": norm}
            found[top.get(key, "lm_head.w")] = array.T if key == "lm_head.weight" else array
            continue
        prefix, rest = f"layers.{match[1]}.", match[2]
        kind = rest.split(".")[-2][0]
        if rest in (norms := GEMMA if is_gemma else LLAMA):
            found[prefix + norms[rest]] = array
        elif expert := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)_proj\.weight", rest):
            found.setdefault(f"{prefix}mlp.{expert[2]}_proj", {})[int(expert[1])] = array.T
        elif rest == "mlp.gate.weight":
            found[f"{prefix}mlp.router.kernel"] = array.T
        elif rest.startswith("mlp."):
            found[prefix + rest.replace("weight", "kernel")] = array.T
        elif rest.endswith("bias"):
            found[f"{prefix}attn.{kind}_bias"] = array
        elif kind == "o":
            where = "attn.attn_vec_einsum.w" if is_gemma else "attn.o_proj.w"
            found[prefix + where] = array.T.reshape(-1, width, array.shape[0])
        elif not is_gemma:
            found[f"{prefix}attn.{kind}_proj.w"] = array.T.reshape(array.shape[1], -1, width)
        else:
            found.setdefault(f"{prefix}attn", {})[kind] = array.reshape(-1, width, array.shape[1]).transpose(0, 2, 1)
    return tensors, _stacked(found)


def _stacked(found: dict[str, Any]) -> dict[str, np.ndarray]:
    """Experts along a first axis, and Gemma's projections as its einsums have them."""
    for name in [key for key, each in found.items() if isinstance(each, dict)]:
        each = found.pop(name)
        if "q" not in each:
            found[name] = np.stack([each[number] for number in sorted(each)])
        elif each["q"].shape == each["k"].shape:
            found[f"{name}.qkv_einsum.w"] = np.stack([each[kind] for kind in "qkv"])
        else:
            found[f"{name}.q_einsum.w"], found[f"{name}.kv_einsum.w"] = each["q"], np.stack([each["k"], each["v"]])
    return found


@each_row("name", ["llama", "qwen2", "qwen2_untied", "qwen3", "qwen3_moe", "gemma2", "gemma3"])
def test_checkpoints_come_back(name):
    tensors, kept = written(name)
    found = dict(named_tensors({key: nnx.Param(array) for key, array in kept.items()}))
    assert set(found) == set(tensors)
    for key, array in tensors.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)


def test_names_that_are_not_known():
    with pytest.raises(ValueError, match="Gemma 3: layers.0.attn.q_proj.w_lora_a, vision.kernel"):
        named_tensors({"layers": [{"attn": {"q_proj": {"w_lora_a": np.ones(2)}}}], "vision": {"kernel": np.ones(2)}})
