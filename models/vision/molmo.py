"""Vision tower of Molmo (Deitke et al. 2024, arXiv:2409.17146): CLIP over overlapping crops, states of two layers, to
which a vector is added for padding, and one query for each window of two by two patches, their mean, which attends to
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.vision.base.vit import read_vit, table, vector
from jaxengine.models.vision.llava import PROJECTOR, TOWER
from jaxengine.models.vision.molmo2 import Molmo2Tower, Molmo2TowerConfig, PoolingConfig, read_layers

# What the column of a patch says of the pixels that the mask of its unit names: all are of the image, none, some.
FULL, EMPTY, PARTIAL = 0, 1, 2
WINDOW = 2  # patches of a window's side
# Sizes of the published code, which config.json has not, by the names of the training library.
_VISION: dict[str, Any] = {
    "image_default_input_size": [336, 336],
    "image_patch_size": 14,
    "image_emb_dim": 1024,
    "image_num_heads": 16,
    "image_num_key_value_heads": 16,
    "image_num_layers": 23,
    "image_mlp_dim": 4096,
    "image_mlp_activations": "quick_gelu",
    "image_num_pos": None,
    "image_norm_eps": 1e-5,
}
_SPELLED = {
    "image_default_input_size": "image_size",
    "image_patch_size": "patch_size",
    "image_emb_dim": "hidden_size",
    "image_num_heads": "num_attention_heads",
    "image_num_layers": "num_hidden_layers",
    "image_mlp_dim": "intermediate_size",
    "image_mlp_activations": "hidden_act",
    "image_norm_eps": "layer_norm_eps",
}


@dataclass(frozen=True, kw_only=True)
class MolmoTowerConfig(Molmo2TowerConfig):
    """Sizes of the tower. A unit is a crop."""

    def make(self, hidden_size: int, build: Build) -> MolmoTower:
        return MolmoTower(self, hidden_size, build)


def read_molmo_tower(fields: ConfigFields, intermediate_size: int) -> MolmoTowerConfig:
    """Return the tower's configuration from a config.json, with the published code's sizes for those that
    `vision_backbone` and `vit_layers` lack. intermediate_size: that of the text model's MLP, and of the projector's.

    Raises ModelConfigError for wrong fields, for a number of positions other than that of patches and one more, for an
    odd number of patches along a side, and for fewer heads of keys.
    """
    given = {**_VISION, **(fields.mapping("vision_backbone") or {})}
    vision = ConfigFields({"vision_backbone": given | {usual: given[own] for own, usual in _SPELLED.items()}})
    vision = vision.part("vision_backbone")
    vit = read_vit(vision, has_class_token=True)
    vision.require(image_num_key_value_heads=vit.num_heads)
    if vision.integer("image_num_pos", None) not in (None, vit.num_positions):
        raise vision.fail("image_num_pos", f"{vit.num_positions}, the patches of image_default_input_size and one more")
    if vit.grid % WINDOW:
        raise vision.fail("image_default_input_size", f"an even number of patches of {vit.patch_size} pixels")
    return MolmoTowerConfig(
        num_features=vit.num_features,
        columns=("padding",),
        merge=WINDOW**2,
        unit=vit.num_patches,
        adds=True,
        vit=vit,
        layers=read_layers(fields, "vit_layers", fields.value("vit_layers", [-2, -9]), vit.num_layers),
        pooling=PoolingConfig(
            hidden_size=vit.hidden_size,
            num_heads=vit.num_heads,
            num_kv_heads=vit.num_heads,
            head_dim=vit.head_size,
            bias=True,
            intermediate_size=intermediate_size,
            activation="silu",
        ),
        mlp_bias=False,
    )


class MolmoTower(Molmo2Tower):
    """Vision tower of Molmo.

    A call maps patches f32[P, F] and columns i32[1, P], each FULL, EMPTY or PARTIAL, to embeddings [P / 4, D], one for
    each window of a unit, row by row.
    """

    def __init__(self, config: MolmoTowerConfig, hidden_size: int, build: Build):
        super().__init__(config, hidden_size, build)
        vit = config.vit
        self.class_token = vector(vit.hidden_size, f"{TOWER}.class_embedding", build)
        self.first_norm = LayerNorm(vit.hidden_size, vit.norm_eps, source=f"{TOWER}.pre_ln", build=build)
        self.padding = table(2, vit.hidden_size * len(config.layers), f"{PROJECTOR}.pad_embed", build)

    def placed(self, x: jax.Array) -> jax.Array:
        x = x.reshape(-1, self.config.vit.num_patches, x.shape[1])
        first = jnp.broadcast_to(self.class_token[...], (len(x), 1, x.shape[2]))
        return self.first_norm(jnp.concatenate([first, x], axis=1) + self.positions[...])

    def pooled(self, states: jax.Array, columns: jax.Array) -> jax.Array:
        vit, size = self.config.vit, states.shape[1]
        x = states.reshape(-1, vit.num_positions, size)[:, 1:].reshape(-1, size)
        padding = jnp.concatenate([jnp.zeros_like(self.padding[...], shape=(1, size)), self.padding[...]])
        x = x + padding[jnp.maximum(columns[0], FULL)]
        lines = vit.grid // WINDOW
        windows = x.reshape(-1, lines, WINDOW, lines, WINDOW, size).swapaxes(2, 3).reshape(-1, WINDOW**2, size)
        means = jnp.mean(windows, axis=1, dtype=jnp.float32).astype(x.dtype)
        kv = self.pooling.kv(windows.reshape(-1, size)).reshape(*windows.shape[:2], -1)
        return self.pooling(means, kv, jnp.ones(windows.shape[:2], bool))
