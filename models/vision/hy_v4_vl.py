"""Vision tower of Hy4 (Tencent 2026): HunyuanOCR's, whose merger projects to the text's embeddings at once, and which
takes learned positions at slightly shifted places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.vision.base.layers import PatchEmbedding
from jaxengine.models.vision.hunyuan_vl import (
    MERGER,
    NEWLINE,
    HunYuanVLTower,
    HunYuanVLTowerConfig,
    learned,
    read_hunyuan_vl,
)

# Images count as larger by this many patches of each side where learned positions are stretched to them.
_SHIFT = 0.1


@dataclass(frozen=True, kw_only=True)
class HYV4VLTowerConfig(HunYuanVLTowerConfig):
    """Sizes of the tower. jaxengine.media.processors.hunyuan_vl writes its `columns`."""

    @property
    def unused(self) -> tuple[str, ...]:
        return ()

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return HYV4VLTower(self, hidden_size, build)


def read_hy_v4_vl(fields: ConfigFields, hidden_size: int) -> HYV4VLTowerConfig:
    """Return the tower's configuration from a vision_config, as `read_hunyuan_vl` does with other defaults, for a text
    model of this hidden size. Raises ModelConfigError for wrong fields, and if `out_hidden_size` (default: 6144)
    differs from hidden_size.
    """
    defaults: dict[str, Any] = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 40}
    fields = fields.with_defaults(**defaults)
    if fields.integer("out_hidden_size", 6144) != hidden_size:
        raise fields.fail("out_hidden_size", f"the hidden_size of the text, {hidden_size}")
    tower = read_hunyuan_vl(fields, hidden_size)
    return HYV4VLTowerConfig(**vars(tower))


class HYV4VLTower(HunYuanVLTower):
    """Vision tower of Hy4: HunyuanOCR's with another merger."""

    def make_merger(self, hidden_size: int, build: Build) -> nnx.Module:
        return HYV4VLMerger(self.config, hidden_size, build)

    def sampled(self, sizes: jax.Array) -> jax.Array:
        """Return the sides of images in patches, i32[P], as learned positions are stretched to them: f32[P], each 0.1
        more, unless there are as many positions.
        """
        shown = sizes.astype(jnp.float32)
        return jnp.where(sizes == self.config.vit.grid, shown, shown + _SHIFT)


class HYV4VLMerger(nnx.Module):
    """Merger of Hy4: a norm and two convolutions over a square of patches, with a learned embedding in the place of
    squares that are marked.
    """

    def __init__(self, config: HunYuanVLTowerConfig, hidden_size: int, build: Build):
        vit, self.merge = config.vit, config.merge
        size, inner = vit.hidden_size, vit.hidden_size * config.merge
        self.activation = ACTIVATIONS[vit.activation]
        self.norm = RMSNorm(size, vit.norm_eps, source=f"{MERGER}.norm", build=build)
        # The second one is a convolution of single squares.
        self.joining, self.widening = (
            PatchEmbedding(inner, outputs, source=f"{MERGER}.proj.{number}", bias=True, build=build)
            for number, outputs in ((0, inner), (2, hidden_size))
        )
        self.newline = learned("newline", hidden_size, build)

    def __call__(self, x: jax.Array, marks: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, D of the model] of patches x [P, D of the tower], square by square:
        widening(activation(joining(norm(x)))).

        marks: i32[P / merge]; NEWLINE for squares that become the learned embedding.
        """
        squares = self.norm(x).reshape(-1, self.merge, x.shape[1]).swapaxes(1, 2)
        y = self.joining(squares.reshape(len(squares), -1))
        y = self.widening(self.activation(y.astype(jnp.float32)).astype(x.dtype))
        return jnp.where(marks[:, None] == NEWLINE, self.newline[...], y)
