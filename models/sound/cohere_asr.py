"""Tower of Cohere Transcribe: a Fast Conformer, of whose positions the keys and values of all cross-attention layers of
the decoder are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.sound.crossed import HEARD, CrossedSoundConfig, CrossProjections, row_size
from jaxengine.models.sound.fast_conformer import STRIDE, ConformerConfig, FastConformer, conformer_fields
from jaxengine.models.vision.base.vit import linear

ENCODER, PROJECTION = "encoder", "encoder_decoder_proj"
_DEFAULTS = {
    "hidden_size": 1280,
    "num_hidden_layers": 48,
    "num_attention_heads": 8,
    "intermediate_size": 5120,
    "conv_kernel_size": 9,
    "subsampling_conv_channels": 256,
    "num_mel_bins": 128,
}
# Seconds of the longest sound where the configuration does not say it, and the most that it may say; frames of one.
_LONGEST, _MOST_SECONDS, _FRAMES = 35.0, 120.0, 100


@dataclass(frozen=True, kw_only=True)
class CohereAsrTowerConfig(CrossedSoundConfig, ConformerConfig):
    """Sizes of the tower. A patch has the column HEARD.

    Attributes:
      decoder_size, decoder_bias, decoder_activation: hidden size of the decoder, whether its projections have biases,
        and the activation of its MLPs.
    """

    decoder_size: int
    decoder_bias: bool
    decoder_activation: str

    @property
    def activate_decoder(self) -> Callable[[jax.Array], jax.Array]:
        """The function that `decoder_activation` names."""
        return ACTIVATIONS[self.decoder_activation]

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return CohereAsrTower(self, build)

    def positions_of(self, columns: np.ndarray) -> int:
        """Return the number of positions of a sound: one for each STRIDE frames begun, at least 1."""
        return max(1, -(-int((columns[0] > 0).sum()) // STRIDE))


def read_cohere_asr_tower(fields: ConfigFields, *, bias: bool) -> CohereAsrTowerConfig:
    """Return the tower's configuration from a config.json, whose `encoder_config` has transformers' defaults for absent
    fields, and for all of them where it is absent or null; `max_audio_clip_s` bounds a sound's seconds, 35 by default.
    bias: whether the decoder's attention has biases.

    Raises ModelConfigError for wrong fields, and for sizes that do not fit each other or are too large.
    """
    sizes = conformer_fields(fields.part_or_empty("encoder_config", **_DEFAULTS))
    if (seconds := fields.number("max_audio_clip_s", _LONGEST)) > _MOST_SECONDS:
        raise fields.fail("max_audio_clip_s", f"a number > 0 and <= {_MOST_SECONDS:g}")
    positions = -(-int(seconds * _FRAMES) // STRIDE)
    layers = fields.integer("num_hidden_layers")
    return CohereAsrTowerConfig(
        **sizes,
        columns=(HEARD,),
        merge=positions * STRIDE,
        unit=positions * STRIDE,
        **row_size(layers, positions),
        num_positions=positions,
        decoder_layers=layers,
        decoder_heads=fields.integer("num_attention_heads"),
        decoder_size=fields.integer("hidden_size"),
        decoder_bias=bias,
        decoder_activation=read_activation(fields, "hidden_act", "relu"),
    )


class CohereAsrTower(FastConformer):
    """Fast Conformer, and the projections of its output to the keys and values of all cross-attention layers."""

    def __init__(self, config: CohereAsrTowerConfig, build: Build):
        super().__init__(config, ENCODER, build)
        size = config.decoder_size
        self.projection = linear(config.hidden_size, PROJECTION, size, ("embed", "embed"), build)
        self.cross = CrossProjections(
            config,
            size,
            size,
            source="model.layers.{number}.second_sub_layer",
            names=("key_net", "value_net"),
            bias=(config.decoder_bias, config.decoder_bias),
            build=build,
        )

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the keys and values of U sounds for L decoder layers, [U, 2 L * S * D], for their spectrograms
        f32[U * P, B]. columns: i32[1, U * P], HEARD.
        """
        lengths = (columns[0].reshape(-1, self.config.unit) > 0).sum(axis=1)
        return self.cross(self.projection(self.encoded(patches, lengths)), len(lengths))
