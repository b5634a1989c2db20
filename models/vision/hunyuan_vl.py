"""Vision tower of HunyuanOCR (Tencent 2025, arXiv:2511.19575): SigLIP's layers over images of any shape.

Learned positions are stretched to an image's size, and patches attend to those of the same image. Convolutions join a
square of patches to one embedding; a learned one follows each line, and others begin and end an image. For these a call
has squares of no patches, which a column marks.
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
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.vision.base.attention import UNIT, segment_attention
from jaxengine.models.vision.base.layers import PatchEmbedding, in_turn, plain_layer, stretched
from jaxengine.models.vision.base.vit import VitTowerConfig, linear, read_vit, table, vector

TOWER = "vit"
LAYER, MERGER = f"{TOWER}.layers.{{layer}}", f"{TOWER}.perceive"
# Names of a layer's modules.
_NAMES: dict[str, tuple[str, str]] = {
    "norms": ("input_layernorm", "post_attention_layernorm"),
    "attention": ("self_attn", "o_proj"),
    "mlp": ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
}
# Values of the column "mark": of patches, and of squares that become the learned embeddings.
NEWLINE, BEGIN, END = 1, 2, 3
_MOST_MERGED = 8


@dataclass(frozen=True, kw_only=True)
class HunYuanVLTowerConfig(VitTowerConfig):
    """Sizes of the tower. jaxengine.media.processors.hunyuan_vl writes its `columns`.

    Attributes:
      vit: sizes; its image_size determines the number of learned positions, of which one, the first, is not used.
      spatial_merge_size: number of patches along a side of the square that becomes one embedding.
    """

    spatial_merge_size: int

    @property
    def unused(self) -> tuple[str, ...]:
        return (f"{MERGER}.image_sep",)  # between videos' frames, which the model's class does not take

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return HunYuanVLTower(self, hidden_size, build)


def read_hunyuan_vl(fields: ConfigFields, hidden_size: int) -> HunYuanVLTowerConfig:
    """Return the tower's configuration from a vision_config, with transformers' defaults: read_vit's fields, with
    `max_image_size` for image_size and `rms_norm_eps`, and `spatial_merge_size` (default: 2). hidden_size: not used.

    Raises ModelConfigError for wrong fields, for an interpolation of positions other than bilinear, for grouped keys,
    and for a spatial_merge_size above _MOST_MERGED.
    """
    del hidden_size
    defaults: dict[str, Any] = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "patch_size": 16,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "max_image_size": 2048,
    }
    fields = fields.with_defaults(**defaults)
    fields.require(interpolate_mode="bilinear", temporal_patch_size=1)
    fields.require(num_key_value_heads=fields.integer("num_attention_heads"))
    sizes = {"image_size": fields.value("max_image_size"), "layer_norm_eps": fields.value("rms_norm_eps")}
    vit = read_vit(ConfigFields({**fields.raw, **sizes}), has_class_token=True)
    merge = fields.integer("spatial_merge_size", 2)
    if merge > _MOST_MERGED:
        raise fields.fail("spatial_merge_size", f"1 to {_MOST_MERGED}")
    return HunYuanVLTowerConfig(
        num_features=vit.num_features,
        columns=("segment", "row", "column", "height", "width", "mark"),
        merge=merge * merge,
        unit=math.lcm(UNIT, merge * merge),
        vit=vit,
        spatial_merge_size=merge,
    )


class HunYuanVLTower(nnx.Module):
    """Vision tower of HunyuanOCR: learned positions, layers with layer norms and MLPs of two matrices, biases
    everywhere, and a merger.
    """

    def __init__(self, config: HunYuanVLTowerConfig, hidden_size: int, build: Build):
        self.config = config
        vit, size, source = config.vit, config.vit.hidden_size, f"{TOWER}.embeddings"
        patches = f"{source}.patch_embedding"
        self.patches = PatchEmbedding(config.num_features, size, source=patches, bias=True, build=build)
        self.positions = table(vit.num_positions, size, f"{source}.position_embedding.weight", build)
        builds = (replace(build, layer=layer) for layer in range(vit.num_layers))
        self.layers = nnx.List([plain_layer(vit, LAYER, each, eps=vit.norm_eps, **_NAMES) for each in builds])
        self.merger = self.make_merger(hidden_size, build)

    def make_merger(self, hidden_size: int, build: Build) -> nnx.Module:
        """Return a new merger of squares of patches to embeddings of a text model of this hidden size."""
        return HunYuanVLMerger(self.config, hidden_size, build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, D] of patches f32[P, F]: interpolated learned positions, layers that attend
        within segments, and the merger, which gets each square's mark.

        columns: i32[C, P], those of config.columns, in order.
        """
        segment, row, column, height, width, mark = columns
        vit = self.config.vit
        with jax.named_scope("patches"):
            x, sides = self.patches(patches), (vit.grid, vit.grid)
            height, width = self.sampled(height), self.sampled(width)
            places = stretched(self.positions[...][1:], sides, (row, height), (column, width), linear=True)
            x = x + places.astype(x.dtype)
        attend = partial(segment_attention, segment=segment, scale=(vit.hidden_size // vit.num_heads) ** -0.5)
        x = in_turn(self.layers, x, None, attend)
        with jax.named_scope("merger"):
            return self.merger(x, mark.reshape(-1, self.config.merge)[:, 0])

    def sampled(self, sizes: jax.Array) -> jax.Array:
        """Return the sides of images in patches, i32[P], as learned positions are stretched to them: unchanged here."""
        return sizes


class HunYuanVLMerger(nnx.Module):
    """Merger of HunyuanOCR: a norm, two convolutions over a square of patches, a product and a norm, with learned
    embeddings in the place of squares that are marked.
    """

    def __init__(self, config: HunYuanVLTowerConfig, hidden_size: int, build: Build):
        vit, self.merge = config.vit, config.merge
        size, eps = vit.hidden_size, vit.norm_eps
        self.activation = ACTIVATIONS[vit.activation]
        self.first_norm = RMSNorm(size, eps, source=f"{MERGER}.before_rms", build=build)
        # Both are convolutions, the second one of single squares.
        self.joining, self.widening = (
            PatchEmbedding(inputs, outputs, source=f"{MERGER}.proj.{number}", bias=True, build=build)
            for number, inputs, outputs in ((0, size * config.merge, 2 * size), (2, 2 * size, 4 * size))
        )
        self.proj = linear(4 * size, f"{MERGER}.mlp", hidden_size, ("embed", "embed"), build)
        self.newline = learned("newline", 4 * size, build)
        self.begin, self.end = learned("begin", hidden_size, build), learned("end", hidden_size, build)
        self.last_norm = RMSNorm(hidden_size, eps, source=f"{MERGER}.after_rms", build=build)

    def __call__(self, x: jax.Array, marks: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, D of the model] of patches x [P, D of the tower], square by square.

        marks: i32[P / merge]; BEGIN or END for squares that become these learned embeddings, NEWLINE for one before the
        last product. The last norm is applied to all.
        """
        squares = self.first_norm(x).reshape(-1, self.merge, x.shape[1]).swapaxes(1, 2)
        y = self.joining(squares.reshape(len(squares), -1))
        y = self.widening(self.activation(y.astype(jnp.float32)).astype(x.dtype))
        marks = marks[:, None]
        y = self.proj(jnp.where(marks == NEWLINE, self.newline[...], y))
        y = jnp.where(marks == BEGIN, self.begin[...], jnp.where(marks == END, self.end[...], y))
        return self.last_norm(y)


def learned(name: str, width: int, build: Build) -> nnx.Param:
    """Return a new parameter [width] for the merger's learned embedding `name`, such as "newline"."""
    return vector(width, f"{MERGER}.image_{name}", build)
