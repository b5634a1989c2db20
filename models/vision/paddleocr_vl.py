"""Vision tower of PaddleOCR-VL (Cui et al. 2025, arXiv:2510.14528) and of Keye-VL (Kwai Keye Team 2025,
arXiv:2507.01949), from which it comes: SigLIP's layers over images of any shape.

Learned positions are stretched to an image's size, queries and keys are rotated by row and column, patches attend to
those of the same image, and a square of them becomes one embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.vision.base.attention import UNIT, segment_attention
from jaxengine.models.vision.base.layers import (
    PatchEmbedding,
    PatchMerger,
    axial_rope,
    in_turn,
    plain_layer,
    read_axial_theta,
    rope_frequencies,
    stretched,
)
from jaxengine.models.vision.base.vit import VitTowerConfig, read_vit, table

TOWER, PROJECTOR = "visual.vision_model", "mlp_AR"
LAYER = f"{TOWER}.encoder.layers.{{layer}}"
# torch's epsilon of norms, used by the projector's norm.
_PROJECTOR_EPS = 1e-5
_MOST_MERGED = 8


@dataclass(frozen=True, kw_only=True)
class PaddleOcrVLTowerConfig(VitTowerConfig):
    """Sizes of the tower. jaxengine.media.processors.grids writes its `columns`.

    Attributes:
      vit: sizes; its image_size determines the number of learned positions.
      spatial_merge_size: number of patches along a side of the square that becomes one embedding.
      rope_theta: base of the rotary frequencies, which rows and columns share.
      joined_norm: whether the projector's norm is of a whole square of patches, not of each.
    """

    rope_theta: float
    spatial_merge_size: int
    joined_norm: bool = False

    @property
    def unused(self) -> tuple[str, ...]:
        # Weights for pooling, and for a way to pack images that is not used here.
        return f"{TOWER}.head.", f"{TOWER}.embeddings.packing_position_embedding."

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return PaddleOcrVLTower(self, hidden_size, build)


def read_paddleocr_vl(fields: ConfigFields, hidden_size: int) -> PaddleOcrVLTowerConfig:
    """Return the tower's configuration from a vision_config, with transformers' defaults for fields that it lacks.
    hidden_size: not used.

    Raises ModelConfigError for wrong fields, for a `spatial_merge_size` above 8, and for heads whose number of elements
    is not a multiple of 4.
    """
    del hidden_size
    fields = fields.with_defaults(
        hidden_size=1152,
        intermediate_size=4304,
        num_hidden_layers=27,
        num_attention_heads=16,
        image_size=384,
        patch_size=14,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=1e-6,
    )
    vit = read_vit(fields, has_class_token=False)
    if vit.hidden_size // vit.num_heads % 4:
        raise fields.fail("hidden_size", f"a multiple of 4 * num_attention_heads = {4 * vit.num_heads}")
    merge = fields.integer("spatial_merge_size", 2)
    if merge > _MOST_MERGED:
        raise fields.fail("spatial_merge_size", f"1 to {_MOST_MERGED}")
    return PaddleOcrVLTowerConfig(
        num_features=vit.num_features,
        columns=("segment", "row", "column", "height", "width"),
        merge=merge * merge,
        unit=math.lcm(UNIT, merge * merge),
        vit=vit,
        rope_theta=read_axial_theta(fields),
        spatial_merge_size=merge,
    )


class PaddleOcrVLTower(nnx.Module):
    """Vision tower of PaddleOCR-VL: learned positions, layers with layer norms and MLPs of two matrices, biases
    everywhere, and a projector.
    """

    def __init__(self, config: PaddleOcrVLTowerConfig, hidden_size: int, build: Build):
        self.config = config
        vit, size, source = config.vit, config.vit.hidden_size, f"{TOWER}.embeddings"
        patches = f"{source}.patch_embedding"
        self.patches = PatchEmbedding(config.num_features, size, source=patches, bias=True, build=build)
        self.positions = table(vit.num_patches, size, f"{source}.position_embedding.weight", build)
        builds = (replace(build, layer=layer) for layer in range(vit.num_layers))
        self.layers = nnx.List([plain_layer(vit, LAYER, each, eps=vit.norm_eps) for each in builds])
        self.last_norm = LayerNorm(size, vit.norm_eps, source=f"{TOWER}.post_layernorm", build=build)
        width = size * config.merge if config.joined_norm else size
        self.projector = PatchMerger(
            size,
            config.merge,
            hidden_size,
            norm=LayerNorm(width, _PROJECTOR_EPS, source=f"{PROJECTOR}.pre_norm", build=build),
            joined=config.joined_norm,
            names=(f"{PROJECTOR}.linear_1", f"{PROJECTOR}.linear_2"),
            build=build,
        )

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, D] of patches f32[P, F]: interpolated learned positions, layers with rope
        that attend within segments, and the projector.

        columns: i32[C, P], those of config.columns, in order.
        """
        segment, row, column, height, width = columns
        vit = self.config.vit
        head_dim = vit.hidden_size // vit.num_heads
        freqs = rope_frequencies(head_dim // 2, self.config.rope_theta)
        with jax.named_scope("rope_table"):
            turns = axial_rope(row, column, freqs, freqs)
        with jax.named_scope("patches"):
            x, sides = self.patches(patches), (vit.grid, vit.grid)
            places = stretched(self.positions[...], sides, (row, height), (column, width), linear=True)
            x = x + places.astype(x.dtype)
        attend = partial(segment_attention, segment=segment, scale=head_dim**-0.5)
        x = in_turn(self.layers, x, turns, attend)
        with jax.named_scope("projector"):
            return self.projector(self.last_norm(x))
