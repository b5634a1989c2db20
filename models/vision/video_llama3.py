"""Vision tower of VideoLLaMA 3 (Zhang et al. 2025, arXiv:2501.13106): SigLIP's layers over images of any shape.

There are no learned positions: queries and keys are rotated by row and column. Patches attend to those of the same
image, and each becomes one embedding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.vision.base.attention import UNIT, segment_attention
from jaxengine.models.vision.base.clip import DEFAULTS, SIGLIP
from jaxengine.models.vision.base.layers import (
    PatchEmbedding,
    PatchMerger,
    axial_rope,
    in_turn,
    read_axial_theta,
    rope_frequencies,
)
from jaxengine.models.vision.base.vit import MAX_SIDE, VitTowerConfig, read_vit
from jaxengine.models.vision.minicpmv import TOWER, make_layer

PROJECTOR = "projector"


@dataclass(frozen=True, kw_only=True)
class VideoLlama3TowerConfig(VitTowerConfig):
    """Sizes of the tower. jaxengine.media.processors.grids writes its `columns`.

    Attributes:
      vit: sizes; its image_size has no use.
      rope_theta: base of the rotary frequencies, which rows and columns share.
    """

    rope_theta: float

    @property
    def spatial_merge_size(self) -> int:
        """Number of patches along a side of the square that becomes one embedding: 1."""
        return 1

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return VideoLlama3Tower(self, hidden_size, build)


def read_video_llama3(fields: ConfigFields) -> VideoLlama3TowerConfig:
    """Return the tower's configuration from a config.json. Raises ModelConfigError for wrong fields, for another
    model_type of vision_config, and for heads whose number of elements is not a multiple of 4.
    """
    vision = fields.part("vision_config", **DEFAULTS[SIGLIP])
    vision.require(model_type="video_llama_3_vision")
    vit = read_vit(ConfigFields({**vision.raw, f"{vision.prefix}image_size": MAX_SIDE}, vision.prefix))
    if vit.hidden_size // vit.num_heads % 4:
        raise vision.fail("hidden_size", f"a multiple of 4 * num_attention_heads = {4 * vit.num_heads}")
    rope = {name.removeprefix(vision.prefix): value for name, value in vision.raw.items()}
    return VideoLlama3TowerConfig(
        num_features=vit.num_features,
        columns=("segment", "row", "column"),
        merge=1,
        unit=UNIT,
        vit=vit,
        rope_theta=read_axial_theta(ConfigFields(rope)),
    )


class VideoLlama3Tower(nnx.Module):
    """Vision tower of VideoLLaMA 3: SigLIP's layers, and a projector of two matrices over normed patches.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: VideoLlama3TowerConfig, hidden_size: int, build: Build):
        vit, size = config.vit, config.vit.hidden_size
        self.config = config
        source = f"{TOWER}.embeddings.patch_embedding"
        self.patches = PatchEmbedding(vit.num_features, size, source=source, bias=True, build=build)
        self.layers = nnx.List([make_layer(vit, replace(build, layer=layer)) for layer in range(vit.num_layers)])
        self.projector = PatchMerger(
            size,
            1,
            hidden_size,
            norm=LayerNorm(size, vit.norm_eps, source=f"{TOWER}.post_layernorm", build=build),
            joined=False,
            names=(f"{PROJECTOR}.readout.0", f"{PROJECTOR}.readout.2"),
            build=build,
            ffn_size=hidden_size,
        )

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        segment, row, column = columns
        head_dim = self.config.vit.hidden_size // self.config.vit.num_heads
        freqs = rope_frequencies(head_dim // 2, self.config.rope_theta)
        with jax.named_scope("rope_table"):
            turns = axial_rope(row, column, freqs, freqs)
        with jax.named_scope("patches"):
            x = self.patches(patches)
        attend = partial(segment_attention, segment=segment, scale=head_dim**-0.5)
        x = in_turn(self.layers, x, turns, attend)
        with jax.named_scope("projector"):
            return self.projector(x)
