"""Vision tower of Muse Glimmer (Meta 2026): learned positions, attention within windows in most layers, and a projector
whose rows have a norm. A patch covers several frames; a square of patches becomes one embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_MERGE, MAX_PATCH, ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm, rms_normalized
from jaxengine.models.params.declare import Source
from jaxengine.models.vision.base.attention import UNIT, segment_attention, window_attention, window_block
from jaxengine.models.vision.base.layers import (
    Attend,
    PatchEmbedding,
    axial_rope,
    plain_layer,
    read_axial_theta,
    rope_frequencies,
    stretched,
    tower_axis,
)
from jaxengine.models.vision.base.vit import table

TOWER, ADAPTER, PROJECTION = "model.vision_tower", "model.vision_adapter", "model.vision_projection"
LAYER = f"{TOWER}.layers.{{layer}}"
_FULL, _WINDOW = "full_attention", "window_attention"
_EPS, _MOST_SIDE = 1e-5, 64


@dataclass(frozen=True, kw_only=True)
class MuseTowerConfig(TowerConfig):
    """Sizes of the tower. jaxengine.media.processors.muse_glimmer writes its `columns`.

    Attributes:
      hidden_size, intermediate_size, num_layers, num_heads: sizes of the tower's layers.
      activation, projector_activation: names of jaxengine.models.layers.base.activations.ACTIVATIONS.
      patch_size, temporal_patch_size: pixels of a patch's side, and frames of a patch.
      spatial_merge_size: rows and columns of patches that become one row.
      window_size: rows and columns of patches in a window, and of the learned positions.
      full_layers: indices of layers whose patches attend to their whole frame, ascending.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of the norms before and after the layers. row_eps: that of the norm of the projector's rows.
      projector_size: outputs of each of the adapter's two products.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    projector_activation: str
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    window_size: int
    full_layers: tuple[int, ...]
    rope_theta: float
    norm_eps: float
    row_eps: float
    projector_size: int

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return MuseTower(self, hidden_size, build)


def read_muse_tower(fields: ConfigFields, row_eps: float) -> MuseTowerConfig:
    """Return the tower's configuration from a config.json, with transformers' defaults for fields that it or its
    vision_config lacks. Unless `layer_types` lists them, the last layer and every fourth attend to whole frames.
    row_eps: epsilon of the text's norms.

    Raises ModelConfigError for wrong fields, for learned positions (`pos_emb_height`, `pos_emb_width`) that are not a
    square of whole merged squares of at most 64 patches a side, and if `out_hidden_size` is not the size of a merged
    square.
    """
    vision = ConfigFields(fields.mapping("vision_config") or {})
    size, heads = vision.integer("hidden_size", 1536), vision.integer("num_attention_heads", 16)
    if size % heads or size // heads % 4:
        raise vision.fail("hidden_size", f"a multiple of 4 * num_attention_heads = {4 * heads}")
    patch, merge, frames = (
        vision.integer(name, default)
        for name, default in (("patch_size", 14), ("merge_size", 2), ("patch_temporal", 2))
    )
    for name, value, most in (("merge_size", merge, MAX_MERGE), ("patch_temporal", frames, MAX_PATCH)):
        if value > most:
            raise vision.fail(name, f"1 to {most}")
    window = vision.integer("pos_emb_height", 32)
    if window % merge or window > _MOST_SIDE:
        raise vision.fail("pos_emb_height", f"a multiple of merge_size = {merge} up to {_MOST_SIDE}")
    if vision.integer("pos_emb_width", 32) != window:
        raise vision.fail("pos_emb_width", f"pos_emb_height, {window}")
    width = fields.integer("out_hidden_size", 6144)
    if width != size * merge * merge:
        raise fields.fail("out_hidden_size", f"hidden_size * merge_size ** 2 of vision_config, {size * merge * merge}")
    layers = vision.integer("num_hidden_layers", 50)
    kinds = vision.value("layer_types", None)
    if kinds is None:
        kinds = [_FULL if (layer + 1) % 4 == 0 or layer == layers - 1 else _WINDOW for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (_FULL, _WINDOW) for kind in kinds):
        raise vision.fail("layer_types", f"a list of {layers} of {_FULL}, {_WINDOW}")
    return MuseTowerConfig(
        num_features=3 * frames * patch * patch,
        columns=("segment", "window", "row", "column", "height", "width"),
        merge=merge * merge,
        unit=math.lcm(UNIT, window_block(window * window), merge * merge),
        hidden_size=size,
        intermediate_size=vision.integer("intermediate_size", 8960),
        num_layers=layers,
        num_heads=heads,
        activation=read_activation(vision, "hidden_act"),
        projector_activation=read_activation(fields, "projector_hidden_act"),
        patch_size=patch,
        temporal_patch_size=frames,
        spatial_merge_size=merge,
        window_size=window,
        full_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == _FULL),
        rope_theta=read_axial_theta(vision),
        norm_eps=vision.number("layer_norm_eps", _EPS),
        row_eps=row_eps,
        projector_size=fields.integer("projector_hidden_size", 4096),
    )


class MuseTower(nnx.Module):
    """Vision tower of Muse Glimmer. Queries and keys are rotated by column and row. Patches are sorted by window."""

    def __init__(self, config: MuseTowerConfig, hidden_size: int, build: Build):
        self.config = config
        size, embedder, ffn = config.hidden_size, f"{TOWER}.patch_embedder", tower_axis("ffn", build)
        self.patches = PatchEmbedding(
            config.num_features, size, source=f"{embedder}.patch_embedding", bias=False, build=build
        )
        positions = f"{embedder}.position_embedding_table.weight"
        self.positions = table(config.window_size**2, size, positions, build)
        self.first_norm, self.last_norm = (
            LayerNorm(size, config.norm_eps, source=f"{TOWER}.{name}", build=build) for name in ("ln_pre", "ln_post")
        )
        builds = (replace(build, layer=layer) for layer in range(config.num_layers))
        self.layers = nnx.List(
            [
                plain_layer(config, LAYER, each, eps=_EPS, norms=("norm1", "norm2"), attention=("attn", "proj"))
                for each in builds
            ]
        )
        inner = config.projector_size
        up, down = Source(f"{ADAPTER}.fc1", inner), Source(f"{ADAPTER}.fc2", inner)
        self.up = Linear(size * config.merge, (up,), axes=("embed", ffn), build=build)
        self.down = Linear(inner, (down,), axes=(ffn, "embed"), build=build)
        self.project = Linear(inner, (Source(PROJECTION, hidden_size),), axes=("embed", "embed"), build=build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, D] of patches f32[P, F]: learned positions, layers with rope that attend
        within segments or, unless in full_layers, within their windows, and the projector.

        columns: i32[C, P], those of config.columns, in order.
        """
        segment, window, row, column, height, width = columns
        config = self.config
        head_dim = config.hidden_size // config.num_heads
        with jax.named_scope("rope_table"):
            freqs = rope_frequencies(head_dim // 2, config.rope_theta)
            turns = axial_rope(column + 1, row + 1, freqs, freqs)
        with jax.named_scope("patches"):
            x = self.patches(patches)
        with jax.named_scope("positions"):
            x = self.first_norm(x + self._placed(row * width + column, height, width).astype(x.dtype))
        scale = head_dim**-0.5
        whole = partial(segment_attention, segment=segment, scale=scale)
        near = partial(window_attention, segment=segment, window=window, longest=config.window_size**2, scale=scale)
        for index, layer in enumerate(self.layers):
            attend: Attend = whole if index in config.full_layers else near
            with jax.named_scope(f"layer_{index}"):
                x = layer(x, turns, attend)
        with jax.named_scope("projector"):
            return self._projected(self.last_norm(x))

    def _placed(self, number: jax.Array, height: jax.Array, width: jax.Array) -> jax.Array:
        """Return the learned positions f32[P, D of the tower] of patches with these numbers, line by line, in images of
        height x width patches; all i32[P].

        The model was trained with images' sides exchanged here: the positions are stretched to an image of width x
        height patches, and its patches, line by line, are those of the image.
        """
        side = self.config.window_size
        line = jnp.maximum(height, 1)
        rows, columns = (number // line, width), (number % line, height)
        return stretched(self.positions[...], (side, side), rows, columns, linear=True, fading=True)

    def _projected(self, x: jax.Array) -> jax.Array:
        """Return the model's rows [P / merge, D of the model] of patches x [P, D of the tower]: the elements of a
        square's patches, element by element, through three products, of which two have an activation, and a norm.
        """
        config, activation = self.config, ACTIVATIONS[self.config.projector_activation]
        x = x.reshape(-1, config.merge, config.hidden_size).swapaxes(1, 2).reshape(-1, config.merge * x.shape[1])
        for product in (self.up, self.down):
            x = activation(product(x).astype(jnp.float32)).astype(x.dtype)
        return rms_normalized(self.project(x), config.row_eps).astype(x.dtype)
