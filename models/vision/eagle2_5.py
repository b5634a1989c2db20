"""Vision tower of Eagle 2.5 (Chen et al. 2025, arXiv:2504.15271): SigLIP over tiles, neighbouring patches side by side,
an MLP."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.vision.base.clip import ClipEncoder, read_siglip
from jaxengine.models.vision.base.vit import VitTowerConfig, joined_neighbours, read_layer_index, read_merge_ratio
from jaxengine.models.vision.llava import PROJECTOR, TOWER, Projector

# torch's epsilon of norms, used by the projector's norm.
_PROJECTOR_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class EagleTowerConfig(VitTowerConfig):
    """SigLIP with InternVL's projector.

    Attributes:
      num_used_layers: number of layers before the hidden states that are used.
      last_norm: whether these states pass the norm after the last layer.
      factor: number of patches along a side of the square that becomes one row.
    """

    num_used_layers: int
    last_norm: bool
    factor: int

    @property
    def unused(self) -> tuple[str, ...]:
        layers = self.unused_layers(f"{TOWER}.encoder.layers", self.num_used_layers)
        return (f"{TOWER}.head.", *layers, *(() if self.last_norm else (f"{TOWER}.post_layernorm.",)))

    def make(self, hidden_size: int, build: Build) -> EagleTower:
        return EagleTower(self, hidden_size, build)


def read_eagle(fields: ConfigFields) -> EagleTowerConfig:
    """Return the vision tower's configuration from a config.json: the last hidden states, normed, or with another
    `select_layer` than -1 those that it selects.

    Raises ModelConfigError for wrong fields, and for another projector or order of a square's patches.
    """
    fields.require(use_pixel_shuffle=True, mlp_connector_layers=2, ps_version="v2")
    vit = read_siglip(fields)
    factor, wanted = read_merge_ratio(fields, "downsample_ratio", vit), fields.value("select_layer", -1)
    return EagleTowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=factor**2,
        unit=vit.num_patches,
        vit=vit,
        num_used_layers=read_layer_index(fields, wanted, vit.num_layers, "select_layer"),
        last_norm=wanted == -1,
        factor=factor,
    )


class EagleTower(nnx.Module):
    """Vision tower of Eagle 2.5.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: EagleTowerConfig, hidden_size: int, build: Build):
        self.config = config
        layers = (config.num_used_layers,)
        self.encoder = ClipEncoder(config.vit, layers, TOWER, build, with_last_norm=config.last_norm)
        size = config.vit.hidden_size * config.merge
        self.norm = LayerNorm(size, _PROJECTOR_EPS, source=f"{PROJECTOR}.layer_norm", build=build)
        self.projector = Projector(size, hidden_size, "gelu", build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        x = self.encoder(patches)
        with jax.named_scope("projector"):
            return self.projector(self.norm(joined_neighbours(x, self.config.vit.grid, self.config.factor)))
