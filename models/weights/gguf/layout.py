"""Names and storage of a model's tensors in llama.cpp. gguf/layouts.py has a row for each of its architectures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

_NONE: Mapping[str, str] = MappingProxyType({})


def names_of(pairs: str) -> dict[str, str]:
    """Return the checkpoint's names by llama.cpp's, from pairs of the two that are separated by commas."""
    return dict(pair.split() for pair in pairs.split(","))


def mlp_names(module: str, end: str = "", parts: Sequence[str] = ("gate", "up", "down")) -> dict[str, str]:
    """Return the names of the projections of an MLP in `module`. end: that of llama.cpp's names."""
    return {f"ffn_{part}{end}": f"{module}.{part}_proj" for part in parts}


_GLOBAL = names_of(
    "token_embd model.embed_tokens, output_norm model.norm, output lm_head, position_embd model.embed_positions, "
    "per_layer_token_embd model.embed_tokens_per_layer, per_layer_model_proj model.per_layer_model_projection, "
    "per_layer_proj_norm model.per_layer_projection_norm, altup_proj model.altup_projections.{expert}, "
    "altup_unembd_proj model.altup_unembed_projections.{expert}, dense_2 dense.0.linear, dense_3 dense.1.linear, "
    "cls.output score, token_embd_norm model.embed_norm"
)
LAYER_NAMES = {
    **names_of(
        "attn_norm input_layernorm, attn_q self_attn.q_proj, attn_k self_attn.k_proj, attn_v self_attn.v_proj, "
        "attn_output self_attn.o_proj, attn_q_norm self_attn.q_norm, attn_k_norm self_attn.k_norm, "
        "ffn_norm post_attention_layernorm"
    ),
    **mlp_names("mlp"),
    "ffn_gate_inp": "mlp.gate",
    **mlp_names("mlp.experts.{expert}", "_exps"),
}
_LAYER_TENSOR = re.compile(
    r"(?:enc\.)?blk\.(0|[1-9][0-9]{0,5})\.((?:(?:indexer|shortconv)\.)?[a-z0-9_]+)(?:\.(weight|bias|scale|input_scale))?"
)
_GLOBAL_TENSOR = re.compile(r"(?:enc\.)?([a-z_0-9]+(?:\.[a-z]+)?)\.(weight|bias|scale|input_scale)")
# Files of old converters have each expert's matrix as a tensor; new ones may join two matrices of all experts.
_ONE_EXPERT = re.compile(r"(blk\.[0-9]+\.ffn_(?:gate|up|down))\.(0|[1-9][0-9]{0,3})(\.[a-z_]+)")
_JOINED_EXPERTS = re.compile(r"(blk\.[0-9]+\.ffn_)gate_up(_exps\.[a-z_]+)")


class GGUFLayout(NamedTuple):
    """Storage of the tensors of one architecture.

    Attributes:
      parts: checkpoint modules of a layer's tensors, by llama.cpp's name, if not LAYER_NAMES. "{expert}"
        in a module: the tensor's first axis is that of the experts.
      permuted: whether rows of q and k are in the order in which llama.cpp rotates neighbours (gguf/file.py,
        unpermute_rows).
      permuted_biases: whether the biases of q and k are in that order too, if their rows are.
      norm_offset: number that the converter has added to the weights of norms, except those in a delta net.
      offsets: numbers that it has added to other norms instead, by the ends of the checkpoint's names.
      decay: factor of exp(A_log), the decays of a layer, in the file.
      norms: end of the checkpoint's names of these norms.
      bare: checkpoint names, without `.weight` or `.bias`, of tensors, by llama.cpp's name: of those of a layer what
        follows its number.
      rows: llama.cpp's names of a layer's vectors that represent a matrix of one row.
      vectors: llama.cpp's names of a layer's vectors that are stored with more axes.
      factors: checkpoint names of a layer's `.scale` tensors that are weights of their own, by llama.cpp's name.
      layers: what the checkpoint names of a layer's modules begin with, before its number.
      tables: checkpoint modules outside of layers, by llama.cpp's name, where they differ from _GLOBAL.
      numbers: checkpoint names of a layer's tensors of one number, by the metadata that list it for each layer.
    """

    parts: Mapping[str, str] = _NONE
    permuted: bool = False
    permuted_biases: bool = True
    norm_offset: float = 0.0
    offsets: Mapping[str, float] = MappingProxyType({})
    decay: float = -1.0
    norms: str = "norm.weight"
    bare: Mapping[str, str] = _NONE
    rows: frozenset[str] = frozenset()
    vectors: frozenset[str] = frozenset()
    factors: Mapping[str, str] = _NONE
    layers: str = "model.layers"
    tables: Mapping[str, str] = _NONE
    numbers: Mapping[str, str] = _NONE

    def canonical_name(self, name: str) -> str:
        """Return the checkpoint's name of a file's tensor: `blk.3.attn_q.weight` becomes
        `model.layers.3.self_attn.q_proj.weight`. An unknown name is returned unchanged.
        """
        if match := _LAYER_TENSOR.fullmatch(name):
            layer, part, kind = match.groups()
            if kind == "scale" and part in self.factors:
                return f"{self.layers}.{layer}.{self.factors[part]}"
            if part in self.bare:
                return f"{self.layers}.{layer}.{self.bare[part]}"
            if kind is None:
                return name
            module = self.parts.get(part) or LAYER_NAMES.get(part)
            return name if module is None else f"{self.layers}.{layer}.{module}.{kind}"
        if match := _GLOBAL_TENSOR.fullmatch(name):
            part, kind = match.groups()
            if part in self.bare:
                return self.bare[part]
            module = self.tables.get(part) or _GLOBAL.get(part)
            return name if module is None else f"{module}.{kind}"
        return name

    def canonical_names(self, name: str) -> tuple[str, ...]:
        """Return the checkpoint's names of the tensors that the rows of a file's tensor consist of, in equal parts and
        in order; with "{expert}" if there is one for each expert.
        """
        if match := _ONE_EXPERT.fullmatch(name):
            stem, expert, kind = match.groups()
            return (self.canonical_name(f"{stem}_exps{kind}").replace("{expert}", expert),)
        if match := _JOINED_EXPERTS.fullmatch(name):
            return tuple(self.canonical_name(match[1] + half + match[2]) for half in ("gate", "up"))
        return (self.canonical_name(name),)

    def offset_of(self, name: str) -> float:
        """Return what the converter has added to the checkpoint's tensor `name`."""
        is_norm = name.endswith(self.norms) and not name.endswith(".linear_attn.norm.weight")
        own = (offset for end, offset in self.offsets.items() if name.endswith(end))
        return next(own, self.norm_offset) if is_norm else 0.0

    def usual_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the checkpoint's shape of the file's tensor `name` of this shape, if it is the single row of a matrix,
        a vector with more axes or a convolution with axes of one entry; of others the shape itself.
        """
        match = _LAYER_TENSOR.fullmatch(name)
        part = match[2] if match is not None else ""
        if part.startswith("ssm_conv1d_"):
            return tuple(size for size in shape if size > 1)
        if part in self.vectors:
            return (math.prod(shape),)
        return (1, *shape) if part in self.rows and len(shape) == 1 else shape

    @property
    def heads(self) -> dict[str, str]:
        """Fields with the numbers of heads whose rows are permuted, by the checkpoint modules with these rows."""
        names = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
        return {{**LAYER_NAMES, **self.parts}[part]: key for part, key in names.items()} if self.permuted else {}
