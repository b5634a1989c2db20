"""Vision tower of MiniMax M3 (MiniMax 2026): CLIP's layers, rotated by frame, row and column, over patches of several
frames, and two MLPs, of each patch and of each square of patches, which becomes one embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import read_activation
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.vision.base.attention import UNIT, segment_attention
from jaxengine.models.vision.base.layers import (
    PatchEmbedding,
    PatchMerger,
    in_turn,
    plain_layer,
    read_axial_theta,
    rope_frequencies,
)
from jaxengine.models.vision.llava import PROJECTOR, TOWER, Projector

LAYER = f"{TOWER}.layers.{{layer}}"
_AXES = 3
# Fields of published files that transformers does not read, and the only values with which its model is the same.
_ONLY: dict[str, Any] = {
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
_VISION_ONLY: dict[str, Any] = {"position_embedding_type": "rope", "rope_mode": "3d"}
# Where published files have the sizes of squares, in vision_config and beside it.
_PUBLISHED_SIZES = "img_token_compression_config"


@dataclass(frozen=True, kw_only=True)
class MiniMaxM3TowerConfig(TowerConfig):
    """Sizes of the tower. jaxengine.media.processors.minimax_m3 writes its `columns`.

    Attributes:
      hidden_size, intermediate_size, num_layers, num_heads: sizes of the tower's layers.
      activation: a name of jaxengine.models.layers.base.activations.ACTIVATIONS, that of the layers.
      norm_eps: epsilon of all norms.
      patch_size, temporal_patch_size: pixels of a patch's side, and frames of a patch.
      spatial_merge_size: rows and columns of patches that become one row.
      rope_theta: base of the rotary frequencies.
      projector_size: outputs of the first product of both MLPs after the layers.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    norm_eps: float
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    rope_theta: float
    projector_size: int

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return MiniMaxM3Tower(self, hidden_size, build)


def read_minimax_m3_tower(fields: ConfigFields) -> MiniMaxM3TowerConfig:
    """Return the tower's configuration from a config.json, with transformers' defaults for fields that it or its
    vision_config lacks: the usual sizes, and `projector_hidden_size` beside them.

    Raises ModelConfigError for wrong fields, for heads of fewer than six elements, for a `head_dim` of rope that is not
    that of attention, and for published fields that ask for another tower.
    """
    vision = fields.part_or_empty("vision_config")
    fields.require(**_ONLY)
    vision.require(num_channels=3, **_VISION_ONLY)
    size, heads = vision.integer("hidden_size", 1280), vision.integer("num_attention_heads", 16)
    if size % heads or size // heads < 2 * _AXES:
        raise vision.fail("hidden_size", f"a multiple of num_attention_heads = {heads}, and at least {2 * _AXES} times")
    vision.require(head_dim=size // heads)
    patch, frames, merge = (
        vision.integer(name, default)
        for name, default in (("patch_size", 14), ("temporal_patch_size", 2), ("spatial_merge_size", 2))
    )
    for published in (fields.part_or_empty(_PUBLISHED_SIZES), vision.part_or_empty(_PUBLISHED_SIZES)):
        published.require(
            image_token_compression_method="patch_merge", spatial_merge_size=merge, temporal_patch_size=frames
        )
    return MiniMaxM3TowerConfig(
        num_features=3 * frames * patch * patch,
        columns=("segment", "frame", "row", "column"),
        merge=merge * merge,
        unit=math.lcm(UNIT, merge * merge),
        hidden_size=size,
        intermediate_size=vision.integer("intermediate_size", 5120),
        num_layers=vision.integer("num_hidden_layers", 32),
        num_heads=heads,
        activation=read_activation(vision, "hidden_act"),
        norm_eps=vision.number("layer_norm_eps", 1e-5),
        patch_size=patch,
        temporal_patch_size=frames,
        spatial_merge_size=merge,
        rope_theta=read_axial_theta(vision),
        projector_size=fields.integer("projector_hidden_size", 6144),
    )


class MiniMaxM3Tower(nnx.Module):
    """Vision tower of MiniMax M3. A third of each head's pairs is rotated by the patch's frame in its segment, a third
    by its row and a third by its column; elements that are left are not rotated.
    """

    def __init__(self, config: MiniMaxM3TowerConfig, hidden_size: int, build: Build):
        self.config = config
        size, patches = config.hidden_size, f"{TOWER}.embeddings.patch_embedding"
        self.patches = PatchEmbedding(config.num_features, size, source=patches, bias=False, build=build)
        self.first_norm = LayerNorm(size, config.norm_eps, source=f"{TOWER}.pre_layrnorm", build=build)
        builds = (replace(build, layer=layer) for layer in range(config.num_layers))
        self.layers = nnx.List([plain_layer(config, LAYER, each, eps=config.norm_eps) for each in builds])
        self.projector = Projector(size, hidden_size, "gelu", build, inner=config.projector_size)
        self.merger = PatchMerger(
            hidden_size,
            config.merge,
            hidden_size,
            norm=None,
            joined=True,
            names=(f"{PROJECTOR}.merge_linear_1", f"{PROJECTOR}.merge_linear_2"),
            ffn_size=config.projector_size,
            build=build,
        )

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, D] of patches f32[P, F]: normed projections, layers with rope by frame, row
        and column that attend within segments, projector and merger.

        columns: i32[C, P], those of config.columns, in order.
        """
        segment, *places = columns
        head_dim = self.config.hidden_size // self.config.num_heads
        with jax.named_scope("rope_table"):
            freqs = rope_frequencies(head_dim // _AXES // 2 * 2, self.config.rope_theta).astype(np.float32)
            angles = jnp.concatenate([place.astype(jnp.float32)[:, None] * freqs for place in places], axis=1)
            turns = jnp.cos(angles), jnp.sin(angles)
        with jax.named_scope("patches"):
            x = self.first_norm(self.patches(patches))
        attend = partial(segment_attention, segment=segment, scale=head_dim**-0.5)
        x = in_turn(self.layers, x, turns, attend)
        with jax.named_scope("projector"):
            x = self.projector(x)
        with jax.named_scope("merger"):
            return self.merger(x)
