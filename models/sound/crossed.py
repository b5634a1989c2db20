"""Sizes of towers of sounds that layers attend to, and their projections to the keys and values of the decoder's
cross-attention, which are what leaves such a tower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.params.declare import Source

# The column of a tower whose sounds differ in length: for each patch the number of its frames or samples that the sound
# has, and -1 in those after the last.
HEARD = "heard"


@dataclass(frozen=True, kw_only=True)
class CrossedSoundConfig(TowerConfig):
    """Sizes of a tower. A unit is one sound.

    Attributes:
      num_positions: S, positions of the longest sound after the encoder.
      decoder_layers: layers of the decoder, each of which gets keys and values.
      decoder_heads: heads of each of these layers.
    """

    num_positions: int
    decoder_layers: int
    decoder_heads: int

    def positions_of(self, columns: np.ndarray) -> int:
        """Return how many positions of a sound are attended to, 1 to S. columns: i32[C, P], the item's. Here S, for a
        tower that pads all sounds with silence.
        """
        return self.num_positions


def row_size(num_layers: int, num_positions: int) -> dict[str, Any]:
    """Return the fields of TowerConfig that say what a sound's row of the pool holds: keys and values of `num_layers`
    layers at `num_positions` positions.
    """
    return {"num_parts": 2 * num_layers * num_positions, "crosses": True}


class CrossProjections(nnx.Module):
    """Projections of encoded sounds to keys and values of all layers of the decoder.

    Args:
      in_size: elements of an encoded position. size: hidden size of the decoder.
      source: the checkpoint's name of a layer's cross-attention, with "{number}" for the layer.
      names: of its projections to keys and values. bias: whether each of the two has a bias.
    """

    def __init__(
        self,
        config: CrossedSoundConfig,
        in_size: int,
        size: int,
        *,
        source: str,
        names: tuple[str, str] = ("k_proj", "v_proj"),
        bias: tuple[bool, bool],
        build: Build,
    ):
        group = size // config.decoder_heads
        self.projections = nnx.List(
            [
                Linear(
                    in_size,
                    (Source(f"{source.format(number=layer)}.{name}", size, group=group),),
                    axes=("embed", "heads"),
                    bias=has_bias,
                    build=build,
                )
                for layer in range(config.decoder_layers)
                for name, has_bias in zip(names, bias, strict=True)
            ]
        )

    def __call__(self, x: jax.Array, num_sounds: int) -> jax.Array:
        """Return the keys and values of U = num_sounds sounds, [U, 2 L * S * D], for encoded positions x [U * S, E]:
        for each decoder layer the keys [S, D] and then the values, of this device's heads alone.
        """
        with jax.named_scope("keys_and_values"):
            return jnp.concatenate([project(x).reshape(num_sounds, -1) for project in self.projections], axis=1)
