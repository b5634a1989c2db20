"""Vision tower of PaliGemma (Beyer et al. 2024, arXiv:2407.07726): SigLIP and one matrix."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.vision.base.clip import ClipEncoder, read_siglip
from jaxengine.models.vision.base.vit import VitTowerConfig, linear
from jaxengine.models.vision.llava import PROJECTOR, TOWER


@dataclass(frozen=True, kw_only=True)
class PaliGemmaTowerConfig(VitTowerConfig):
    """SigLIP with PaliGemma's projector."""

    @property
    def unused(self) -> tuple[str, ...]:
        return (f"{TOWER}.head.",)

    def make(self, hidden_size: int, build: Build) -> PaliGemmaTower:
        return PaliGemmaTower(self, hidden_size, build)


def read_paligemma(fields: ConfigFields, most: int) -> PaliGemmaTowerConfig:
    """Return the configuration from a config.json of SigLIP as a tower without merging whose tokens attend to each
    other. most: the most tokens of a prompt with images. Raises ModelConfigError for wrong fields.
    """
    vit = read_siglip(fields)
    return PaliGemmaTowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=1,
        unit=vit.num_patches,
        attends_both_ways=True,
        whole_prompt=most,
        vit=vit,
    )


class PaliGemmaTower(nnx.Module):
    """Vision tower of PaliGemma: SigLIP and a projector.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: PaliGemmaTowerConfig, hidden_size: int, build: Build):
        vit = config.vit
        self.encoder = ClipEncoder(vit, (vit.num_layers,), TOWER, build, with_last_norm=True)
        self.proj = linear(vit.hidden_size, f"{PROJECTOR}.linear", hidden_size, ("embed", "embed"), build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        x = self.encoder(patches)
        with jax.named_scope("projector"):
            return self.proj(x)
