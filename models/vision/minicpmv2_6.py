"""Vision tower of MiniCPM-V 2.6, 4.0 and 4.5 (Yao et al. 2024, arXiv:2408.01800): SigLIP over an image and its slices,
and a resampler, whose queries read a slice each (Bai et al. 2023, arXiv:2308.12966).

Further shape letters: U crops, S patches of a crop with its padding, Q queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.params.declare import parts_of
from jaxengine.models.vision.base.clip import DEFAULTS, SIGLIP, ClipEncoder
from jaxengine.models.vision.base.layers import tower_axis
from jaxengine.models.vision.base.vit import VitTowerConfig, linear, read_by_queries, read_vit, table

TOWER, RESAMPLER = "vpm", "resampler"
_EPS = 1e-6
# Elements of a head of the resampler, as far as the hidden size is a multiple of this.
_HEAD = 128
_THETA = 10000.0
# Largest ratio of the sides of a crop: that of an image (MAX_ASPECT_RATIO of the processor), and what rounding adds.
_RATIO = 250
_MOST_QUERIES, _MOST_RESOLUTION = 1024, 4096


@dataclass(frozen=True, kw_only=True)
class ResampledTowerConfig(VitTowerConfig):
    """Sizes of the tower. A unit is a crop: the whole image, or a slice. All units have as many patches as the largest
    crop of any shape; the rest of a smaller crop's are padding.

    Attributes:
      vit: sizes of the layers, and of the learned positions.
      num_layers: number of layers that are used.
      num_queries: Q, the number of embeddings of a crop.
      resolution: a crop has about this many pixels squared.
    """

    num_layers: int
    num_queries: int
    resolution: int

    @property
    def spatial_merge_size(self) -> int:
        """Number of patches that a side of a crop is a multiple of: 1."""
        return 1

    @property
    def unused(self) -> tuple[str, ...]:
        return self.unused_layers(f"{TOWER}.encoder.layers", self.num_layers)

    def make(self, hidden_size: int, build: Build) -> ResampledTower:
        return ResampledTower(self, hidden_size, build)


def read_resampled(fields: ConfigFields) -> ResampledTowerConfig:
    """Return the tower's configuration from a config.json: SigLIP's sizes from `vision_config`, `query_num` queries
    (default: 64), and crops of about `scale_resolution` pixels squared (default: 448) from `slice_config`. With
    `drop_vision_last_layer` (default: false) the last layer is not used.

    Raises ModelConfigError for wrong fields, for a tower other than SigLIP, for more than _MOST_QUERIES queries, for
    crops smaller than a patch or larger than _MOST_RESOLUTION, and for a hidden size that the positions or heads of the
    resampler do not divide.
    """
    vision = fields.part_or_empty("vision_config", **DEFAULTS[SIGLIP])
    if vision.text("model_type", SIGLIP) not in (SIGLIP, "siglip"):
        raise vision.fail("model_type", SIGLIP)
    vit = read_vit(vision)
    slices = fields.part_or_empty("slice_config")
    slices.require(patch_size=vit.patch_size)
    resolution, queries = slices.integer("scale_resolution", 448), fields.integer("query_num", 64)
    if not vit.patch_size <= resolution <= _MOST_RESOLUTION:
        raise slices.fail("scale_resolution", f"from patch_size {vit.patch_size} to {_MOST_RESOLUTION}")
    if queries > _MOST_QUERIES:
        raise fields.fail("query_num", f"an integer from 1 to {_MOST_QUERIES}")
    size = fields.integer("hidden_size")
    if size % 4 or size < _HEAD or size % (size // _HEAD):
        raise fields.fail("hidden_size", f"a multiple of 4 and of its number of heads, one for each {_HEAD} elements")
    merge = -(-_most_patches(resolution, vit.patch_size) // queries)
    return ResampledTowerConfig(
        num_features=vit.num_features,
        columns=("place", "row", "column"),
        merge=merge,
        unit=merge * queries,
        vit=vit,
        num_layers=vit.num_layers - fields.boolean("drop_vision_last_layer", False),
        num_queries=queries,
        resolution=resolution,
    )


def _most_patches(resolution: int, patch: int) -> int:
    """Return a number of patches that no crop exceeds. Before its sides are rounded to multiples of `patch` pixels, a
    crop has at most resolution squared pixels, and sides of at most a ratio of _RATIO.
    """
    longest = _RATIO**0.5
    heights = np.arange(max(1, int(resolution / longest)), int(longest * resolution) + 1)
    sides = np.stack([heights, resolution**2 // heights])
    return int(np.maximum(np.rint(sides / patch).astype(np.int64), 1).prod(axis=0).max())


class ResampledTower(nnx.Module):
    """Vision tower of MiniCPM-V 2.6.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D]: Q of each unit. "place" is the
    learned position of a patch; -1 for padding, which no patch attends to. "row" and "column" are a patch's in its
    crop.
    """

    def __init__(self, config: ResampledTowerConfig, hidden_size: int, build: Build):
        self.config = config
        self.encoder = ClipEncoder(config.vit, (config.num_layers,), TOWER, build, with_last_norm=True)
        self.resampler = Resampler(config.vit.hidden_size, config.num_queries, hidden_size, build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        place, row, column = columns
        states = self.encoder(patches, place, self.config.unit)
        with jax.named_scope("resampler"):
            return self.resampler(states, place.reshape(-1, self.config.unit) >= 0, row, column)


class Resampler(nnx.Module):
    """Learned queries that attend to the patches of a crop, whose keys have sinusoidal positions. size: elements of the
    patches' states. out_size: elements of queries and embeddings.
    """

    def __init__(self, size: int, num_queries: int, out_size: int, build: Build):
        heads = tower_axis("heads", build)
        self.head_dim = out_size // (out_size // _HEAD)
        self.queries = table(num_queries, out_size, f"{RESAMPLER}.query", build)
        # A checkpoint whose tower has the model's hidden size has no such matrix.
        plain: dict[str, Any] = {"build": build, "bias": False}
        axes = ("embed", "embed")
        self.inward = None if size == out_size else linear(size, f"{RESAMPLER}.kv_proj", out_size, axes, **plain)
        self.query_norm, self.patch_norm, self.last_norm = (
            LayerNorm(out_size, _EPS, source=f"{RESAMPLER}.ln_{name}", build=build) for name in ("q", "kv", "post")
        )
        parts = (part._replace(group=self.head_dim) for part in parts_of(f"{RESAMPLER}.attn.in_proj", *[out_size] * 3))
        self.q, self.k, self.v = (
            Linear(out_size, (part,), axes=("embed", heads), bias=True, build=build) for part in parts
        )
        self.out = linear(out_size, f"{RESAMPLER}.attn.out_proj", out_size, ("heads", "embed"), build)
        self.outward = linear(out_size, f"{RESAMPLER}.proj", out_size, axes, **plain)

    def __call__(self, x: jax.Array, is_key: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
        """Return the embeddings [U * Q, D] of the crops with states x [U * S, E]. is_key: bool[U, S], patches that are
        attended to; a crop without any gets the mean of its values. row, column: i32[U * S] of patches in their crops.
        """
        x = self.patch_norm(x if self.inward is None else self.inward(x))
        positions = _sinusoids(row, column, x.shape[1]).astype(x.dtype)
        q = self.q(self.query_norm(self.queries[...])).reshape(len(self.queries[...]), -1, self.head_dim)
        k, v = (
            product(states).reshape(*is_key.shape, -1, self.head_dim)
            for product, states in ((self.k, x + positions), (self.v, x))
        )
        # Scores exist for one crop at a time.
        o = lax.map(lambda unit: read_by_queries(q, *unit), (k, v, is_key))
        return self.outward(self.last_norm(self.out(o.reshape(len(is_key) * len(q), -1))))


def _sinusoids(row: jax.Array, column: jax.Array, size: int) -> jax.Array:
    """Return positions f32[P, size] of patches at i32[P] rows and columns: sines, then cosines, of a quarter of the
    elements each for the column, then for the row, with frequencies from 1 to nearly 1 / _THETA.
    """
    freqs = 1.0 / _THETA ** (np.arange(size // 4, dtype=np.float32) / np.float32(size / 4))
    parts = []
    for place in (column, row):
        angles = place.astype(jnp.float32)[:, None] * freqs.astype(np.float32)
        parts += [jnp.sin(angles), jnp.cos(angles)]
    return jnp.concatenate(parts, axis=1)
