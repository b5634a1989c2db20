"""Vision tower of LFM3-VL (Liquid AI 2026): gated convolutions over the grid of patches, and attention in every second
layer, rotated by row and column.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm, RMSNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of
from jaxengine.models.vision.base.attention import UNIT, segment_attention
from jaxengine.models.vision.base.layers import (
    Attend,
    PatchMerger,
    TowerAttention,
    TowerMLP,
    axial_rope,
    in_turn,
    read_axial_theta,
    rope_frequencies,
    tower_axis,
)
from jaxengine.models.vision.llava import PROJECTOR, TOWER

LAYER = f"{TOWER}.layers.{{layer}}"
CONV, FULL = "conv", "full_attention"
_PROJECTOR_EPS = 1e-6
_WIDEST_KERNEL = 7
# For each tap of a convolution, and each patch: the index of the patch under it, and whether there is one.
Taps = tuple[tuple[jax.Array, jax.Array], ...]


@dataclass(frozen=True, kw_only=True)
class Lfm3VlTowerConfig(TowerConfig):
    """Sizes of the tower. jaxengine.media.processors.qwen2_vl writes its `columns`.

    Attributes:
      hidden_size, intermediate_size, num_heads, num_kv_heads, norm_eps: of the tower's layers.
      layer_types: CONV or FULL for each layer.
      conv_kernel: rows and columns of patches under a convolution, an odd number.
      patch_size, temporal_patch_size: pixels of a patch's side, and frames of a patch.
      spatial_merge_size: rows and columns of patches that become one row.
      rope_theta: base of the rotary frequencies.
      projector_size, projector_activation, projector_bias: of the MLP over the patches of a row.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    norm_eps: float
    layer_types: tuple[str, ...]
    conv_kernel: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    rope_theta: float
    projector_size: int
    projector_activation: str
    projector_bias: bool

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layer_types)

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Lfm3VlTower(self, hidden_size, build)


def read_lfm3_vl(fields: ConfigFields) -> Lfm3VlTowerConfig:
    """Return the tower's configuration from a config.json. Of vision_config are read the usual sizes, `norm_eps`,
    `patch_size`, `temporal_patch_size` (default: 2), `spatial_merge_size` (2), `conv_kernel_size` (3) and the base of
    rope (1,000,000), and beside it `projector_hidden_size` (4096), `projector_hidden_act` (gelu) and `projector_bias`
    (true). Without `layer_types` the first two layers and every second one after them are convolutions. Raises
    ModelConfigError for wrong fields, for another model_type of vision_config, for heads whose number of elements is
    not a multiple of 4, heads of keys that do not divide those of queries, and a kernel that is even or above
    _WIDEST_KERNEL.
    """
    defaults: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2560,
        "num_hidden_layers": 14,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "patch_size": 16,
    }
    fields = ConfigFields({**fields.raw, "vision_config": fields.value("vision_config", {})})
    vision = fields.part("vision_config", **defaults)
    vision.require(model_type="lfm3_vl_vision")
    vision.require(in_channels=3)
    size, heads = vision.integer("hidden_size"), vision.integer("num_attention_heads")
    if size % heads or size // heads % 4:
        raise vision.fail("hidden_size", f"a multiple of 4 * num_attention_heads = {4 * heads}")
    if heads % (kv_heads := vision.integer("num_key_value_heads")):
        raise vision.fail("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    kernel = vision.integer("conv_kernel_size", 3)
    if kernel % 2 == 0 or kernel > _WIDEST_KERNEL:
        raise vision.fail("conv_kernel_size", f"an odd integer from 1 to {_WIDEST_KERNEL}")
    count = vision.integer("num_hidden_layers")
    kinds = vision.value("layer_types", [CONV if each < 2 or each % 2 else FULL for each in range(count)])
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (CONV, FULL) for kind in kinds):
        raise vision.fail("layer_types", f"a list of {count} of {CONV}, {FULL}")
    patch, merge = vision.integer("patch_size"), vision.integer("spatial_merge_size", 2)
    frames = vision.integer("temporal_patch_size", 2)
    return Lfm3VlTowerConfig(
        num_features=3 * frames * patch * patch,
        columns=("segment", "row", "column", "height", "width"),
        merge=merge * merge,
        unit=math.lcm(UNIT, merge * merge),
        hidden_size=size,
        intermediate_size=vision.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        norm_eps=vision.number("norm_eps"),
        layer_types=tuple(kinds),
        conv_kernel=kernel,
        patch_size=patch,
        temporal_patch_size=frames,
        spatial_merge_size=merge,
        rope_theta=read_axial_theta(vision, 1e6),
        projector_size=fields.integer("projector_hidden_size", 4096),
        projector_activation=read_activation(fields, "projector_hidden_act"),
        projector_bias=fields.boolean("projector_bias", True),
    )


class GridConv(nnx.Module):
    """Gated convolution over the grid of patches: x -> out(c * conv(b * v)), with b, c and v projected from x. Each
    channel has its own kernel, a square.
    """

    def __init__(self, config: Lfm3VlTowerConfig, build: Build):
        size, count, source = config.hidden_size, config.conv_kernel**2, f"{LAYER}.conv"
        # Not "ffn", for which devices that split a batch exchange rows: a tap is in the same device's rows.
        channels = tower_axis("heads", build)
        inputs = parts_of(f"{source}.in_proj", size, size, size)
        self.inputs = Linear(size, inputs, axes=("embed", channels), build=build)
        taps = ParamDecl((channels, None), (Source(f"{source}.spatial_conv.weight", size),), init_std=0.3)
        self.kernel = declare((size, count), build.dtype, taps)
        self.out = Linear(size, (Source(f"{source}.out_proj", size),), axes=(channels, "embed"), build=build)

    def __call__(self, x: jax.Array, taps: Taps) -> jax.Array:
        """Return out(c * conv(b * v)) for x [P, D], [P, D], with the sums of the convolution in float32.

        taps: results of `taps_of` for the kernel, in the order of its weights.
        """
        before, after, x = jnp.split(self.inputs(x), 3, axis=1)
        mixed, weights = (before * x).astype(jnp.float32), self.kernel[...].astype(jnp.float32)
        total = jnp.zeros_like(mixed)
        for tap, (index, inside) in enumerate(taps):
            total += jnp.where(inside[:, None], mixed[index], 0.0) * weights[:, tap]
        return self.out((after.astype(jnp.float32) * total).astype(x.dtype))


def taps_of(columns: dict[str, jax.Array], merge: int, kernel: int) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yield for each tap of a square kernel, line by line, (index, inside) of all patches: i32[P], the patch under the
    tap, and bool[P], whether that is within the patch's own frame. Outside of it the index is any patch.

    columns: i32[P] by name: "row", "column", "height" and "width" of patches in their frame, -1 for padding. The
    patches of a frame are neighbours, square by square of `merge` x `merge`, each line by line.
    """
    row, column, height, width = (columns[name] for name in ("row", "column", "height", "width"))

    def place(row: jax.Array, column: jax.Array) -> jax.Array:
        square = row // merge * (width // merge) + column // merge
        return square * merge * merge + row % merge * merge + column % merge

    start, reach = jnp.arange(len(row), dtype=jnp.int32) - place(row, column), kernel // 2
    for down in range(-reach, reach + 1):
        for right in range(-reach, reach + 1):
            other_row, other_column = row + down, column + right
            inside = (other_row >= 0) & (other_row < height) & (other_column >= 0) & (other_column < width)
            yield jnp.where(inside, start + place(other_row, other_column), 0), inside


class Lfm3VlLayer(nnx.Module):
    """Layer that computes x + mixer(norm(x)), then x + mlp(norm(x)), where the mixer is a GridConv or attention."""

    def __init__(self, config: Lfm3VlTowerConfig, kind: str, build: Build):
        """Create layer number `build.layer`. kind: CONV or FULL."""
        size, eps = config.hidden_size, config.norm_eps
        self.norm1, self.norm2 = (
            RMSNorm(size, eps, source=f"{LAYER}.{name}_norm", build=build) for name in ("operator", "ffn")
        )
        self.conv = GridConv(config, build) if kind == CONV else None
        self.attention = None if kind == CONV else _attention(config, build)
        self.mlp = TowerMLP(
            size,
            config.intermediate_size,
            up=[f"{LAYER}.feed_forward.{name}" for name in ("w1", "w3")],
            down=f"{LAYER}.feed_forward.w2",
            activation=jax.nn.silu,
            bias=False,
            build=build,
        )

    def __call__(self, x: jax.Array, taps: Taps, turns: tuple[jax.Array, jax.Array], attend: Attend) -> jax.Array:
        """Return x + mixer(norm(x)), then x + mlp(norm(x)), for x [P, D]: [P, D]. taps: results of `taps_of`. turns:
        cos and sin of the patches. attend: function from q, k and v to the attention output.
        """
        normed = self.norm1(x)
        if self.conv is not None:
            with jax.named_scope("conv"):
                x = x + self.conv(normed, taps)
        if self.attention is not None:
            with jax.named_scope("attention"):
                x = x + self.attention(normed, turns, attend)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.norm2(x))


def _attention(config: Lfm3VlTowerConfig, build: Build) -> TowerAttention:
    """Return a new attention without biases, with norms of each head of q and k, and fewer heads of keys."""
    size, source = config.hidden_size, f"{LAYER}.self_attn"
    head_dim = size // config.num_heads
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    q_norm, k_norm = (RMSNorm(head_dim, config.norm_eps, source=f"{source}.{x}_norm", build=build) for x in "qk")
    return TowerAttention(
        size,
        config.num_heads,
        qkv=[Source(f"{source}.{name}_proj", count * head_dim) for name, count in heads.items()],
        out=f"{source}.out_proj",
        bias=False,
        out_bias=False,
        norms=(q_norm, k_norm),
        build=build,
    )


class Lfm3VlTower(nnx.Module):
    """Vision tower of LFM3-VL: a projection of patches with a norm, layers, and an MLP over a square of patches, each
    normed before. The patches of a row are neighbours, line by line.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: Lfm3VlTowerConfig, hidden_size: int, build: Build):
        self.config, self.dtype = config, build.dtype
        size = config.hidden_size
        source = (Source(f"{TOWER}.patch_embed", size),)
        self.patches = Linear(config.num_features, source, axes=("embed", "embed"), build=build)
        self.first_norm = RMSNorm(size, config.norm_eps, source=f"{TOWER}.embedding_norm", build=build)
        kinds = enumerate(config.layer_types)
        self.layers = nnx.List([Lfm3VlLayer(config, kind, replace(build, layer=layer)) for layer, kind in kinds])
        self.projector = PatchMerger(
            size,
            config.merge,
            hidden_size,
            norm=LayerNorm(size, _PROJECTOR_EPS, source=f"{PROJECTOR}.layer_norm", build=build),
            joined=False,
            names=(f"{PROJECTOR}.linear_1", f"{PROJECTOR}.linear_2"),
            build=build,
            ffn_size=config.projector_size,
            activation=ACTIVATIONS[config.projector_activation],
            bias=config.projector_bias,
        )

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        config, named = self.config, dict(zip(self.config.columns, columns, strict=True))
        head_dim = config.hidden_size // config.num_heads
        with jax.named_scope("patches"):
            x = self.first_norm(self.patches(patches.astype(self.dtype)))
        with jax.named_scope("places"):
            taps = tuple(taps_of(named, config.spatial_merge_size, config.conv_kernel))
            # Rows and columns both have the frequencies of a head of half the size.
            freqs = rope_frequencies(head_dim // 2, config.rope_theta)
            turns = axial_rope(named["row"], named["column"], freqs, freqs)
        attend = partial(segment_attention, segment=named["segment"], scale=head_dim**-0.5)
        x = in_turn(self.layers, x, taps, turns, attend)
        with jax.named_scope("projector"):
            return self.projector(x)
