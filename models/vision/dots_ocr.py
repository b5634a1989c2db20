"""Vision tower of dots.ocr (rednote hi lab 2025, arXiv:2512.02498): Qwen2-VL's with RMS norms, of patches as well and
after the last layer, and gated MLPs.

Queries and keys are rotated by row and column, patches attend to those of the same image, and a square of them becomes
one embedding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.norm import LayerNorm, RMSNorm
from jaxengine.models.vision.base.attention import segment_attention
from jaxengine.models.vision.base.layers import (
    PatchEmbedding,
    PatchMerger,
    TowerAttention,
    TowerLayer,
    TowerMLP,
    axial_rope,
    in_turn,
    joined_qkv,
    rope_frequencies,
)
from jaxengine.models.vision.qwen2_vl import Qwen2VLTowerConfig, read_sizes

TOWER = "vision_tower"
LAYER = f"{TOWER}.blocks.{{layer}}"
_MERGER_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DotsOcrTowerConfig(Qwen2VLTowerConfig):
    """Sizes of the tower, in addition to Qwen2-VL's.

    Attributes:
      norm_eps: epsilon of all RMS norms.
      bias: whether the products of layers have biases.
      last_norm: whether an RMS norm follows the last layer.
    """

    norm_eps: float
    bias: bool
    last_norm: bool

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return DotsOcrTower(self, hidden_size, build)


def read_dots_ocr(fields: ConfigFields, hidden_size: int) -> DotsOcrTowerConfig:
    """Return the tower's configuration from a config.json, for a text model of this hidden size, with
    `intermediate_size` (default: 4224), `rms_norm_eps` (1e-5), `use_bias` (false) and `post_norm` (true) of
    vision_config.

    Raises ModelConfigError for wrong fields, for causal attention, and if `hidden_size` of vision_config, the merger's
    output size, differs from the text model's.
    """
    vision = ConfigFields(fields.mapping("vision_config") or {}).with_defaults(
        embed_dim=1536, num_hidden_layers=42, num_attention_heads=12, patch_size=14, temporal_patch_size=1
    )
    vision.require(is_causal=False)
    if vision.integer("hidden_size", hidden_size) != hidden_size:
        raise vision.fail("hidden_size", f"that of the text, {hidden_size}")
    named = {"depth": vision.integer("num_hidden_layers"), "num_heads": vision.integer("num_attention_heads")}
    named |= {"in_channels": vision.integer("num_channels", 3), "hidden_act": "silu"}
    sizes = read_sizes(ConfigFields({**vision.raw, **named}), width="embed_dim")
    return DotsOcrTowerConfig(
        intermediate_size=vision.integer("intermediate_size", 4224),
        norm_eps=vision.number("rms_norm_eps", 1e-5),
        bias=vision.boolean("use_bias", False),
        last_norm=vision.boolean("post_norm", True),
        **sizes,
    )


class DotsOcrTower(nnx.Module):
    """Vision tower of dots.ocr: an RMS norm of patches, layers with RMS norms and gated MLPs, an RMS norm after the
    last layer if the configuration has one, and a merger.
    """

    def __init__(self, config: DotsOcrTowerConfig, hidden_size: int, build: Build):
        self.config = config
        size, source = config.hidden_size, f"{TOWER}.patch_embed.patchifier"
        self.patches = PatchEmbedding(config.num_features, size, source=f"{source}.proj", bias=True, build=build)
        self.first_norm = self._norm(f"{source}.norm", build)
        self.layers = nnx.List([self._make_layer(replace(build, layer=layer)) for layer in range(config.num_layers)])
        self.last_norm = self._norm(f"{TOWER}.post_trunk_norm", build) if config.last_norm else None
        merger = f"{TOWER}.merger"
        self.merger = PatchMerger(
            size,
            config.merge,
            hidden_size,
            norm=LayerNorm(size, _MERGER_EPS, source=f"{merger}.ln_q", build=build),
            joined=False,
            names=(f"{merger}.mlp.0", f"{merger}.mlp.2"),
            build=build,
        )

    def _norm(self, source: str, build: Build) -> RMSNorm:
        """Return a new RMS norm over the tower's hidden size. source: its checkpoint module."""
        return RMSNorm(self.config.hidden_size, self.config.norm_eps, source=source, build=build)

    def _make_layer(self, build: Build) -> TowerLayer:
        """Return a new layer, number `build.layer` of the tower."""
        config, size, bias = self.config, self.config.hidden_size, self.config.bias
        qkv, out = joined_qkv(f"{LAYER}.attn.qkv", size), f"{LAYER}.attn.proj"
        attention = TowerAttention(size, config.num_heads, qkv=qkv, out=out, bias=bias, out_bias=bias, build=build)
        mlp = TowerMLP(
            size,
            config.intermediate_size,
            up=[f"{LAYER}.mlp.{name}" for name in ("fc1", "fc3")],
            down=f"{LAYER}.mlp.fc2",
            activation=ACTIVATIONS[config.activation],
            bias=bias,
            build=build,
        )
        return TowerLayer((self._norm(f"{LAYER}.norm1", build), self._norm(f"{LAYER}.norm2", build)), attention, mlp)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, D] of patches f32[P, F]: normed projections, layers with rope by row and
        column that attend within segments, and the merger.

        columns: i32[C, P], those of config.columns, in order.
        """
        segment, row, column = columns
        head_dim = self.config.hidden_size // self.config.num_heads
        freqs = rope_frequencies(head_dim // 2, self.config.rope_theta)
        with jax.named_scope("rope_table"):
            turns = axial_rope(row, column, freqs, freqs)
        with jax.named_scope("patches"):
            x = self.first_norm(self.patches(patches))
        attend = partial(segment_attention, segment=segment, scale=head_dim**-0.5)
        x = in_turn(self.layers, x, turns, attend)
        with jax.named_scope("merger"):
            return self.merger(x if self.last_norm is None else self.last_norm(x))
