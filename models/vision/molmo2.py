"""Vision tower of Molmo 2 (Clark et al. 2026): a vision transformer over overlapping crops, and one query for each
window of neighbouring patches, their mean, which attends to them.

Further shape letters: P patches, R windows, C the most patches of a window, E elements of a patch's hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import SHARES
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.params.declare import Source
from jaxengine.models.vision.base.layers import tower_axis
from jaxengine.models.vision.base.vit import (
    VitLayer,
    VitNames,
    VitTowerConfig,
    heads_of,
    linear,
    read_vit,
    run_layers,
    table,
)
from jaxengine.models.vision.llava import PROJECTOR, TOWER

# C: those of three by three, as published processors cut videos.
MOST_POOLED = 9
_POOLING, _MLP = f"{PROJECTOR}.image_pooling_2d", f"{PROJECTOR}.image_projector"
# transformers' defaults of fields that a file lacks.
_HEADS: dict[str, Any] = {
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "attention_bias": True,
}
_VISION: dict[str, Any] = _HEADS | {
    "intermediate_size": 4304,
    "num_hidden_layers": 25,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "image_size": [378, 378],
    "patch_size": 14,
}
_ADAPTER: dict[str, Any] = _HEADS | {
    "vision_feature_layer": [24, 18],
    "hidden_act": "silu",
    "intermediate_size": 18944,
    "text_hidden_size": 3584,
    "mlp_bias": False,
}
# Names of published files -> those of transformers' classes.
_SPELLED = {
    "image_default_input_size": "image_size",
    "image_patch_size": "patch_size",
    "image_num_pos": "num_position_embeddings",
    "vit_layers": "vision_feature_layer",
}


@dataclass(frozen=True, kw_only=True)
class Molmo2TowerConfig(VitTowerConfig):
    """Sizes of the tower. A unit is a crop.

    Attributes:
      layers: for each of the hidden states that are read, side by side, the number of layers before it.
      pooling: sizes of the attention to windows; its `hidden_size` is that of its result.
      mlp_bias: whether gate and up of the MLP after it have biases.
    """

    layers: tuple[int, ...]
    pooling: PoolingConfig
    mlp_bias: bool

    @property
    def unused(self) -> tuple[str, ...]:
        return self.unused_layers(f"{TOWER}.layers", max(self.layers))

    def make(self, hidden_size: int, build: Build) -> Molmo2Tower:
        return Molmo2Tower(self, hidden_size, build)


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """Sizes of the attention to windows of patches, and of the MLP after it. bias: whether its projections have
    biases. activation: a name of jaxengine.models.layers.base.activations.ACTIVATIONS.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool
    intermediate_size: int
    activation: str


def read_molmo2_tower(fields: ConfigFields, hidden_size: int) -> Molmo2TowerConfig:
    """Return the tower's configuration from a config.json, in which null stands for transformers' defaults: sizes of
    the layers from `vision_config` or, as published, `vit_config`, those of what follows, and the hidden states that
    are read (`vision_feature_layer`), from `adapter_config`. hidden_size: the text model's.

    Raises ModelConfigError for wrong fields, for a `num_position_embeddings` other than the number of patches, for
    heads of keys that do not divide those of queries, and for sizes of the adapter that differ from those of the tower
    and of the text model.
    """
    vision = _part(fields, "vision_config" if fields.has("vision_config") else "vit_config", _VISION)
    adapter = _part(fields, "adapter_config", _ADAPTER)
    bias, heads = vision.boolean("attention_bias"), _num_kv_heads(vision)
    own = {"head_dim": vision.integer("head_dim"), "num_kv_heads": heads, "qkv_bias": bias, "out_bias": bias}
    vit = read_vit(vision, **own)
    if vision.integer("num_position_embeddings", vit.num_patches) != vit.num_patches:
        raise vision.fail("num_position_embeddings", f"{vit.num_patches}, the patches of a square of image_size")
    for name, wanted, of in (("hidden_size", vit.hidden_size, "tower"), ("text_hidden_size", hidden_size, "text")):
        if adapter.integer(name) != wanted:
            raise adapter.fail(name, f"{wanted}, the hidden_size of the {of}")
    return Molmo2TowerConfig(
        num_features=vit.num_features,
        columns=tuple(f"pooled_{number}" for number in range(MOST_POOLED)),
        merge=_merge(vit.grid),
        unit=vit.num_patches,
        attends_both_ways=True,
        attends_across=True,
        adds=True,
        vit=vit,
        layers=read_layers(adapter, "vision_feature_layer", adapter.value("vision_feature_layer"), vit.num_layers),
        pooling=PoolingConfig(
            hidden_size=vit.hidden_size,
            num_heads=adapter.integer("num_attention_heads"),
            num_kv_heads=_num_kv_heads(adapter),
            head_dim=adapter.integer("head_dim"),
            bias=adapter.boolean("attention_bias"),
            intermediate_size=adapter.integer("intermediate_size"),
            activation=read_activation(adapter),
        ),
        mlp_bias=adapter.boolean("mlp_bias"),
    )


def _part(fields: ConfigFields, name: str, defaults: Mapping[str, Any]) -> ConfigFields:
    """Return the fields of the mapping `name` under the names of transformers' class, those of published files first,
    with `defaults` for absent and null ones. Raises ModelConfigError for anything but a mapping, absent or null.
    """
    given = fields.mapping(name) or {}
    given = {**given, **{usual: given[own] for own, usual in _SPELLED.items() if own in given}}
    kept = {key: value for key, value in given.items() if value is not None}
    return ConfigFields({name: kept}).part_or_empty(name, **defaults)


def _num_kv_heads(part: ConfigFields) -> int:
    """Return `num_key_value_heads`. Raises ModelConfigError unless it divides `num_attention_heads`."""
    heads, found = part.integer("num_attention_heads"), part.integer("num_key_value_heads")
    if heads % found:
        raise part.fail("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    return found


def read_layers(fields: ConfigFields, name: str, listed: Any, count: int) -> tuple[int, ...]:
    """Return, for each layer of `listed`, the value of the field `name`, the number of layers up to and with it;
    negative ones count from the last of `count`. Raises ModelConfigError for anything but a list of one to 64 layers.
    """
    right = isinstance(listed, list) and 1 <= len(listed) <= 64
    if not right or any(type(layer) is not int or not -count <= layer < count for layer in listed):
        raise fields.fail(name, f"a list of 1 to 64 layers from {-count} to {count - 1}")
    return tuple(layer % count + 1 for layer in listed)


def _merge(grid: int) -> int:
    """Return the number of patches for which the tower has one row: the largest that divides a unit of grid x grid
    patches and leaves a row for each window of two by two patches.
    """
    unit, windows = grid**2, (-(-grid // 2)) ** 2
    return max(each for each in range(1, unit + 1) if unit % each == 0 and unit // each >= windows)


class Molmo2Tower(nnx.Module):
    """Vision tower of Molmo 2.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [R, D], R = P / merge. The columns of every
    merge-th patch are those of a window: for each of its patches the patch's number minus that of this first one, plus
    SHARES; -1 for none. A window without patches gets some row.
    """

    def __init__(self, config: Molmo2TowerConfig, hidden_size: int, build: Build):
        vit, names = config.vit, VitNames(f"{TOWER}.layers", out="o_proj")
        self.config = config
        source = f"{TOWER}.patch_embedding"
        bias = not vit.has_class_token  # as in SigLIP and CLIP
        self.patches = linear(vit.num_features, source, vit.hidden_size, ("embed", "embed"), build, bias=bias)
        self.dtype = build.dtype
        self.positions = table(vit.num_positions, vit.hidden_size, f"{TOWER}.positional_embedding", build)
        numbers = range(max(config.layers))
        self.layers = nnx.List([VitLayer(vit, f"{names.layers}.{number}", names, build) for number in numbers])
        self.pooling = WindowPooling(config, build)
        inner, bias = config.pooling.intermediate_size, config.mlp_bias
        gate_up = tuple(Source(f"{_MLP}.{name}_proj", inner) for name in ("gate", "up"))
        axes = ("embed", tower_axis("ffn", build))
        self.gate_up = Linear(config.pooling.hidden_size, gate_up, axes=axes, bias=bias, build=build)
        self.down = linear(inner, f"{_MLP}.down_proj", hidden_size, ("ffn", "embed"), build, bias=False)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        with jax.named_scope("patches"):
            # The checkpoint's patches are pixel by pixel.
            by_pixel = patches.reshape(len(patches), 3, -1).swapaxes(1, 2).reshape(patches.shape)
            x = self.placed(self.patches(by_pixel.astype(self.dtype)))
        states = run_layers(self.layers, x.reshape(-1, x.shape[-1]), len(x), self.config.layers)
        with jax.named_scope("projector"):
            x = self.pooled(jnp.concatenate(states, axis=-1), columns)
            gate, up = jnp.split(self.gate_up(x, out_dtype=jnp.float32), 2, axis=-1)
            return self.down((ACTIVATIONS[self.config.pooling.activation](gate) * up).astype(x.dtype))

    def placed(self, x: jax.Array) -> jax.Array:
        """Return the embeddings of patches [P, D'] with those of their positions added, by unit: [U, S, D']."""
        return x.reshape(-1, self.config.vit.num_patches, x.shape[1]) + self.positions[...]

    def pooled(self, states: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the attention output [R, D'] of each window's mean state to the states of its patches. states: [U * S,
        E]. columns: i32[C, P], those of the tower's call.
        """
        given, merge = columns[:, :: self.config.merge].T, self.config.merge
        rows, is_key = jnp.arange(len(given), dtype=jnp.int32)[:, None] * merge, given >= 0
        index = jnp.where(is_key, rows + given - SHARES, 0)  # [R, C]
        counts = jnp.maximum(jnp.sum(is_key, axis=1, dtype=jnp.float32), 1.0)
        total = jnp.zeros((len(given), states.shape[1]), jnp.float32)
        for place in range(index.shape[1]):
            total += jnp.where(is_key[:, place, None], states[index[:, place]], 0).astype(jnp.float32)
        means = (total / counts[:, None]).astype(states.dtype)
        return self.pooling(means, self.pooling.kv(states)[index], is_key)


class WindowPooling(nnx.Module):
    """Attention of a query for each window, the mean of its patches, to these patches."""

    def __init__(self, config: Molmo2TowerConfig, build: Build):
        own, in_size = config.pooling, config.vit.hidden_size * len(config.layers)
        self.head_dim = own.head_dim
        q, *kv = heads_of(_POOLING, own.num_heads, own.num_kv_heads, own.head_dim)
        axes = ("embed", tower_axis("heads", build))
        self.q, self.kv = (Linear(in_size, each, axes=axes, bias=own.bias, build=build) for each in ((q,), kv))
        inner, axes = own.num_heads * own.head_dim, ("heads", "embed")
        self.out = linear(inner, f"{_POOLING}.o_proj", own.hidden_size, axes, build, bias=own.bias)

    def __call__(self, means: jax.Array, kv: jax.Array, is_key: jax.Array) -> jax.Array:
        """Return the attention output [R, D'] for the windows' mean states [R, E], their patches' keys and values
        [R, C, 2 * N * H], and which of these count, bool[R, C].
        """
        q = self.q(means).reshape(len(means), -1, self.head_dim)
        k, v = jnp.split(kv.reshape(*kv.shape[:2], -1, self.head_dim), 2, axis=2)
        scores = jnp.einsum("rnh,rcnh->rnc", q, k, preferred_element_type=jnp.float32) * self.head_dim**-0.5
        # Not -inf: padding has no key at all.
        weights = jax.nn.softmax(jnp.where(is_key[:, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
        o = jnp.einsum("rnc,rcnh->rnh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return self.out(o.astype(means.dtype).reshape(len(means), -1))
