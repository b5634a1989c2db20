"""Towers of CLIP and SigLIP that make one embedding of an image: CLIP projects the class token's state, in SigLIP a
learned query attends to the patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.params.declare import parts_of
from jaxengine.models.vision.base.clip import CLIP, DEFAULTS, SIGLIP, ClipEncoder
from jaxengine.models.vision.base.layers import tower_axis
from jaxengine.models.vision.base.vit import (
    VitConfig,
    VitMLP,
    VitTowerConfig,
    linear,
    read_by_queries,
    read_vit,
    vector,
)

# Prefixes in the model's names of tensors.
TOWER, PROJECTION = "vision_tower", "visual_projection"


@dataclass(frozen=True, kw_only=True)
class EmbeddingTowerConfig(VitTowerConfig):
    """Sizes of a tower whose result is one row for each unit, an image."""

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return ClipTower(self, hidden_size, build) if self.vit.has_class_token else SiglipTower(self, build)


def read_clip(vision: ConfigFields) -> EmbeddingTowerConfig:
    """Return CLIP's configuration from its vision_config. Raises ModelConfigError for wrong fields."""
    return _tower(read_vit(vision.with_defaults(**DEFAULTS[CLIP]), has_class_token=True))


def read_siglip(vision: ConfigFields) -> EmbeddingTowerConfig:
    """Return SigLIP's configuration from its vision_config. Raises ModelConfigError for wrong fields, and for a tower
    without a query that attends to the patches.
    """
    vision.require(vision_use_head=True)
    return _tower(read_vit(vision.with_defaults(**DEFAULTS[SIGLIP])))


def _tower(vit: VitConfig) -> EmbeddingTowerConfig:
    """Return the configuration, with these sizes, of a tower that makes one embedding of all patches of a unit."""
    patches = vit.num_patches
    return EmbeddingTowerConfig(num_features=vit.num_features, columns=(), merge=patches, unit=patches, vit=vit)


class ClipTower(nnx.Module):
    """Tower of CLIP: the class token's normed state, projected.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: EmbeddingTowerConfig, hidden_size: int, build: Build):
        vit = config.vit
        self.encoder = ClipEncoder(vit, (vit.num_layers,), TOWER, build, with_last_norm=True)
        self.projection = linear(vit.hidden_size, PROJECTION, hidden_size, ("embed", "embed"), build, bias=False)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none
        return self.projection(self.encoder.states(patches)[:, 0])


class SiglipTower(nnx.Module):
    """Tower of SigLIP: a learned query attends to the patches of a unit: x = attention, then x + mlp(norm(x)).

    A call maps patches f32[P, F] and columns i32[0, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: EmbeddingTowerConfig, build: Build):
        vit, source = config.vit, f"{TOWER}.head"
        size, self.head_dim = vit.hidden_size, vit.head_size
        self.num_patches = vit.num_patches
        self.encoder = ClipEncoder(vit, (vit.num_layers,), TOWER, build, with_last_norm=True)
        self.query = vector(size, f"{source}.probe", build)
        heads = tower_axis("heads", build)
        parts = (each._replace(group=self.head_dim) for each in parts_of(f"{source}.attention.in_proj", *[size] * 3))
        self.q, self.k, self.v = (
            Linear(size, (part,), axes=("embed", heads), bias=True, build=build) for part in parts
        )
        self.out = linear(size, f"{source}.attention.out_proj", size, ("heads", "embed"), build)
        self.norm = LayerNorm(size, vit.norm_eps, source=f"{source}.layernorm", build=build)
        self.mlp = VitMLP(vit, source=f"{source}.mlp", build=build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none
        states = self.encoder.states(patches)
        num_units, size = len(states), states.shape[2]
        with jax.named_scope("head"):
            q = self.q(self.query[...][None]).reshape(1, -1, self.head_dim)
            rows = states.reshape(-1, size)
            k, v = (part(rows).reshape(num_units, self.num_patches, -1, self.head_dim) for part in (self.k, self.v))
            seen = jnp.ones(self.num_patches, bool)
            x = lax.map(lambda unit: read_by_queries(q, unit[0], unit[1], seen), (k, v))
            x = self.out(x.reshape(num_units, -1))
            return x + self.mlp(self.norm(x))
