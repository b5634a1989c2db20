"""Vision tower of HyperCLOVA X SEED Think 32B (NAVER 2025): Qwen2.5-VL's, whose embeddings a linear projection takes to
the text model's size.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.params.declare import Source
from jaxengine.models.vision.qwen2_vl import Qwen2_5VLTower, Qwen2_5VLTowerConfig, read_qwen2_5_vl

PROJECTOR = "projector"


@dataclass(frozen=True, kw_only=True)
class HyperClovaTowerConfig(Qwen2_5VLTowerConfig):
    """Sizes of the tower, in addition to Qwen2.5-VL's.

    Attributes:
      out_hidden_size: size of the merger's rows, which are then projected.
    """

    out_hidden_size: int

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return HyperClovaTower(self, hidden_size, build)


def read_hyperclovax(fields: ConfigFields) -> HyperClovaTowerConfig:
    """Return the tower's configuration from a vision_config: that of Qwen2.5-VL, with rows of `out_hidden_size`; both
    it and `hidden_size` are 3584 by default. Raises the same errors.
    """
    fields = fields.with_defaults(hidden_size=3584)
    size = fields.integer("out_hidden_size", 3584)
    tower = read_qwen2_5_vl(fields, size)
    return HyperClovaTowerConfig(**vars(tower), out_hidden_size=size)


class HyperClovaTower(Qwen2_5VLTower):
    """Vision tower of HyperCLOVA X SEED Think 32B: projector(Qwen2.5-VL's tower)."""

    config: HyperClovaTowerConfig

    def __init__(self, config: HyperClovaTowerConfig, hidden_size: int, build: Build):
        super().__init__(config, config.out_hidden_size, build)
        source = (Source(PROJECTOR, hidden_size),)
        self.projector = Linear(config.out_hidden_size, source, axes=("embed", "embed"), bias=True, build=build)

    def run(self, x: jax.Array, turns: tuple[jax.Array, jax.Array], columns: dict[str, jax.Array]) -> jax.Array:
        rows = super().run(x, turns, columns)
        with jax.named_scope("projector"):
            return self.projector(rows)
