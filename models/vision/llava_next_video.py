"""Vision tower of LLaVA-NeXT-Video (Zhang et al. 2024): LLaVA-NeXT's, in which the hidden states of each square of
2 x 2 patches of a video's frame become one before they are projected.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.vision.llava import LlavaTower, LlavaTowerConfig, read_llava_next

_STRIDE = 2
_MODES = ("average", "max")


@dataclass(frozen=True, kw_only=True)
class LlavaNextVideoTowerConfig(LlavaTowerConfig):
    """LLaVA-NeXT's tower, with a column that is 1 for the patches of a video's frames.

    Attributes:
      pool: how hidden states of a square become one, one of _MODES.
    """

    pool: str

    @property
    def frame_lines(self) -> int:
        """Lines and columns of a frame's rows."""
        return self.vit.grid // _STRIDE

    def make(self, hidden_size: int, build: Build) -> LlavaNextVideoTower:
        return LlavaNextVideoTower(self, hidden_size, build)


def read_llava_next_video(fields: ConfigFields) -> LlavaNextVideoTowerConfig:
    """Return the configuration of LLaVA-NeXT-Video's tower from a config.json: read_llava_next's, and
    `spatial_pool_mode` (default: average). Raises ModelConfigError for wrong fields, for an odd number of patches in a
    line, for a stride other than two, and for a pooling with weights.
    """
    fields.require(spatial_pool_stride=_STRIDE)
    mode = fields.text("spatial_pool_mode", _MODES[0])
    if mode not in _MODES:
        raise fields.fail("spatial_pool_mode", " or ".join(_MODES))
    tower = read_llava_next(fields)
    if tower.vit.grid % _STRIDE:
        raise fields.part("vision_config").fail("image_size", f"an even number of patches of {tower.vit.patch_size}")
    return LlavaNextVideoTowerConfig(**{**vars(tower), "columns": ("video",)}, pool=mode)


class LlavaNextVideoTower(LlavaTower):
    """Vision tower of LLaVA-NeXT-Video. A frame is a unit, the first quarter of whose rows are its embeddings."""

    config: LlavaNextVideoTowerConfig

    def encoded(self, units: jax.Array, columns: jax.Array) -> jax.Array:
        states = super().encoded(units, columns)
        count = self.config.vit.num_patches
        with jax.named_scope("pool"):
            half = self.config.frame_lines
            squares = states.reshape(-1, half, _STRIDE, half, _STRIDE, states.shape[-1])
            if self.config.pool == "max":
                pooled = squares.max(axis=(2, 4))
            else:
                pooled = squares.astype(jnp.float32).mean(axis=(2, 4)).astype(states.dtype)
            pooled = pooled.reshape(len(pooled), half * half, -1)
            of_frames = jnp.pad(pooled, ((0, 0), (0, count - half * half), (0, 0)))
            is_frame = columns[0].reshape(-1, self.config.unit)[:, 0] == 1
            states = jnp.where(is_frame[:, None, None], of_frames, states.reshape(of_frames.shape))
            return states.reshape(-1, states.shape[-1])
