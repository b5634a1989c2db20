"""Parts of towers that encode an image and its tiles line by line: Phi-3-vision's and Phi-4-multimodal's.

A unit is an image or a tile. Its rows are those of its squares of patches, line by line, then an end of each line, then
the one between tiles and whole; the last two are learned and read no features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.vision.base.clip import ClipEncoder
from jaxengine.models.vision.base.vit import VitConfig, VitTowerConfig, linear, read_layer_index, vector

# Patches along a side of the square that becomes one row.
SQUARE = 2
# What files say of images in lines, all of which these towers compute.
EMBEDDING = {
    "hd_transform_order": "sub_glb",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}


@dataclass(frozen=True, kw_only=True)
class LinesTowerConfig(VitTowerConfig):
    """CLIP or SigLIP with a projector of lines.

    Attributes:
      num_used_layers: number of layers before the hidden states that are used.
    """

    num_used_layers: int

    @property
    def lines(self) -> int:
        """Lines and columns of a unit's rows. Where the number of patches in a line is odd, the last square of a line
        is only partly of the image.
        """
        return -(-self.vit.grid // SQUARE)

    def encoder(self, tower: str, build: Build) -> ClipEncoder:
        """Return the new encoder, up to the layer that is used. tower: prefix of its names."""
        return ClipEncoder(self.vit, (self.num_used_layers,), tower, build)

    def unused_of(self, tower: str, *others: str) -> tuple[str, ...]:
        """Return beginnings of names of tensors that are not read: the layers after the one that is used of the encoder
        `tower`, its last norm, and `others`.
        """
        layers = self.unused_layers(f"{tower}.encoder.layers", self.num_used_layers)
        return (*others, f"{tower}.post_layernorm.", *layers)


def read_lines(fields: ConfigFields, vit: VitConfig, layer: str) -> dict[str, Any]:
    """Return arguments of a LinesTowerConfig, without `columns`. layer: name of the field that selects the hidden
    states (default: -2). Raises ModelConfigError if it is wrong.
    """
    lines, merge = -(-vit.grid // SQUARE), SQUARE**2
    return {
        "num_features": vit.num_features,
        "merge": merge,
        "unit": merge * (lines * lines + lines + 1),
        "vit": vit,
        "num_used_layers": read_layer_index(fields, fields.value(layer, -2), vit.num_layers, layer),
    }


def patches_of(patches: jax.Array, config: LinesTowerConfig) -> jax.Array:
    """Return the features of patches, [U * N, ...] of N each unit, from those of rows, [U * unit, ...], of which others
    read none.
    """
    used = patches.reshape(-1, config.unit, *patches.shape[1:])[:, : config.vit.num_patches]
    return used.reshape(-1, *patches.shape[1:])


class LinesProjector(nnx.Module):
    """Projector of the rows of units: down(gelu(up(row))), with the learned rows after each unit's own.

    size: elements of a row. ends: names of the tensors of the end of a line and of the row between tiles and whole.
    modules: checkpoint modules of up and down.
    """

    def __init__(self, size: int, hidden_size: int, ends: Sequence[str], modules: Sequence[str], build: Build):
        self.line_end, self.between = (vector(size, name, build) for name in ends)
        up, down = modules
        self.up = linear(size, up, hidden_size, ("embed", "ffn"), build)
        self.down = linear(hidden_size, down, hidden_size, ("ffn", "embed"), build)

    def __call__(self, rows: jax.Array, lines: int) -> jax.Array:
        """Return the embeddings [U * (L * L + L + 1), D] of rows [U, L * L, E] of L = `lines` lines: of a unit's rows,
        then of L ends of lines, then of the row between.
        """
        num_units, _, size = rows.shape
        ends = jnp.broadcast_to(self.line_end[...], (num_units, lines, size))
        between = jnp.broadcast_to(self.between[...], (num_units, 1, size))
        with jax.named_scope("projector"):
            rows = jnp.concatenate([rows, ends, between], axis=1).reshape(-1, size)
            return self.down(ACTIVATIONS["gelu"](self.up(rows, out_dtype=jnp.float32)).astype(rows.dtype))
