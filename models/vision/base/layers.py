"""Parts of vision towers: patch embedding, attention and MLPs that devices may share, rotation by patch positions.

Names of tensors hold "{layer}", which stands for a layer's number in its tower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TOWER
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import gelu
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.layers.base.rope import apply_rope
from jaxengine.models.params.declare import Source, parts_of
from jaxengine.models.quantization.registry import PLAIN

# Function of (q, k, v), each [P, N, H], that returns the attention output [P, N, H].
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def tower_axis(axis: str, build: Build) -> str:
    """Return `axis`, the logical axis by which a tower's weight is split; or "embed", which is never split, if each
    device has the whole tower (build.whole_parts).
    """
    return "embed" if TOWER in build.whole_parts else axis


def in_blocks(function: Callable[[jax.Array], jax.Array], x: jax.Array, most: int) -> jax.Array:
    """Return function(x), [T, E] for x [T, D], computed for at most `most` rows at a time. function: maps each row by
    itself, whatever the number of rows; blocks are equal, and rows of zeros fill the last one.
    """
    count = -(-len(x) // most)
    if count <= 1:
        return function(x)
    rows = -(-len(x) // count)
    blocks = jnp.pad(x, ((0, count * rows - len(x)), (0, 0))).reshape(count, rows, -1)
    return lax.map(function, blocks).reshape(count * rows, -1)[: len(x)]


def in_turn(layers: Any, x: jax.Array, *more: Any, name: str = "layer") -> jax.Array:
    """Return x after each of `layers` in turn, called with `more`, too. name: of their scopes, before their numbers."""
    for index, layer in enumerate(layers):
        with jax.named_scope(f"{name}_{index}"):
            x = layer(x, *more)
    return x


# Parameter `a` of the interpolation by cubic convolution (Keys 1981); torch has the same.
_KEYS = -0.75


def rope_frequencies(size: int, theta: float) -> np.ndarray:
    """Return the radians per position of the size / 2 pairs of `size` elements, f64[size / 2]: theta ** (-2 i / size)
    for pair i.
    """
    return theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)


def read_axial_theta(vision: ConfigFields, default: float = 10000.0) -> float:
    """Return the base of a tower's rotary frequencies: `rope_theta` of `rope_parameters`, or of `rope_scaling`,
    otherwise that of the vision_config itself, otherwise `default`. Raises ModelConfigError for wrong fields, and for
    scaled frequencies.
    """
    name = "rope_parameters" if vision.mapping("rope_parameters") else "rope_scaling"
    rope = ConfigFields(vision.mapping(name) or {})
    if (rope.text("rope_type", None) or rope.text("type", "axial")) not in ("axial", "default"):
        raise vision.fail(name, 'a mapping with the rope_type "axial" or "default"')
    return rope.number("rope_theta", None) or vision.number("rope_theta", default)


def axial_rope(
    rows: jax.Array, columns: jax.Array, row_freqs: np.ndarray, column_freqs: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin of the rotation angles, f32[P, H / 2] each, of patches at rows and columns i32[P].

    row_freqs, column_freqs: radians per position, H / 2 together. The first pairs, as many as there are `row_freqs`,
    rotate by the row, and the rest by the column.
    """
    turned = zip((rows, columns), (row_freqs, column_freqs), strict=True)
    angles = jnp.concatenate(
        [place.astype(jnp.float32)[:, None] * freqs.astype(np.float32) for place, freqs in turned], 1
    )
    return jnp.cos(angles), jnp.sin(angles)


def stretched(
    table: jax.Array,
    sides: tuple[int, int],
    rows: tuple[jax.Array, jax.Array],
    columns: tuple[jax.Array, jax.Array],
    *,
    linear: bool = False,
    fading: bool = False,
) -> jax.Array:
    """Return learned positions interpolated to images of other sizes, f32[P, D], by cubic convolution of 4 x 4 table
    entries, or linearly between 2 x 2.

    Args:
      table: [height * width, D].
      sides: (height, width) of the table.
      rows, columns: of each patch, its index i32[P], and the number of rows or columns of its image, i32[P] or f32[P].
      linear: whether to interpolate linearly.
      fading: with `linear`, whether positions beyond an edge of the table count as zeros, instead of as that at the
        edge.
    """
    height, width = sides
    taps = partial(_linear_taps, fading=fading) if linear else _taps
    total = jnp.zeros((len(rows[0]), table.shape[1]), jnp.float32)
    for row, row_share in taps(*rows, height):
        for column, share in taps(*columns, width):
            total += table[row * width + column].astype(jnp.float32) * (row_share * share)[:, None]
    return total


def _taps(places: jax.Array, sizes: jax.Array, side: int) -> list[tuple[jax.Array, jax.Array]]:
    """Return the four of `side` learned positions around each of `places`, with their weights in cubic convolution
    (Keys 1981, a = _KEYS): four pairs (i32[P], f32[P]).

    places: i32[P], indices of patches along a side of `sizes` i32[P] patches. Beyond an edge, the position at the edge
    is repeated.
    """
    spot = _spots(places, sizes, side)
    low = jnp.floor(spot)
    taps = []
    for offset in range(-1, 3):
        far = jnp.abs(spot - low - offset)
        near_share = ((_KEYS + 2) * far - (_KEYS + 3)) * far * far + 1
        far_share = ((_KEYS * far - 5 * _KEYS) * far + 8 * _KEYS) * far - 4 * _KEYS
        tap = jnp.clip(low.astype(jnp.int32) + offset, 0, side - 1)
        taps.append((tap, jnp.where(far <= 1, near_share, far_share)))
    return taps


def _linear_taps(places: jax.Array, sizes: jax.Array, side: int, *, fading: bool) -> list[tuple[jax.Array, jax.Array]]:
    """Return the two of `side` learned positions around each of `places`, with their weights in linear interpolation:
    two pairs (i32[P], f32[P]).

    places: i32[P], indices of patches along a side of `sizes` i32[P] patches. Beyond an edge, the position at the edge
    is repeated, or with `fading` has the weight 0.
    """
    spot = _spots(places, sizes, side)
    low = jnp.floor(spot)
    first = low.astype(jnp.int32)
    shares = (first, 1 - (spot - low)), (first + 1, spot - low)
    if fading:
        shares = [(tap, jnp.where((tap >= 0) & (tap < side), share, 0.0)) for tap, share in shares]
    return [(jnp.clip(tap, 0, side - 1), share) for tap, share in shares]


def _spots(places: jax.Array, sizes: jax.Array, side: int) -> jax.Array:
    """Return the centre of each patch in units of the `side` learned positions, f32[P]: (p + 0.5) * side / size - 0.5
    for index p.

    places, sizes: the patches' indices, i32[P], and the number of patches along their side, i32[P] or f32[P]; a size
    below 1 counts as 1.
    """
    return (places.astype(jnp.float32) + 0.5) * side / jnp.maximum(sizes, 1).astype(jnp.float32) - 0.5


class PatchEmbedding(nnx.Module):
    """Projection of patches f32[P, F] to rows [P, D] in the model's dtype: a convolution whose stride is its width,
    hence a product.

    Its weight, [D, channels, ...] in checkpoints, is read with the axes of F joined (CheckpointNames.flattened). It is
    never quantised.
    """

    def __init__(self, num_features: int, size: int, *, source: str, bias: bool, build: Build):
        plain = replace(build, scheme=PLAIN)
        self.proj = Linear(num_features, (Source(source, size),), axes=("embed", "embed"), bias=bias, build=plain)
        self.dtype = build.dtype

    def __call__(self, patches: jax.Array) -> jax.Array:
        return self.proj(patches.astype(self.dtype))


class TowerAttention(nnx.Module):
    """Attention of patches with each other.

    Args:
      qkv: the checkpoint modules of q, k and v. Those of k and v may have fewer heads, each for as many neighbouring
        heads of q.
      out: checkpoint module of the output projection.
      bias, out_bias: whether the projections have biases.
      interleaved: whether rope rotates neighbouring elements, instead of halves of a head.
      norms: norms over each head of q and of k, before rope; None without.
      inner: elements of all heads; None for `size`.
    """

    def __init__(
        self,
        size: int,
        num_heads: int,
        *,
        qkv: Sequence[Source],
        out: str,
        build: Build,
        bias: bool = True,
        out_bias: bool = True,
        interleaved: bool = False,
        norms: tuple[nnx.Module | None, nnx.Module | None] = (None, None),
        inner: int | None = None,
    ):
        self.interleaved = interleaved
        self.q_norm, self.k_norm = norms
        inner = inner or size
        self.head_dim = inner // num_heads
        heads = tower_axis("heads", build)
        parts = tuple(part._replace(group=self.head_dim) for part in qkv)
        self.group = parts[0].rows // parts[1].rows  # heads of q for each of k and v
        self.qkv = Linear(size, parts, axes=("embed", heads), bias=bias, build=build)
        self.out = Linear(inner, (Source(out, size),), axes=(heads, "embed"), bias=out_bias, build=build)

    def __call__(self, x: jax.Array, turns: tuple[jax.Array, jax.Array] | None, attend: Attend) -> jax.Array:
        """Return out(attend(q, k, v)) for x [P, D], [P, D], with q and k normed and rotated.

        turns: cos and sin of the patches, arguments of `apply_rope`; None for no rotation. attend: function of (q, k,
        v), [P, N, H] each, that returns [P, N, H].
        """
        with jax.named_scope("qkv"):
            heads = self.qkv(x).reshape(x.shape[0], -1, self.head_dim)
            # On several devices each has an equal part of the heads of q, k and v.
            num_kv = heads.shape[1] // (self.group + 2)
            q, k, v = jnp.split(heads, (self.group * num_kv, (self.group + 1) * num_kv), axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if turns is not None:
            with jax.named_scope("rope"):
                q, k = (apply_rope(each, *turns, interleaved=self.interleaved) for each in (q, k))
        if self.group > 1:
            k, v = (jnp.repeat(each, self.group, axis=1) for each in (k, v))
        with jax.named_scope("attend"):
            o = attend(q, k, v)
        with jax.named_scope("out"):
            return self.out(o.reshape(x.shape[0], -1))


class TowerMLP(nnx.Module):
    """MLP down(activation(up(x))), or down(activation(gate(x)) * up(x)) if `up` names two modules, the gate first."""

    def __init__(
        self,
        size: int,
        ffn_size: int,
        *,
        up: Sequence[str],
        down: str,
        activation: Callable[[jax.Array], jax.Array],
        build: Build,
        bias: bool = True,
    ):
        ffn = tower_axis("ffn", build)
        sources = tuple(Source(name, ffn_size) for name in up)
        self.up = Linear(size, sources, axes=("embed", ffn), bias=bias, build=build)
        self.down = Linear(ffn_size, (Source(down, size),), axes=(ffn, "embed"), bias=bias, build=build)
        self.activation = activation
        self.gated = len(sources) > 1

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return down(activation(up(x))), or down(activation(gate(x)) * up(x)) with a gate, for x [P, D]: [P, D], with
        the activation in float32.
        """
        inner = self.up(x)
        if self.gated:
            gate, up = (part.astype(jnp.float32) for part in jnp.split(inner, 2, axis=-1))
            return self.down((self.activation(gate) * up).astype(x.dtype))
        return self.down(self.activation(inner.astype(jnp.float32)).astype(x.dtype))


class TowerLayer(nnx.Module):
    """Layer that computes x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, norms: tuple[nnx.Module, nnx.Module], attention: TowerAttention, mlp: TowerMLP):
        self.norm1, self.norm2 = norms
        self.attention = attention
        self.mlp = mlp

    def __call__(self, x: jax.Array, turns: tuple[jax.Array, jax.Array] | None, attend: Attend) -> jax.Array:
        with jax.named_scope("attention"):
            x = x + self.attention(self.norm1(x), turns, attend)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.norm2(x))


def plain_layer(
    sizes: Any,
    source: str,
    build: Build,
    *,
    eps: float,
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2"),
    attention: tuple[str, str] = ("self_attn", "out_proj"),
    mlp: tuple[str, str] = ("mlp.fc1", "mlp.fc2"),
) -> TowerLayer:
    """Return a layer with layer norms, an MLP of two matrices and biases everywhere; the default names are SigLIP's.

    sizes: has hidden_size, intermediate_size, num_heads and activation (a name of ACTIVATIONS). source: checkpoint
    module of the layer. eps: of the norms. norms, mlp: the layer's modules. attention: the module, and its output
    projection.
    """
    size, module = sizes.hidden_size, f"{source}.{attention[0]}"
    first, second = (LayerNorm(size, eps, source=f"{source}.{name}", build=build) for name in norms)
    qkv = [Source(f"{module}.{name}_proj", size) for name in "qkv"]
    up, down = (f"{source}.{name}" for name in mlp)
    inner, activation = sizes.intermediate_size, ACTIVATIONS[sizes.activation]
    return TowerLayer(
        (first, second),
        TowerAttention(size, sizes.num_heads, qkv=qkv, out=f"{module}.{attention[1]}", build=build),
        TowerMLP(size, inner, up=[up], down=down, activation=activation, build=build),
    )


class PatchMerger(nnx.Module):
    """Merger of `merge` neighbouring patches to one row of the model: a norm, then two products with an activation, by
    default GELU, between them (Qwen2-VL).

    norm: norm of each patch, or, if `joined`, of all `merge` patches at once; None for none. names: modules of the two
    products.
    ffn_size: outputs of the first product; None for merge * size. bias: whether the products have biases.
    """

    def __init__(
        self,
        size: int,
        merge: int,
        out_size: int,
        *,
        norm: nnx.Module | None,
        joined: bool,
        names: tuple[str, str],
        build: Build,
        ffn_size: int | None = None,
        activation: Callable[[jax.Array], jax.Array] = gelu,
        bias: bool = True,
    ):
        width, ffn = size * merge, tower_axis("ffn", build)
        inner, (first, second) = ffn_size or width, names
        self.norm, self.joined, self.width, self.activation = norm, joined, width, activation
        self.up = Linear(width, (Source(first, inner),), axes=("embed", ffn), bias=bias, build=build)
        self.down = Linear(inner, (Source(second, out_size),), axes=(ffn, "embed"), bias=bias, build=build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the merged rows [P / merge, D of the model] of patches x [P, D of the tower]: down(activation(up(y))),
        where y is `merge` normed patches side by side.
        """
        if self.norm is not None:
            x = self.norm(x.reshape(-1, self.width) if self.joined else x)
        x = x.reshape(-1, self.width)
        return self.down(self.activation(self.up(x).astype(jnp.float32)).astype(x.dtype))


def joined_qkv(name: str, size: int) -> tuple[Source, ...]:
    """Return the sources of q, k and v of a module that has all three, one after the other, in this order.

    name: the checkpoint's module. size: number of rows of each.
    """
    return parts_of(name, size, size, size)
