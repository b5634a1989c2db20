"""Vision tower of Gemma 3 (Gemma Team 2025, arXiv:2503.19786): SigLIP, means of patches, a norm, one matrix."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.norm import OffsetRMSNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.vision.base.clip import ClipEncoder, read_siglip
from jaxengine.models.vision.base.vit import VitTowerConfig
from jaxengine.models.vision.llava import PROJECTOR, TOWER


@dataclass(frozen=True, kw_only=True)
class Gemma3TowerConfig(VitTowerConfig):
    """SigLIP with Gemma 3's projector.

    Attributes:
      factor: number of patches along a side of the square that becomes one embedding.
    """

    factor: int

    @property
    def unused(self) -> tuple[str, ...]:
        return (f"{TOWER}.head.",)

    def make(self, hidden_size: int, build: Build) -> Gemma3Tower:
        return Gemma3Tower(self, hidden_size, build)


def read_gemma3(fields: ConfigFields) -> Gemma3TowerConfig:
    """Return the vision tower's configuration from a config.json; a unit becomes `mm_tokens_per_image` embeddings
    (default: 256).

    Raises ModelConfigError for wrong fields, for a tower other than SigLIP, and if that number is not a square whose
    side divides the number of patches along a unit's side.
    """
    vit = read_siglip(fields)
    rows = fields.integer("mm_tokens_per_image", 256)
    side = round(rows**0.5)
    if side**2 != rows or side > vit.grid or vit.grid % side:
        raise fields.fail("mm_tokens_per_image", f"a square whose side divides the {vit.grid} patches of a unit's side")
    factor = vit.grid // side
    return Gemma3TowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=factor**2,
        unit=vit.num_patches,
        attends_both_ways=True,
        vit=vit,
        factor=factor,
    )


class Gemma3Tower(nnx.Module):
    """Vision tower of Gemma 3: SigLIP and a projector.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: Gemma3TowerConfig, hidden_size: int, build: Build):
        self.config = config
        vit = config.vit
        self.encoder = ClipEncoder(vit, (vit.num_layers,), TOWER, build, with_last_norm=True)
        norm = OffsetRMSNorm(vit.hidden_size, vit.norm_eps, source=f"{PROJECTOR}.mm_soft_emb_norm", build=build)
        self.norm = norm
        # [in, out] in checkpoints: it is not a linear layer there, so nothing quantises it.
        rows = Source(f"{PROJECTOR}.mm_input_projection_weight", vit.hidden_size)
        decl = ParamDecl((None, None), (rows,), init_std=vit.hidden_size**-0.5)
        self.proj = declare((vit.hidden_size, hidden_size), build.dtype, decl)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        x = self.encoder(patches)
        grid, factor, size = self.config.vit.grid, self.config.factor, x.shape[1]
        side = grid // factor
        with jax.named_scope("projector"):
            squares = x.astype(jnp.float32).reshape(-1, side, factor, side, factor, size)
            pooled = squares.mean(axis=(2, 4)).reshape(-1, size).astype(x.dtype)
            return jnp.dot(self.norm(pooled), self.proj[...], preferred_element_type=jnp.float32).astype(x.dtype)
