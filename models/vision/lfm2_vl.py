"""Vision tower of LFM2-VL (Liquid AI 2025): SigLIP 2 (Tschannen et al. 2025, arXiv:2502.14786) over images of any size,
whose learned positions are interpolated, and squares of patches joined to rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import isqrt

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
from jaxengine.models.vision.base.vit import VitTowerConfig, read_vit, table
from jaxengine.models.vision.llava import PROJECTOR, TOWER
from jaxengine.models.vision.minicpmv import make_layer

_PROJECTOR_EPS = 1e-5
# Most patches along a side of the square that becomes one row, which must be within a block of attention's queries.
_MOST_SIDE = 8


@dataclass(frozen=True, kw_only=True)
class Lfm2VlTowerConfig(VitTowerConfig):
    """SigLIP 2 with a projector.

    Attributes:
      vit: sizes of the layers; its grid is that of the learned positions.
      spatial_merge_size: number of patches along a side of the square that becomes one row.
      projector_size, projector_activation, projector_bias, projector_norm: inner size, activation, presence of biases
        and of a norm of the MLP over a row's patches.
    """

    spatial_merge_size: int
    projector_size: int
    projector_activation: str
    projector_bias: bool
    projector_norm: bool

    @property
    def unused(self) -> tuple[str, ...]:
        return (f"{TOWER}.head.",)

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Lfm2VlTower(self, hidden_size, build)


def read_lfm2_vl(fields: ConfigFields) -> Lfm2VlTowerConfig:
    """Return the tower's configuration from a config.json: `vision_config`, with `num_patches` (default: 256) learned
    positions, and `projector_hidden_size` (2560), `projector_bias` and `projector_use_layernorm` (both true).

    Raises ModelConfigError for wrong fields, and unless the number of learned positions is a square and
    `downsample_factor` (default: 2) is 1, 2, 4 or 8.
    """
    vision = fields.part("vision_config", **DEFAULTS[SIGLIP])
    vision.require(model_type="siglip2_vision_model")
    fields.require(vision_feature_layer=-1)
    count = vision.integer("num_patches", 256)
    if isqrt(count) ** 2 != count:
        raise vision.fail("num_patches", "a square")
    # The side of an image whose patches have the learned positions unchanged; it has no other use.
    vision_config = {
        **(fields.mapping("vision_config") or {}),
        "image_size": isqrt(count) * vision.integer("patch_size"),
    }
    vit = read_vit(ConfigFields({"vision_config": vision_config}).part("vision_config", **DEFAULTS[SIGLIP]))
    factor = fields.integer("downsample_factor", 2)
    if factor > _MOST_SIDE or UNIT % factor**2:
        raise fields.fail("downsample_factor", "1, 2, 4 or 8")
    return Lfm2VlTowerConfig(
        num_features=vit.num_features,
        columns=("segment", "row", "column", "height", "width"),
        merge=factor**2,
        unit=UNIT,
        vit=vit,
        spatial_merge_size=factor,
        projector_size=fields.integer("projector_hidden_size", 2560),
        projector_activation=read_activation(fields, "projector_hidden_act"),
        projector_bias=fields.boolean("projector_bias", True),
        projector_norm=fields.boolean("projector_use_layernorm", True),
    )


class Lfm2VlTower(nnx.Module):
    """Vision tower of LFM2-VL. The patches of a row are neighbours, line by line.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: Lfm2VlTowerConfig, hidden_size: int, build: Build):
        vit, size = config.vit, config.vit.hidden_size
        self.config = config
        source = f"{TOWER}.embeddings"
        features = vit.num_features, size
        self.patches = PatchEmbedding(*features, source=f"{source}.patch_embedding", bias=True, build=build)
        self.positions = table(vit.num_patches, size, f"{source}.position_embedding.weight", build)
        self.layers = nnx.List([make_layer(vit, replace(build, layer=layer)) for layer in range(vit.num_layers)])
        self.last_norm = LayerNorm(size, vit.norm_eps, source=f"{TOWER}.post_layernorm", build=build)
        width = size * config.merge
        norm = LayerNorm(width, _PROJECTOR_EPS, source=f"{PROJECTOR}.layer_norm", build=build)
        self.projector = PatchMerger(
            size,
            config.merge,
            hidden_size,
            norm=norm if config.projector_norm else Identity(),
            joined=True,
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
