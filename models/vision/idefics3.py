"""Vision tower of Idefics3 (Laurençon et al. 2024, arXiv:2408.12637) and SmolVLM: SigLIP over tiles, neighbouring
patches side by side, one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.vision.base import clip
from jaxengine.models.vision.base.clip import ClipEncoder
from jaxengine.models.vision.base.vit import VitTowerConfig, joined_neighbours, linear, read_merge, read_vit

# Prefixes in the model's names of tensors; a checkpoint's names have more before them.
TOWER, CONNECTOR = "vision_model", "connector"
# transformers' defaults of fields that a file lacks.
DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


@dataclass(frozen=True, kw_only=True)
class Idefics3TowerConfig(VitTowerConfig):
    """SigLIP with Idefics3's connector.

    Attributes:
      scale_factor: number of patches along a side of the square that becomes one embedding.
    """

    scale_factor: int

    def make(self, hidden_size: int, build: Build) -> Idefics3Tower:
        return Idefics3Tower(self, hidden_size, build)


def read_idefics3(fields: ConfigFields, defaults: Mapping[str, float | str] = DEFAULTS) -> Idefics3TowerConfig:
    """Return the vision tower's configuration from a config.json, whose vision part has `defaults`. Raises
    ModelConfigError for wrong fields, and if `scale_factor` (default: 2) does not divide the number of patches along a
    unit's side.
    """
    vit = read_vit(fields.part("vision_config", **defaults))
    factor = read_merge(fields, "scale_factor", fields.integer("scale_factor", 2), vit)
    return Idefics3TowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=factor**2,
        unit=vit.num_patches,
        vit=vit,
        scale_factor=factor,
    )


def read_modernvbert(fields: ConfigFields) -> Idefics3TowerConfig:
    """Return read_idefics3 of ModernVBERT's fields, whose vision part has SigLIP's defaults and whose factor is
    `pixel_shuffle_factor` (default: 4). Raises the same errors.
    """
    factor = fields.integer("pixel_shuffle_factor", 4)
    return read_idefics3(ConfigFields({**fields.raw, "scale_factor": factor}), clip.DEFAULTS[clip.SIGLIP])


class Idefics3Tower(nnx.Module):
    """Vision tower of Idefics3: SigLIP and a connector.

    All patches of a tile are in use, so the number of a patch in its tile is its position.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: Idefics3TowerConfig, hidden_size: int, build: Build):
        vit = config.vit
        self.config = config
        self.encoder = ClipEncoder(vit, (vit.num_layers,), TOWER, build, with_last_norm=True)
        size, name = vit.hidden_size * config.merge, f"{CONNECTOR}.modality_projection.proj"
        self.proj = linear(size, name, hidden_size, ("embed", "embed"), build, bias=False)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        x = joined_neighbours(self.encoder(patches), self.config.vit.grid, self.config.scale_factor)
        with jax.named_scope("connector"):
            return self.proj(x)
