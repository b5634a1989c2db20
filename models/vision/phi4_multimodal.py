"""Vision tower of Phi-4-multimodal (Microsoft 2025, arXiv:2503.01743): SigLIP over a whole image and its tiles, whose
white margins are not attended to, the mean of each square of 2 x 2 patches, and an MLP. Learned embeddings follow each
line, and stand between the tiles and the whole."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.vision.base.lines import (
    EMBEDDING,
    SQUARE,
    LinesProjector,
    LinesTowerConfig,
    patches_of,
    read_lines,
)
from jaxengine.models.vision.base.vit import read_vit

# Prefix in the model's names of tensors, and of those of SigLIP; a checkpoint's names have more before it.
TOWER = "image_embed"
SIGLIP = f"{TOWER}.img_processor"
LINE_END, BETWEEN = f"{TOWER}.sub_img_feature_extensor", f"{TOWER}.global_img_feature_extensor"
# transformers' defaults of fields that a file lacks; files as first published have no vision_config.
_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


@dataclass(frozen=True, kw_only=True)
class Phi4TowerConfig(LinesTowerConfig):
    """SigLIP with Phi-4-multimodal's projector. In an odd line of patches, a square at the edge has the second last
    ones twice.
    """

    @property
    def unused(self) -> tuple[str, ...]:
        return self.unused_of(SIGLIP, f"{SIGLIP}.head.")

    def make(self, hidden_size: int, build: Build) -> Phi4Tower:
        return Phi4Tower(self, hidden_size, build)


def read_phi4(fields: ConfigFields) -> Phi4TowerConfig:
    """Return the vision tower's configuration from a config.json, with the hidden states that `feature_layer` (default:
    -2) selects. Raises ModelConfigError for wrong fields, for a `crop_size` other than the image_size, for a patch as
    large as a unit, and for files as first published whose `embd_layer` or `img_processor` say something else.
    """
    fields.require(img_processor=None)
    vision = fields.part_or_empty("vision_config", **_DEFAULTS)
    vit = read_vit(vision)
    said = (fields.mapping("embd_layer") or {}).get("image_embd_layer")
    if said is not None:
        published = ConfigFields({"image_embd_layer": said}).part("image_embd_layer")
        published.require(**EMBEDDING, image_token_compression_cls="avg_pool_2d", crop_size=vit.image_size)
    if vit.grid < SQUARE:
        raise vision.fail("image_size", f"at least {SQUARE} patches of {vit.patch_size}")
    vision.require(crop_size=vit.image_size)
    return Phi4TowerConfig(columns=("place",), adapter="vision-lora", **read_lines(vision, vit, "feature_layer"))


class Phi4Tower(nnx.Module):
    """Vision tower of Phi-4-multimodal: SigLIP and a projector.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D]. "place" is the learned position of
    a patch; -1 for one of an image's margin, which no patch attends to.
    """

    def __init__(self, config: Phi4TowerConfig, hidden_size: int, build: Build):
        self.config, self.encoder = config, config.encoder(SIGLIP, build)
        modules = [f"{TOWER}.img_projection_{name}" for name in ("up", "down")]
        self.projector = LinesProjector(config.vit.hidden_size, hidden_size, (LINE_END, BETWEEN), modules, build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        config, grid, lines = self.config, self.config.vit.grid, self.config.lines
        states = self.encoder(patches_of(patches, config), patches_of(columns[0], config))
        with jax.named_scope("squares"):
            odd, states = grid % SQUARE, states.reshape(-1, grid, grid, states.shape[-1])
            states = jnp.pad(states, ((0, 0), (0, odd), (0, odd), (0, 0)), mode="reflect")
            squares = states.reshape(-1, lines, SQUARE, lines, SQUARE, states.shape[-1])
            means = squares.astype(jnp.float32).mean(axis=(2, 4)).astype(states.dtype)
        return self.projector(means.reshape(-1, lines * lines, means.shape[-1]), lines)
