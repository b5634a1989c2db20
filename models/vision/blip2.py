"""Vision tower of BLIP-2 (Li et al. 2023, arXiv:2301.12597): a vision transformer, all of whose positions a fixed
number of queries read (Q-Former), and a product.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.vision.base.layers import PatchEmbedding, joined_qkv
from jaxengine.models.vision.base.qformer import QueryConfig, QueryFormer, read_query_config
from jaxengine.models.vision.base.vit import (
    VitAttention,
    VitConfig,
    VitLayer,
    VitMLP,
    VitTowerConfig,
    linear,
    read_vit,
    run_layers,
    table,
)

# Prefixes of tensors.
TOWER, QUERIES, QFORMER, PROJECTION = "vision_model", "query_tokens", "qformer", "language_projection"
_MOST_QUERIES = 1024
# transformers' defaults of fields that a file lacks.
_VISION = {
    "hidden_size": 1408,
    "intermediate_size": 6144,
    "num_hidden_layers": 39,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
_QFORMER = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "cross_attention_frequency": 2,
}


@dataclass(frozen=True, kw_only=True)
class Blip2TowerConfig(VitTowerConfig):
    """Vision transformer and Q-Former of BLIP-2. A unit has at least as many patches as queries: those after the
    image's are not read.

    Attributes:
      queries: sizes of the Q-Former.
    """

    queries: QueryConfig

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Blip2Tower(self, hidden_size, build)


def read_blip2(fields: ConfigFields) -> Blip2TowerConfig:
    """Return the tower's configuration from a config.json: read_vit's fields and `qkv_bias` (default: true) of
    `vision_config`, and `qformer_config`, each with transformers' defaults. The Q-Former reads states of the tower's
    size, whatever its `encoder_hidden_size` says, as in transformers.

    Raises ModelConfigError for wrong fields, for more than 1024 `num_query_tokens` (default: 32), for a Q-Former that
    also reads text, and for heads that do not divide its hidden size.
    """
    vision = fields.part_or_empty("vision_config", **_VISION)
    vit = read_vit(vision, has_class_token=True, qkv_bias=vision.boolean("qkv_bias", True))
    own = fields.part_or_empty("qformer_config", **_QFORMER)
    own.require(use_qformer_text_input=False)
    size, heads = own.integer("hidden_size"), own.integer("num_attention_heads")
    if size % heads:
        raise own.fail("num_attention_heads", f"a divisor of hidden_size {size}")
    count = fields.integer("num_query_tokens", 32)
    if count > _MOST_QUERIES:
        raise fields.fail("num_query_tokens", f"an integer from 1 to {_MOST_QUERIES}")
    merge = -(-vit.num_patches // count)
    return Blip2TowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=merge,
        unit=merge * count,
        vit=vit,
        queries=read_query_config(own, size, heads, vit.num_positions, count),
    )


class Blip2Layer(VitLayer):
    """Layer whose queries, keys and values are one module in checkpoints. source: prefix of its modules."""

    def __init__(self, config: VitConfig, source: str, build: Build):
        size, eps, attention = config.hidden_size, config.norm_eps, f"{source}.self_attn"
        self.attention_norm, self.mlp_norm = (
            LayerNorm(size, eps, source=f"{source}.{name}", build=build) for name in ("layer_norm1", "layer_norm2")
        )
        qkv = joined_qkv(f"{attention}.qkv", size)
        self.attention = VitAttention(
            config, source=attention, out="projection", qkv=qkv, bias=config.qkv_bias, build=build
        )
        self.mlp = VitMLP(config, source=f"{source}.mlp", build=build)


class Blip2Tower(nnx.Module):
    """Vision tower of BLIP-2.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D]: as many of each unit as there are
    queries.
    """

    def __init__(self, config: Blip2TowerConfig, hidden_size: int, build: Build):
        vit, queries, start = config.vit, config.queries, f"{TOWER}.embeddings"
        size = vit.hidden_size
        self.config = config
        self.patches = PatchEmbedding(vit.num_features, size, source=f"{start}.patch_embedding", bias=True, build=build)
        self.class_token = table(1, size, f"{start}.class_embedding", build, flat=True)
        self.positions = table(vit.num_positions, size, f"{start}.position_embedding", build, flat=True)
        layers = [Blip2Layer(vit, f"{TOWER}.encoder.layers.{number}", build) for number in range(vit.num_layers)]
        self.layers = nnx.List(layers)
        self.last_norm = LayerNorm(size, vit.norm_eps, source=f"{TOWER}.post_layernorm", build=build)
        self.queries = table(queries.num_queries, queries.hidden_size, QUERIES, build, flat=True)
        self.qformer = QueryFormer(queries, size, QFORMER, build)
        self.projection = linear(queries.hidden_size, PROJECTION, hidden_size, ("embed", "embed"), build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        config, vit = self.config, self.config.vit
        units = patches.reshape(-1, config.unit, patches.shape[1])[:, : vit.num_patches]
        with jax.named_scope("patches"):
            x = self.patches(units.reshape(-1, patches.shape[1])).reshape(len(units), vit.num_patches, -1)
            first = jnp.broadcast_to(self.class_token[...], (len(units), 1, vit.hidden_size))
            x = jnp.concatenate([first, x], axis=1) + self.positions[...].reshape(vit.num_positions, -1)
        (states,) = run_layers(self.layers, x.reshape(-1, vit.hidden_size), len(units), (vit.num_layers,))
        states = self.last_norm(states).reshape(x.shape)
        with jax.named_scope("qformer"):
            queries = self.queries[...].reshape(1, config.queries.num_queries, -1)
            read = self.qformer(jnp.broadcast_to(queries, (len(units), *queries.shape[1:])), states)
            return self.projection(read.reshape(-1, read.shape[2]))
