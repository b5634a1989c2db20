"""Parameters of Tunix's own Llama 3, Qwen and Gemma models under Hugging Face names. Nothing of Tunix is imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxengine.models.weights.formats.arrays import on_host
from jaxengine.rl.trees import flat, in_first, named_arrays, out_last, refuse_unknown, same

Turn = Callable[[np.ndarray], np.ndarray]

# Names outside the layers, with Hugging Face's name and the function that converts the array's shape.
_TOP: dict[str, tuple[str, Turn]] = {
    "embedder.input_embedding": ("model.embed_tokens.weight", same),
    "final_norm.w": ("model.norm.weight", same),
    "final_norm.scale": ("model.norm.weight", same),
    "lm_head.w": ("lm_head.weight", in_first),
}


def _heads_first(array: np.ndarray) -> np.ndarray:
    """Return an array [heads, in, head dimension] as [heads * head dimension, in]."""
    return array.transpose(0, 2, 1).reshape(-1, array.shape[1])


# Names within a layer, with Hugging Face's names and the function that converts each array's shape. An array for
# several names is split along its first axis.
_LAYER: dict[str, tuple[tuple[str, ...], Turn]] = {
    "attn.q_proj.w": (("self_attn.q_proj.weight",), in_first),
    "attn.k_proj.w": (("self_attn.k_proj.weight",), in_first),
    "attn.v_proj.w": (("self_attn.v_proj.weight",), in_first),
    "attn.o_proj.w": (("self_attn.o_proj.weight",), out_last),
    "attn.q_bias": (("self_attn.q_proj.bias",), flat),
    "attn.k_bias": (("self_attn.k_proj.bias",), flat),
    "attn.v_bias": (("self_attn.v_proj.bias",), flat),
    "attn.q_norm.w": (("self_attn.q_norm.weight",), same),
    "attn.k_norm.w": (("self_attn.k_norm.weight",), same),
    "attn.q_einsum.w": (("self_attn.q_proj.weight",), _heads_first),
    "attn.kv_einsum.w": (("self_attn.k_proj.weight", "self_attn.v_proj.weight"), _heads_first),
    "attn.qkv_einsum.w": (
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        _heads_first,
    ),
    "attn.attn_vec_einsum.w": (("self_attn.o_proj.weight",), out_last),
    "attn._query_norm.scale": (("self_attn.q_norm.weight",), same),
    "attn._key_norm.scale": (("self_attn.k_norm.weight",), same),
    "mlp.gate_proj.kernel": (("mlp.gate_proj.weight",), in_first),
    "mlp.up_proj.kernel": (("mlp.up_proj.weight",), in_first),
    "mlp.down_proj.kernel": (("mlp.down_proj.weight",), in_first),
    "mlp.router.kernel": (("mlp.gate.weight",), in_first),
    "input_layernorm.w": (("input_layernorm.weight",), same),
    "post_attention_layernorm.w": (("post_attention_layernorm.weight",), same),
    "pre_attention_norm.scale": (("input_layernorm.weight",), same),
    "post_attention_norm.scale": (("post_attention_layernorm.weight",), same),
    "post_attn_norm.scale": (("post_attention_layernorm.weight",), same),
    "pre_ffw_norm.scale": (("pre_feedforward_layernorm.weight",), same),
    "post_ffw_norm.scale": (("post_feedforward_layernorm.weight",), same),
}
# Names within a layer of arrays whose first axis is that of all experts.
_EXPERTS = {f"mlp.{name}_proj": f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")}
_OF_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def named_tensors(params: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Return an iterator over (Hugging Face name, array) of the parameters of one of Tunix's models.

    params: an nnx.State, an nnx.Module, or nested mappings. Arrays are converted one by one, in host memory, as the
    iterator reaches them. Raises ValueError for unknown names.
    """
    arrays = dict(named_arrays(params))
    refuse_unknown(arrays, _is_known, "those of Tunix's Llama 3, Qwen 2, Qwen 3, Gemma and Gemma 3")
    return _tensors(arrays)


def _is_known(name: str) -> bool:
    """Return whether Tunix's models have parameters of this name."""
    match = _OF_LAYER.fullmatch(name)
    return name in _TOP if match is None else match[2] in _LAYER or match[2] in _EXPERTS


def _tensors(arrays: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, array) for `arrays` by Tunix's names, all of which must be known.

    Arrays of all experts, and of joined projections, are split along their first axis, and all are turned into Hugging
    Face's layout; each is copied to the host when it is reached.
    """
    for name, array in arrays.items():
        host, match = on_host(array), _OF_LAYER.fullmatch(name)
        if match is None:
            hf_name, turn = _TOP[name]
            yield hf_name, turn(host)
            continue
        prefix = f"model.layers.{match[1]}."
        if match[2] in _EXPERTS:
            for number, expert in enumerate(host):
                yield prefix + _EXPERTS[match[2]].replace("{expert}", str(number)), expert.T
            continue
        hf_names, turn = _LAYER[match[2]]
        parts = host if len(hf_names) > 1 else host[None]
        for hf_name, part in zip(hf_names, parts, strict=True):
            yield prefix + hf_name, turn(part)
