"""Tower of Audio Flamingo 3 (Goel et al. 2025, arXiv:2507.08128): Whisper's encoder over each window of a sound, as in
Qwen2-Audio, and an MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import read_activation
from jaxengine.models.sound.encoder import LARGE, SoundEncoder
from jaxengine.models.sound.qwen2_audio import POOLED, TOWER, Qwen2AudioTower, Qwen2AudioTowerConfig, read_qwen2_audio
from jaxengine.models.vision.llava import Projector


@dataclass(frozen=True, kw_only=True)
class AudioFlamingo3TowerConfig(Qwen2AudioTowerConfig):
    """Sizes of the tower, in addition to Qwen2-Audio's. A unit is one window.

    Attributes:
      activation, projector_bias: activation of the MLP, and whether its products have biases.
    """

    activation: str
    projector_bias: bool

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return AudioFlamingo3Tower(self, hidden_size, build)


def read_audioflamingo3(fields: ConfigFields) -> AudioFlamingo3TowerConfig:
    """Return the tower's configuration from a config.json: read_qwen2_audio's with the sizes of Whisper's large models
    by default, `projector_hidden_act` (default: gelu) and `projector_bias` (default: true). Raises ModelConfigError for
    wrong fields, and for an odd number of positions.
    """
    return AudioFlamingo3TowerConfig(
        **vars(read_qwen2_audio(fields, LARGE)),
        activation=read_activation(fields, "projector_hidden_act"),
        projector_bias=fields.boolean("projector_bias", True),
    )


class AudioFlamingo3Tower(Qwen2AudioTower):
    """Tower of Audio Flamingo 3."""

    def __init__(self, config: AudioFlamingo3TowerConfig, hidden_size: int, build: Build):
        self.config = config
        self.encoder = SoundEncoder(config.sizes, source=TOWER, build=build, pooled=POOLED)
        size, bias = config.sizes.size, config.projector_bias
        self.projector = Projector(size, hidden_size, config.activation, build, bias=bias)
