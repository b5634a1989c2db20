"""Vision tower of LLaVA-OneVision (Li et al. 2024, arXiv:2408.03326): LLaVA-NeXT's, whose rows are then interpolated:
of images in many tiles, and of frames of videos."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import SHARES
from jaxengine.models.vision.base.clip import SIGLIP
from jaxengine.models.vision.llava import LlavaTower, LlavaTowerConfig, read_llava_next

_ASPECT, _MAX_TILES = "vision_aspect_ratio", 64
_TAPS = ("top_left", "top_right", "bottom_left", "bottom_right")


@dataclass(frozen=True, kw_only=True)
class LlavaOnevisionTowerConfig(LlavaTowerConfig):
    """LLaVA-NeXT's tower with interpolated rows.

    Attributes:
      max_tiles: an image with more patches than this many tiles have is interpolated to fewer rows.
    """

    max_tiles: int

    def make(self, hidden_size: int, build: Build) -> LlavaOnevisionTower:
        return LlavaOnevisionTower(self, hidden_size, build)


def read_llava_onevision(fields: ConfigFields) -> LlavaOnevisionTowerConfig:
    """Return the configuration of LLaVA-OneVision's tower from a config.json. `vision_aspect_ratio` is anyres_max_N,
    where N is max_tiles (default: 9). By default it is SigLIP with its last hidden states.

    Raises ModelConfigError for wrong fields, and if vision_config is no mapping.
    """
    aspect = re.fullmatch(r"anyres_max_(\d{1,2})", fields.text(_ASPECT, "anyres_max_9"))
    if aspect is None or not 1 <= int(aspect[1]) <= _MAX_TILES:
        raise fields.fail(_ASPECT, f"anyres_max_N with N from 1 to {_MAX_TILES}")
    vision = fields.mapping("vision_config")
    if vision is None:
        raise fields.fail("vision_config", "a mapping")
    tower = read_llava_next(
        ConfigFields(
            {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", **fields.raw}
            | {"vision_config": {"model_type": SIGLIP, **vision}}
        )
    )
    columns = (*_TAPS, "down", "right")
    return LlavaOnevisionTowerConfig(**{**vars(tower), "columns": columns}, max_tiles=int(aspect[1]))


class LlavaOnevisionTower(LlavaTower):
    """Vision tower of LLaVA-OneVision.

    For each output row, the columns have the offsets to the four rows of LLaVA-NeXT's tower that it is interpolated
    between, and how far down and right it is between them, in units of 1 / SHARES.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        rows = super().__call__(patches, columns)
        with jax.named_scope("interpolate"):
            own = jnp.arange(len(rows), dtype=jnp.int32)
            taps = jnp.clip(own + columns[: len(_TAPS)], 0, len(rows) - 1)
            top_left, top_right, bottom_left, bottom_right = (rows[tap].astype(jnp.float32) for tap in taps)
            down, right = (share[:, None].astype(jnp.float32) / SHARES for share in columns[len(_TAPS) :])
            top = top_left + right * (top_right - top_left)
            bottom = bottom_left + right * (bottom_right - bottom_left)
            return (top + down * (bottom - top)).astype(rows.dtype)
