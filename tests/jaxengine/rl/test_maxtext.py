"""jaxengine.rl.maxtext: recorded checkpoints, written as MaxText keeps them and read back."""

from __future__ import annotations

import json
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxengine.rl.maxtext import named_tensors
from tests.fixtures.drawn_weights import checkpoint
from tests.tables import each_row

HALVES = {"mlp": "mlp", "self_attn": "self_attention"}
NORMS = {"input_layernorm": "pre_self_attention", "post_attention_layernorm": "post_self_attention"}
GEMMA_NORMS = {"pre_feedforward_layernorm": "pre_ffw", "post_feedforward_layernorm": "post_ffw"}
MLP = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo", "w1": "wi_0", "w3": "wi_1", "w2": "wo"}
PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}


class Written:
    """A checkpoint of Hugging Face as MaxText keeps it, by the rules of MaxText's conversion."""

    def __init__(self, name: str, **changes: Any):
        self.config = json.loads((checkpoint(name) / "config.json").read_text()) | changes
        files = sorted(checkpoint(name).glob("*.safetensors"))
        self.tensors = {key: array for file in files for key, array in load_file(file).items()}
        self.kind = self.config["model_type"]
        self.heads, self.kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.gemma = self.kind.startswith("gemma")
        self.interleaved = self.config.get("rope_parameters", {}).get("rope_type") == "llama3"

    def layer(self, number: int) -> dict[str, np.ndarray]:
        """One layer's arrays by MaxText's names; experts are stacked on a first axis."""
        found: dict[str, Any] = {}
        for key, array in self.tensors.items():
            match = re.fullmatch(rf"(?:model\.)?layers\.{number}\.(.+)\.(weight|bias)", key)
            if match is None:
                continue
            *outer, last = match[1].split(".")
            if outer[:1] == ["self_attn"] and last in PROJECTIONS:
                found[f"self_attention.{PROJECTIONS[last]}.{'kernel' if match[2] == 'weight' else 'bias'}"] = (
                    self.projection(PROJECTIONS[last], array)
                )
            elif outer[:1] == ["self_attn"]:
                found[f"self_attention.{'query' if last[0] == 'q' else 'key'}_norm.scale"] = array + self.gemma
            elif "experts" in outer:
                block = "moe_block" if self.kind == "qwen3_moe" else "MoeBlock_0"
                found.setdefault(f"{block}.{MLP[last]}", {})[int(outer[-1])] = array.T
            elif last == "gate":
                found["moe_block.gate.kernel" if self.kind == "qwen3_moe" else "MoeBlock_0.gate.kernel"] = array.T
            elif outer == ["mlp"]:
                found[f"mlp.{MLP[last]}.kernel"] = array.T
            elif self.gemma:
                found[f"{(NORMS | GEMMA_NORMS)[last]}_norm.scale"] = array + np.float32(1)
            else:
                found[f"{NORMS[last]}_layer_norm.scale"] = array
        stacked = {key: np.stack([each[n] for n in sorted(each)]) for key, each in found.items() if type(each) is dict}
        return found | stacked

    def projection(self, name: str, array: np.ndarray) -> np.ndarray:
        heads = self.heads if name in ("query", "out") else self.kv_heads
        if array.ndim == 1:
            return array.reshape(heads, -1)
        if name == "out":
            return array.T.reshape(heads, -1, array.shape[0])
        kernel = array.T.reshape(array.shape[1], heads, -1)
        if name in ("query", "key") and self.interleaved:
            first, second = np.split(kernel, 2, axis=-1)
            kernel = np.stack([first, second], axis=-1).reshape(kernel.shape)
        scaled = name == "query" and self.kind in ("llama", "mixtral", "gemma2")
        return kernel / np.float32(kernel.shape[-1] ** 0.5) if scaled else kernel

    def top(self) -> dict[str, np.ndarray]:
        embedding = self.tensors["model.embed_tokens.weight"]
        if self.gemma:
            dtype = np.float32 if self.kind == "gemma2" else ml_dtypes.bfloat16
            embedding = embedding * np.float32(dtype(self.config["hidden_size"] ** 0.5))
        padding = np.zeros((3, embedding.shape[1]), np.float32)
        found = {
            "token_embedder.embedding": np.concatenate([embedding, padding]),
            "decoder.decoder_norm.scale": self.tensors["model.norm.weight"] + np.float32(self.gemma),
        }
        if "lm_head.weight" in self.tensors:
            found["decoder.logits_dense.kernel"] = np.concatenate([self.tensors["lm_head.weight"], padding]).T
        return found

    def blocks(self, scan: bool) -> list[tuple[str, list[dict[str, np.ndarray]]]]:
        """Prefixes and the layers that are scanned under them; lists of one where they are not."""
        layers = [self.layer(number) for number in range(self.config["num_hidden_layers"])]
        if self.kind == "gemma2":
            pairs = []
            for local, other in zip(layers[::2], layers[1::2], strict=True):
                halves = {"local": local, "global": other}
                pairs.append(
                    {key.replace(".", f"_{half}.", 1): v for half in halves for key, v in halves[half].items()}
                )
            layers = pairs
        if not scan:
            return [(f"decoder.layers_{number}", [layer]) for number, layer in enumerate(layers)]
        if self.kind != "gemma3_text":
            return [("decoder.layers", layers)]
        whole = len(layers) // 6 * 6
        scanned = [(f"decoder.layers.layers_{first}", layers[first:whole:6]) for first in range(6 if whole else 0)]
        return scanned + [(f"decoder.layers_remainder.layers_{n}", [each]) for n, each in enumerate(layers[whole:])]

    def tree(self, scan: bool, axis: int = 1) -> dict[str, np.ndarray]:
        found = self.top()
        for prefix, layers in self.blocks(scan):
            is_scanned = scan and "remainder" not in prefix
            for key in layers[0]:
                each = [layer[key] for layer in layers]
                found[f"{prefix}.{key}"] = np.stack(each, axis=axis) if is_scanned else each[0]
        return found


def nested(flat: dict[str, Any], *outer: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, array in flat.items():
        *path, last = (*outer, *name.split("."))
        level = tree
        for key in path:
            level = level.setdefault(key, {})
        level[last] = array
    return tree


def of_layers(name: str, *numbers: int) -> Written:
    """A checkpoint whose layers are these of a recorded one, each told apart by its numbers."""
    written = Written(name)
    kept = {key: array for key, array in written.tensors.items() if "layers." not in key}
    for new, old in enumerate(numbers):
        for key, array in written.tensors.items():
            if key.startswith(f"model.layers.{old}."):
                kept[key.replace(f"layers.{old}.", f"layers.{new}.")] = array + np.float32(new)
    written.tensors = kept
    written.config["num_hidden_layers"] = len(numbers)
    return written


CASES = {
    "llama": Written("llama"),
    "llama with the rope of 3.1": Written("llama", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5}),
    "mixtral": Written("mixtral"),
    "qwen2": Written("qwen2"),
    "qwen2 with a head": Written("qwen2_untied"),
    "qwen3": Written("qwen3"),
    "qwen3_moe": of_layers("qwen3_moe", 0, 2, 0),
    "gemma2": of_layers("gemma2", 0, 1, 2, 0),
    "gemma3": Written("gemma3"),
    "gemma3, eight layers": of_layers("gemma3", *range(3), *range(3), 0, 1),
    "gemma3, twelve layers": of_layers("gemma3", *range(3), *range(3), *range(3), *range(3)),
}


@each_row("name", CASES)
def test_checkpoints_come_back(name):
    written = CASES[name]
    for scan, axis, outer in ((True, 1, ("params", "params")), (False, 1, ()), (True, 0, ("base",))):
        tree = nested(written.tree(scan, axis), *outer)
        found = dict(named_tensors(tree, written.config, scan_axis=axis))
        assert set(found) == set(written.tensors)
        for key, array in written.tensors.items():
            np.testing.assert_allclose(found[key], array, rtol=2e-6, atol=1e-7, err_msg=key)


def test_variables_a_folder_and_bfloat16():
    written = CASES["qwen3"]
    half = {name: array.astype(ml_dtypes.bfloat16) for name, array in written.tree(True).items()}
    tree = nnx.State(nested({name: nnx.Param(array) for name, array in half.items()}))
    found = dict(named_tensors(tree, checkpoint("qwen3")))
    for key, array in written.tensors.items():
        np.testing.assert_array_equal(found[key], array.astype(ml_dtypes.bfloat16), err_msg=key)


@each_row(
    ("change", "says"),
    [
        ({"decoder.layers.mlp.wi_2.kernel": np.zeros(3)}, "not MaxText's for qwen3: decoder.layers.mlp.wi_2.kernel"),
        ({"opt_state.step": np.zeros(3)}, "not MaxText's for qwen3: opt_state.step"),
        ({"decoder.layers.mlp.wo.kernel": np.zeros((3, 5, 4))}, "must have 2 layers along axis 1, got shape .3, 5, 4"),
    ],
)
def test_what_does_not_fit_is_named(change, says):
    written = CASES["qwen3"]
    with pytest.raises(ValueError, match=says):
        dict(named_tensors(written.tree(True) | change, written.config))


def test_an_unknown_family_is_refused_before_anything_is_read():
    with pytest.raises(ValueError, match="config.model_type must be one of llama, .*, gemma3, got 'mamba'"):
        named_tensors({}, {"model_type": "mamba"})
