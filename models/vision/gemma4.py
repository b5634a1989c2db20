"""Vision tower of Gemma 4 (Google 2026): images of any aspect ratio, learned positions of columns and of rows that are
added, queries and keys that are normalised and rotated by column and row, and means of squares of patches.

In some checkpoints the inputs and outputs of the layers' products have limits, which are learned as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm, rms_normalized
from jaxengine.models.layers.base.rope import apply_rope
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.vision.base.attention import UNIT, segment_attention
from jaxengine.models.vision.base.layers import (
    Attend,
    PatchEmbedding,
    axial_rope,
    in_turn,
    read_axial_theta,
    rope_frequencies,
    tower_axis,
)
from jaxengine.models.vision.base.vit import heads_of, table

TOWER, PROJECTOR = "model.vision_tower", "model.embed_vision"
LAYER = f"{TOWER}.encoder.layers.{{layer}}"
POSITIONS = f"{TOWER}.patch_embedder.position_embedding_table"
LIMITS = ("input_min", "input_max", "output_min", "output_max")
# transformers' defaults of fields that a file lacks.
DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
    "standardize": False,
}
_LIMITS = {"pooling_kernel_size": 8, "patch_size": 256, "position_embedding_size": 1 << 16}
_THETA = 100.0
# A block of queries is a multiple of this many patches, as well as of those that become one embedding.
_ALIGN = 32
_LARGEST = 3e38


@dataclass(frozen=True, kw_only=True)
class Gemma4TowerConfig(TowerConfig):
    """Sizes of the tower. jaxengine.media.processors.grids writes its `columns`.

    Attributes:
      hidden_size, intermediate_size, num_layers, num_heads, head_dim, norm_eps, theta: sizes of the tower's layers.
      num_kv_heads: heads of keys and values; it divides num_heads.
      activation: a name of jaxengine.models.layers.base.activations.ACTIVATIONS, for MLPs.
      patch_size: pixels of a patch's side.
      temporal_patch_size: frames of a patch.
      spatial_merge_size: patches along a side of the square that becomes one embedding.
      num_positions: learned positions along each side.
      clipped: whether products have limits.
      standardized: whether embeddings are shifted and scaled by learned numbers.
      filler_id: token whose further layer inputs the tokens of an image use.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    norm_eps: float
    theta: float
    patch_size: int
    spatial_merge_size: int
    num_positions: int
    clipped: bool
    standardized: bool
    filler_id: int
    temporal_patch_size: int = 1

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Gemma4Tower(self, hidden_size, build)


def read_gemma4(fields: ConfigFields, *, both_ways: bool, filler_id: int) -> Gemma4TowerConfig:
    """Return the vision tower's configuration from the `vision_config` of a config.json, with transformers' defaults:
    the usual sizes, `rms_norm_eps`, `pooling_kernel_size`, `position_embedding_size`, `use_clipped_linears` and
    `standardize`. Raises ModelConfigError for wrong fields, and for heads whose number of elements is not a multiple of
    4, heads of keys that do not divide those of queries, and sizes above _LIMITS.

    both_ways: whether layers with windows let the tokens of an image see its later tokens. filler_id:
    Gemma4TowerConfig's filler_id.
    """
    vision = fields.part("vision_config", **DEFAULTS)
    heads, head_dim = vision.integer("num_attention_heads"), vision.integer("head_dim")
    if heads % (kv_heads := vision.integer("num_key_value_heads")):
        raise vision.fail("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if head_dim % 4:
        raise vision.fail("head_dim", "a multiple of 4: halves are rotated by columns and rows")
    for name, most in _LIMITS.items():
        if vision.integer(name) > most:
            raise vision.fail(name, f"1 to {most}")
    side, patch = vision.integer("pooling_kernel_size"), vision.integer("patch_size")
    step = math.lcm(_ALIGN, side**2)
    return Gemma4TowerConfig(
        num_features=3 * patch**2,
        columns=("segment", "row", "column"),
        merge=side**2,
        unit=-(-UNIT // step) * step,
        attends_both_ways=both_ways,
        in_windows_only=True,
        hidden_size=vision.integer("hidden_size"),
        intermediate_size=vision.integer("intermediate_size"),
        num_layers=vision.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        activation=read_activation(vision, "hidden_activation"),
        norm_eps=vision.number("rms_norm_eps"),
        theta=read_axial_theta(vision, _THETA),
        patch_size=patch,
        spatial_merge_size=side,
        num_positions=vision.integer("position_embedding_size"),
        clipped=vision.boolean("use_clipped_linears"),
        standardized=vision.boolean("standardize"),
        filler_id=filler_id,
    )


class ClippedLinear(nnx.Module):
    """Product whose inputs, and whose outputs, are clipped to a learned range each."""

    def __init__(self, in_size: int, source: Source, axes: tuple[str, str], build: Build):
        self.product = Linear(in_size, (source,), axes=axes, build=build)
        module = source.name.removesuffix(".linear")
        self.least, self.most = (
            declare(
                (2,),
                jnp.float32,
                ParamDecl((None,), tuple(Source(f"{module}.{name}", 1) for name in names), init_value=value),
            )
            for names, value in ((LIMITS[::2], -_LARGEST), (LIMITS[1::2], _LARGEST))
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the clipped product [P, out] of the clipped x [P, in]."""
        (least_in, least_out), (most_in, most_out) = self.least[...], self.most[...]
        y = self.product(jnp.clip(x, least_in.astype(x.dtype), most_in.astype(x.dtype)))
        return jnp.clip(y, least_out.astype(y.dtype), most_out.astype(y.dtype))


class Products(nnx.Module):
    """Products of one input, side by side: one matrix for all, or one for each if they have limits.

    sources: of each product, named within a layer.
    """

    def __init__(
        self,
        config: Gemma4TowerConfig,
        in_size: int,
        sources: Sequence[Source],
        axes: tuple[str, str],
        build: Build,
    ):
        parts = [each._replace(name=f"{LAYER}.{each.name}.linear") for each in sources]
        split = tower_axis(axes[0], build), tower_axis(axes[1], build)
        joined: list[nnx.Module] = []
        if config.clipped:
            joined += [ClippedLinear(in_size, part, split, build) for part in parts]
        else:
            joined.append(Linear(in_size, parts, axes=split, build=build))
        self.parts = nnx.List(joined)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the outputs of all modules, [P, out], for x [P, in]; on several devices, this device's part of each
        module's outputs.
        """
        outputs = [part(x) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=-1)


class Gemma4TowerAttention(nnx.Module):
    """Attention of an image's patches with each other. q, k and v are normed, and products are not scaled."""

    def __init__(self, config: Gemma4TowerConfig, build: Build):
        size, head_dim = config.hidden_size, config.head_dim
        inner = config.num_heads * head_dim
        qkv = heads_of("self_attn", config.num_heads, config.num_kv_heads, head_dim)
        self.qkv = Products(config, size, qkv, ("embed", "heads"), build)
        self.out = Products(config, inner, [Source("self_attn.o_proj", size)], ("heads", "embed"), build)
        self.q_norm, self.k_norm = (
            RMSNorm(head_dim, config.norm_eps, source=f"{LAYER}.self_attn.{name}_norm", build=build) for name in "qk"
        )
        self.head_dim, self.eps = head_dim, config.norm_eps

    def __call__(self, x: jax.Array, turns: Sequence[tuple[jax.Array, jax.Array]], attend: Attend) -> jax.Array:
        """Return out(attend(q, k, v)) for x [P, D]: [P, D]. q and k are normed, then rotated; v is normed.

        turns: (cos, sin) of the patches by column, and by row, f32[P, H / 4] each. attend: function of q, k and v.
        """
        q, k, v = jnp.split(self.qkv(x).reshape(x.shape[0], -1, self.head_dim), 3, axis=1)
        with jax.named_scope("rope"):
            q, k = _rotated(self.q_norm(q), turns), _rotated(self.k_norm(k), turns)
        with jax.named_scope("attend"):
            o = attend(q, k, rms_normalized(v, self.eps).astype(v.dtype))
        return self.out(o.reshape(x.shape[0], -1))


def _rotated(x: jax.Array, turns: Sequence[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Return heads x [P, N, H] with the first half of their elements rotated by the first of `turns`, (cos, sin) f32[P,
    H / 4] each, and the second half by the second.
    """
    halves = zip(jnp.split(x, 2, axis=-1), turns, strict=True)
    return jnp.concatenate([apply_rope(half, *turn) for half, turn in halves], axis=-1)


class Gemma4TowerMLP(nnx.Module):
    """MLP down(activation(gate(x)) * up(x))."""

    def __init__(self, config: Gemma4TowerConfig, build: Build):
        size, ffn = config.hidden_size, config.intermediate_size
        gate_up = [Source(f"mlp.{name}_proj", ffn) for name in ("gate", "up")]
        self.up = Products(config, size, gate_up, ("embed", "ffn"), build)
        self.down = Products(config, ffn, [Source("mlp.down_proj", size)], ("ffn", "embed"), build)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return down(activation(gate(x)) * up(x)) for x [P, D]: [P, D], with the activation in float32."""
        gate, up = (part.astype(jnp.float32) for part in jnp.split(self.up(x), 2, axis=-1))
        return self.down((self.activation(gate) * up).astype(x.dtype))


class Gemma4TowerLayer(nnx.Module):
    """Layer that computes x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: Gemma4TowerConfig, build: Build):
        def norm(name: str) -> RMSNorm:
            return RMSNorm(config.hidden_size, config.norm_eps, source=f"{LAYER}.{name}_layernorm", build=build)

        self.input_norm, self.attention_norm = norm("input"), norm("post_attention")
        self.mlp_input_norm, self.mlp_norm = norm("pre_feedforward"), norm("post_feedforward")
        self.attention, self.mlp = Gemma4TowerAttention(config, build), Gemma4TowerMLP(config, build)

    def __call__(self, x: jax.Array, turns: Sequence[tuple[jax.Array, jax.Array]], attend: Attend) -> jax.Array:
        with jax.named_scope("attention"):
            x = x + self.attention_norm(self.attention(self.input_norm(x), turns, attend))
        with jax.named_scope("mlp"):
            return x + self.mlp_norm(self.mlp(self.mlp_input_norm(x)))


class Gemma4Tower(nnx.Module):
    """Vision tower of Gemma 4 and the product that follows it."""

    def __init__(self, config: Gemma4TowerConfig, hidden_size: int, build: Build):
        self.config = config
        size, source = config.hidden_size, f"{TOWER}.patch_embedder.input_proj"
        self.patches = PatchEmbedding(config.num_features, size, source=source, bias=False, build=build)
        # One row has the positions of columns, the other those of rows.
        self.positions = table(2, config.num_positions * size, POSITIONS, build)
        self.layers = nnx.List(
            [Gemma4TowerLayer(config, replace(build, layer=layer)) for layer in range(config.num_layers)]
        )
        learned = (ParamDecl((None,), (Source(f"{TOWER}.std_{name}", size),)) for name in ("bias", "scale"))
        self.shift, self.scale = (
            declare((size,), build.dtype, decl) if config.standardized else None for decl in learned
        )
        project = Source(f"{PROJECTOR}.embedding_projection", hidden_size)
        self.projector = Linear(size, (project,), axes=("embed", "embed"), build=build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, D] of patches f32[P, F], from 0 to 1: learned positions of row and column,
        layers with rope that attend within segments, and projected norms of squares' means.

        columns: i32[C, P], those of config.columns, in order.
        """
        segment, row, column = columns
        config = self.config
        with jax.named_scope("rope_table"):
            freqs = rope_frequencies(config.head_dim // 2, config.theta)
            none = np.zeros(0)
            turns = [axial_rope(place, place, freqs, none) for place in (column, row)]
        with jax.named_scope("patches"):
            x = self.patches(2.0 * patches - 1.0)
        with jax.named_scope("positions"):
            of_columns, of_rows = self.positions[...].reshape(2, config.num_positions, config.hidden_size)
            x = x + (of_columns[jnp.maximum(column, 0)] + of_rows[jnp.maximum(row, 0)])
        attend = partial(segment_attention, segment=segment, scale=1.0, block=config.unit)
        x = in_turn(self.layers, x, turns, attend)
        with jax.named_scope("projector"):
            pooled = x.astype(jnp.float32).reshape(-1, config.merge, config.hidden_size).mean(axis=1)
            pooled = pooled * config.hidden_size**0.5
            if self.shift is not None and self.scale is not None:
                pooled = (pooled - self.shift[...].astype(jnp.float32)) * self.scale[...].astype(jnp.float32)
            return self.projector(rms_normalized(pooled.astype(x.dtype), config.norm_eps).astype(x.dtype))
