"""Vision tower of Llama 4 (Meta 2025): a vision transformer over tiles that rotates queries and keys by row and column,
neighbouring patches side by side, an MLP and a matrix."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.mlp import gelu
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.layers.base.rope import apply_rope
from jaxengine.models.vision.base.layers import PatchEmbedding, rope_frequencies
from jaxengine.models.vision.base.vit import (
    VitLayer,
    VitNames,
    VitTowerConfig,
    joined_neighbours,
    linear,
    read_merge_ratio,
    read_vit,
    run_layers,
    table,
    vector,
)

# Prefixes in the model's names of tensors.
TOWER, PROJECTOR = "vision_model", "multi_modal_projector"
# transformers' defaults of fields that a file lacks. Norms have torch's epsilon, whatever norm_eps says.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "vision_output_dim": 7680,
}
_NAMES = VitNames(f"{TOWER}.model.layers", "input_layernorm", "post_attention_layernorm", out="o_proj")


@dataclass(frozen=True, kw_only=True)
class Llama4TowerConfig(VitTowerConfig):
    """Llama 4's vision model and projector.

    Attributes:
      vit: sizes; the class token comes last.
      theta: base of the rotary frequencies.
      factor: number of patches along a side of the square that becomes one row.
      adapter_size: elements of the adapter's output.
    """

    theta: float
    factor: int
    adapter_size: int

    def make(self, hidden_size: int, build: Build) -> Llama4Tower:
        return Llama4Tower(self, hidden_size, build)


def read_llama4_tower(fields: ConfigFields) -> Llama4TowerConfig:
    """Return the vision tower's configuration from the `vision_config` of a config.json, whose `rope_theta` is 10,000
    by default.

    Raises ModelConfigError for wrong fields, for sizes of the adapter and projector that do not fit the sizes before
    them, and for heads whose number of elements is not a multiple of 4.
    """
    vision = fields.part("vision_config", **_DEFAULTS)
    vision.require(hidden_act="gelu", vision_feature_select_strategy="default", multi_modal_projector_bias=False)
    vit = read_vit(vision, has_class_token=True)
    if vit.hidden_size // vit.num_heads % 4:
        raise vision.fail("num_attention_heads", "such that heads have a multiple of 4 elements")
    factor = read_merge_ratio(vision, "pixel_shuffle_ratio", vit)
    size = vision.integer("projector_output_dim")
    for name, wanted in (
        ("intermediate_size", vit.hidden_size * factor**2),
        ("projector_input_dim", size),
        ("vision_output_dim", size),
    ):
        if vision.integer(name) != wanted:
            raise vision.fail(name, f"{wanted}, for what comes before it")
    rope = ConfigFields(vision.mapping("rope_parameters") or {})
    theta = rope.number("rope_theta", vision.number("rope_theta", 10000.0))
    return Llama4TowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=factor**2,
        unit=vit.num_patches,
        vit=vit,
        theta=theta,
        factor=factor,
        adapter_size=size,
    )


class _Turn(nnx.Module):
    """Rotation of queries or keys of all units, [U * S, heads, H], by a patch's column and row, both counted from 1.
    The class token, which is last, is not rotated.
    """

    def __init__(self, config: Llama4TowerConfig):
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        vit = self.config.vit
        freqs = rope_frequencies(vit.hidden_size // vit.num_heads // 2, self.config.theta)
        row, column = np.divmod(np.arange(vit.num_patches), vit.grid)
        angles = np.concatenate([(place[:, None] + 1) * freqs for place in (column, row)], axis=1)
        angles = np.tile(np.pad(angles, ((0, 1), (0, 0))).astype(np.float32), (len(x) // vit.num_positions, 1))
        return apply_rope(x, jnp.cos(angles), jnp.sin(angles), interleaved=True)


class Llama4Tower(nnx.Module):
    """Vision tower of Llama 4: a vision transformer and a projector.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: Llama4TowerConfig, hidden_size: int, build: Build):
        self.config = config
        vit = config.vit
        size, eps, adapter = vit.hidden_size, vit.norm_eps, f"{TOWER}.vision_adapter.mlp"
        embedding = f"{TOWER}.patch_embedding.linear"
        self.patches = PatchEmbedding(vit.num_features, size, source=embedding, bias=False, build=build)
        self.class_token = vector(size, f"{TOWER}.class_embedding", build)
        self.positions = table(vit.num_positions, size, f"{TOWER}.positional_embedding_vlm", build)
        self.first_norm = LayerNorm(size, eps, source=f"{TOWER}.layernorm_pre", build=build)
        sources = [f"{_NAMES.layers}.{number}" for number in range(vit.num_layers)]
        layers = (VitLayer(vit, each, _NAMES, build, (_Turn(config), _Turn(config))) for each in sources)
        self.layers = nnx.List(list(layers))
        self.last_norm = LayerNorm(size, eps, source=f"{TOWER}.layernorm_post", build=build)
        inner, width = size * config.merge, config.adapter_size
        self.up = linear(inner, f"{adapter}.fc1", width, ("embed", "ffn"), build, bias=False)
        self.down = linear(width, f"{adapter}.fc2", width, ("ffn", "embed"), build, bias=False)
        self.project = linear(width, f"{PROJECTOR}.linear_1", hidden_size, ("embed", "embed"), build, bias=False)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        config, vit = self.config, self.config.vit
        num_units, size = len(patches) // vit.num_patches, vit.hidden_size
        with jax.named_scope("patches"):
            x = self.patches(patches).reshape(num_units, vit.num_patches, size)
            last = jnp.broadcast_to(self.class_token[...], (num_units, 1, size))
            x = jnp.concatenate([x, last], axis=1) + self.positions[...]
            x = self.first_norm(x.reshape(-1, size))
        x = self.last_norm(run_layers(self.layers, x, num_units, (vit.num_layers,))[0])
        x = x.reshape(num_units, -1, size)[:, :-1].reshape(len(patches), size)
        with jax.named_scope("projector"):
            x = joined_neighbours(x, vit.grid, config.factor)
            x = gelu(self.up(x, out_dtype=jnp.float32)).astype(x.dtype)
            x = gelu(self.down(x, out_dtype=jnp.float32)).astype(x.dtype)
            return self.project(x)
