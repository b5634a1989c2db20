"""Encoder of SAM (Kirillov et al. 2023, arXiv:2304.02643) as a part of vision towers, and the tower of GOT-OCR 2.0 (Wei
et al. 2024, arXiv:2409.01704), which it is with two convolutions.

Patches of a unit attend within windows, in some layers to the whole unit. What they add to scores for the distance of
rows and columns (Li et al. 2022, arXiv:2112.01526) follows from learned vectors and the query.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_INTERMEDIATE, ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.vision.base.layers import PatchEmbedding, in_turn, joined_qkv, tower_axis
from jaxengine.models.vision.base.vit import VitConfig, attend_units, linear, read_vit, table

TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
# Names of convolutions' kernels, which are matrices here, and of positions.
FLATTENED = tuple(
    f"{name}.weight" for name in (".projection", ".neck.conv1", ".neck.conv2", ".conv_upsampler1", ".conv_upsampler2")
) + (".pos_embed",)
# transformers' defaults of fields that a file lacks.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
# Epsilon of the norms after the layers.
_NECK_EPS = 1e-6
_MOST_WINDOW = 64
# Parameter `a` of cubic convolution (Keys 1981) that also shrinks; torch and Pillow have the same.
_KEYS = -0.5


@dataclass(frozen=True, kw_only=True)
class SamConfig:
    """Sizes of the encoder.

    Attributes:
      vit: sizes of its layers.
      window: rows and columns of patches of a window.
      whole_layers: indices of layers whose patches attend to their whole unit.
      out_size: output channels.
      qkv_bias: whether queries, keys and values have biases.
      has_positions: whether patches have learned positions.
      has_distances: whether scores have learned terms for distances.
    """

    vit: VitConfig
    window: int
    whole_layers: frozenset[int]
    out_size: int
    qkv_bias: bool
    has_positions: bool
    has_distances: bool


def read_sam(fields: ConfigFields, name: str, *, mlp_ratio: bool = False) -> SamConfig:
    """Return the encoder's configuration from the mapping `name` of `fields`. Layers in `global_attn_indexes` (default:
    2, 5, 8, 11) attend to whole units, and all do for a `window_size` (default: 14) of 0. `output_channels` is 256, and
    `qkv_bias`, `use_abs_pos` and `use_rel_pos` are true by default.

    mlp_ratio: whether the default of `mlp_dim` is the hidden size times the field `mlp_ratio`, instead of 3072. Raises
    ModelConfigError for wrong fields, for windows larger than _MOST_WINDOW, and for a side of a unit that is not a
    multiple of four patches, which convolutions merge into one.
    """
    vision = fields.part(name, **_DEFAULTS)
    inner = int(vision.integer("hidden_size") * vision.number("mlp_ratio", 4.0)) if mlp_ratio else 3072
    vit = replace(read_vit(vision), intermediate_size=_size(vision, "mlp_dim", inner))
    if vit.grid % 4:
        raise vision.fail("image_size", f"a multiple of 4 * patch_size = {4 * vit.patch_size}")
    whole = vision.value("global_attn_indexes", [2, 5, 8, 11])
    if not isinstance(whole, (list, tuple)) or any(type(layer) is not int for layer in whole):
        raise vision.fail("global_attn_indexes", "a list of layers")
    window = vision.integer("window_size", 14, minimum=0)
    if window > _MOST_WINDOW:
        raise vision.fail("window_size", f"0 to {_MOST_WINDOW}")
    layers = range(vit.num_layers)
    return SamConfig(
        vit=vit,
        window=window,
        whole_layers=frozenset(layer for layer in layers if layer in whole or not window),
        out_size=_size(vision, "output_channels", 256),
        qkv_bias=vision.boolean("qkv_bias", True),
        has_positions=vision.boolean("use_abs_pos", True),
        has_distances=vision.boolean("use_rel_pos", True),
    )


def _size(fields: ConfigFields, name: str, default: int) -> int:
    """Return the field `name`, an integer from 1 to MAX_INTERMEDIATE; `default` if it is absent. Raises
    ModelConfigError for wrong fields.
    """
    found = fields.integer(name, default)
    if found > MAX_INTERMEDIATE:
        raise fields.fail(name, f"1 to {MAX_INTERMEDIATE}")
    return found


class _Layer(nnx.Module):
    """Layer that computes x + attention(norm(x)), then x + mlp(norm(x)), over units [U, G, G, D] of G by G patches.

    source: prefix of its modules. is_whole: whether patches attend to their whole unit, instead of their window.
    """

    def __init__(self, config: SamConfig, source: str, build: Build, *, is_whole: bool):
        vit, attention = config.vit, f"{source}.attn"
        size, inner = vit.hidden_size, vit.intermediate_size
        self.head_dim, self.activation = size // vit.num_heads, ACTIVATIONS[vit.activation]
        self.is_whole, self.side = is_whole, vit.grid if is_whole else config.window
        qkv = tuple(part._replace(group=self.head_dim) for part in joined_qkv(f"{attention}.qkv", size))
        heads, bias = tower_axis("heads", build), config.qkv_bias
        self.attention_norm = LayerNorm(size, vit.norm_eps, source=f"{source}.layer_norm1", build=build)
        self.qkv = Linear(size, qkv, axes=("embed", heads), bias=bias, build=build)
        self.out = linear(size, f"{attention}.proj", size, ("heads", "embed"), build)
        rows, columns = (f"{attention}.rel_pos_{axis}" for axis in "hw")
        self.rows = self._distances(rows, build) if config.has_distances else None
        self.columns = self._distances(columns, build) if config.has_distances else None
        self.mlp_norm = LayerNorm(size, vit.norm_eps, source=f"{source}.layer_norm2", build=build)
        self.up = linear(size, f"{source}.mlp.lin1", inner, ("embed", "ffn"), build)
        self.down = linear(inner, f"{source}.mlp.lin2", size, ("ffn", "embed"), build)

    def _distances(self, source: str, build: Build) -> nnx.Param:
        """Return a new parameter for the vectors of distances from 1 - side to side - 1, [2 * side - 1, H]."""
        return table(2 * self.side - 1, self.head_dim, source, build)

    def __call__(self, x: jax.Array, sides: jax.Array | None = None) -> jax.Array:
        units, grid, _, size = x.shape
        with jax.named_scope("attention"):
            side, count = self.side, -(-grid // self.side)
            missing = count * side - grid
            # Windows at the end are filled with zeros, to which patches attend, too.
            y = jnp.pad(inside(self.attention_norm(x), sides), ((0, 0), (0, missing), (0, missing), (0, 0)))
            y = y.reshape(units, count, side, count, side, size).swapaxes(2, 3).reshape(-1, side, side, size)
            y = self._attend(y, sides if self.is_whole else None)
            y = y.reshape(units, count, count, side, side, size).swapaxes(2, 3)
            x = x + y.reshape(units, count * side, count * side, size)[:, :grid, :grid]
        with jax.named_scope("mlp"):
            inner = self.activation(self.up(self.mlp_norm(x).reshape(-1, size), out_dtype=jnp.float32))
            return x + self.down(inner.astype(x.dtype)).reshape(x.shape)

    def _attend(self, x: jax.Array, sides: jax.Array | None) -> jax.Array:
        """Return the attention output, projected, within each of the squares x [B, side, side, D], in the same shape.

        sides: i32[B], the number of rows and columns of each square that are patches; None if all are.
        """
        count, side = len(x), self.side
        joined = self.qkv(x.reshape(-1, x.shape[-1])).reshape(count, side, side, -1, self.head_dim)
        q, k, v = jnp.split(joined, 3, axis=3)
        if self.rows is not None and self.columns is not None:
            # Sums for rows and columns are products of further elements: of queries with each vector, and of keys
            # with ones where they lie. Scores are divided by the root of all elements.
            width = self.head_dim + 2 * side
            each = "" if sides is None else "b"
            by_row = jnp.einsum(f"bijnh,{each}ikh->bijnk", q, self._apart(self.rows[...], sides))
            by_column = jnp.einsum(f"bijnh,{each}jkh->bijnk", q, self._apart(self.columns[...], sides))
            own = q * jnp.asarray((width / self.head_dim) ** 0.5, q.dtype)
            q = jnp.concatenate([own, jnp.concatenate([by_row, by_column], -1) * jnp.asarray(width**0.5, q.dtype)], -1)
            places = [np.broadcast_to(np.eye(side)[:, None], (side, side, side))]
            places.append(places[0].swapaxes(0, 1))
            where = jnp.asarray(np.concatenate(places, -1), k.dtype)[None, :, :, None]
            k = jnp.concatenate([k, jnp.broadcast_to(where, (*k.shape[:-1], 2 * side))], -1)
        seen = None if sides is None else is_inside(side, sides).reshape(count, side * side)
        q, k, v = (each.reshape(count, side * side, *each.shape[3:]) for each in (q, k, v))
        o = attend_units(q, k, v, seen)
        return self.out(o.reshape(count * side * side, -1)).reshape(x.shape)

    def _apart(self, vectors: jax.Array, sides: jax.Array | None) -> jax.Array:
        """Return the vector for the distance of each two rows of a square, [side, side, H]; for `sides` i32[B], [B,
        side, side, H], with vectors interpolated linearly to the distances of squares with fewer rows.

        vectors: [2 * side - 1, H], one for each distance.
        """
        apart = np.arange(self.side)[:, None] - np.arange(self.side)
        if sides is None:
            return vectors[apart + self.side - 1]
        own, most = jnp.maximum(sides, 1)[:, None, None], 2 * self.side - 1
        spot = jnp.clip((jnp.asarray(apart) + own - 0.5) * most / (2 * own - 1) - 0.5, 0, most - 1)
        low = jnp.floor(spot).astype(jnp.int32)
        share = (spot - low)[..., None]
        near, far = (vectors[jnp.minimum(low + step, most - 1)].astype(jnp.float32) for step in (0, 1))
        return (near * (1 - share) + far * share).astype(vectors.dtype)


class SamEncoder(nnx.Module):
    """Encoder of SAM: patches, learned positions if any, layers, and two convolutions with norms. source: prefix of its
    modules.
    """

    def __init__(self, config: SamConfig, source: str, build: Build):
        vit = config.vit
        size, out = vit.hidden_size, config.out_size
        self.vit, self.out_size = vit, out
        patches = f"{source}.patch_embed.projection"
        self.patches = PatchEmbedding(vit.num_features, size, source=patches, bias=True, build=build)
        positions = f"{source}.pos_embed"
        self.positions = table(vit.num_patches, size, positions, build, flat=True) if config.has_positions else None
        layers = range(vit.num_layers)
        self.layers = nnx.List(
            [_Layer(config, f"{source}.layers.{n}", build, is_whole=n in config.whole_layers) for n in layers]
        )
        self.first = PatchEmbedding(size, out, source=f"{source}.neck.conv1", bias=False, build=build)
        self.second = PatchEmbedding(9 * out, out, source=f"{source}.neck.conv2", bias=False, build=build)
        norms = (LayerNorm(out, _NECK_EPS, source=f"{source}.neck.layer_norm{n}", build=build) for n in (1, 2))
        self.first_norm, self.second_norm = norms

    def __call__(self, patches: jax.Array, sides: jax.Array | None = None) -> jax.Array:
        """Return the encoded units [U, G, G, channels] of patches f32[U * G * G, F], of units of G by G patches, row by
        row.

        sides: i32[U], the number of a unit's rows and columns, the first of the G, that are patches; None if all are.
        Learned positions and distances are interpolated for fewer. The result beyond these rows and columns is
        meaningless.
        """
        grid, size = self.vit.grid, self.vit.hidden_size
        with jax.named_scope("patches"):
            x = self.patches(patches).reshape(-1, grid, grid, size)
            if self.positions is not None:
                places = self.positions[...].reshape(grid, grid, size)
                x = x + (places if sides is None else shrunk(places, sides))
        x = in_turn(self.layers, x, sides)
        with jax.named_scope("neck"):
            x = self.first_norm(self.first(x.reshape(-1, size))).reshape(-1, grid, grid, self.out_size)
            return self.second_norm(convolved(inside(x, sides), self.second))


def is_inside(grid: int, sides: jax.Array) -> jax.Array:
    """Return bool[U, grid, grid]: whether each position of U squares is within the first `sides` i32[U] rows and
    columns of its square.
    """
    ahead = jnp.arange(grid) < sides[:, None]
    return ahead[:, :, None] & ahead[:, None, :]


def inside(x: jax.Array, sides: jax.Array | None) -> jax.Array:
    """Return x [U, G, G, D] with zeros beyond the first `sides` i32[U] rows and columns of each square; x itself if
    `sides` is None.
    """
    return x if sides is None else jnp.where(is_inside(x.shape[1], sides)[..., None], x, 0)


def shrunk(places: jax.Array, sides: jax.Array) -> jax.Array:
    """Return learned positions [G, G, D] interpolated to squares of `sides` i32[U] positions along a side, by cubic
    convolution over as many of them as become one (torch's `antialias`): [U, G, G, D], of which the first `sides` rows
    and columns count.

    Entries of `sides` must be at most G.
    """
    grid = len(places)
    scale = grid / jnp.maximum(sides, 1).astype(jnp.float32)[:, None, None]
    centre = (jnp.arange(grid)[:, None] + 0.5) * scale
    far = jnp.abs(jnp.arange(grid) + 0.5 - centre) / scale
    near_share = ((_KEYS + 2) * far - (_KEYS + 3)) * far * far + 1
    far_share = ((_KEYS * far - 5 * _KEYS) * far + 8 * _KEYS) * far - 4 * _KEYS
    shares = jnp.where(far <= 1, near_share, jnp.where(far < 2, far_share, 0))
    total = shares.sum(-1, keepdims=True)
    shares = shares / jnp.where(total == 0, 1, total)
    found = jnp.einsum("uia,abd,ujb->uijd", shares, places.astype(jnp.float32), shares, precision="highest")
    return found.astype(places.dtype)


def convolved(x: jax.Array, kernel: PatchEmbedding, stride: int = 1) -> jax.Array:
    """Return the convolution of x [U, G, G, C] with a kernel of 3 by 3 positions and zeros around x: [U, G / stride, G
    / stride, D].

    kernel: product of the 3 by 3 neighbours of a position, channel by channel, row by row, as torch stores it.
    """
    units, grid, _, channels = x.shape
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    ends = grid - stride + 1
    around = [
        padded[:, row : row + ends : stride, column : column + ends : stride] for row in range(3) for column in range(3)
    ]
    side = grid // stride
    return kernel(jnp.stack(around, -1).reshape(-1, 9 * channels)).reshape(units, side, side, -1)


@dataclass(frozen=True, kw_only=True)
class GotOcr2TowerConfig(TowerConfig):
    """SAM's encoder with GOT-OCR 2.0's projector. sam: sizes of the encoder."""

    sam: SamConfig

    @property
    def vit(self) -> VitConfig:
        """Sizes of the encoder's layers."""
        return self.sam.vit

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return GotOcr2Tower(self, hidden_size, build)


def read_got_ocr2(fields: ConfigFields) -> GotOcr2TowerConfig:
    """Return the configuration of a tower of SAM alone, 16 patches to a row, from a config.json. Raises the errors of
    read_sam.
    """
    sam = read_sam(fields, "vision_config")
    vit = sam.vit
    return GotOcr2TowerConfig(num_features=vit.num_features, columns=(), merge=16, unit=vit.num_patches, sam=sam)


class GotOcr2Tower(nnx.Module):
    """Vision tower of GOT-OCR 2.0: SAM's encoder, two convolutions that each merge four positions into one, and a
    product.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: GotOcr2TowerConfig, hidden_size: int, build: Build):
        self.config = config
        out, names = config.sam.out_size, (f"{PROJECTOR}.conv_upsampler{n}" for n in (1, 2))
        self.encoder = SamEncoder(config.sam, TOWER, build)
        first, second = names
        self.first = PatchEmbedding(9 * out, 2 * out, source=first, bias=False, build=build)
        self.second = PatchEmbedding(18 * out, hidden_size, source=second, bias=False, build=build)
        source = f"{PROJECTOR}.multimodal_projector"
        self.projector = linear(hidden_size, source, hidden_size, ("embed", "embed"), build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        x = self.encoder(patches)
        with jax.named_scope("projector"):
            x = convolved(convolved(x, self.first, 2), self.second, 2)
            return self.projector(x.reshape(-1, x.shape[-1]))
