"""Scales of cached keys and values, per layer and kv head.

A checkpoint may have them, one number per layer or one per kv head, for codes of float8_e4m3fn: those of
compressed-tensors, AutoFP8 and ModelOpt do. Our own file format holds the largest magnitudes from which scales follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxengine.models.params.declare import numbered
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WeightSource

# Names after "model.layers.{layer}.self_attn.", or "model.layers.{pair}.self_attn.{half}.", of the scales of keys and
# of values, the newest first.
_OF_KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
_OF_VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")
KV_SCALES = tuple(
    f".self_attn.{half}{name}" for name in dict.fromkeys((*_OF_KEYS, *_OF_VALUES)) for half in ("", "0.", "1.")
)
STORED_FOR = "float8_e4m3fn"

# Headroom against saturation. fp8 is as exact at half the range, int8 is not.
_HEADROOM = {"float8_e4m3fn": 2.0, "float8_e5m2": 2.0, "int8": 1.0}
# Exclusive limit of magnitudes: a product of two such numbers is beyond float32.
BEYOND = 1e30
_TINY = np.finfo(np.float32).tiny
_LARGEST_KEYS, _LARGEST_VALUES = "largest_keys", "largest_values"


class KVScales(NamedTuple):
    """Scales of cached keys and values of all layers of a model, f32[layers, K] each; rows of layers without pages are
    meaningless.

    v: None if values lie in keys.
    """

    k: np.ndarray
    v: np.ndarray | None

    def of_layers(self, layers: list[int]) -> KVScales:
        """Return the scales of the layers with these numbers, in this order."""
        return self.each(lambda kind: kind[layers])

    def each(self, made: Callable[[np.ndarray], np.ndarray]) -> KVScales:
        """Return the KVScales after applying a function to the scales of keys, and to those of values if there are
        any.
        """
        return KVScales(made(self.k), None if self.v is None else made(self.v))


def scales_for(largest: np.ndarray, dtype: str) -> np.ndarray:
    """Return scales, f32, with which magnitudes up to `largest` [layers, K] fit into codes of `dtype`, one of
    _HEADROOM: `largest` / _codes(dtype).

    A scale is 1 if all numbers were zero, or so small that devices would flush the scale to 0 and divide by it.
    """
    scales = (largest.astype(np.float64) / _codes(dtype)).astype(np.float32)
    return np.where(scales >= _TINY, scales, np.float32(1))


def largest_for(scales: np.ndarray, dtype: str) -> np.ndarray:
    """Return magnitudes, f64, from which `scales_for` computes `scales`, bit for bit, if these are normal numbers."""
    return scales.astype(np.float64) * _codes(dtype)


def _codes(dtype: str) -> float:
    """Return the ratio of the largest magnitude to its scale, for codes of this dtype: the largest code / _HEADROOM."""
    most = 127.0 if dtype == "int8" else float(jnp.finfo(dtype).max)
    return most / _HEADROOM[dtype]


class KVShape(NamedTuple):
    """Layers and heads of a model that have scales.

    Attributes:
      num_layers: number of layers of the full model.
      paged: numbers of the layers with pages.
      num_heads: number of kv heads of a layer.
      values_in_keys: whether values are parts of keys, and have no scales of their own.
      stored: the checkpoint's number of each layer; several have the same one, and so its scales, where a layer of the
        checkpoint runs several times. Empty if each has its own number.
    """

    num_layers: int
    paged: tuple[int, ...]
    num_heads: int
    values_in_keys: bool
    stored: tuple[int, ...] = ()

    def stored_layer(self, layer: int) -> int:
        """Return the checkpoint's number of layer number `layer`."""
        return self.stored[layer] if self.stored else layer


def to_object(largest: KVScales) -> dict[str, Any]:
    """Return the largest magnitudes as a JSON object: for keys and, if `v` is not None, values a list of heads
    for each layer.
    """
    values = {} if largest.v is None else {_LARGEST_VALUES: largest.v.tolist()}
    return {_LARGEST_KEYS: largest.k.tolist()} | values


def of_object(content: dict[str, Any], shape: KVShape) -> KVScales:
    """Return the largest magnitudes, f64, from a result of `to_object`.

    shape: layers and heads of the model. Raises ValueError for anything else, with a text that states what a file of
    this model must have.
    """
    names = [_LARGEST_KEYS, *([] if shape.values_in_keys else [_LARGEST_VALUES])]
    kinds = [_numbers(content.get(name), shape) for name in names]
    if content.keys() != set(names) or any(kind is None for kind in kinds):
        raise ValueError(f"{' and '.join(names)} of {shape.num_heads} heads in {shape.num_layers} layers")
    k, *v = (kind for kind in kinds if kind is not None)
    return KVScales(k, v[0] if v else None)


def _numbers(rows: Any, shape: KVShape) -> np.ndarray | None:
    """Return magnitudes, numbers from 0 to below BEYOND, as f64[layers, K]; None for anything else."""
    if not isinstance(rows, list) or len(rows) != shape.num_layers:
        return None
    for row in rows:
        numbers = isinstance(row, list) and len(row) == shape.num_heads and {*map(type, row)} <= {int, float}
        if not numbers or not all(0 <= number < BEYOND for number in row):
            return None
    return np.array(rows, np.float64)


def read_scales(source: WeightSource, shape: KVShape) -> KVScales | None:
    """Return the checkpoint's scales, for codes of STORED_FOR; None if no layer has any. `source` has the model's
    names.

    Raises ModelFileError if only some layers have scales, or only keys or values, and for invalid ones.
    """
    names = set(source.names())
    kinds = [_OF_KEYS, *([] if shape.values_in_keys else [_OF_VALUES])]
    found = [_read_kind(source, names, kind, shape) for kind in kinds]
    if all(scales is None for scales in found):
        return None
    for kind, scales in zip(kinds, found, strict=True):
        if scales is None:
            text = "a scale of cached keys and values is missing, though the checkpoint has others"
            raise ModelFileError(source.path, text, _name(shape.stored_layer(shape.paged[0]), kind[0]))
    k, *v = (scales for scales in found if scales is not None)
    return KVScales(k, v[0] if v else None)


def _read_kind(source: WeightSource, names: set[str], kind: tuple[str, ...], shape: KVShape) -> np.ndarray | None:
    """Return the scales of keys or of values, f32[layers, K], 1 for layers without pages; None if no layer has any. Of
    several names of a layer's scale the first of `kind` counts; one number holds for all heads. Raises ModelFileError
    if only some layers with pages have one, and for invalid ones.

    names: all names of the source. kind: names of a layer's scale, _OF_KEYS or _OF_VALUES.
    """
    stored = {}
    for layer in shape.paged:
        number = shape.stored_layer(layer)
        own = (name for each in kind for name in (_name(number, each), _paired(number, each)))
        stored[layer] = [name for name in own if name in names]
    if not any(stored.values()):
        return None
    scales = np.ones((shape.num_layers, shape.num_heads), np.float32)
    for layer, candidates in stored.items():
        if not candidates:
            text = "a scale of cached keys and values is missing, though other layers have theirs"
            raise ModelFileError(source.path, text, _name(shape.stored_layer(layer), kind[0]))
        values = source.read(candidates[0]).astype(np.float32).ravel()
        if values.size not in (1, shape.num_heads):
            text = f"must hold one scale or one for each of {shape.num_heads} kv heads, got {values.size}"
            raise ModelFileError(source.path, text, candidates[0])
        if not ((values >= _TINY) & (largest_for(values, STORED_FOR) < BEYOND)).all():
            text = "must hold finite scales above 0 that float32 can multiply with"
            raise ModelFileError(source.path, text, candidates[0])
        scales[layer] = values
    return scales


def _name(layer: int, end: str) -> str:
    """Return the full name of a layer's scale with the last part `end`."""
    return f"model.layers.{layer}.self_attn.{end}"


def _paired(layer: int, end: str) -> str:
    """Return the full name of a layer's scale with the last part `end` in a checkpoint that numbers pairs of layers."""
    return numbered(f"model.layers.{{pair}}.self_attn.{{half}}.{end}", layer)
