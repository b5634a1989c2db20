"""Tower of Voxtral (Liu et al. 2025, arXiv:2507.13264): Whisper's encoder over each window of a sound, and an MLP over
neighbouring positions, which are joined.
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


@dataclass(frozen=True, kw_only=True)
class VoxtralTowerConfig(TowerConfig):
    """Sizes of the tower. A patch is one frame of a spectrogram, and a unit is one window.

    Attributes:
      sizes: sizes of the encoder.
      joined: number of positions that become one row.
      activation: activation of the MLP.
    """

    sizes: EncoderSizes
    joined: int
    activation: str

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return VoxtralTower(self, hidden_size, build)


def read_voxtral(fields: ConfigFields) -> VoxtralTowerConfig:
    """Return the tower's configuration from a config.json; intermediate_size / hidden_size positions become one row.
    Raises ModelConfigError for wrong fields, and if that is not an integer that divides the number of positions.
    """
    audio = fields.part("audio_config", **LARGE)
    sizes = read_encoder(audio)
    joined = sizes.intermediate_size // sizes.size
    if joined * sizes.size != sizes.intermediate_size or sizes.num_positions % joined:
        allowed = "a multiple of hidden_size by a divisor of max_source_positions: so many positions become one row"
        raise audio.fail("intermediate_size", allowed)
    return VoxtralTowerConfig(
        num_features=sizes.num_bins,
        columns=(),
        merge=2 * joined,
        unit=2 * sizes.num_positions,
        hears=True,
        sizes=sizes,
        joined=joined,
        activation=read_activation(fields, "projector_hidden_act"),
    )


class VoxtralTower(nnx.Module):
    """Tower of Voxtral.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: VoxtralTowerConfig, hidden_size: int, build: Build):
        self.config = config
        self.encoder = SoundEncoder(config.sizes, source=TOWER, build=build)
        size = config.sizes.size * config.joined
        self.projector = Projector(size, hidden_size, config.activation, build, bias=False)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: silence is a part of a window
        x = self.encoder(patches)
        with jax.named_scope("projector"):
            return self.projector(x.reshape(len(x) // self.config.joined, -1))
