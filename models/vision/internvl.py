"""Vision tower of InternVL 3 (Zhu et al. 2025, arXiv:2504.10479): InternViT over tiles, neighbouring patches side by
side, an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import read_activation
from jaxengine.models.layers.base.norm import HeadsRMSNorm, LayerNorm, RMSNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.vision.base.layers import PatchEmbedding, joined_qkv, tower_axis
from jaxengine.models.vision.base.vit import (
    VitAttention,
    VitMLP,
    VitTowerConfig,
    joined_neighbours,
    read_layer_index,
    read_merge_ratio,
    read_vit,
    run_layers,
    table,
)
from jaxengine.models.vision.llava import PROJECTOR, TOWER, Projector

# transformers' defaults of fields that a file lacks.
_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
_NORMS = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
# torch's epsilons of norms that no configuration gives one: those of q and k, and the projector's.
_QK_EPS, _PROJECTOR_EPS = 1e-6, 1e-5


@dataclass(frozen=True, kw_only=True)
class InternVLTowerConfig(VitTowerConfig):
    """InternViT with InternVL's projector.

    Attributes:
      num_used_layers: number of layers before the hidden states that are used.
      factor: number of patches along a side of the square that becomes one row.
      norm: kind of the layers' norms, a name of _NORMS.
      attention_bias: whether q, k and v have biases.
      qk_norm: whether q and k are normed, over all heads at once.
      projector_activation: activation of the projector's MLP.
      last_norm: whether a norm follows the last layer.
      has_positions: whether learned positions are added to patches.
      joined_qkv: whether checkpoints have q, k and v of a layer in one module.
      projector_bias: whether the projector's products have biases.
      projector_size: outputs of the projector's first product; 0 for the size of the embeddings.
    """

    num_used_layers: int
    factor: int
    norm: str
    attention_bias: bool
    qk_norm: bool
    projector_activation: str
    last_norm: bool
    has_positions: bool
    joined_qkv: bool = False
    projector_bias: bool = True
    projector_size: int = 0

    @property
    def unused(self) -> tuple[str, ...]:
        layers = self.unused_layers(f"{TOWER}.encoder.layer", self.num_used_layers)
        # A mask token stands for patches that are left out in training.
        return (*layers, f"{TOWER}.embeddings.mask_token", *(() if self.last_norm else (f"{TOWER}.layernorm.",)))

    def make(self, hidden_size: int, build: Build) -> InternVLTower:
        return InternVLTower(self, hidden_size, build)


def read_internvl(fields: ConfigFields, *, joined_qkv: bool = False) -> InternVLTowerConfig:
    """Return the vision tower's configuration from a config.json, with the hidden states that `vision_feature_layer`
    (default: -1) selects. A norm follows the last of them only for -1 and with `use_mean_pooling` false (default:
    true).

    By default `attention_bias` and `use_qk_norm` are false and `use_absolute_position_embeddings` true. joined_qkv:
    whether checkpoints have q, k and v of a layer in one module. Raises ModelConfigError for wrong fields, and for a
    norm_type or selection strategy that is not supported.
    """
    vision = fields.part("vision_config", **_DEFAULTS)
    vit = read_vit(vision, has_class_token=True)
    if (norm := vision.text("norm_type", "layer_norm")) not in _NORMS:
        raise vision.fail("norm_type", f"one of {', '.join(_NORMS)}")
    fields.require(vision_feature_select_strategy="default")
    factor = read_merge_ratio(fields, "downsample_ratio", vit)
    wanted = fields.value("vision_feature_layer", -1)
    return InternVLTowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=factor**2,
        unit=vit.num_patches,
        vit=vit,
        num_used_layers=read_layer_index(fields, wanted, vit.num_layers),
        factor=factor,
        norm=norm,
        attention_bias=vision.boolean("attention_bias", False),
        qk_norm=vision.boolean("use_qk_norm", False),
        projector_activation=read_activation(fields, "projector_hidden_act"),
        last_norm=wanted == -1 and not vision.boolean("use_mean_pooling", True),
        has_positions=vision.boolean("use_absolute_position_embeddings", True),
        joined_qkv=joined_qkv,
    )


class _Layer(nnx.Module):
    """Layer of InternViT, which computes x + scale * attention(norm(x)), then x + scale * mlp(norm(x)), with two
    learned scales of D elements.
    """

    def __init__(self, config: InternVLTowerConfig, source: str, build: Build):
        vit, norm = config.vit, _NORMS[config.norm]
        size, eps, attention = vit.hidden_size, vit.norm_eps, f"{source}.attention"
        norms = None
        if config.qk_norm:
            heads, axis = (vit.num_heads, size // vit.num_heads), tower_axis("heads", build)
            q_norm, k_norm = (
                HeadsRMSNorm(*heads, _QK_EPS, source=f"{attention}.{name}_norm", build=build, axis=axis)
                for name in "qk"
            )
            norms = q_norm, k_norm
        self.attention_norm = norm(size, eps, source=f"{source}.layernorm_before", build=build)
        qkv = joined_qkv(f"{attention}.qkv", size) if config.joined_qkv else None
        names: dict[str, Any] = {"source": attention, "out": "projection_layer", "qkv": qkv}
        self.attention = VitAttention(vit, **names, build=build, bias=config.attention_bias, qk_norms=norms)
        self.mlp_norm = norm(size, eps, source=f"{source}.layernorm_after", build=build)
        self.mlp = VitMLP(vit, source=f"{source}.mlp", build=build)
        decls = [ParamDecl((None,), (Source(f"{source}.lambda_{n}", size),), init_value=0.1) for n in (1, 2)]
        self.attention_scale, self.mlp_scale = (declare((size,), build.dtype, decl) for decl in decls)

    def __call__(self, x: jax.Array, num_units: int) -> jax.Array:
        """Return x + scale * attention(norm(x)), then x + scale * mlp(norm(x)), for x [U * S, D] of U = num_units
        units, each of which attends to itself.
        """
        with jax.named_scope("attention"):
            x = x + self.attention(self.attention_norm(x), num_units) * self.attention_scale[...]
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x)) * self.mlp_scale[...]


class InternVLTower(nnx.Module):
    """Vision tower of InternVL: InternViT and a projector.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: InternVLTowerConfig, hidden_size: int, build: Build):
        self.config = config
        vit, source = config.vit, f"{TOWER}.embeddings"
        size = vit.hidden_size
        sizes, projection = (vit.num_features, vit.hidden_size), f"{source}.patch_embeddings.projection"
        self.patches = PatchEmbedding(*sizes, source=projection, bias=True, build=build)
        self.class_token = table(1, size, f"{source}.cls_token", build, flat=True)
        positions = f"{source}.position_embeddings"
        self.positions = table(vit.num_positions, size, positions, build, flat=True) if config.has_positions else None
        sources = [f"{TOWER}.encoder.layer.{number}" for number in range(config.num_used_layers)]
        self.layers = nnx.List([_Layer(config, name, build) for name in sources])
        norm = LayerNorm(size, vit.norm_eps, source=f"{TOWER}.layernorm", build=build) if config.last_norm else None
        self.last_norm = norm
        size *= config.merge
        self.projector_norm = LayerNorm(size, _PROJECTOR_EPS, source=f"{PROJECTOR}.layer_norm", build=build)
        options: dict[str, Any] = {"bias": config.projector_bias, "inner": config.projector_size}
        self.projector = Projector(size, hidden_size, config.projector_activation, build, **options)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        config, vit = self.config, self.config.vit
        num_units, size = len(patches) // vit.num_patches, vit.hidden_size
        with jax.named_scope("patches"):
            x = self.patches(patches).reshape(num_units, vit.num_patches, size)
            first = jnp.broadcast_to(self.class_token[...], (num_units, 1, size))
            x = jnp.concatenate([first, x], axis=1)
            if self.positions is not None:
                x = x + self.positions[...].reshape(-1, size)
        x = run_layers(self.layers, x.reshape(-1, size), num_units, (config.num_used_layers,))[0]
        if self.last_norm is not None:
            x = self.last_norm(x)
        x = x.reshape(num_units, -1, size)[:, 1:].reshape(len(patches), size)
        with jax.named_scope("projector"):
            return self.projector(self.projector_norm(joined_neighbours(x, vit.grid, config.factor)))
