"""Vision transformer over units, which are images or tiles of them with equally many patches (Dosovitskiy et al. 2021,
arXiv:2010.11929), as in CLIP (Radford et al. 2021), SigLIP (Zhai et al. 2023) and InternVL.

Further shape letters: U units, S positions of a unit, P patches of all units, F numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.vision.base.layers import tower_axis

MAX_SIDE = 4096  # pixels of a unit
# Most positions of a unit whose queries meet all keys at once.
_QUERIES = 1152


@dataclass(frozen=True, kw_only=True)
class VitConfig:
    """Sizes of a vision transformer.

    Attributes:
      num_layers: layers of the checkpoint.
      image_size, patch_size: side in pixels of a unit, and of a patch; both are squares.
      has_class_token: whether a unit has a position that is not a patch: the first, in Llama 4 the last.
      qkv_bias, out_bias: whether the projections of q, k and v, and that after attention, have biases in layers of
        VitLayer.
      head_dim: elements of a head; None for hidden_size / num_heads.
      num_kv_heads: heads of keys and values, which num_heads is a multiple of; None for num_heads.
      activation: a name of jaxengine.models.layers.base.activations.ACTIVATIONS.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    activation: str
    norm_eps: float
    has_class_token: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    head_dim: int | None = None
    num_kv_heads: int | None = None

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def grid(self) -> int:
        """Number of patches along a side of a unit."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """Number of patches of a unit."""
        return self.grid**2

    @property
    def num_positions(self) -> int:
        """S: the number of patches, plus one for a class token."""
        return self.num_patches + self.has_class_token

    @property
    def num_features(self) -> int:
        """F: red, green and blue of a patch's pixels, colour by colour, row by row."""
        return 3 * self.patch_size**2


@dataclass(frozen=True, kw_only=True)
class VitTowerConfig(TowerConfig):
    """Sizes of a tower of a vision transformer's layers.

    Attributes:
      vit: sizes of the layers, and of the learned positions.
    """

    vit: VitConfig

    @property
    def patch_size(self) -> int:
        """Pixels of a patch's side."""
        return self.vit.patch_size

    @property
    def temporal_patch_size(self) -> int:
        """Frames of a patch: 1."""
        return 1

    def unused_layers(self, prefix: str, used: int) -> tuple[str, ...]:
        """Return the beginnings of the names of tensors of layers from number `used` on: `prefix` and the number."""
        return tuple(f"{prefix}.{number}." for number in range(used, self.vit.num_layers))


def read_vit(vision: ConfigFields, **more: Any) -> VitConfig:
    """Return the sizes from a vision_config: `hidden_size`, `intermediate_size`, `num_hidden_layers`,
    `num_attention_heads`, `image_size`, `patch_size`, `hidden_act` (default: gelu) and `layer_norm_eps`, all but one
    required. more: further arguments of VitConfig.

    Raises ModelConfigError for wrong fields, for `num_channels` other than 3, and if the number of heads does not
    divide the hidden size, unless head_dim is given, or a unit is smaller than a patch.
    """
    vision.require(num_channels=3)
    size, heads = vision.integer("hidden_size"), vision.integer("num_attention_heads")
    if "head_dim" not in more and size % heads:
        raise vision.fail("num_attention_heads", f"a divisor of hidden_size {size}")
    image, patch = _side(vision, "image_size"), _side(vision, "patch_size")
    if image < patch:
        raise vision.fail("image_size", f">= patch_size {patch}")
    return VitConfig(
        hidden_size=size,
        intermediate_size=vision.integer("intermediate_size"),
        num_layers=vision.integer("num_hidden_layers"),
        num_heads=heads,
        image_size=image,
        patch_size=patch,
        activation=read_activation(vision, "hidden_act"),
        norm_eps=vision.number("layer_norm_eps"),
        **more,
    )


def _side(vision: ConfigFields, name: str) -> int:
    """Return the side of a square in pixels from the field `name`, which has one number or the same number twice.
    Raises ModelConfigError for two different values, and for one that is not from 1 to MAX_SIDE.
    """
    value = vision.value(name)
    sides = value if isinstance(value, (list, tuple)) else [value]
    if not 1 <= len(sides) <= 2 or any(type(side) is not int or not 1 <= side <= MAX_SIDE for side in sides):
        raise vision.fail(name, f"an integer >= 1 and <= {MAX_SIDE}, or two")
    if len(set(sides)) != 1:
        raise vision.fail(name, "the same for height and width")
    return sides[0]


def read_layer_index(fields: ConfigFields, index: Any, num_layers: int, name: str = "vision_feature_layer") -> int:
    """Return the number of layers before the hidden states that `index`, a value of the field `name`, selects.

    Negative indices count from the end: -1 is the last layer's output, -2 its input. Raises ModelConfigError unless it
    is an integer from -num_layers - 1 to num_layers.
    """
    if type(index) is not int or not -num_layers - 1 <= index <= num_layers:
        raise fields.fail(name, f"an integer from {-num_layers - 1} to {num_layers}")
    return index if index >= 0 else num_layers + 1 + index


def linear(
    in_size: int, source: str, out_size: int, axes: tuple[str, str], build: Build, *, bias: bool = True
) -> Linear:
    """Return a new product of a tower, in_size -> out_size, with the checkpoint module `source`. axes: logical axes of
    (in, out), which are not split if each device has the whole tower. bias: whether it has one.
    """
    split = (tower_axis(axes[0], build), tower_axis(axes[1], build))
    return Linear(in_size, (Source(source, out_size),), axes=split, bias=bias, build=build)


@dataclass(frozen=True)
class VitNames:
    """Checkpoint names of a layer's modules: `layers` is the prefix of the layer's number, and the others follow it."""

    layers: str
    attention_norm: str = "layer_norm1"
    mlp_norm: str = "layer_norm2"
    attention: str = "self_attn"
    out: str = "out_proj"


class VitAttention(nnx.Module):
    """Attention of each unit's positions to all of its positions.

    out: name within `source` of the output projection. qkv: the checkpoint modules of q, k and v; None for `q_proj`,
    `k_proj` and `v_proj` of `source`. bias, out_bias: presence of biases of these, and of the output's. qk_norms:
    norms, or rope, of q and k, [U * S, heads of this device, H] to the same shape; None for none.
    """

    def __init__(
        self,
        config: VitConfig,
        *,
        source: str,
        out: str,
        build: Build,
        bias: bool = True,
        out_bias: bool = True,
        qkv: tuple[Source, ...] | None = None,
        qk_norms: tuple[nnx.Module, nnx.Module] | None = None,
    ):
        size, inner = config.hidden_size, config.num_heads * config.head_size
        self.head_dim = config.head_size
        qkv = qkv or heads_of(source, config.num_heads, config.num_kv_heads or config.num_heads, self.head_dim)
        qkv = tuple(each._replace(group=self.head_dim) for each in qkv)
        heads = tower_axis("heads", build)
        self.qkv = Linear(size, qkv, axes=("embed", heads), bias=bias, build=build)
        self.out = linear(inner, f"{source}.{out}", size, ("heads", "embed"), build, bias=out_bias)
        self.q_norm, self.k_norm = qk_norms or (None, None)

    def __call__(self, x: jax.Array, num_units: int, is_key: jax.Array | None = None) -> jax.Array:
        """Return the attention output [U * S, D] of x [U * S, D] within each of the U = num_units units. is_key:
        bool[U, S], positions that are attended to; None for all.
        """
        q, k, v = jnp.split(self.qkv(x).reshape(len(x), -1, self.head_dim), 3, axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.reshape(num_units, -1, *each.shape[1:]) for each in (q, k, v))
        o = attend_units(q, k, v, is_key)
        return self.out(o.reshape(len(x), -1))


def heads_of(source: str, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Source, Source, Source]:
    """Return the checkpoint modules `q_proj`, `k_proj` and `v_proj` of `source`, with as many heads each: a head of
    keys or values is repeated for each head of queries that attends to it. num_kv_heads: a divisor of num_heads.
    """
    kv = {"rows": num_kv_heads * head_dim, "repeat": num_heads // num_kv_heads, "group": head_dim}
    q = Source(f"{source}.q_proj", num_heads * head_dim, group=head_dim)
    return q, Source(f"{source}.k_proj", **kv), Source(f"{source}.v_proj", **kv)


def attend_units(q: jax.Array, k: jax.Array, v: jax.Array, is_key: jax.Array | None = None) -> jax.Array:
    """Return the attention within each unit, softmax(q k^T / sqrt(H)) v, for [U, S, N, H] each, in the same shape.

    is_key: bool[U, S], positions that are attended to; None for all. A unit without any gets the mean of its values.
    """
    num_positions, head_dim = q.shape[1], q.shape[3]
    blocks = -(-num_positions // _QUERIES)
    rows = -(-num_positions // blocks)

    def block(queries: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array | None) -> jax.Array:
        scores = jnp.einsum("snh,tnh->nst", queries, keys, preferred_element_type=jnp.float32) * head_dim**-0.5
        if seen is not None:  # not -inf: padding may have no key at all
            scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        return jnp.einsum("nst,tnh->snh", weights, values, preferred_element_type=jnp.float32).astype(values.dtype)

    def unit(own: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        queries, keys, values, seen = own
        if blocks == 1:
            return block(queries, keys, values, seen)
        queries = jnp.pad(queries, ((0, blocks * rows - num_positions), (0, 0), (0, 0)))
        cut = queries.reshape(blocks, rows, *queries.shape[1:])
        o = lax.map(lambda part: block(part, keys, values, seen), cut)
        return o.reshape(blocks * rows, *o.shape[2:])[:num_positions]

    if len(q) == 1:
        return unit((q[0], k[0], v[0], None if is_key is None else is_key[0]))[None]
    return lax.map(unit, (q, k, v, is_key))


def read_by_queries(q: jax.Array, k: jax.Array, v: jax.Array, is_key: jax.Array) -> jax.Array:
    """Return the attention output [Q, N, H] of queries q [Q, N, H] to the keys and values [S, N, H] of which bool[S]
    are seen, with sums in float32. If none is, the output is the mean of the values.
    """
    scores = jnp.einsum("qnh,snh->nqs", q, k, preferred_element_type=jnp.float32) * q.shape[2] ** -0.5
    # Not -inf: padding may have no key at all.
    weights = jax.nn.softmax(jnp.where(is_key, scores, jnp.finfo(jnp.float32).min), axis=-1).astype(v.dtype)
    return jnp.einsum("nqs,snh->qnh", weights, v, preferred_element_type=jnp.float32).astype(v.dtype)


class VitMLP(nnx.Module):
    """MLP fc2(activation(fc1(x)))."""

    def __init__(self, config: VitConfig, *, source: str, build: Build):
        size, inner = config.hidden_size, config.intermediate_size
        self.fc1 = linear(size, f"{source}.fc1", inner, ("embed", "ffn"), build)
        self.fc2 = linear(inner, f"{source}.fc2", size, ("ffn", "embed"), build)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return fc2(activation(fc1(x))) for x [R, D]: [R, D], with the activation in float32."""
        return self.fc2(self.activation(self.fc1(x, out_dtype=jnp.float32)).astype(x.dtype))


class VitLayer(nnx.Module):
    """Layer that computes x + attention(norm(x)), then x + mlp(norm(x)). qk_norms: norms, or rope, of q and k."""

    def __init__(
        self,
        config: VitConfig,
        source: str,
        names: VitNames,
        build: Build,
        qk_norms: tuple[nnx.Module, nnx.Module] | None = None,
    ):
        size, eps = config.hidden_size, config.norm_eps
        self.attention_norm = LayerNorm(size, eps, source=f"{source}.{names.attention_norm}", build=build)
        options: dict[str, Any] = {"bias": config.qkv_bias, "out_bias": config.out_bias, "qk_norms": qk_norms}
        self.attention = VitAttention(
            config, source=f"{source}.{names.attention}", out=names.out, build=build, **options
        )
        self.mlp_norm = LayerNorm(size, eps, source=f"{source}.{names.mlp_norm}", build=build)
        self.mlp = VitMLP(config, source=f"{source}.mlp", build=build)

    def __call__(self, x: jax.Array, num_units: int, is_key: jax.Array | None = None) -> jax.Array:
        """Return x + attention(norm(x)), then x + mlp(norm(x)), for x [U * S, D] of U = num_units units, each of which
        attends to itself. is_key: bool[U, S], positions that are attended to; None for all.
        """
        with jax.named_scope("attention"):
            x = x + self.attention(self.attention_norm(x), num_units, is_key)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x))


def table(rows: int, size: int, source: str, build: Build, *, flat: bool = False) -> nnx.Param:
    """Return a new parameter for the tensor `source` of learned vectors, [rows, size]; with `flat`, [1, rows * size],
    for a tensor [1, ...].
    """
    shape = (1, rows * size) if flat else (rows, size)
    return declare(shape, build.dtype, ParamDecl((None, None), (Source(source, shape[0]),), init_std=0.02))


def vector(size: int, source: str, build: Build) -> nnx.Param:
    """Return a new parameter [size] for the tensor `source`, a learned vector."""
    return declare((size,), build.dtype, ParamDecl((None,), (Source(source, size),), init_std=0.02))


def run_layers(
    layers: Any, x: jax.Array, num_units: int, wanted: tuple[int, ...], is_key: jax.Array | None = None
) -> list[jax.Array]:
    """Run x [U * S, D] through `layers`; return the list of hidden states after the first n layers for each n of
    `wanted`, x itself for 0.

    is_key: bool[U, S], positions that are attended to, for layers that take it; None for all.
    """
    states, masks = {0: x}, () if is_key is None else (is_key,)
    for number, layer in enumerate(layers, 1):
        with jax.named_scope(f"layer_{number - 1}"):
            states[number] = x = layer(x, num_units, *masks)
    return [states[number] for number in wanted]


def joined_neighbours(x: jax.Array, grid: int, factor: int) -> jax.Array:
    """Return the hidden states of each square of factor x factor patches side by side, row by row ("pixel shuffle"):
    [P, D] to [P / factor**2, D * factor**2], for units of grid x grid patches.
    """
    side, size = grid // factor, x.shape[1]
    cut = x.reshape(-1, side, factor, side, factor, size).transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(-1, size * factor**2)


def read_deepstack(vision: ConfigFields, default: Sequence[int], num_layers: int) -> tuple[list[int], tuple[int, ...]]:
    """Return (`deepstack_visual_indexes` as given, by default `default`; those of these layers that are among the
    tower's num_layers, ascending and each once).

    Raises ModelConfigError for what is not a list of integers.
    """
    layers = vision.value("deepstack_visual_indexes", default)
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        raise vision.fail("deepstack_visual_indexes", "a list of layers")
    return layers, tuple(layer for layer in range(num_layers) if layer in layers)


def read_merge(fields: ConfigFields, name: str, factor: int, vit: VitConfig) -> int:
    """Return `factor`, the number of patches along a side of the square that becomes one row. Raises ModelConfigError,
    which names the field `name`, if it does not divide the number of patches along a unit's side.
    """
    if vit.grid % factor:
        raise fields.fail(name, f"such that it divides the {vit.grid} patches of a unit's side")
    return factor


def read_merge_ratio(fields: ConfigFields, name: str, vit: VitConfig) -> int:
    """Return the number of patches along a side of the square that becomes one row: one divided by the field `name`, 2
    if it is absent.

    Raises ModelConfigError if that is not an integer, or does not divide the number of patches along a unit's side.
    """
    ratio = fields.number(name, 0.5)
    if not 1 / MAX_SIDE <= ratio <= 1 or 1 / ratio != int(1 / ratio):
        raise fields.fail(name, "one divided by an integer")
    return read_merge(fields, name, int(1 / ratio), vit)
