"""Vision tower of EXAONE 4.5 (LG AI Research 2026): Qwen2.5-VL's, with fewer heads of keys than of queries."""

from __future__ import annotations

from dataclasses import dataclass

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.params.declare import Source, parts_of
from jaxengine.models.vision.qwen2_vl import LAYER, Qwen2_5VLTower, Qwen2_5VLTowerConfig, read_qwen2_5_vl


@dataclass(frozen=True, kw_only=True)
class Exaone4_5TowerConfig(Qwen2_5VLTowerConfig):
    """Sizes of the tower, in addition to Qwen2.5-VL's.

    Attributes:
      num_kv_heads: heads of keys and values; it divides num_heads.
    """

    num_kv_heads: int

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Exaone4_5Tower(self, hidden_size, build)


def read_exaone4_5(fields: ConfigFields, hidden_size: int) -> Exaone4_5TowerConfig:
    """Return the tower's configuration from a vision_config, for a text model of this hidden size: read_qwen2_5_vl's,
    where `hidden_size` and `out_hidden_size` are 3584 by default. Raises the same errors, and if `num_key_value_heads`
    (default: 8) does not divide `num_heads`.
    """
    tower = read_qwen2_5_vl(fields.with_defaults(hidden_size=3584, out_hidden_size=3584), hidden_size)
    heads = fields.integer("num_key_value_heads", 8)
    if tower.num_heads % heads:
        raise fields.fail("num_key_value_heads", f"a divisor of num_heads = {tower.num_heads}")
    return Exaone4_5TowerConfig(**vars(tower), num_kv_heads=heads)


class Exaone4_5Tower(Qwen2_5VLTower):
    """Vision tower of EXAONE 4.5: each head of keys and values is for num_heads / num_kv_heads heads of queries."""

    config: Exaone4_5TowerConfig

    def qkv_sources(self) -> tuple[Source, ...]:
        config = self.config
        rows = config.hidden_size // config.num_heads * config.num_kv_heads
        return parts_of(f"{LAYER}.attn.qkv", config.hidden_size, rows, rows)
