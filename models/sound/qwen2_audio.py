"""Tower of Qwen2-Audio (Chu et al. 2024, arXiv:2407.10759): Whisper's encoder with the mean of neighbouring positions,
and one product. Positions of silence after a sound are not attended to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.sound.encoder import EncoderSizes, SoundEncoder, read_encoder
from jaxengine.models.vision.base.vit import linear
from jaxengine.models.vision.llava import PROJECTOR

# Prefix of the tower's tensors in the model's names: checkpoints may have more before it.
TOWER = "audio_tower"
POOLED = 2
# transformers' defaults of fields that a file lacks.
DEFAULTS = {
    "num_mel_bins": 128,
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
}


@dataclass(frozen=True, kw_only=True)
class Qwen2AudioTowerConfig(TowerConfig):
    """Sizes of the tower. A patch is one frame of a spectrogram, and a unit is one sound. Its column "sound" is 0 for
    frames of the sound, and -1 for those of the silence after it.
    """

    sizes: EncoderSizes

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Qwen2AudioTower(self, hidden_size, build)


def read_qwen2_audio(fields: ConfigFields, defaults: Mapping[str, Any] = DEFAULTS) -> Qwen2AudioTowerConfig:
    """Return the tower's configuration from the `audio_config` of a config.json. defaults: values of absent fields.
    Raises ModelConfigError for wrong fields, and for an odd number of positions.
    """
    audio = fields.part("audio_config", **defaults)
    sizes = read_encoder(audio)
    if sizes.num_positions % POOLED:
        raise audio.fail("max_source_positions", "an even number")
    return Qwen2AudioTowerConfig(
        num_features=sizes.num_bins,
        columns=("sound",),
        merge=2 * POOLED,
        unit=2 * sizes.num_positions,
        hears=True,
        sizes=sizes,
    )


class Qwen2AudioTower(nnx.Module):
    """Tower of Qwen2-Audio: a SoundEncoder with pooled positions, and a projection.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: Qwen2AudioTowerConfig, hidden_size: int, build: Build):
        self.config = config
        self.encoder = SoundEncoder(config.sizes, source=TOWER, build=build, pooled=POOLED)
        axes = ("embed", "embed")
        self.projector = linear(config.sizes.size, f"{PROJECTOR}.linear", hidden_size, axes, build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        # A position is of two frames, and of the sound if the first of them is.
        is_heard = columns[0].reshape(-1, self.config.unit)[:, ::2] >= 0
        x = self.placed(self.encoder(patches, is_heard), columns)
        with jax.named_scope("projector"):
            return self.projector(x)

    def placed(self, x: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the input of the projector for the encoder's rows x [P / merge, E]: x itself. columns: i32[C, P]."""
        del columns
        return x
