"""Vision tower of Phi-3-vision and Phi-3.5-vision (Abdin et al. 2024, arXiv:2404.14219): CLIP over a whole image and
its tiles, squares of 2 x 2 patches side by side, and an MLP. Learned embeddings follow each line, and stand between the
tiles and the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.vision.base.lines import (
    EMBEDDING,
    SQUARE,
    LinesProjector,
    LinesTowerConfig,
    patches_of,
    read_lines,
)
from jaxengine.models.vision.base.vit import joined_neighbours, read_merge, read_vit

# Prefix in the model's names of tensors, and of those of CLIP; a checkpoint's names have more before it.
TOWER = "vision_embed_tokens"
CLIP = f"{TOWER}.img_processor.vision_model"
LINE_END, BETWEEN = f"{TOWER}.sub_GN", f"{TOWER}.glb_GN"
# Sizes of the CLIP that files name, and do not state.
_NAMED: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}


@dataclass(frozen=True, kw_only=True)
class Phi3TowerConfig(LinesTowerConfig):
    """CLIP with Phi-3-vision's projector."""

    @property
    def unused(self) -> tuple[str, ...]:
        return self.unused_of(CLIP, f"{TOWER}.wte.")

    def make(self, hidden_size: int, build: Build) -> Phi3Tower:
        return Phi3Tower(self, hidden_size, build)


def read_phi3_vision(fields: ConfigFields) -> Phi3TowerConfig:
    """Return the vision tower's configuration from a config.json: `img_processor`, whose sizes are those of CLIP
    ViT-L/14 for 336 pixels unless it states others, with the hidden states that its `layer_idx` (default: -2) selects.

    Raises ModelConfigError for wrong fields, for other features than those of patches, for an odd number of patches in
    a line, and for an `embd_layer` that says something else of images than what the tower computes.
    """
    named = fields.part_or_empty("img_processor", **_NAMED)
    named.require(name="clip_vision_model", type_feature="patch", image_dim_out=named.integer("hidden_size"))
    fields.part_or_empty("embd_layer").require(**EMBEDDING)
    vit = read_vit(named, has_class_token=True)
    read_merge(named, "image_size", SQUARE, vit)
    named.require(num_img_tokens=(vit.grid // SQUARE) ** 2)
    return Phi3TowerConfig(columns=(), **read_lines(named, vit, "layer_idx"))


class Phi3Tower(nnx.Module):
    """Vision tower of Phi-3-vision: CLIP and a projector.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: Phi3TowerConfig, hidden_size: int, build: Build):
        self.config, self.encoder = config, config.encoder(CLIP, build)
        modules = [f"{TOWER}.img_projection.{number}" for number in (0, 2)]
        size = config.vit.hidden_size * config.merge
        self.projector = LinesProjector(size, hidden_size, (LINE_END, BETWEEN), modules, build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        config, lines = self.config, self.config.lines
        rows = joined_neighbours(self.encoder(patches_of(patches, config)), config.vit.grid, SQUARE)
        return self.projector(rows.reshape(-1, lines * lines, rows.shape[-1]), lines)
