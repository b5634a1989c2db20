"""Vision tower of Phi-3-vision and Phi-3.5-vision (Abdin et al. 2024, arXiv:2404.14219): CLIP over a whole image and
its tiles, squares of 2 x 2 patches side by side, and an MLP. Learned embeddings follow each line, and stand between the
tiles and the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.vision.base.clip import ClipEncoder
from jaxengine.models.vision.base.layers import ACTIVATIONS
from jaxengine.models.vision.base.vit import (
    VitConfig,
    joined_neighbours,
    linear,
    read_layer_index,
    read_merge,
    read_vit,
)

# Prefix in the model's names of tensors, and of those of CLIP; a checkpoint's names have more before it.
TOWER = "vision_embed_tokens"
CLIP = f"{TOWER}.img_processor.vision_model"
LINE_END, BETWEEN = f"{TOWER}.sub_GN", f"{TOWER}.glb_GN"
# Patches along a side of the square that becomes one embedding.
_SQUARE = 2
# Sizes of the CLIP that files name, and do not state.
_NAMED: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
# What files say of images, all of which the tower computes.
_EMBEDDING = {
    "hd_transform_order": "sub_glb",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}


@dataclass(frozen=True, kw_only=True)
class Phi3TowerConfig(TowerConfig):
    """CLIP with Phi-3-vision's projector. The rows of a unit are those of its squares of patches, line by line, then an
    end of each line, then the one between tiles and whole; the last two read no features.

    Attributes:
      vit: sizes.
      num_used_layers: number of layers before the hidden states that are used.
    """

    vit: VitConfig
    num_used_layers: int

    @property
    def lines(self) -> int:
        """Lines and columns of a unit's rows."""
        return self.vit.grid // _SQUARE

    @property
    def unused(self) -> tuple[str, ...]:
        behind = range(self.num_used_layers, self.vit.num_layers)
        layers = (f"{CLIP}.encoder.layers.{n}." for n in behind)
        return (f"{TOWER}.wte.", f"{CLIP}.post_layernorm.", *layers)

    def make(self, hidden_size: int, build: Build) -> Phi3Tower:
        return Phi3Tower(self, hidden_size, build)


def read_phi3_vision(fields: ConfigFields) -> Phi3TowerConfig:
    """Return the vision tower's configuration from a config.json: `img_processor`, whose sizes are those of CLIP
    ViT-L/14 for 336 pixels unless it states others, with the hidden states that its `layer_idx` (default: -2) selects.

    Raises ModelConfigError for wrong fields, for other features than those of patches, for an odd number of patches in
    a line, and for an `embd_layer` that says something else of images than what the tower computes.
    """
    named = fields.with_defaults(img_processor={}).part("img_processor", **_NAMED)
    named.require(name="clip_vision_model", type_feature="patch", image_dim_out=named.integer("hidden_size"))
    fields.with_defaults(embd_layer={}).part("embd_layer").require(**_EMBEDDING)
    vit = read_vit(named, has_class_token=True)
    read_merge(named, "image_size", _SQUARE, vit)
    lines, merge = vit.grid // _SQUARE, _SQUARE**2
    named.require(num_img_tokens=lines * lines)
    return Phi3TowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=merge,
        unit=merge * (lines * lines + lines + 1),
        vit=vit,
        num_used_layers=read_layer_index(named, named.value("layer_idx", -2), vit.num_layers, "layer_idx"),
    )


class Phi3Tower(nnx.Module):
    """Vision tower of Phi-3-vision: CLIP and a projector.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D] (see
    jaxengine.models.config.tower).
    """

    def __init__(self, config: Phi3TowerConfig, hidden_size: int, build: Build):
        size = config.vit.hidden_size * config.merge
        self.config = config
        self.encoder = ClipEncoder(config.vit, (config.num_used_layers,), CLIP, build)
        ends = [ParamDecl((None,), (Source(name, size),), init_std=0.02) for name in (LINE_END, BETWEEN)]
        self.line_end, self.between = (declare((size,), build.dtype, decl) for decl in ends)
        self.up = linear(size, f"{TOWER}.img_projection.0", hidden_size, ("embed", "ffn"), build)
        self.down = linear(hidden_size, f"{TOWER}.img_projection.2", hidden_size, ("ffn", "embed"), build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        config, vit, lines = self.config, self.config.vit, self.config.lines
        num_units = len(patches) // config.unit
        used = patches.reshape(num_units, config.unit, -1)[:, : vit.num_patches]
        states = self.encoder(used.reshape(-1, used.shape[-1]))
        rows = joined_neighbours(states, vit.grid, _SQUARE).reshape(num_units, lines * lines, -1)
        ends = jnp.broadcast_to(self.line_end[...], (num_units, lines, rows.shape[-1]))
        between = jnp.broadcast_to(self.between[...], (num_units, 1, rows.shape[-1]))
        rows = jnp.concatenate([rows, ends, between], axis=1).reshape(-1, rows.shape[-1])
        with jax.named_scope("projector"):
            return self.down(ACTIVATIONS["gelu"](self.up(rows, out_dtype=jnp.float32)).astype(rows.dtype))
