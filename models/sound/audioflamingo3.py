"""Tower of Audio Flamingo 3 (Goel et al. 2025, arXiv:2507.08128): Whisper's encoder over each window of a sound, as in
Qwen2-Audio, and an MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import read_activation
from jaxengine.models.sound.encoder import LARGE, EncoderSizes, SoundEncoder, read_encoder
from jaxengine.models.sound.qwen2_audio import TOWER
from jaxengine.models.vision.llava import Projector

_POOLED = 2


@dataclass(frozen=True, kw_only=True)
class AudioFlamingo3TowerConfig(TowerConfig):
    """Sizes of the tower. A patch is one frame of a spectrogram, and a unit is one window. Its column "sound" is 0 for
    frames of the sound, and -1 for those of the silence after it.

    Attributes:
      sizes: sizes of the encoder.
      activation, projector_bias: activation of the MLP, and whether its products have biases.
    """

    sizes: EncoderSizes
    activation: str
    projector_bias: bool

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return AudioFlamingo3Tower(self, hidden_size, build)


def read_audioflamingo3(fields: ConfigFields) -> AudioFlamingo3TowerConfig:
    """Return the tower's configuration from a config.json. Raises ModelConfigError for wrong fields, and for an odd
    number of positions.
    """
    audio = fields.part("audio_config", **LARGE)
    sizes = read_encoder(audio)
    if sizes.num_positions % _POOLED:
        raise audio.fail("max_source_positions", "an even number")
    return AudioFlamingo3TowerConfig(
        num_features=sizes.num_bins,
        columns=("sound",),
        merge=2 * _POOLED,
        unit=2 * sizes.num_positions,
        hears=True,
        sizes=sizes,
        activation=read_activation(fields, "projector_hidden_act"),
        projector_bias=fields.boolean("projector_bias", True),
    )


class AudioFlamingo3Tower(nnx.Module):
    """Tower of Audio Flamingo 3.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D] (see
    jaxengine.models.config.tower).
    """

    def __init__(self, config: AudioFlamingo3TowerConfig, hidden_size: int, build: Build):
        self.config = config
        self.encoder = SoundEncoder(config.sizes, source=TOWER, build=build, pooled=_POOLED)
        size, bias = config.sizes.size, config.projector_bias
        self.projector = Projector(size, hidden_size, config.activation, build, bias=bias)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        # A position is of two frames, and of the sound if the first of them is.
        is_heard = columns[0].reshape(-1, self.config.unit)[:, ::2] >= 0
        x = self.placed(self.encoder(patches, is_heard), columns)
        with jax.named_scope("projector"):
            return self.projector(x)

    def placed(self, x: jax.Array, columns: jax.Array) -> jax.Array:
        """Return what the MLP gets of the encoder's rows x [P / merge, E]: x itself. columns: i32[C, P]."""
        del columns
        return x
