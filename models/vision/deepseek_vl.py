"""Vision tower of DeepSeek-VL (Lu et al. 2024, arXiv:2403.05525) and of what Janus sees with (Wu et al. 2024,
arXiv:2410.13848): SigLIP with the norm that follows its last layer, and products with an activation before each but
the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_INTERMEDIATE, ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.vision.base.clip import ClipEncoder, read_siglip
from jaxengine.models.vision.base.vit import VitConfig, VitTowerConfig, linear, read_vit

# Prefixes in the model's names of tensors; a checkpoint's names have more before them.
TOWER, ALIGNER = "vision_model", "aligner"
# transformers' defaults of fields that a file of Janus lacks.
_JANUS = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
_TEXT_SIZE = 4096  # transformers' default of a Llama's hidden_size


@dataclass(frozen=True, kw_only=True)
class AlignedTowerConfig(VitTowerConfig):
    """SigLIP with an aligner.

    Attributes:
      products: checkpoint modules of the aligner's products, in order.
      aligner_activation: activation before each product but the first.
      encoder: checkpoint module of SigLIP.
    """

    products: tuple[str, ...]
    aligner_activation: str = "gelu"
    encoder: str = TOWER

    @property
    def unused(self) -> tuple[str, ...]:
        return (f"{self.encoder}.head.",)

    def make(self, hidden_size: int, build: Build) -> AlignedTower:
        return AlignedTower(self, hidden_size, build)


def read_deepseek_vl(fields: ConfigFields) -> AlignedTowerConfig:
    """Return the configuration of DeepSeek-VL's tower from a config.json: SigLIP, and two products. Raises
    ModelConfigError for wrong fields.
    """
    return aligned(read_siglip(fields), (f"{ALIGNER}.linear1", f"{ALIGNER}.linear2"))


def read_janus(fields: ConfigFields) -> AlignedTowerConfig:
    """Return the configuration of the tower with which Janus sees, from a config.json: read_vit's fields, with
    `mlp_ratio` (default: 4) for intermediate_size and `attention_bias` (true), and a projector of `depth` products (2).

    Raises ModelConfigError for wrong fields, for norms of queries and keys, which no model has, and unless
    `projection_dim` (default: 2048) is the hidden_size of the text.
    """
    vision = fields.part("vision_config", **_JANUS)
    vision.require(model_type="janus_vision_model", use_qk_norm=False)
    size, wanted = vision.integer("projection_dim", 2048), fields.part("text_config").integer("hidden_size", _TEXT_SIZE)
    if size != wanted:
        raise vision.fail("projection_dim", f"the hidden_size of the text, {wanted}")
    inner = int(vision.integer("hidden_size") * vision.number("mlp_ratio", 4.0))
    if not 1 <= inner <= MAX_INTERMEDIATE:
        raise vision.fail("mlp_ratio", f"such that the MLP has 1 to {MAX_INTERMEDIATE} elements")
    sizes = ConfigFields({**vision.raw, f"{vision.prefix}intermediate_size": inner}, vision.prefix)
    vit = read_vit(sizes, qkv_bias=vision.boolean("attention_bias", True))
    further = tuple(f"{ALIGNER}.hidden_layers.{number}" for number in range(vision.integer("depth", 2) - 1))
    return aligned(vit, (f"{ALIGNER}.fc1", *further), aligner_activation=vit.activation)


def aligned(vit: VitConfig, products: tuple[str, ...], **more: Any) -> AlignedTowerConfig:
    """Return the configuration with these sizes and aligner products. more: further fields."""
    size = vit.num_patches
    return AlignedTowerConfig(
        num_features=vit.num_features, columns=(), merge=1, unit=size, vit=vit, products=products, **more
    )


class AlignedTower(nnx.Module):
    """Vision tower of DeepSeek-VL, Janus and PaliGemma: SigLIP and an aligner.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: AlignedTowerConfig, hidden_size: int, build: Build):
        vit = config.vit
        self.encoder = ClipEncoder(vit, (vit.num_layers,), config.encoder, build, with_last_norm=True)
        sizes = (vit.hidden_size, *[hidden_size] * len(config.products))
        made = [
            linear(sizes[number], name, hidden_size, ("embed", "embed"), build)
            for number, name in enumerate(config.products)
        ]
        self.products = nnx.List(made)
        self.activation = ACTIVATIONS[config.aligner_activation]

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        x = self.encoder(patches)
        with jax.named_scope("aligner"):
            for number, product in enumerate(self.products):
                x = product(self.activation(x.astype(jnp.float32)).astype(x.dtype) if number else x)
            return x
