"""MaxText's parameters under Hugging Face names: its scanned layers, kernels by head, scales and paddings undone.

    llm.update_weights(named_tensors(params, "folder of the Hugging Face model"))

Nothing of MaxText is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxengine.models.weights.formats.arrays import on_host
from jaxengine.rl.trees import flat, in_first, in_float32, named_arrays, out_last, refuse_unknown, same

Turn = Callable[[np.ndarray], np.ndarray]

# Number of layers in a block that Gemma 3 scans over; the remaining layers follow unscanned.
GEMMA3_PERIOD = 6

_ATTENTION: dict[str, tuple[str, Turn]] = {
    "self_attention.query.kernel": ("self_attn.q_proj.weight", in_first),
    "self_attention.key.kernel": ("self_attn.k_proj.weight", in_first),
    "self_attention.value.kernel": ("self_attn.v_proj.weight", in_first),
    "self_attention.out.kernel": ("self_attn.o_proj.weight", out_last),
    "self_attention.query.bias": ("self_attn.q_proj.bias", flat),
    "self_attention.key.bias": ("self_attn.k_proj.bias", flat),
    "self_attention.value.bias": ("self_attn.v_proj.bias", flat),
    "self_attention.query_norm.scale": ("self_attn.q_norm.weight", same),
    "self_attention.key_norm.scale": ("self_attn.k_norm.weight", same),
}
_MLP: dict[str, tuple[str, Turn]] = {
    "mlp.wi_0.kernel": ("mlp.gate_proj.weight", in_first),
    "mlp.wi_1.kernel": ("mlp.up_proj.weight", in_first),
    "mlp.wo.kernel": ("mlp.down_proj.weight", in_first),
}
_NORMS: dict[str, tuple[str, Turn]] = {
    "pre_self_attention_layer_norm.scale": ("input_layernorm.weight", same),
    "post_self_attention_layer_norm.scale": ("post_attention_layernorm.weight", same),
}
_GEMMA_NORMS: dict[str, tuple[str, Turn]] = {
    "pre_self_attention_norm.scale": ("input_layernorm.weight", same),
    "post_self_attention_norm.scale": ("post_attention_layernorm.weight", same),
    "pre_ffw_norm.scale": ("pre_feedforward_layernorm.weight", same),
    "post_ffw_norm.scale": ("post_feedforward_layernorm.weight", same),
}
# Experts are the first axis; {expert} is their number.
_QWEN_EXPERTS: dict[str, tuple[str, Turn]] = {
    "moe_block.gate.kernel": ("mlp.gate.weight", in_first),
    "moe_block.wi_0": ("mlp.experts.{expert}.gate_proj.weight", in_first),
    "moe_block.wi_1": ("mlp.experts.{expert}.up_proj.weight", in_first),
    "moe_block.wo": ("mlp.experts.{expert}.down_proj.weight", in_first),
}
_MIXTRAL_EXPERTS: dict[str, tuple[str, Turn]] = {
    "MoeBlock_0.gate.kernel": ("block_sparse_moe.gate.weight", in_first),
    "MoeBlock_0.wi_0": ("block_sparse_moe.experts.{expert}.w1.weight", in_first),
    "MoeBlock_0.wi_1": ("block_sparse_moe.experts.{expert}.w3.weight", in_first),
    "MoeBlock_0.wo": ("block_sparse_moe.experts.{expert}.w2.weight", in_first),
}
_TOP = {
    "token_embedder.embedding": "embed_tokens.weight",
    "decoder.decoder_norm.scale": "norm.weight",
    "decoder.logits_dense.kernel": "lm_head.weight",
}
_PREFIXES = re.compile(r"^(?:params\.|base\.)+")
_OF_BLOCK = re.compile(r"decoder\.layers\.layers_(\d+)\.(.+)")
_LEFT_OVER = re.compile(r"decoder\.layers_remainder\.layers_(\d+)\.(.+)")
_SCANNED = re.compile(r"decoder\.layers\.(.+)")
_ALONE = re.compile(r"decoder\.layers_(\d+)\.(.+)")
_PAIRED = re.compile(r"([a-z_]+?)_(local|global)\.(.+)")


@dataclass(frozen=True)
class _Family:
    """Names and layouts in which MaxText stores a family.

    Attributes:
      layer: by MaxText's name within a layer, (Hugging Face's name, function that converts the array's shape).
      query_scaled: the query kernel is divided by the square root of the head dimension.
      norm_offset: number that MaxText's norms have in addition to those of Hugging Face.
      embedding_scaled: dtype in which embeddings are multiplied by the square root of the hidden size; None: they are
        not.
      paired: a layer of MaxText is two of Hugging Face, a local one and a global one.
    """

    layer: Mapping[str, tuple[str, Turn]]
    query_scaled: bool = False
    norm_offset: float = 0.0
    embedding_scaled: Any = None
    paired: bool = False


_GEMMA = {**_ATTENTION, **_MLP, **_GEMMA_NORMS}
_FAMILIES = {
    "llama": _Family({**_ATTENTION, **_MLP, **_NORMS}, query_scaled=True),
    "mistral": _Family({**_ATTENTION, **_MLP, **_NORMS}, query_scaled=True),
    "mixtral": _Family({**_ATTENTION, **_NORMS, **_MIXTRAL_EXPERTS}, query_scaled=True),
    "qwen2": _Family({**_ATTENTION, **_MLP, **_NORMS}),
    "qwen3": _Family({**_ATTENTION, **_MLP, **_NORMS}),
    "qwen3_moe": _Family({**_ATTENTION, **_NORMS, **_MLP, **_QWEN_EXPERTS}),
    "gemma2": _Family(_GEMMA, True, norm_offset=1.0, embedding_scaled=np.float32, paired=True),
    "gemma3_text": _Family(_GEMMA, norm_offset=1.0, embedding_scaled=ml_dtypes.bfloat16),
}
MODEL_TYPES = (*_FAMILIES, "gemma3")


@dataclass(frozen=True)
class _Location:
    """Location of a MaxText tensor.

    Attributes:
      name: within its layer, or its whole name outside the layers.
      layers: Hugging Face's numbers of the layers that it holds; empty outside the layers.
      is_scanned: whether it has an axis for them.
    """

    name: str
    layers: Sequence[int] = field(default=())
    is_scanned: bool = False


def named_tensors(
    params: Any, config: Mapping[str, Any] | str | PathLike[str], *, scan_axis: int = 1
) -> Iterator[tuple[str, np.ndarray]]:
    """Return an iterator over (Hugging Face name, array) of MaxText's parameters, for `update_weights`.

    Args:
      params: nested mappings, an nnx.State or an nnx.Module; outer keys "params" and "base" are removed.
      config: the fields of the Hugging Face model's config.json, or the folder with it; text_config counts if there is
        one, and model_type names the family.
      scan_axis: the axis of scanned arrays that counts layers, MaxText's `param_scan_axis`.

    Arrays are converted one by one, in host memory, as the iterator reaches them. Raises ValueError for an unknown
    family or unknown names, OSError for a folder without config.json; the iterator raises ValueError for an array whose
    number of layers differs from `config`.
    """
    outer = config if isinstance(config, Mapping) else json.loads((Path(config) / "config.json").read_text())
    text = outer.get("text_config", outer)
    kind = str(text.get("model_type", outer.get("model_type"))).replace("gemma3_text", "gemma3")
    family = _FAMILIES.get("gemma3_text" if kind == "gemma3" else kind)
    if family is None:
        raise ValueError(f"config.model_type must be one of {', '.join(MODEL_TYPES)}, got {kind!r}")
    arrays = {_PREFIXES.sub("", name): array for name, array in named_arrays(params)}
    model = _Model(family, text, "model.language_model." if text is not outer else "model.")
    kind_text = f"MaxText's for {kind}"
    refuse_unknown(arrays, lambda name: model.location(name) is not None, kind_text)
    return model.tensors(arrays, scan_axis)


@dataclass(frozen=True)
class _Model:
    """A family with the shape of one model.

    Attributes:
      family: names and layouts.
      config: fields of the Hugging Face model's config.json, of its text model if it has several.
      prefix: prefix of the Hugging Face names.
    """

    family: _Family
    config: Mapping[str, Any]
    prefix: str

    @property
    def _num_layers(self) -> int:
        """Number of layers, as Hugging Face counts them."""
        return int(self.config["num_hidden_layers"])

    @property
    def _head_dim(self) -> int:
        """Dimension of a head: head_dim, by default hidden_size // num_attention_heads."""
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])

    def location(self, name: str) -> _Location | None:
        """Return the location of a tensor by its MaxText name; None for an unknown name.

        Tensors outside the layers have no layer numbers. "layers_N" is one layer. Scanned layers are all layers, or in
        Gemma 3's blocks every GEMMA3_PERIOD-th from N on, and the remaining layers follow the blocks. In a paired
        family the local layer is 2n, the global one 2n + 1.
        """
        if name in _TOP:
            return _Location(name)
        if match := _OF_BLOCK.fullmatch(name):
            whole = self._num_layers - self._num_layers % GEMMA3_PERIOD
            found = _Location(match[2], range(int(match[1]), whole, GEMMA3_PERIOD), True)
        elif match := _LEFT_OVER.fullmatch(name):
            whole = self._num_layers - self._num_layers % GEMMA3_PERIOD
            found = _Location(match[2], [whole + int(match[1])])
        elif match := _SCANNED.fullmatch(name):
            found = _Location(match[1], range(self._num_layers // (2 if self.family.paired else 1)), True)
        elif match := _ALONE.fullmatch(name):
            found = _Location(match[2], [int(match[1])])
        else:
            return None
        if self.family.paired:
            if (match := _PAIRED.fullmatch(found.name)) is None:
                return None
            odd = match[2] == "global"
            found = _Location(f"{match[1]}.{match[3]}", [2 * layer + odd for layer in found.layers], found.is_scanned)
        return found if found.name in self.family.layer else None

    def tensors(self, arrays: Mapping[str, Any], scan_axis: int) -> Iterator[tuple[str, np.ndarray]]:
        """Yield Hugging Face names and arrays, one for each layer and expert, converted on the host as they are
        reached.

        arrays: by MaxText's names, all of which must be known. scan_axis: axis of scanned arrays that counts layers.
        Raises ValueError for an array with another number of layers.
        """
        for name, array in arrays.items():
            location, host = self.location(name), on_host(array)
            assert location is not None
            if name in _TOP:
                yield self._top(name, host)
                continue
            hf_name, turn = self.family.layer[location.name]
            turn = self._turned(location.name, turn)
            each = _by_layer(name, host, scan_axis, len(location.layers)) if location.is_scanned else host[None]
            for layer, one in zip(location.layers, each, strict=True):
                full = f"{self.prefix}layers.{layer}.{hf_name}"
                if "{expert}" not in hf_name:
                    yield full, turn(one)
                    continue
                for number, expert in enumerate(one):
                    yield full.replace("{expert}", str(number)), turn(expert)

    def _top(self, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
        """Return the Hugging Face name and array of a tensor outside the layers, whose MaxText name is in _TOP. Rows
        that pad the vocabulary are left out, and the family's embedding scale and norm offset are undone.
        """
        family, size = self.family, int(self.config["vocab_size"])
        hf_name = _TOP[name] if name == "decoder.logits_dense.kernel" else self.prefix + _TOP[name]
        if name == "decoder.decoder_norm.scale":
            return hf_name, self._turned(name, same)(array)
        array = array[:size] if name == "token_embedder.embedding" else array.T[:size]
        if name == "token_embedder.embedding" and family.embedding_scaled is not None:
            root = float(family.embedding_scaled(self.config["hidden_size"] ** 0.5))
            array = in_float32(lambda values: values / np.float32(root))(array)
        return hf_name, array

    def _turned(self, name: str, turn: Turn) -> Turn:
        """Return a function that converts an array of a layer without changing it in place: it undoes the family's
        query scale and order of rope dimensions, then applies `turn`.

        name: name of the tensor within a layer, or of the last norm. For a norm in a family with an offset, the
        function only subtracts the offset.
        """
        if name.endswith("norm.scale") and self.family.norm_offset:
            return in_float32(lambda values: values - np.float32(self.family.norm_offset))
        of_query, of_key = name == "self_attention.query.kernel", name == "self_attention.key.kernel"
        first: list[Turn] = []
        if of_query and self.family.query_scaled:
            root = np.float32(self._head_dim**0.5)
            first.append(in_float32(lambda values: values * root))
        if (of_query or of_key) and self._rope_is_interleaved:
            first.append(lambda values: np.concatenate([values[..., ::2], values[..., 1::2]], axis=-1))

        def turned(array: np.ndarray) -> np.ndarray:
            """Apply the functions of `first` in order, then `turn`."""
            for each in first:
                array = each(array)
            return turn(array)

        return turned

    @property
    def _rope_is_interleaved(self) -> bool:
        """Whether rope rotates neighbouring elements, as MaxText does for Llama 3.1 and later: models of the model_type
        "llama" with the rope_type (or type) "llama3" in rope_parameters or else rope_scaling.
        """
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type"))
        return self.config.get("model_type") == "llama" and kind == "llama3"


def _by_layer(name: str, array: np.ndarray, axis: int, count: int) -> np.ndarray:
    """Return a scanned array with its layer axis `axis` moved to the front. name: name of the array, for the error.
    Raises ValueError unless that axis has `count` layers.
    """
    if array.ndim <= axis or array.shape[axis] != count:
        raise ValueError(f"{name} must have {count} layers along axis {axis}, got shape {array.shape}")
    return np.moveaxis(array, axis, 0)
