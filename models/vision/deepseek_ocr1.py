"""Vision tower of DeepSeek-OCR (Wei et al. 2025, arXiv:2510.18234): SAM's encoder, whose rows are the patches of CLIP's
layers; the states of both, side by side, become an image's embeddings.

An image is encoded as a whole and, where it is large, also in smaller tiles. A unit is a square of the larger size: a
tile is its upper left corner. Each line of embeddings ends with a learned vector, and each image with another.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.vision.base.clip import CLIP, DEFAULTS
from jaxengine.models.vision.base.layers import PatchEmbedding, in_turn
from jaxengine.models.vision.base.vit import VitConfig, VitLayer, VitNames, linear, read_vit, table, vector
from jaxengine.models.vision.deepseek_ocr import PROJECTOR, SEPARATOR, TOWER, read_channels
from jaxengine.models.vision.sam import SamConfig, SamEncoder, convolved, is_inside, read_sam, shrunk

NEWLINE = "image_newline"
# Patches along a side that become one row.
_MERGE = 4
# transformers' defaults of fields that a file lacks.
_ENCODER = DEFAULTS[CLIP] | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
}


@dataclass(frozen=True, kw_only=True)
class DeepseekOcrTowerConfig(TowerConfig):
    """SAM's encoder, two convolutions, and CLIP's layers.

    Attributes:
      sam: sizes of the first encoder.
      channels: output channels of the two convolutions.
      clip: sizes of the second encoder, whose patches are the rows of the first.
    """

    sam: SamConfig
    channels: tuple[int, int]
    clip: VitConfig

    @property
    def vit(self) -> VitConfig:
        """Sizes of SAM's layers, for units as large as a whole image."""
        return self.sam.vit

    @property
    def lines(self) -> int:
        """Number of lines, and of columns, of a unit's rows."""
        return self.sam.vit.grid // _MERGE

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return DeepseekOcrTower(self, hidden_size, build)


def read_deepseek_ocr(fields: ConfigFields) -> DeepseekOcrTowerConfig:
    """Return the vision tower's configuration from `sam_config` and `encoder_config` in vision_config of a config.json.
    Raises ModelConfigError for wrong fields, for a second encoder with another number of patches a side than the first
    has rows, and unless downsample_channels are two sizes of which the second is the second encoder's.
    """
    vision = fields.part("vision_config")
    sam, first = read_sam(vision, "sam_config", mlp_ratio=True), vision.part("sam_config")
    encoder = vision.part("encoder_config", **_ENCODER)
    clip, lines = read_vit(encoder, has_class_token=True), sam.vit.grid // _MERGE
    if clip.grid != lines:
        raise encoder.fail("image_size", f"such that it has {lines} patches a side, as many as SAM has rows")
    return DeepseekOcrTowerConfig(
        num_features=sam.vit.num_features,
        columns=("side",),
        merge=_MERGE**2,
        # Further rows are the ends of lines, and the separator after an image.
        unit=sam.vit.num_patches + (lines + 1) * _MERGE**2,
        sam=sam,
        channels=read_channels(first, (512, 1024), clip.hidden_size),
        clip=clip,
    )


class DeepseekOcrTower(nnx.Module):
    """Vision tower of DeepSeek-OCR. The column "side" has the number of rows and columns of a unit's patches, a
    multiple of four; patches after them are empty.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D]. Those of a unit are its rows, line
    by line, as for the largest side, then an end for each line, then the separator.
    """

    def __init__(self, config: DeepseekOcrTowerConfig, hidden_size: int, build: Build):
        self.config = config
        clip, (first, second) = config.clip, config.channels
        sam, encoder = f"{TOWER}.sam_encoder", f"{TOWER}.vision_encoder"
        self.sam = SamEncoder(config.sam, sam, build)
        channels = 9 * config.sam.out_size, 9 * first
        self.first = PatchEmbedding(channels[0], first, source=f"{sam}.proj.conv1", bias=False, build=build)
        self.second = PatchEmbedding(channels[1], second, source=f"{sam}.proj.conv2", bias=False, build=build)
        names = VitNames(f"{encoder}.encoder.layers")
        layers = [VitLayer(clip, f"{names.layers}.{number}", names, build) for number in range(clip.num_layers)]
        self.layers = nnx.List(layers)
        self.norm = LayerNorm(second, clip.norm_eps, source=f"{encoder}.pre_layrnorm", build=build)
        self.positions = table(clip.num_positions, second, f"{encoder}.embeddings.position_embedding.weight", build)
        self.projector = linear(2 * second, PROJECTOR, hidden_size, ("embed", "embed"), build)
        self.class_token = vector(second, f"{encoder}.embeddings.class_embedding", build)
        self.newline, self.separator = (vector(hidden_size, name, build) for name in (NEWLINE, SEPARATOR))

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        config = self.config
        sides = columns[0].reshape(-1, config.unit)[:, 0]
        units = patches.reshape(len(sides), config.unit, -1)[:, : config.vit.num_patches]
        x = self.sam(units.reshape(-1, patches.shape[1]), sides)
        # With a stride of two over an even number of positions, of which the last has none after it.
        with jax.named_scope("downsampling"):
            x = convolved(convolved(x, self.first, 2), self.second, 2)
        with jax.named_scope("encoder"):
            states = self._encoded(x, sides // _MERGE)
        with jax.named_scope("projector"):
            joined = jnp.concatenate([states, x.reshape(states.shape)], axis=-1)
            rows = self.projector(joined.reshape(-1, joined.shape[-1])).reshape(*states.shape[:2], -1)
            ends = jnp.concatenate([jnp.tile(self.newline[...], (config.lines, 1)), self.separator[...][None]])
            ends = jnp.broadcast_to(ends, (len(sides), *ends.shape))
            return jnp.concatenate([rows, ends], axis=1).reshape(-1, rows.shape[-1])

    def _encoded(self, x: jax.Array, sides: jax.Array) -> jax.Array:
        """Return the states [U, G * G, D] after CLIP's layers of x [U, G, G, D], the rows of U units of G by G.

        sides: i32[U], the number of lines and columns that are in use, the first of the G. Rows see these and the class
        token. Learned positions are interpolated for fewer than G; the result beyond these rows is meaningless.
        """
        units, grid, _, size = x.shape
        places = self.positions[...]
        x = (x + shrunk(places[1:].reshape(grid, grid, size), sides)).reshape(units, -1, size)
        token = jnp.broadcast_to(self.class_token[...] + places[0], (units, 1, size))
        x = self.norm(jnp.concatenate([token, x], axis=1).reshape(-1, size))
        seen = is_inside(grid, sides).reshape(units, -1)
        seen = jnp.concatenate([jnp.ones((units, 1), bool), seen], axis=1)
        x = in_turn(self.layers, x, units, seen)
        return x.reshape(units, -1, size)[:, 1:]
