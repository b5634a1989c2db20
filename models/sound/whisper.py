"""Tower of Whisper (Radford et al. 2022, arXiv:2212.04356): spectrograms of fixed length to the keys and values of
all cross-attention layers of the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.sound.crossed import CrossedSoundConfig, CrossProjections, row_size
from jaxengine.models.sound.encoder import EncoderSizes, SoundEncoder, read_encoder

ENCODER = "model.encoder"
_MAX_FILTER = 31


@dataclass(frozen=True, kw_only=True)
class WhisperTowerConfig(CrossedSoundConfig):
    """Sizes of the tower. A patch is one frame of a spectrogram.

    Attributes:
      sizes: sizes of the encoder.
      alignment_heads: (layer, head) of the decoder whose cross-attention follows the sound as the transcript does;
        empty if they are not known.
      filter_width: number of positions of a sound, odd, over which the median of their weights is taken.
    """

    sizes: EncoderSizes
    alignment_heads: tuple[tuple[int, int], ...] = ()
    filter_width: int = 7

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return WhisperTower(self, hidden_size, build)

    @property
    def has_rules(self) -> bool:
        return True

    @property
    def aligns(self) -> bool:
        return bool(self.alignment_heads)

    def with_generation(self, fields: ConfigFields) -> WhisperTowerConfig:
        """Return the configuration with its `alignment_heads` replaced by those of a generation_config.json, () if it
        has none.

        Raises ModelConfigError for anything but pairs (layer, head) of the decoder, at most as many as it has heads.
        """
        given = fields.value("alignment_heads", None) or ()
        sizes = self.decoder_layers, self.decoder_heads
        if not (
            isinstance(given, list | tuple)
            and len(given) <= self.decoder_layers * self.decoder_heads
            and all(isinstance(each, list | tuple) and len(each) == 2 for each in given)
            and all(
                type(number) is int and 0 <= number < size
                for each in given
                for number, size in zip(each, sizes, strict=True)
            )
        ):
            allowed = f"a list of pairs, a layer below {sizes[0]} and a head below {sizes[1]}, at most one of each"
            raise fields.fail("alignment_heads", allowed)
        return replace(self, alignment_heads=tuple((layer, head) for layer, head in given))


def read_whisper_tower(fields: ConfigFields) -> WhisperTowerConfig:
    """Return the tower's configuration from a config.json, whose `num_mel_bins` is 80 by default. Raises
    ModelConfigError for wrong fields, and if `median_filter_width` (default: 7) is even or above 31.
    """
    sizes, layers = read_encoder(fields.with_defaults(num_mel_bins=80)), fields.integer("decoder_layers")
    frames, width = 2 * sizes.num_positions, fields.integer("median_filter_width", 7)
    if width % 2 == 0 or width > _MAX_FILTER:
        raise fields.fail("median_filter_width", f"an odd number from 1 to {_MAX_FILTER}")
    return WhisperTowerConfig(
        num_features=sizes.num_bins,
        columns=(),
        merge=frames,
        unit=frames,
        **row_size(layers, sizes.num_positions),
        num_positions=sizes.num_positions,
        sizes=sizes,
        decoder_layers=layers,
        decoder_heads=fields.integer("decoder_attention_heads"),
        filter_width=width,
    )


class WhisperTower(nnx.Module):
    """Whisper's encoder, and the projections to keys and values of the decoder's cross-attention."""

    def __init__(self, config: WhisperTowerConfig, hidden_size: int, build: Build):
        self.config = config
        self.encoder = SoundEncoder(config.sizes, source=ENCODER, build=build)
        source = "model.layers.{number}.encoder_attn"
        self.cross = CrossProjections(config, hidden_size, hidden_size, source=source, bias=(False, True), build=build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the keys and values of U sounds for L decoder layers, [U, 2 L * S * D], for their spectrograms
        f32[U * 2 S, F]. columns: not used, i32[0, U * 2 S].
        """
        return self.cross(self.encoder(patches), len(patches) // self.config.unit)
