"""Vision tower of GLM-4V (GLM Team 2024, arXiv:2406.12793): EVA-2-CLIP, whose norms follow attention and MLP, a
convolution that joins squares of two by two patches, and a gated MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.params.declare import Source
from jaxengine.models.vision.base.layers import PatchEmbedding, joined_qkv, tower_axis
from jaxengine.models.vision.base.vit import (
    VitAttention,
    VitConfig,
    VitMLP,
    VitTowerConfig,
    joined_neighbours,
    linear,
    read_vit,
    run_layers,
    table,
    vector,
)

TOWER = "vision_tower"
_FACTOR = 2  # patches of the convolution's side
# Embeddings of a unit that are no patches': those of the beginning and the end of an image.
_ENDS = 2
_GLU_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Eva2ClipTowerConfig(VitTowerConfig):
    """Sizes of the tower. A unit is an image: its patches, and places for its two ends, whose features are not read.

    Attributes:
      projector_size: size of the gated MLP.
      divisor: that of all embeddings.
    """

    projector_size: int
    divisor: float

    def make(self, hidden_size: int, build: Build) -> Eva2ClipTower:
        return Eva2ClipTower(self, hidden_size, build)


def read_eva2_clip(fields: ConfigFields, projector_size: int) -> Eva2ClipTowerConfig:
    """Return the tower's configuration from a config.json's `vision_config`: read_vit's fields, with `num_heads` for
    heads, and `scaling_factor`. projector_size: size of its gated MLP, that of the text model's.

    Raises ModelConfigError for wrong fields, for an odd number of patches along a side, and for a number of positions
    other than that of patches and one more.
    """
    given = fields.part("vision_config")
    given.require(in_channels=3)
    own = fields.mapping("vision_config") or {}
    spelled = {"num_attention_heads": given.integer("num_heads")}
    vit = read_vit(ConfigFields({"vision_config": {**own, **spelled}}).part("vision_config"), has_class_token=True)
    if given.integer("num_positions", vit.num_positions) != vit.num_positions:
        raise given.fail("num_positions", f"{vit.num_positions}, the patches of image_size and one more")
    if vit.grid % _FACTOR:
        raise given.fail("image_size", f"an even number of patches of {vit.patch_size} pixels")
    merge = _FACTOR**2
    return Eva2ClipTowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=merge,
        unit=vit.num_patches + _ENDS * merge,
        vit=vit,
        projector_size=projector_size,
        divisor=given.number("scaling_factor"),
    )


class _Layer(nnx.Module):
    """Layer that computes x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(self, vit: VitConfig, source: str, build: Build):
        attention, size = f"{source}.attention", vit.hidden_size
        qkv = joined_qkv(f"{attention}.query_key_value", size)
        self.attention = VitAttention(vit, source=attention, out="dense", qkv=qkv, build=build)
        self.attention_norm = LayerNorm(size, vit.norm_eps, source=f"{source}.input_layernorm", build=build)
        self.mlp = VitMLP(vit, source=f"{source}.mlp", build=build)
        self.mlp_norm = LayerNorm(size, vit.norm_eps, source=f"{source}.post_attention_layernorm", build=build)

    def __call__(self, x: jax.Array, num_units: int) -> jax.Array:
        """Return x + norm(attention(x)), then x + norm(mlp(x)), for x [U * S, D] of U = num_units units, each of which
        attends to itself.
        """
        with jax.named_scope("attention"):
            x = x + self.attention_norm(self.attention(x, num_units))
        with jax.named_scope("mlp"):
            return x + self.mlp_norm(self.mlp(x))


class _Projector(nnx.Module):
    """Gated MLP after a linear layer with a norm and GELU: down(silu(gate(y)) * up(y)), y = gelu(norm(linear(x)))."""

    def __init__(self, hidden_size: int, inner: int, build: Build):
        source = f"{TOWER}.linear_proj"
        axes = ("embed", "embed")
        self.first = linear(hidden_size, f"{source}.linear_proj", hidden_size, axes, build, bias=False)
        self.norm = LayerNorm(hidden_size, _GLU_EPS, source=f"{source}.norm1", build=build)
        gate_up = tuple(Source(f"{source}.{name}", inner) for name in ("gate_proj", "dense_h_to_4h"))
        self.gate_up = Linear(hidden_size, gate_up, axes=("embed", tower_axis("ffn", build)), bias=False, build=build)
        self.down = linear(inner, f"{source}.dense_4h_to_h", hidden_size, ("ffn", "embed"), build, bias=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return down(silu(gate(y)) * up(y)), y = gelu(norm(linear(x))), for x [R, D]: [R, D], with both activations in
        float32.
        """
        x = ACTIVATIONS["gelu"](self.norm(self.first(x)).astype(jnp.float32)).astype(x.dtype)
        gate, up = jnp.split(self.gate_up(x, out_dtype=jnp.float32), 2, axis=-1)
        return self.down((jax.nn.silu(gate) * up).astype(x.dtype))


class Eva2ClipTower(nnx.Module):
    """Vision tower of GLM-4V.

    A call maps patches f32[P, F] and columns i32[0, P] to embeddings [P / 4, D]: of each unit those of its squares of
    patches, then that of an image's beginning and that of its end, all divided by `config.divisor`.
    """

    def __init__(self, config: Eva2ClipTowerConfig, hidden_size: int, build: Build):
        self.config = config
        vit, source = config.vit, f"{TOWER}.patch_embedding"
        size = vit.hidden_size
        self.patches = PatchEmbedding(vit.num_features, size, source=f"{source}.proj", bias=True, build=build)
        self.class_token = vector(size, f"{source}.cls_embedding", build)
        self.positions = table(vit.num_positions, size, f"{source}.position_embedding.weight", build)
        names = [f"{TOWER}.transformer.layers.{number}" for number in range(vit.num_layers)]
        self.layers = nnx.List([_Layer(vit, name, build) for name in names])
        # A convolution of the same kind as the one of patches.
        joined = size * config.merge
        self.joining = PatchEmbedding(joined, hidden_size, source=f"{TOWER}.conv", bias=True, build=build)
        self.projector = _Projector(hidden_size, config.projector_size, build)
        self.ends = nnx.List([vector(hidden_size, f"{TOWER}.{name}", build) for name in ("boi", "eoi")])

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        config, vit = self.config, self.config.vit
        units = patches.reshape(-1, config.unit, vit.num_features)[:, : vit.num_patches]
        num_units, size = len(units), vit.hidden_size
        with jax.named_scope("patches"):
            x = self.patches(units.reshape(-1, vit.num_features)).reshape(num_units, vit.num_patches, size)
            first = jnp.broadcast_to(self.class_token[...], (num_units, 1, size))
            x = jnp.concatenate([first, x], axis=1) + self.positions[...]
        x = run_layers(self.layers, x.reshape(-1, size), num_units, (vit.num_layers,))[0]
        with jax.named_scope("projector"):
            x = x.reshape(num_units, -1, size)[:, 1:].reshape(-1, size)
            squares = joined_neighbours(x, vit.grid, _FACTOR).reshape(-1, config.merge, size)
            # The convolution's features are, of each channel, its square's.
            x = self.projector(self.joining(squares.swapaxes(1, 2).reshape(len(squares), -1)))
            x = x.reshape(num_units, -1, x.shape[1])
            ends = [jnp.broadcast_to(end[...], (num_units, 1, x.shape[2])) for end in self.ends]
            x = jnp.concatenate([x, *ends], axis=1)
            return (x.astype(jnp.float32) / config.divisor).astype(x.dtype).reshape(-1, x.shape[2])
