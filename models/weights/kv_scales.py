"""Scales of cached keys and values: what a code stands for, in each layer and kv head.

A checkpoint may have them, one number for a layer or one for each kv head, for codes of float8_e4m3fn: those of
compressed-tensors, AutoFP8 and ModelOpt do. Knows nothing of pools.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from models.weights.errors import ModelFileError
from models.weights.source import WeightSource

# Behind "model.layers.{layer}.self_attn.": the tensors of keys and of values, the newest names first.
_OF_KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
_OF_VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")
KV_SCALES = tuple(f".self_attn.{name}" for name in dict.fromkeys((*_OF_KEYS, *_OF_VALUES)))
STORED_FOR = "float8_e4m3fn"
_LEAST = np.finfo(np.float32).tiny  # devices take less for 0

# A code that saturates is wrong by what is cut off. Numbers of fp8 are as exact at half the range, those of int8 not.
_HEADROOM = {"float8_e4m3fn": 2.0, "float8_e5m2": 2.0, "int8": 1.0}


class KVScales(NamedTuple):
    """Rows of all layers of a model, f32[layers, K]; of layers without pages they mean nothing.

    v: None where values lie in keys.
    """

    k: np.ndarray
    v: np.ndarray | None

    def of_layers(self, layers: list[int]) -> KVScales:
        return KVScales(self.k[layers], None if self.v is None else self.v[layers])


def scales_for(largest: np.ndarray, dtype: str) -> np.ndarray:
    """Scales with which the largest magnitudes f32[layers, K] fit into codes; 1 where nothing but zeros was seen, or
    numbers so small that devices would take their scale for 0, and divide by it."""
    most = 127.0 if dtype == "int8" else float(jnp.finfo(dtype).max)
    scales = (largest * (_HEADROOM[dtype] / most)).astype(np.float32)
    return np.where(scales >= _LEAST, scales, np.float32(1))


class KVShape(NamedTuple):
    """What of a model has scales.

    Attributes:
      num_layers: of the whole model. paged: the layers with pages among them.
      num_heads: kv heads of a layer.
      values_in_keys: whether values are parts of keys, and have no scales of their own.
    """

    num_layers: int
    paged: tuple[int, ...]
    num_heads: int
    values_in_keys: bool


def read_scales(source: WeightSource, shape: KVShape) -> KVScales | None:
    """The checkpoint's, by the names that the model has for its tensors; None where it has none of any layer.

    Raises ModelFileError where it has those of some layers only, or numbers that are none.
    """
    names = set(source.names())
    kinds = [_OF_KEYS, *([] if shape.values_in_keys else [_OF_VALUES])]
    found = [_read_kind(source, names, kind, shape) for kind in kinds]
    if all(scales is None for scales in found):
        return None
    for kind, scales in zip(kinds, found, strict=True):
        if scales is None:
            text = "a scale of cached keys and values is missing, though the checkpoint has others"
            raise ModelFileError(source.path, text, _name(shape.paged[0], kind[0]))
    k, *v = (scales for scales in found if scales is not None)
    return KVScales(k, v[0] if v else None)


def _read_kind(source: WeightSource, names: set[str], kind: tuple[str, ...], shape: KVShape) -> np.ndarray | None:
    stored = {layer: [name for each in kind if (name := _name(layer, each)) in names] for layer in shape.paged}
    if not any(stored.values()):
        return None
    scales = np.ones((shape.num_layers, shape.num_heads), np.float32)
    for layer, candidates in stored.items():
        if not candidates:
            text = "a scale of cached keys and values is missing, though other layers have theirs"
            raise ModelFileError(source.path, text, _name(layer, kind[0]))
        values = source.read(candidates[0]).astype(np.float32).ravel()
        if values.size not in (1, shape.num_heads):
            text = f"must hold one scale or one for each of {shape.num_heads} kv heads, got {values.size}"
            raise ModelFileError(source.path, text, candidates[0])
        if not (np.isfinite(values) & (values >= _LEAST)).all():
            raise ModelFileError(source.path, f"must hold finite scales of at least {_LEAST:.2g}", candidates[0])
        scales[layer] = values
    return scales


def _name(layer: int, end: str) -> str:
    return f"model.layers.{layer}.self_attn.{end}"
