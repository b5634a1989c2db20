"""CLIP (Radford et al. 2021, arXiv:2103.00020) and SigLIP (Zhai et al. 2023, arXiv:2303.15343) as vision towers: they
return the hidden states of patches, without pooling.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.vision.base.layers import PatchEmbedding
from jaxengine.models.vision.base.vit import VitConfig, VitLayer, VitNames, read_vit, run_layers, table, vector

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
# transformers' defaults of fields that a file lacks.
DEFAULTS: dict[str, dict[str, Any]] = {
    CLIP: {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    SIGLIP: {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
}


def read_clip_or_siglip(fields: ConfigFields, default: str = CLIP) -> tuple[str, VitConfig]:
    """Return the model_type of `vision_config`, CLIP or SIGLIP (`default` if absent), and its sizes, with transformers'
    defaults for absent fields. Raises ModelConfigError for wrong fields, and for another type.
    """
    kind = fields.part("vision_config").text("model_type", default)
    if kind not in DEFAULTS:
        raise fields.part("vision_config").fail("model_type", " or ".join(DEFAULTS))
    return kind, read_vit(fields.part("vision_config", **DEFAULTS[kind]), has_class_token=kind == CLIP)


def read_siglip(fields: ConfigFields) -> VitConfig:
    """Return the sizes of `vision_config`, whose model_type must be SigLIP's or absent, with transformers' defaults for
    absent fields. Raises ModelConfigError for wrong fields, and for another type.
    """
    vision = fields.part("vision_config", **DEFAULTS[SIGLIP])
    vision.require(model_type=SIGLIP)
    return read_vit(vision)


class ClipEncoder(nnx.Module):
    """Layers of CLIP or SigLIP, which return the hidden states of patches after some of the layers, concatenated.

    layers: for each hidden state returned, the number of layers before it. tower: prefix of the names of all modules.
    with_last_norm: whether hidden states pass the norm that follows the last layer.
    """

    def __init__(
        self, vit: VitConfig, layers: tuple[int, ...], tower: str, build: Build, *, with_last_norm: bool = False
    ):
        size, source = vit.hidden_size, f"{tower}.embeddings"
        self.vit, self.wanted = vit, layers
        bias = not vit.has_class_token  # SigLIP's convolution has one, CLIP's has not
        self.patches = PatchEmbedding(
            vit.num_features, vit.hidden_size, source=f"{source}.patch_embedding", bias=bias, build=build
        )
        self.positions = table(vit.num_positions, size, f"{source}.position_embedding.weight", build)
        if vit.has_class_token:
            self.class_token = vector(size, f"{source}.class_embedding", build)
            self.first_norm = LayerNorm(size, vit.norm_eps, source=f"{tower}.pre_layrnorm", build=build)
        names = VitNames(f"{tower}.encoder.layers")
        made = [VitLayer(vit, f"{names.layers}.{number}", names, build) for number in range(max(layers))]
        self.layers = nnx.List(made)
        norm = LayerNorm(size, vit.norm_eps, source=f"{tower}.post_layernorm", build=build) if with_last_norm else None
        self.last_norm = norm

    def __call__(self, patches: jax.Array, places: jax.Array | None = None, unit: int | None = None) -> jax.Array:
        """Return the hidden states of patches f32[U * N, F] of U units after each of the wanted numbers of layers,
        concatenated and without the class token: [U * N, D * numbers]. places: i32[U * N], the learned position of each
        patch, -1 for padding; None for all in order. unit: N; None for vit.num_patches.
        """
        joined = self.states(patches, places, unit)
        return joined[:, self.vit.has_class_token :].reshape(len(patches), -1)

    def states(self, patches: jax.Array, places: jax.Array | None = None, unit: int | None = None) -> jax.Array:
        """Return the hidden states of patches f32[U * N, F] of U units after each of the wanted numbers of layers,
        concatenated: [U, S, D * numbers], with that of CLIP's class token first. Each unit is encoded by itself.

        places: i32[U * N], the learned position of each patch, of SigLIP only; a patch with -1 has that of 0, and none
        attends to it. None for all patches in order. unit: N, the number of patches of a unit; None for
        vit.num_patches, without which `places` must be given.
        """
        vit, is_key, unit = self.vit, None, unit or self.vit.num_patches
        num_units = len(patches) // unit
        with jax.named_scope("patches"):
            x = self.patches(patches).reshape(num_units, unit, vit.hidden_size)
            if vit.has_class_token:
                first = jnp.broadcast_to(self.class_token[...], (num_units, 1, vit.hidden_size))
                x = jnp.concatenate([first, x], axis=1)
            positions = self.positions[...]
            if places is not None:
                places = places.reshape(num_units, -1)
                positions, is_key = positions[jnp.maximum(places, 0)], places >= 0
            x = (x + positions).reshape(-1, vit.hidden_size)
        if vit.has_class_token:
            x = self.first_norm(x)
        states = run_layers(self.layers, x, num_units, self.wanted, is_key)
        if self.last_norm is not None:
            states = [self.last_norm(state) for state in states]
        return jnp.concatenate(states, axis=-1).reshape(num_units, unit + vit.has_class_token, -1)
