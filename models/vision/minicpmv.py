"""Vision tower of MiniCPM-V 4.6 (OpenBMB 2026): SigLIP over images of any size.

After one of its layers, four patches that attend to each other become one; after the last, a merger joins squares
again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.mlp import gelu_tanh
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.params.declare import Source
from jaxengine.models.vision.base.attention import UNIT, segment_attention
from jaxengine.models.vision.base.clip import DEFAULTS, SIGLIP
from jaxengine.models.vision.base.layers import (
    PatchEmbedding,
    PatchMerger,
    TowerAttention,
    TowerLayer,
    plain_layer,
)
from jaxengine.models.vision.base.vit import VitConfig, VitTowerConfig, read_vit, table

TOWER, MERGER = "vision_tower", "merger"
_INSERTED = f"{TOWER}.vit_merger"
# Patches along a side of what one step joins, and their number.
_SIDE, _SQUARE = 2, 4
_MERGER_EPS = 1e-6
# By `downsample_mode`: whether patches are joined after one of the layers, too.
_MODES = {"16x": True, "4x": False}


@dataclass(frozen=True, kw_only=True)
class MiniCPMVTowerConfig(VitTowerConfig):
    """Sizes of the tower.

    Attributes:
      vit: sizes of the layers, and of the learned positions.
      joined_after: index of the layer after which squares of patches are joined; None if they are joined only after
        the last.
    """

    joined_after: int | None

    @property
    def num_joins(self) -> int:
        """Number of steps that join squares of patches: 1 or 2."""
        return 1 + (self.joined_after is not None)

    @property
    def spatial_merge_size(self) -> int:
        """Number of patches along a side of the square that becomes one row."""
        return _SIDE**self.num_joins

    @property
    def unused(self) -> tuple[str, ...]:
        return () if self.joined_after is not None else (f"{_INSERTED}.",)

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return MiniCPMVTower(self, hidden_size, build)


def read_minicpmv(fields: ConfigFields, mode: str) -> MiniCPMVTowerConfig:
    """Return the tower's configuration from a config.json. mode: default of `downsample_mode`: 16x joins squares after
    layer `insert_layer_id` (default: 6) and after the last, 4x only after the last.

    Raises ModelConfigError for wrong fields, for squares other than of 2 x 2 patches, for `merger_times` other than 1,
    which no published processor has, for a last layer that is dropped, and for an `insert_layer_id` that is not a
    layer.
    """
    vision = fields.part("vision_config", **DEFAULTS[SIGLIP])
    vit = read_vit(vision)
    for owner, name in ((vision, "window_kernel_size"), (fields, "merge_kernel_size")):
        if owner.value(name, [_SIDE, _SIDE]) not in ([_SIDE, _SIDE], (_SIDE, _SIDE)):
            raise owner.fail(name, f"{[_SIDE, _SIDE]}")
    fields.require(drop_vision_last_layer=False, merger_times=1)
    joins = _MODES.get(fields.text("downsample_mode", mode))
    if joins is None:
        raise fields.fail("downsample_mode", " or ".join(_MODES))
    layer = fields.integer("insert_layer_id", 6, minimum=0)
    if joins and layer >= vit.num_layers:
        raise fields.fail("insert_layer_id", f"one of the {vit.num_layers} layers of the tower, from 0")
    return MiniCPMVTowerConfig(
        num_features=vit.num_features,
        columns=("segment", "row", "column", "height", "width"),
        merge=_SQUARE ** (1 + joins),
        unit=UNIT,
        vit=vit,
        joined_after=layer if joins else None,
    )


class MiniCPMVTower(nnx.Module):
    """Vision tower of MiniCPM-V 4.6.

    The patches of a row are neighbours, and so are those of each square within it that is joined: their order is that
    of squares in squares (jaxengine.media.processors.minicpmv). A patch has the learned position at its share of the
    image's height and width.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: MiniCPMVTowerConfig, hidden_size: int, build: Build):
        vit, size = config.vit, config.vit.hidden_size
        self.config = config
        source = f"{TOWER}.embeddings"
        self.patches = PatchEmbedding(
            vit.num_features, size, source=f"{source}.patch_embedding", bias=True, build=build
        )
        self.positions = table(vit.num_patches, size, f"{source}.position_embedding.weight", build)
        self.layers = nnx.List([make_layer(vit, replace(build, layer=layer)) for layer in range(vit.num_layers)])
        self.last_norm = LayerNorm(size, vit.norm_eps, source=f"{TOWER}.post_layernorm", build=build)
        self.joining = JoinedWindows(vit, build) if config.joined_after is not None else None
        source = f"{MERGER}.mlp.0"
        self.merger = PatchMerger(
            size,
            _SQUARE,
            hidden_size,
            norm=LayerNorm(size * _SQUARE, _MERGER_EPS, source=f"{source}.pre_norm", build=build),
            joined=True,
            names=(f"{source}.linear_1", f"{source}.linear_2"),
            build=build,
        )

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        segment, row, column, height, width = columns
        config, side, block = self.config, self.config.vit.grid, UNIT
        with jax.named_scope("patches"):
            down, right = (
                jnp.clip(place * side // jnp.maximum(count, 1), 0, side - 1)
                for place, count in ((row, height), (column, width))
            )
            x = self.patches(patches) + self.positions[...][down * side + right]
        scale = (config.vit.hidden_size // config.vit.num_heads) ** -0.5
        for index, layer in enumerate(self.layers):
            attend = partial(segment_attention, segment=segment, scale=scale, block=block)
            with jax.named_scope(f"layer_{index}"):
                x = layer(x, None, attend)
            if self.joining is not None and index == config.joined_after:
                with jax.named_scope("joining"):
                    x, segment, block = self.joining(x), segment[::_SQUARE], block // _SQUARE
        x = self.last_norm(x)
        with jax.named_scope("merger"):
            return self.merger(x)


class JoinedWindows(nnx.Module):
    """Step that joins windows of four patches: they attend to each other, and the mean of their hidden states is added
    to an MLP over all four.
    """

    def __init__(self, vit: VitConfig, build: Build):
        size, eps = vit.hidden_size, vit.norm_eps
        self.norm = LayerNorm(size, eps, source=f"{_INSERTED}.layer_norm1", build=build)
        source = f"{_INSERTED}.self_attn"
        qkv = [Source(f"{source}.{name}_proj", size) for name in "qkv"]
        self.attention = TowerAttention(size, vit.num_heads, qkv=qkv, out=f"{source}.out_proj", build=build)
        self.mlp = PatchMerger(
            size,
            _SQUARE,
            size,
            norm=LayerNorm(size * _SQUARE, eps, source=f"{_INSERTED}.pre_norm", build=build),
            joined=True,
            names=(f"{_INSERTED}.linear_1", f"{_INSERTED}.linear_2"),
            build=build,
            ffn_size=vit.intermediate_size * _SQUARE,
            activation=gelu_tanh,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the hidden states [P / 4, D] of the windows of four neighbours in x [P, D]: mlp(y) plus the mean of y
        = x + attention(norm(x)) within each.
        """
        x = x + self.attention(self.norm(x), None, _window_attention)
        mean = x.astype(jnp.float32).reshape(-1, _SQUARE, x.shape[1]).mean(axis=1)
        return self.mlp(x) + mean.astype(x.dtype)


def make_layer(vit: VitConfig, build: Build) -> TowerLayer:
    """Return a new layer of SigLIP, number `build.layer` of the tower."""
    return plain_layer(vit, f"{TOWER}.encoder.layers.{{layer}}", build, eps=vit.norm_eps)


def _window_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return the attention output [P, N, H] within every four patches, for q, k and v [P, N, H] each, with sums in
    float32.
    """
    q, k, v = (each.reshape(-1, _SQUARE, *each.shape[1:]) for each in (q, k, v))
    scores = jnp.einsum("wqnh,wknh->wnqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("wnqk,wknh->wqnh", weights, v, preferred_element_type=jnp.float32)
    return out.astype(v.dtype).reshape(-1, *v.shape[2:])
