"""Vision tower of Pixtral (Agrawal et al. 2024, arXiv:2410.07073), and of Mistral Small 3.1 and later.

Queries and keys are rotated by a patch's row and column, patches attend to those of the same image, and each patch, or
each square of merged patches, becomes one embedding for the text model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.params.declare import Source
from jaxengine.models.vision.base.attention import UNIT, segment_attention
from jaxengine.models.vision.base.layers import (
    PatchEmbedding,
    TowerAttention,
    TowerLayer,
    TowerMLP,
    axial_rope,
    in_turn,
    read_axial_theta,
    rope_frequencies,
    tower_axis,
)
from jaxengine.models.vision.base.vit import read_layer_index

TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
LAYER = f"{TOWER}.transformer.layers.{{layer}}"
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class PixtralTowerConfig(TowerConfig):
    """Sizes of the tower. jaxengine.media.processors.grids writes its `columns`.

    Attributes:
      hidden_size, intermediate_size, num_layers, num_heads: sizes of the tower's layers.
      num_used_layers: number of layers before the hidden states that are used.
      activation, projector_activation: names of jaxengine.models.layers.base.activations.ACTIVATIONS.
      patch_size: pixels of a patch's side.
      temporal_patch_size: frames of a patch.
      spatial_merge_size: number of patches along a side of the square that becomes one embedding.
      rope_theta: base of the rotary frequencies, which rows and columns share.
      projector_bias: whether the projector's matrices have biases.
      norm_eps: epsilon of the projector's RMS norm, which it has with `joins` only.
      joins: whether the projector merges each square of patches into one, after the norm (Mistral Small 3.1).
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_used_layers: int
    num_heads: int
    activation: str
    projector_activation: str
    patch_size: int
    spatial_merge_size: int
    rope_theta: float
    projector_bias: bool
    norm_eps: float
    joins: bool = True
    temporal_patch_size: int = 1

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(f"{LAYER.format(layer=layer)}." for layer in range(self.num_used_layers, self.num_layers))

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return PixtralTower(self, hidden_size, build)


def read_pixtral(fields: ConfigFields, norm_eps: float | None = None) -> PixtralTowerConfig:
    """Return the vision tower's configuration from the config.json of Pixtral, or of a Mistral 3 model with images; an
    absent vision_config means all defaults, and for Mistral 3 patches of 14 pixels instead of 16.
    `vision_feature_layer` (default: -1) selects the hidden states, and Mistral 3 merges squares with
    `spatial_merge_size` (default: 2) patches along a side. `multimodal_projector_bias` is true by default for Pixtral
    alone.

    norm_eps: epsilon of the text model's RMS norms, which the projector of Mistral 3 uses before it merges patches;
    None for Pixtral, whose projector neither norms nor merges. Raises ModelConfigError for wrong fields, for another
    model_type of vision_config, and for heads whose number of elements is not hidden_size / num_attention_heads, a
    multiple of 4.
    """
    joins = norm_eps is not None
    vision = ConfigFields(fields.mapping("vision_config") or {})
    vision.require(num_channels=3)
    kind = vision.text("model_type", "pixtral")
    if kind != "pixtral":
        raise vision.fail("model_type", "pixtral in vision_config")
    size, heads = vision.integer("hidden_size", 1024), vision.integer("num_attention_heads", 16)
    if size % heads or size // heads % 4:
        raise vision.fail("hidden_size", f"a multiple of 4 * num_attention_heads = {4 * heads}")
    if vision.integer("head_dim", size // heads) != size // heads:
        raise vision.fail("head_dim", f"hidden_size / num_attention_heads = {size // heads}")
    layers = vision.integer("num_hidden_layers", 24)
    # Without a vision_config Mistral 3's default patch size differs from that of the tower's own class.
    patch = vision.integer("patch_size", 14 if joins and fields.mapping("vision_config") is None else 16)
    merge = fields.integer("spatial_merge_size", 2) if joins else 1
    return PixtralTowerConfig(
        num_features=3 * patch * patch,
        columns=("segment", "row", "column"),
        merge=merge * merge,
        unit=math.lcm(UNIT, merge * merge),
        hidden_size=size,
        intermediate_size=vision.integer("intermediate_size", 4096),
        num_layers=layers,
        num_used_layers=read_layer_index(fields, fields.value("vision_feature_layer", -1), layers),
        num_heads=heads,
        activation=read_activation(vision, "hidden_act"),
        projector_activation=read_activation(fields, "projector_hidden_act"),
        patch_size=patch,
        spatial_merge_size=merge,
        rope_theta=read_axial_theta(vision),
        projector_bias=fields.boolean("multimodal_projector_bias", not joins),
        norm_eps=norm_eps or 0.0,
        joins=joins,
    )


class PixtralTower(nnx.Module):
    """Vision tower of Pixtral: layers with RMS norms before attention and before a gated MLP, without biases, and a
    projector.
    """

    def __init__(self, config: PixtralTowerConfig, hidden_size: int, build: Build):
        self.config = config
        size = config.hidden_size
        self.patches = PatchEmbedding(config.num_features, size, source=f"{TOWER}.patch_conv", bias=False, build=build)
        self.first_norm = RMSNorm(size, EPS, source=f"{TOWER}.ln_pre", build=build)
        self.layers = nnx.List(
            [self._make_layer(replace(build, layer=layer)) for layer in range(config.num_used_layers)]
        )
        self.projector = PixtralProjector(config, hidden_size, build)

    def _make_layer(self, build: Build) -> TowerLayer:
        """Return a new layer, number `build.layer` of the tower."""
        config, size = self.config, self.config.hidden_size
        norms = (RMSNorm(size, EPS, source=f"{LAYER}.{name}", build=build) for name in ("attention_norm", "ffn_norm"))
        before_attention, before_mlp = norms
        qkv = [Source(f"{LAYER}.attention.{name}_proj", size) for name in "qkv"]
        attention = TowerAttention(
            size, config.num_heads, qkv=qkv, out=f"{LAYER}.attention.o_proj", bias=False, out_bias=False, build=build
        )
        mlp = TowerMLP(
            size,
            config.intermediate_size,
            up=[f"{LAYER}.feed_forward.{name}_proj" for name in ("gate", "up")],
            down=f"{LAYER}.feed_forward.down_proj",
            activation=ACTIVATIONS[config.activation],
            bias=False,
            build=build,
        )
        return TowerLayer((before_attention, before_mlp), attention, mlp)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, D] of patches f32[P, F]: normed projections, layers with rope by row and
        column that attend within segments, and the projector.

        columns: i32[C, P], those of config.columns, in order.
        """
        segment, rows, places = columns
        head_dim = self.config.hidden_size // self.config.num_heads
        # Rows have every other frequency of a head's, and columns the rest.
        freqs = rope_frequencies(head_dim, self.config.rope_theta)
        with jax.named_scope("rope_table"):
            turns = axial_rope(rows, places, freqs[0::2], freqs[1::2])
        with jax.named_scope("patches"):
            x = self.first_norm(self.patches(patches))
        attend = partial(segment_attention, segment=segment, scale=head_dim**-0.5)
        x = in_turn(self.layers, x, turns, attend)
        with jax.named_scope("projector"):
            return self.projector(x)


class PixtralProjector(nnx.Module):
    """Projector of patches to embeddings for the text model: two matrices with an activation between them.

    With config.joins they are preceded by an RMS norm and a matrix that merges `merge` neighbouring patches into one.
    """

    def __init__(self, config: PixtralTowerConfig, hidden_size: int, build: Build):
        size, self.merge = config.hidden_size, config.merge
        ffn, bias = tower_axis("ffn", build), config.projector_bias
        norm, merged = f"{PROJECTOR}.norm", (Source(f"{PROJECTOR}.patch_merger.merging_layer", size),)
        self.norm = RMSNorm(size, config.norm_eps, source=norm, build=build) if config.joins else None
        joined = size * self.merge
        self.merging = Linear(joined, merged, axes=("embed", "embed"), build=build) if config.joins else None
        first, second = ((Source(f"{PROJECTOR}.linear_{number}", hidden_size),) for number in (1, 2))
        self.up = Linear(size, first, axes=("embed", ffn), bias=bias, build=build)
        self.down = Linear(hidden_size, second, axes=(ffn, "embed"), bias=bias, build=build)
        self.activation = ACTIVATIONS[config.projector_activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return down(activation(up(x))), [P / merge, D of the model], of patches x [P, D of the tower], which are
        first normed and merged if the config `joins`. The activation is in float32.
        """
        width, joined = x.shape[1], x
        if self.norm is not None and self.merging is not None:
            # The checkpoint has a channel's patches side by side, as torch's unfold gives them.
            joined = self.norm(x).reshape(-1, self.merge, width).swapaxes(1, 2).reshape(-1, self.merge * width)
            joined = self.merging(joined)
        inner = self.up(joined).astype(x.dtype)
        return self.down(self.activation(inner.astype(jnp.float32)).astype(x.dtype))
