"""Tower of MOSS-Transcribe-Diarize (OpenMOSS 2026): Whisper's encoder over each window of a sound, and an MLP with a
norm over neighbouring positions, which are joined.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import read_activation
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.sound.encoder import EncoderSizes, SoundEncoder, read_encoder
from jaxengine.models.sound.qwen2_audio import TOWER
from jaxengine.models.vision.llava import PROJECTOR, Projector

# transformers' defaults of fields that a file lacks.
_DEFAULTS = {
    "num_mel_bins": 80,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


@dataclass(frozen=True, kw_only=True)
class MossTranscribeTowerConfig(TowerConfig):
    """Sizes of the tower. A patch is one frame of a spectrogram, and a unit is one window.

    Attributes:
      sizes: sizes of the encoder.
      joined: number of positions that become one row.
      activation, projector_bias, norm_eps: activation of the MLP, whether its products have biases, and the epsilon of
        the norm after it.
    """

    sizes: EncoderSizes
    joined: int
    activation: str
    projector_bias: bool
    norm_eps: float

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return MossTranscribeTower(self, hidden_size, build)


def read_moss_transcribe(fields: ConfigFields, norm_eps: float) -> MossTranscribeTowerConfig:
    """Return the tower's configuration from a config.json. norm_eps: epsilon of the text model's norms. Raises
    ModelConfigError for wrong fields, if `audio_merge_size` (default: 4) does not divide the number of positions, and
    if `audio_chunk_size` is not a window's number of samples.
    """
    sizes = read_encoder(fields.part("audio_config", **_DEFAULTS))
    joined = fields.integer("audio_merge_size", 4)
    if sizes.num_positions % joined:
        raise fields.fail("audio_merge_size", f"a divisor of max_source_positions {sizes.num_positions}")
    # Two frames of 160 samples are a position.
    if fields.has("audio_chunk_size"):
        fields.require(audio_chunk_size=2 * 160 * sizes.num_positions)
    return MossTranscribeTowerConfig(
        num_features=sizes.num_bins,
        columns=(),
        merge=2 * joined,
        unit=2 * sizes.num_positions,
        hears=True,
        sizes=sizes,
        joined=joined,
        activation=read_activation(fields, "projector_hidden_act", "silu"),
        projector_bias=fields.boolean("projector_bias", True),
        norm_eps=norm_eps,
    )


class MossTranscribeTower(nnx.Module):
    """Tower of MOSS-Transcribe-Diarize.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: MossTranscribeTowerConfig, hidden_size: int, build: Build):
        self.config = config
        self.encoder = SoundEncoder(config.sizes, source=TOWER, build=build)
        size, bias = config.sizes.size * config.joined, config.projector_bias
        self.projector = Projector(size, hidden_size, config.activation, build, bias=bias)
        self.norm = LayerNorm(hidden_size, config.norm_eps, source=f"{PROJECTOR}.norm", build=build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: silence is a part of a window
        x = self.encoder(patches)
        with jax.named_scope("projector"):
            return self.norm(self.projector(x.reshape(len(x) // self.config.joined, -1)))
