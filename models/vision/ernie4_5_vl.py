"""Vision tower of ERNIE 4.5-VL (Baidu 2025, ERNIE 4.5 Technical Report): the layers of Qwen2-VL's over single frames,
and a resampler, which joins squares of patches and then two frames. An image counts as two equal frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.mlp import gelu
from jaxengine.models.layers.base.norm import LayerNorm, RMSNorm
from jaxengine.models.vision.base.vit import linear
from jaxengine.models.vision.qwen2_vl import VISUAL, Qwen2VLTower, Qwen2VLTowerConfig, read_sizes

RESAMPLER = "resampler_model"
# transformers' defaults of token ids around and in place of images and videos.
_TOKENS = {
    "image_start_token_id": 101304,
    "image_end_token_id": 101305,
    "image_token_id": 100295,
    "video_start_token_id": 101306,
    "video_end_token_id": 101307,
    "video_token_id": 103367,
}


def _read_tokens(fields: ConfigFields) -> dict[str, int]:
    """Return the token ids around and in place of images and videos, by transformers' field names, from a config.json.
    The published one has `im_patch_id` for the placeholder of images. Raises ModelConfigError for wrong fields.
    """
    placeholder = fields.integer("im_patch_id", _TOKENS["image_token_id"], minimum=0)
    usual = {**_TOKENS, "image_token_id": placeholder}
    return {name: fields.integer(name, default, minimum=0) for name, default in usual.items()}


@dataclass(frozen=True, kw_only=True)
class ErnieVLTowerConfig(Qwen2VLTowerConfig):
    """Sizes of the tower, in addition to Qwen2-VL's.

    Attributes:
      norm_eps: epsilon of layer norms.
      last_eps: epsilon of the resampler's RMS norm, the text's.
      tokens: names, transformers' fields in config.json, and ids of tokens around and in place of images and videos.
    """

    norm_eps: float
    last_eps: float
    tokens: tuple[tuple[str, int], ...]

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return ErnieVLTower(self, hidden_size, build)


def read_ernie4_5_vl(fields: ConfigFields, text: ConfigFields) -> ErnieVLTowerConfig:
    """Return the tower's configuration from a config.json. text: fields of its text part.

    The resampler's sizes may be in vision_config, as transformers writes them, or outside, as published.
    `intermediate_size` is by default hidden_size times `mlp_ratio` (default: 4). Raises ModelConfigError for wrong
    fields, and unless two frames are joined.
    """
    vision = fields.part(
        "vision_config", depth=32, hidden_size=1280, num_heads=16, patch_size=14, hidden_act="quick_gelu"
    )
    vision.require(temporal_merge_size=2, attn_sep=False)
    merge = vision.integer("spatial_merge_size", 2)
    fields.require(spatial_conv_size=merge, temporal_conv_size=2, use_temporal_conv=True)
    vision.require(temporal_patch_size=1)
    sizes = read_sizes(vision, temporal_patch_size=1)
    ratio = vision.number("mlp_ratio", 4)
    inner = vision.integer("intermediate_size", int(sizes["hidden_size"] * ratio))
    return ErnieVLTowerConfig(
        intermediate_size=inner,
        norm_eps=vision.number("rms_norm_eps", 1e-6),
        last_eps=text.number("rms_norm_eps"),
        tokens=tuple(_read_tokens(fields).items()),
        **sizes,
    )


class ErnieVLTower(Qwen2VLTower):
    """Vision tower of ERNIE 4.5-VL: Qwen2-VL's with a Resampler as its merger."""

    config: ErnieVLTowerConfig

    def _norm(self, source: str, build: Build, size: int | None = None) -> nnx.Module:
        return LayerNorm(size or self.config.hidden_size, self.config.norm_eps, source=source, build=build)

    def make_merger(self, hidden_size: int, names: tuple[str, str, str], build: Build, *, joined: bool = False) -> Any:
        """Return the resampler. names, joined: not used."""
        return Resampler(self.config, hidden_size, build)


class ResamplerMLP(nnx.Module):
    """MLP norm(fc2(gelu(fc1(x)))), in_size -> size. eps: of the norm. source: prefix of its modules' numbers."""

    def __init__(self, in_size: int, size: int, eps: float, source: str, build: Build):
        self.fc1 = linear(in_size, f"{source}.0", size, ("embed", "ffn"), build)
        self.fc2 = linear(size, f"{source}.2", size, ("ffn", "embed"), build)
        self.norm = LayerNorm(size, eps, source=f"{source}.3", build=build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return norm(fc2(gelu(fc1(x)))) for x [R, in_size]: [R, size], with the activation in float32."""
        return self.norm(self.fc2(gelu(self.fc1(x, out_dtype=jnp.float32)).astype(x.dtype)))


class Resampler(nnx.Module):
    """Resampler of ERNIE 4.5-VL: a norm, an MLP over a square of patches, one over two frames of it, and a product with
    an RMS norm.
    """

    def __init__(self, config: ErnieVLTowerConfig, hidden_size: int, build: Build):
        size, self.width, eps = config.hidden_size, config.hidden_size * config.merge, config.norm_eps
        self.first_norm = LayerNorm(size, eps, source=f"{VISUAL}.ln", build=build)
        self.spatial = ResamplerMLP(self.width, self.width, eps, f"{RESAMPLER}.spatial_linear", build)
        self.temporal = ResamplerMLP(2 * self.width, self.width, eps, f"{RESAMPLER}.temporal_linear", build)
        self.proj = linear(self.width, f"{RESAMPLER}.mlp", hidden_size, ("embed", "embed"), build)
        self.last_norm = RMSNorm(hidden_size, config.last_eps, source=f"{RESAMPLER}.after_norm", build=build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, D of the model] of patches of images, each two equal frames, x [P, D of the
        tower]: last_norm(proj(temporal([y, y]))), y = spatial(the normed patches of a square, joined).
        """
        x = self.spatial(self.first_norm(x).reshape(-1, self.width))
        x = self.temporal(jnp.concatenate([x, x], axis=-1))
        return self.last_norm(self.proj(x))
