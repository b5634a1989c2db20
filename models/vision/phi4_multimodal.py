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
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.vision.base.clip import ClipEncoder
from jaxengine.models.vision.base.layers import ACTIVATIONS
from jaxengine.models.vision.base.vit import VitConfig, linear, read_layer_index, read_vit

# Prefix in the model's names of tensors, and of those of SigLIP; a checkpoint's names have more before it.
TOWER = "image_embed"
SIGLIP = f"{TOWER}.img_processor"
LINE_END, BETWEEN = f"{TOWER}.sub_img_feature_extensor", f"{TOWER}.global_img_feature_extensor"
# Patches along a side of the square that becomes one embedding.
_SQUARE = 2
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
# What files as first published say of images, all of which the tower computes.
_PUBLISHED = {
    "hd_transform_order": "sub_glb",
    "image_token_compression_cls": "avg_pool_2d",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}


@dataclass(frozen=True, kw_only=True)
class Phi4TowerConfig(TowerConfig):
    """SigLIP with Phi-4-multimodal's projector. The rows of a unit are those of its squares of patches, line by line,
    then an end of each line, then the one between tiles and whole; the last two read no features.

    Attributes:
      vit: sizes.
      num_used_layers: number of layers before the hidden states that are used.
    """

    vit: VitConfig
    num_used_layers: int

    @property
    def lines(self) -> int:
        """Lines and columns of a unit's rows. Where the number of patches in a line is odd, a square at the edge has
        the second last ones twice.
        """
        return -(-self.vit.grid // _SQUARE)

    @property
    def unused(self) -> tuple[str, ...]:
        behind = range(self.num_used_layers, self.vit.num_layers)
        layers = (f"{SIGLIP}.encoder.layers.{n}." for n in behind)
        return (f"{SIGLIP}.head.", f"{SIGLIP}.post_layernorm.", *layers)

    def make(self, hidden_size: int, build: Build) -> Phi4Tower:
        return Phi4Tower(self, hidden_size, build)


def read_phi4(fields: ConfigFields) -> Phi4TowerConfig:
    """Return the vision tower's configuration from a config.json, with the hidden states that `feature_layer` (default:
    -2) selects. Raises ModelConfigError for wrong fields, for a `crop_size` other than the image_size, for a patch as
    large as a unit, and for files as first published whose `embd_layer` or `img_processor` say something else.
    """
    fields.require(img_processor=None)
    vision = fields.with_defaults(vision_config={}).part("vision_config", **_DEFAULTS)
    vit = read_vit(vision)
    said = (fields.mapping("embd_layer") or {}).get("image_embd_layer")
    if said is not None:
        published = ConfigFields({"image_embd_layer": said}).part("image_embd_layer")
        published.require(**_PUBLISHED, crop_size=vit.image_size)
    if vit.grid < _SQUARE:
        raise vision.fail("image_size", f"at least {_SQUARE} patches of {vit.patch_size}")
    vision.require(crop_size=vit.image_size)
    lines = -(-vit.grid // _SQUARE)
    merge = _SQUARE**2
    return Phi4TowerConfig(
        num_features=vit.num_features,
        columns=("place",),
        merge=merge,
        unit=merge * (lines * lines + lines + 1),
        adapter="vision-lora",
        vit=vit,
        num_used_layers=read_layer_index(vision, vision.value("feature_layer", -2), vit.num_layers, "feature_layer"),
    )


class Phi4Tower(nnx.Module):
    """Vision tower of Phi-4-multimodal: SigLIP and a projector.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D] (see
    jaxengine.models.config.tower). "place" is the learned position of a patch; -1 for one of an image's margin, which
    no patch attends to.
    """

    def __init__(self, config: Phi4TowerConfig, hidden_size: int, build: Build):
        vit = config.vit
        self.config = config
        self.encoder = ClipEncoder(vit, (config.num_used_layers,), SIGLIP, build)
        ends = [ParamDecl((None,), (Source(name, vit.hidden_size),), init_std=0.02) for name in (LINE_END, BETWEEN)]
        self.line_end, self.between = (declare((vit.hidden_size,), build.dtype, decl) for decl in ends)
        up, down = (f"{TOWER}.img_projection_{name}" for name in ("up", "down"))
        self.up = linear(vit.hidden_size, up, hidden_size, ("embed", "ffn"), build)
        self.down = linear(hidden_size, down, hidden_size, ("ffn", "embed"), build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        config, vit, lines = self.config, self.config.vit, self.config.lines
        num_units = len(patches) // config.unit
        used = patches.reshape(num_units, config.unit, -1)[:, : vit.num_patches]
        places = columns[0].reshape(num_units, config.unit)[:, : vit.num_patches]
        states = self.encoder(used.reshape(-1, used.shape[-1]), places.reshape(-1))
        with jax.named_scope("squares"):
            odd = vit.grid % _SQUARE
            states = states.reshape(num_units, vit.grid, vit.grid, -1)
            states = jnp.pad(states, ((0, 0), (0, odd), (0, odd), (0, 0)), mode="reflect")
            squares = states.reshape(num_units, lines, _SQUARE, lines, _SQUARE, -1)
            means = squares.astype(jnp.float32).mean(axis=(2, 4)).astype(states.dtype)
            rows = means.reshape(num_units, lines * lines, -1)
        ends = jnp.broadcast_to(self.line_end[...], (num_units, lines, rows.shape[-1]))
        between = jnp.broadcast_to(self.between[...], (num_units, 1, rows.shape[-1]))
        rows = jnp.concatenate([rows, ends, between], axis=1).reshape(-1, rows.shape[-1])
        with jax.named_scope("projector"):
            return self.down(ACTIVATIONS["gelu"](self.up(rows, out_dtype=jnp.float32)).astype(rows.dtype))
