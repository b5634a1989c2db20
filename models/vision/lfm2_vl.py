"""Vision tower of LFM2-VL (Liquid AI 2025): SigLIP 2 (Tschannen et al. 2025, arXiv:2502.14786) over images of any size,
whose learned positions are interpolated, and squares of patches joined to rows. Phi-4-reasoning-vision leaves out the
last layer and the last norm, and has a row for each patch. Cosmos 3 Edge has a norm of each patch before they are
joined."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.norm import Identity, LayerNorm
from jaxengine.models.vision.base.attention import UNIT, segment_attention
from jaxengine.models.vision.base.clip import DEFAULTS, SIGLIP
from jaxengine.models.vision.base.layers import PatchEmbedding, PatchMerger, in_turn
from jaxengine.models.vision.base.vit import VitConfig, VitTowerConfig, read_vit, table
from jaxengine.models.vision.llava import PROJECTOR, TOWER
from jaxengine.models.vision.minicpmv import make_layer

_PROJECTOR_EPS, _PATCH_EPS = 1e-5, 1e-6
# Most patches along a side of the square that becomes one row, which must be within a block of attention's queries.
_MOST_SIDE = 8


@dataclass(frozen=True, kw_only=True)
class Lfm2VlTowerConfig(VitTowerConfig):
    """SigLIP 2 with a projector.

    Attributes:
      vit: sizes of the layers; its grid is that of the learned positions.
      num_used: number of layers that are used. The last norm is, too, if they are all.
      spatial_merge_size: number of patches along a side of the square that becomes one row.
      projector_size, projector_activation, projector_bias, projector_norm: inner size, activation, presence of biases
        and of a norm of the MLP over a row's patches.
      norms_patches: whether that norm is of each patch, and not of all patches of a row at once.
    """

    num_used: int
    spatial_merge_size: int
    projector_size: int
    projector_activation: str
    projector_bias: bool
    projector_norm: bool
    norms_patches: bool = False

    @property
    def unused(self) -> tuple[str, ...]:
        last = (f"{TOWER}.post_layernorm.",) if self.num_used < self.vit.num_layers else ()
        return (f"{TOWER}.head.", *last, *self.unused_layers(f"{TOWER}.encoder.layers", self.num_used))

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Lfm2VlTower(self, hidden_size, build)


def read_lfm2_vl(fields: ConfigFields) -> Lfm2VlTowerConfig:
    """Return the tower's configuration from a config.json: `vision_config`, with `num_patches` (default: 256) learned
    positions, and `projector_hidden_size` (2560), `projector_bias` and `projector_use_layernorm` (both true).

    Raises ModelConfigError for wrong fields, and unless the number of learned positions is a square and
    `downsample_factor` (default: 2) is 1, 2, 4 or 8.
    """
    fields.part("vision_config", **DEFAULTS[SIGLIP]).require(model_type="siglip2_vision_model")
    fields.require(vision_feature_layer=-1)
    factor = fields.integer("downsample_factor", 2)
    if factor > _MOST_SIDE or UNIT % factor**2:
        raise fields.fail("downsample_factor", "1, 2, 4 or 8")
    vit = _read_siglip2(fields)
    return _tower_config(
        vit,
        num_used=vit.num_layers,
        spatial_merge_size=factor,
        projector_size=fields.integer("projector_hidden_size", 2560),
        projector_activation=read_activation(fields, "projector_hidden_act"),
        projector_bias=fields.boolean("projector_bias", True),
        projector_norm=fields.boolean("projector_use_layernorm", True),
    )


def read_phi4_reasoning_vision(fields: ConfigFields, hidden_size: int) -> Lfm2VlTowerConfig:
    """Return the configuration of Phi-4-reasoning-vision's tower from a config.json. hidden_size: of the text model.

    Raises ModelConfigError for wrong fields, for a tower of one layer, for an `mm_hidden_size` that is not the tower's
    hidden size, and unless the number of learned positions is a square.
    """
    fields.require(mm_projector_type="mlp2x_gelu", use_s2=False)
    vit = _read_siglip2(fields)
    if vit.num_layers < 2:
        raise fields.part("vision_config").fail("num_hidden_layers", "at least 2: the last layer is not used")
    if fields.integer("mm_hidden_size", vit.hidden_size) != vit.hidden_size:
        raise fields.fail("mm_hidden_size", f"{vit.hidden_size}, hidden_size of vision_config")
    return _tower_config(
        vit,
        num_used=vit.num_layers - 1,
        spatial_merge_size=1,
        projector_size=hidden_size,
        projector_activation="gelu",
        projector_bias=True,
        projector_norm=False,
    )


def read_cosmos3_edge(fields: ConfigFields) -> Lfm2VlTowerConfig:
    """Return the configuration of Cosmos 3 Edge's tower from a config.json. Raises ModelConfigError for wrong fields,
    and unless the number of learned positions is a square and `spatial_merge_size` is 1, 2, 4 or 8.
    """
    vit, vision = _read_siglip2(fields), fields.part("vision_config")
    factor = vision.integer("spatial_merge_size", 2)
    if factor > _MOST_SIDE or UNIT % factor**2:
        raise vision.fail("spatial_merge_size", "1, 2, 4 or 8")
    return _tower_config(
        vit,
        num_used=vit.num_layers,
        spatial_merge_size=factor,
        projector_size=fields.integer("projector_hidden_size", 11520),
        projector_activation="gelu",
        projector_bias=True,
        projector_norm=True,
        norms_patches=True,
    )


def _tower_config(vit: VitConfig, *, spatial_merge_size: int, **more: Any) -> Lfm2VlTowerConfig:
    """Return the configuration of a tower with layers of `vit`. more: further arguments of it."""
    return Lfm2VlTowerConfig(
        num_features=vit.num_features,
        columns=("segment", "row", "column", "height", "width"),
        merge=spatial_merge_size**2,
        unit=UNIT,
        vit=vit,
        spatial_merge_size=spatial_merge_size,
        **more,
    )


def _read_siglip2(fields: ConfigFields) -> VitConfig:
    """Return the sizes of SigLIP 2's layers from a config.json. Raises ModelConfigError for wrong fields, and unless
    the number of learned positions is a square.
    """
    vision = fields.part("vision_config", **DEFAULTS[SIGLIP])
    count = vision.integer("num_patches", 256)
    if isqrt(count) ** 2 != count:
        raise vision.fail("num_patches", "a square")
    # The side of an image whose patches have the learned positions unchanged; it has no other use.
    sized = {**(fields.mapping("vision_config") or {}), "image_size": isqrt(count) * vision.integer("patch_size")}
    return read_vit(ConfigFields({"vision_config": sized}).part("vision_config", **DEFAULTS[SIGLIP]))


class Lfm2VlTower(nnx.Module):
    """Vision tower of LFM2-VL and of models with the same encoder. The patches of a row are neighbours, line by line.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: Lfm2VlTowerConfig, hidden_size: int, build: Build):
        vit, size = config.vit, config.vit.hidden_size
        self.config = config
        source = f"{TOWER}.embeddings"
        features = vit.num_features, size
        self.patches = PatchEmbedding(*features, source=f"{source}.patch_embedding", bias=True, build=build)
        self.positions = table(vit.num_patches, size, f"{source}.position_embedding.weight", build)
        self.layers = nnx.List([make_layer(vit, replace(build, layer=layer)) for layer in range(config.num_used)])
        last = LayerNorm(size, vit.norm_eps, source=f"{TOWER}.post_layernorm", build=build)
        self.last_norm = last if config.num_used == vit.num_layers else Identity()
        width, eps = (size, _PATCH_EPS) if config.norms_patches else (size * config.merge, _PROJECTOR_EPS)
        norm = LayerNorm(width, eps, source=f"{PROJECTOR}.layer_norm", build=build)
        self.projector = PatchMerger(
            size,
            config.merge,
            hidden_size,
            norm=norm if config.projector_norm else Identity(),
            joined=not config.norms_patches,
            names=(f"{PROJECTOR}.linear_1", f"{PROJECTOR}.linear_2"),
            build=build,
            ffn_size=config.projector_size,
            activation=ACTIVATIONS[config.projector_activation],
            bias=config.projector_bias,
        )

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        segment, row, column, height, width = columns
        vit = self.config.vit
        with jax.named_scope("patches"):
            down, right = _shares(row, height, vit.grid), _shares(column, width, vit.grid)
            shares = (down[:, :, None] * right[:, None]).reshape(len(row), -1)
            positions = jnp.dot(shares, self.positions[...].astype(jnp.float32), precision="highest")
            x = self.patches(patches)
            x = x + positions.astype(x.dtype)
        scale = (vit.hidden_size // vit.num_heads) ** -0.5
        attend = partial(segment_attention, segment=segment, scale=scale, block=UNIT)
        x = in_turn(self.layers, x, None, attend)
        with jax.named_scope("projector"):
            return self.projector(self.last_norm(x))


def _shares(places: jax.Array, sizes: jax.Array, side: int) -> jax.Array:
    """Return the weight of each of `side` learned positions in the position of each patch, f32[P, side], for linear
    interpolation that averages when it shrinks (torch's `antialias`). The weights of a patch add up to 1.

    places, sizes: i32[P], the patch's row or column, and the number of rows or columns of its image, below 1 as 1.
    """
    scale = side / jnp.maximum(sizes, 1).astype(jnp.float32)
    centre = (places.astype(jnp.float32) + 0.5) * scale - 0.5
    far = jnp.abs(jnp.arange(side) - centre[:, None]) / jnp.maximum(scale, 1)[:, None]
    shares = jnp.maximum(1 - far, 0)
    return shares / jnp.maximum(shares.sum(axis=1, keepdims=True), 1e-6)
