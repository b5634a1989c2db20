"""Vision towers of Aya Vision (Dash et al. 2025, arXiv:2505.08751) and Command A Vision: SigLIP over tiles,
neighbouring patches side by side, a gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.params.declare import parts_of
from jaxengine.models.vision.base.clip import ClipEncoder, read_siglip
from jaxengine.models.vision.base.layers import tower_axis
from jaxengine.models.vision.base.vit import (
    VitConfig,
    VitTowerConfig,
    joined_neighbours,
    linear,
    read_layer_index,
    read_merge,
)
from jaxengine.models.vision.llava import PROJECTOR, TOWER


@dataclass(frozen=True, kw_only=True)
class AyaTowerConfig(VitTowerConfig):
    """SigLIP with Aya Vision's projector.

    Attributes:
      num_used_layers: number of layers before the hidden states that are used.
      last_norm: whether these are taken after the norm that follows the last layer.
      factor: number of patches along a side of the square that becomes one embedding.
      inner_size: elements of the gate, and of the value, in the projector's MLP.
      norm_eps: epsilon of the norm before the projector; None for no norm.
    """

    num_used_layers: int
    last_norm: bool
    factor: int
    inner_size: int
    norm_eps: float | None

    @property
    def unused(self) -> tuple[str, ...]:
        layers = self.unused_layers(f"{TOWER}.encoder.layers", self.num_used_layers)
        return (f"{TOWER}.head.", *layers, *(() if self.last_norm else (f"{TOWER}.post_layernorm.",)))

    def make(self, hidden_size: int, build: Build) -> AyaTower:
        return AyaTower(self, hidden_size, build)


def read_aya(fields: ConfigFields) -> AyaTowerConfig:
    """Return the configuration of Aya Vision's tower from a config.json: with the hidden states that
    `vision_feature_layer` (default: -1) selects, and a norm before the projector, of epsilon `adapter_layer_norm_eps`
    (default: 1e-6). `alignment_intermediate_size` is by default the text's hidden size (default: 8192).

    Raises ModelConfigError for wrong fields, and for a selection strategy other than "full".
    """
    fields.require(vision_feature_select_strategy="full")
    vit = read_siglip(fields)
    size = fields.integer("alignment_intermediate_size", fields.part("text_config").integer("hidden_size", 8192))
    used = read_layer_index(fields, fields.value("vision_feature_layer", -1), vit.num_layers)
    return _tower(fields, vit, used, size, fields.number("adapter_layer_norm_eps", 1e-6))


def read_cohere2_vision(fields: ConfigFields) -> AyaTowerConfig:
    """Return the configuration of Command A Vision's tower from a config.json: with all layers of SigLIP, and no norm
    before the projector, whose `alignment_intermediate_size` is 36864 by default. Raises ModelConfigError for wrong
    fields.
    """
    vit = read_siglip(fields)
    return _tower(fields, vit, None, fields.integer("alignment_intermediate_size", 36864), None)


def _tower(
    fields: ConfigFields, vit: VitConfig, num_used_layers: int | None, size: int, norm_eps: float | None
) -> AyaTowerConfig:
    """Return the configuration of a tower whose projector has `size` numbers, gate and value together.

    num_used_layers: None for all layers and the last norm. norm_eps: epsilon of the norm before the projector; None for
    no norm. Raises ModelConfigError for an odd size, and a `downsample_factor` (default: 2) that does not divide the
    number of patches along a unit's side.
    """
    if size % 2:
        raise fields.fail("alignment_intermediate_size", "an even number")
    factor = read_merge(fields, "downsample_factor", fields.integer("downsample_factor", 2), vit)
    return AyaTowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=factor**2,
        unit=vit.num_patches,
        vit=vit,
        num_used_layers=vit.num_layers if num_used_layers is None else num_used_layers,
        last_norm=num_used_layers is None,
        factor=factor,
        inner_size=size // 2,
        norm_eps=norm_eps,
    )


class AyaTower(nnx.Module):
    """Vision tower of Aya Vision: SigLIP and a projector.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: AyaTowerConfig, hidden_size: int, build: Build):
        self.config = config
        vit, inner, size = config.vit, config.inner_size, config.vit.hidden_size * config.merge
        self.encoder = ClipEncoder(vit, (config.num_used_layers,), TOWER, build, with_last_norm=config.last_norm)
        norm = None
        if config.norm_eps is not None:
            norm = LayerNorm(size, config.norm_eps, source=f"{PROJECTOR}.layernorm", build=build)
        self.norm = norm
        axes = ("embed", tower_axis("ffn", build))
        self.up = Linear(size, parts_of(f"{PROJECTOR}.linear_1", inner, inner), axes=axes, bias=True, build=build)
        self.down = linear(inner, f"{PROJECTOR}.linear_2", hidden_size, ("ffn", "embed"), build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        x = joined_neighbours(self.encoder(patches), self.config.vit.grid, self.config.factor)
        with jax.named_scope("projector"):
            up, gate = jnp.split(self.up(x if self.norm is None else self.norm(x), out_dtype=jnp.float32), 2, axis=-1)
            return self.down((jax.nn.silu(gate) * up).astype(x.dtype))
