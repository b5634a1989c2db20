"""Vision tower of Ovis2.5 (Lu et al. 2025, arXiv:2508.11737): SigLIP 2's layers over images of any shape, whose states
become probabilities of visual words, and these a mean of the words' embeddings.

Learned positions are stretched to an image's size, queries and keys are rotated by row and column, patches attend to
those of the same image or frame, and a square of them becomes one embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.vision.base.attention import UNIT, segment_attention
from jaxengine.models.vision.base.layers import (
    PatchEmbedding,
    axial_rope,
    in_turn,
    plain_layer,
    rope_frequencies,
    stretched,
)
from jaxengine.models.vision.base.vit import VitTowerConfig, linear, read_vit, table
from jaxengine.models.vision.llava import TOWER
from jaxengine.models.vision.ovis2 import WORDS, mean_of_words

HEAD = "visual_head"
_LAYER = f"{TOWER}.encoder.layers.{{layer}}"
# The last visual words stand before and after an image, and before and after a video: those of the marks 1 to 4.
NUM_INDICATORS = 4
_THETA, _HEAD_EPS, _MOST_MERGED = 10000.0, 1e-5, 8
# The published code's defaults of fields that a file lacks.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 512,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


@dataclass(frozen=True, kw_only=True)
class Ovis2_5TowerConfig(VitTowerConfig):
    """Sizes of the tower. jaxengine.media.processors.ovis2_5 writes its `columns`.

    Attributes:
      vit: sizes; its image_size determines the number of learned positions.
      spatial_merge_size: number of patches along a side of the square that becomes one embedding.
      num_words: number of visual words, those of indicators included.
      has_positions: whether learned positions are added to patches.
      has_rope: whether queries and keys are rotated.
    """

    spatial_merge_size: int
    num_words: int
    has_positions: bool
    has_rope: bool

    @property
    def unused(self) -> tuple[str, ...]:
        # Words are chosen by the states before this norm.
        positions = () if self.has_positions else (f"{TOWER}.embeddings.position_embedding.",)
        return (f"{TOWER}.post_layernorm.", *positions)

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Ovis2_5Tower(self, hidden_size, build)


def read_ovis2_5(fields: ConfigFields) -> Ovis2_5TowerConfig:
    """Return the tower's configuration from a config.json: `vit_config`, and `visual_vocab_size` (default: 65536).
    `num_patches` (default: -1, for those of `image_size`) is the number of learned positions. `preserve_original_pe`
    and `use_rope` are true by default.

    Raises ModelConfigError for wrong fields, and for another model_type than siglip2_navit, windows of attention,
    patches of several frames, positions that are not a square, a `hidden_stride` above 8 (default: 2), no more words
    than NUM_INDICATORS, and heads whose number of elements is not a multiple of 4.
    """
    vision = fields.part("vit_config", **_DEFAULTS)
    vision.require(model_type="siglip2_navit", fullatt_block_indexes=None, temporal_patch_size=1)
    count = vision.integer("num_patches", -1, minimum=-1)
    if count > 0:
        side = math.isqrt(count)
        if side**2 != count:
            raise vision.fail("num_patches", "-1, or a square")
        size = {f"{vision.prefix}image_size": side * vision.integer("patch_size")}
        vision = ConfigFields({**vision.raw, **size}, vision.prefix)
    vit = read_vit(vision)
    if vit.hidden_size // vit.num_heads % 4:
        raise vision.fail("hidden_size", f"a multiple of 4 * num_attention_heads = {4 * vit.num_heads}")
    merge = vision.integer("hidden_stride", 2)
    if merge > _MOST_MERGED:
        raise vision.fail("hidden_stride", f"1 to {_MOST_MERGED}")
    num_words = fields.integer("visual_vocab_size", 65536)
    if num_words <= NUM_INDICATORS:
        raise fields.fail("visual_vocab_size", f"more than {NUM_INDICATORS}")
    return Ovis2_5TowerConfig(
        num_features=vit.num_features,
        columns=("segment", "row", "column", "height", "width", "mark"),
        merge=merge * merge,
        unit=math.lcm(UNIT, merge * merge),
        vit=vit,
        spatial_merge_size=merge,
        num_words=num_words,
        has_positions=vision.boolean("preserve_original_pe", True),
        has_rope=vision.boolean("use_rope", True),
    )


class Ovis2_5Tower(nnx.Module):
    """Vision tower of Ovis2.5: layers with layer norms, biases and MLPs of two matrices, and visual words."""

    def __init__(self, config: Ovis2_5TowerConfig, hidden_size: int, build: Build):
        self.config = config
        vit, size, source = config.vit, config.vit.hidden_size, f"{TOWER}.embeddings"
        patches = f"{source}.patch_embedding"
        self.patches = PatchEmbedding(config.num_features, size, source=patches, bias=True, build=build)
        positions = f"{source}.position_embedding.weight"
        self.positions = table(vit.num_patches, size, positions, build) if config.has_positions else None
        builds = (replace(build, layer=layer) for layer in range(vit.num_layers))
        self.layers = nnx.List([plain_layer(vit, _LAYER, each, eps=vit.norm_eps) for each in builds])
        words, axes = config.num_words - NUM_INDICATORS, ("embed", "embed")
        self.head = linear(size * config.merge, f"{HEAD}.0", words, axes, build, bias=False)
        self.head_norm = LayerNorm(words, _HEAD_EPS, source=f"{HEAD}.1", build=build)
        self.words = table(config.num_words, hidden_size, f"{WORDS}.weight", build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, D] of patches f32[P, F]: positions and rope as far as the config has them,
        layers that attend within segments, and means of visual words by the head's logits.

        columns: i32[C, P], those of config.columns, in order. Squares whose mark is 1 to NUM_INDICATORS become this one
        of the last visual words.
        """
        segment, row, column, height, width, mark = columns
        config, vit = self.config, self.config.vit
        turns = None
        if config.has_rope:
            with jax.named_scope("rope_table"):
                freqs = rope_frequencies(vit.head_size // 2, _THETA)
                turns = axial_rope(row, column, freqs, freqs)
        with jax.named_scope("patches"):
            x = self.patches(patches)
            if self.positions is not None:
                sides = vit.grid, vit.grid
                x = x + stretched(self.positions[...], sides, (row, height), (column, width)).astype(x.dtype)
        attend = partial(segment_attention, segment=segment, scale=vit.head_size**-0.5)
        x = in_turn(self.layers, x, turns, attend)
        with jax.named_scope("words"):
            words, marks = self.words[...], mark.reshape(-1, config.merge)[:, 0]
            logits = self.head_norm(self.head(x.reshape(len(marks), -1)))
            rows = mean_of_words(logits, words[:-NUM_INDICATORS])
            ends = words[len(words) - NUM_INDICATORS + jnp.maximum(marks, 1) - 1]
            return jnp.where(marks[:, None] > 0, ends, rows)
