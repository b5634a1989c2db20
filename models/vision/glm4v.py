"""Vision towers of GLM-4.1V (GLM-V Team 2025, arXiv:2507.01006) and GLM-OCR (Z.ai 2026).

Queries and keys are rotated by row and column, and patches have learned positions, stretched to an image's size. They
attend to those of the same frame; a convolution joins a square of them, and a gated MLP follows. GLM-OCR has no learned
positions; its queries and keys are normed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import gelu
from jaxengine.models.layers.base.norm import LayerNorm, RMSNorm
from jaxengine.models.params.declare import Source
from jaxengine.models.vision.base.attention import segment_attention
from jaxengine.models.vision.base.layers import (
    PatchEmbedding,
    TowerAttention,
    TowerLayer,
    TowerMLP,
    axial_rope,
    in_turn,
    joined_qkv,
    rope_frequencies,
    stretched,
)
from jaxengine.models.vision.base.vit import table
from jaxengine.models.vision.qwen2_vl import LAYER, VISUAL, Qwen2VLTowerConfig, read_sizes

_PROJECTION_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Glm4vTowerConfig(Qwen2VLTowerConfig):
    """Sizes of the tower, in addition to Qwen2-VL's.

    Attributes:
      intermediate_size: inner size of the merger's MLP.
      layer_size: inner size of the MLPs of layers.
      side: rows and columns of the learned positions; 0 for a tower without them, and without the norm before them.
      norm_eps: epsilon of all RMS norms.
      attention_bias: whether q, k and v have biases.
      layer_bias: whether all other products of layers have biases.
      qk_norm: whether each head of q and of k is normed.
    """

    layer_size: int
    side: int
    norm_eps: float
    attention_bias: bool
    layer_bias: bool = False
    qk_norm: bool = False

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Glm4vTower(self, hidden_size, build)


def read_glm4v(fields: ConfigFields, hidden_size: int) -> Glm4vTowerConfig:
    """Return the tower's configuration from a vision_config, for a text model of this hidden size, which is also that
    of the layers' MLPs. By default `intermediate_size` of the merger is 13696, and `image_size` 336.

    Raises ModelConfigError for wrong fields, for an out_hidden_size that differs from hidden_size, and for an
    image_size that is not 1 to 1024 times patch_size.
    """
    fields = fields.with_defaults(hidden_size=1536, num_heads=12, attention_bias=False)
    shared = _read_shared(fields, hidden_size)
    shared["columns"] = ("segment", "row", "column", "height", "width")
    patch, image = shared["patch_size"], fields.integer("image_size", 336)
    if not patch <= image <= 1024 * patch:
        raise fields.fail("image_size", f"1 to 1024 times patch_size {patch}")
    return Glm4vTowerConfig(
        intermediate_size=fields.integer("intermediate_size", 13696),
        layer_size=hidden_size,
        side=image // patch,
        **shared,
    )


def read_glm_ocr(fields: ConfigFields, hidden_size: int) -> Glm4vTowerConfig:
    """Return the configuration of GLM-OCR's tower from a vision_config, for a text model of this hidden size.
    `intermediate_size` (default: 4096) is that of the layers' MLPs; the merger's is three times hidden_size. Raises
    ModelConfigError for wrong fields, and for an out_hidden_size that differs from hidden_size.
    """
    shared = _read_shared(fields.with_defaults(hidden_size=1024, num_heads=16, attention_bias=True), hidden_size)
    return Glm4vTowerConfig(
        intermediate_size=3 * hidden_size,  # as many as an image has colours
        layer_size=fields.integer("intermediate_size", 4096),
        side=0,
        layer_bias=shared["attention_bias"],
        qk_norm=True,
        **shared,
    )


def _read_shared(fields: ConfigFields, hidden_size: int) -> dict[str, Any]:
    """Return the keyword arguments of a Glm4vTowerConfig that both towers read from the same fields: read_sizes',
    `rms_norm_eps` (default: 1e-5) and `attention_bias`. Raises ModelConfigError for wrong fields, and for an
    out_hidden_size that differs from hidden_size.
    """
    if fields.integer("out_hidden_size", hidden_size) != hidden_size:
        raise fields.fail("out_hidden_size", f"the hidden_size of the text, {hidden_size}")
    return read_sizes(fields, depth=24, patch_size=14, hidden_act="silu") | {
        "norm_eps": fields.number("rms_norm_eps", 1e-5),
        "attention_bias": fields.boolean("attention_bias"),
    }


class Glm4vTower(nnx.Module):
    """Vision tower of GLM-4.1V or GLM-OCR: layers with RMS norms and gated MLPs, and a merger.

    A further RMS norm follows the last layer and, with learned positions, another one precedes the first layer. Queries
    and keys are rotated by row and column.
    """

    def __init__(self, config: Glm4vTowerConfig, hidden_size: int, build: Build):
        self.config = config
        size, features = config.hidden_size, config.num_features
        self.patches = PatchEmbedding(features, size, source=f"{VISUAL}.patch_embed.proj", bias=True, build=build)
        self.first_norm = self._norm(f"{VISUAL}.post_conv_layernorm", build) if config.side else None
        positions = f"{VISUAL}.embeddings.position_embedding.weight"
        self.positions = table(config.side**2, size, positions, build) if config.side else None
        self.layers = nnx.List([self._make_layer(replace(build, layer=layer)) for layer in range(config.num_layers)])
        self.last_norm = self._norm(f"{VISUAL}.post_layernorm", build)
        # A convolution of the same kind as the one of patches.
        joined = size * config.merge
        self.joining = PatchEmbedding(joined, hidden_size, source=f"{VISUAL}.downsample", bias=True, build=build)
        self.merger = Glm4vMerger(config, hidden_size, build)

    def _norm(self, source: str, build: Build, size: int = 0) -> RMSNorm:
        """Return a new RMS norm over `size` elements; 0 stands for the tower's hidden size. source: its checkpoint
        module.
        """
        return RMSNorm(size or self.config.hidden_size, self.config.norm_eps, source=source, build=build)

    def _make_layer(self, build: Build) -> TowerLayer:
        """Return a new layer, number `build.layer` of the tower."""
        config, size = self.config, self.config.hidden_size
        head_dim, names = size // config.num_heads, (f"{LAYER}.attn.{name}_norm" for name in "qk")
        q_norm, k_norm = (self._norm(name, build, head_dim) if config.qk_norm else None for name in names)
        attention = TowerAttention(
            size,
            config.num_heads,
            qkv=joined_qkv(f"{LAYER}.attn.qkv", size),
            out=f"{LAYER}.attn.proj",
            bias=config.attention_bias,
            out_bias=config.layer_bias,
            norms=(q_norm, k_norm),
            build=build,
        )
        mlp = TowerMLP(
            size,
            config.layer_size,
            up=[f"{LAYER}.mlp.{name}_proj" for name in ("gate", "up")],
            down=f"{LAYER}.mlp.down_proj",
            activation=ACTIVATIONS[config.activation],
            bias=config.layer_bias,
            build=build,
        )
        return TowerLayer((self._norm(f"{LAYER}.norm1", build), self._norm(f"{LAYER}.norm2", build)), attention, mlp)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, D] of patches f32[P, F]: interpolated learned positions, if any, layers
        with rope that attend within segments, joined squares, and the merger.

        columns: i32[C, P], those of config.columns, in order.
        """
        segment, row, column, *sides = columns
        config = self.config
        head_dim = config.hidden_size // config.num_heads
        freqs = rope_frequencies(head_dim // 2, config.rope_theta)
        with jax.named_scope("rope_table"):
            turns = axial_rope(row, column, freqs, freqs)
        with jax.named_scope("patches"):
            x = self.patches(patches)
        if self.first_norm is not None and self.positions is not None:
            with jax.named_scope("positions"):
                x, (height, width), square = self.first_norm(x), sides, (config.side, config.side)
                x = x + stretched(self.positions[...], square, (row, height), (column, width)).astype(x.dtype)
        attend = partial(segment_attention, segment=segment, scale=head_dim**-0.5)
        x = in_turn(self.layers, x, turns, attend)
        with jax.named_scope("merger"):
            x = self.last_norm(x).reshape(-1, config.merge, config.hidden_size).swapaxes(1, 2)
            return self.merger(self.joining(x.reshape(len(x), -1)))


class Glm4vMerger(nnx.Module):
    """Merger to embeddings for the text model: gelu(norm(proj(x))), then a gated MLP."""

    def __init__(self, config: Glm4vTowerConfig, hidden_size: int, build: Build):
        source = f"{VISUAL}.merger"
        sources = (Source(f"{source}.proj", hidden_size),)
        self.proj = Linear(hidden_size, sources, axes=("embed", "embed"), build=build)
        norm = f"{source}.post_projection_norm"
        self.norm = LayerNorm(hidden_size, _PROJECTION_EPS, source=norm, build=build)
        self.mlp = TowerMLP(
            hidden_size,
            config.intermediate_size,
            up=[f"{source}.{name}_proj" for name in ("gate", "up")],
            down=f"{source}.down_proj",
            activation=ACTIVATIONS[config.activation],
            bias=False,
            build=build,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return mlp(gelu(norm(proj(x)))) for x [R, D]: [R, D]."""
        x = self.norm(self.proj(x))
        return self.mlp(gelu(x.astype(jnp.float32)).astype(x.dtype))
