"""Tower of sounds of Qwen2.5-Omni (Qwen Team 2025, arXiv:2503.20215): Whisper's encoder over windows of two seconds,
each by itself, with the mean of neighbouring positions, and one product.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.sound.encoder import EPS, Convolution, EncoderLayer, EncoderSizes, read_encoder, sinusoids
from jaxengine.models.sound.qwen2_audio import DEFAULTS, TOWER
from jaxengine.models.vision.base.vit import linear

_POOLED = 2
# transformers' defaults of fields that a file lacks.
_DEFAULTS = {
    **DEFAULTS,
    "n_window": 100,
    "output_dim": 3584,
}


@dataclass(frozen=True, kw_only=True)
class Qwen2_5OmniSoundConfig(TowerConfig):
    """Sizes of the tower. A patch is one frame of a spectrogram, and a unit is one window. Its column "sound" is 0 for
    frames of the sound, and -1 for those after it.
    """

    sizes: EncoderSizes

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Qwen2_5OmniSoundTower(self, hidden_size, build)


def read_qwen2_5_omni_sound(fields: ConfigFields, hidden_size: int) -> Qwen2_5OmniSoundConfig:
    """Return the tower's configuration from the `audio_config` of a config.json, with transformers' defaults for absent
    fields. A window has 2 * n_window frames. hidden_size: size of the text model's hidden states. Raises
    ModelConfigError for wrong fields, and if `n_window` is odd or `output_dim` is not hidden_size.
    """
    audio = fields.part("audio_config", **_DEFAULTS)
    positions = audio.integer("n_window")
    if positions % _POOLED:
        raise audio.fail("n_window", "an even number")
    if audio.integer("output_dim") != hidden_size:
        raise audio.fail("output_dim", f"{hidden_size}, hidden_size of the text model")
    sizes = read_encoder(ConfigFields({**audio.raw, f"{audio.prefix}max_source_positions": positions}, audio.prefix))
    return Qwen2_5OmniSoundConfig(
        num_features=sizes.num_bins,
        columns=("sound",),
        merge=2 * _POOLED,
        unit=2 * positions,
        hears=True,
        sizes=sizes,
    )


class Qwen2_5OmniSoundTower(nnx.Module):
    """Tower of sounds of Qwen2.5-Omni.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: Qwen2_5OmniSoundConfig, hidden_size: int, build: Build):
        self.config, sizes = config, config.sizes
        shapes = (("conv1", sizes.num_bins, 1), ("conv2", sizes.size, 2))
        self.convolutions = nnx.List(
            [
                Convolution(width, sizes.size, stride=stride, source=f"{TOWER}.{name}", build=build)
                for name, width, stride in shapes
            ]
        )
        layers = (f"{TOWER}.layers.{number}" for number in range(sizes.num_layers))
        self.layers = nnx.List([EncoderLayer(sizes, source=each, build=build) for each in layers])
        self.norm = LayerNorm(sizes.size, EPS, source=f"{TOWER}.ln_post", build=build)
        self.projector = linear(sizes.size, f"{TOWER}.proj", hidden_size, ("embed", "embed"), build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        sizes = self.config.sizes
        is_sound = columns[0].reshape(-1, self.config.unit) >= 0
        first, second = self.convolutions
        with jax.named_scope("convolutions"):
            x = first(patches.reshape(len(is_sound), self.config.unit, -1))
            # The second one sees zeros after a sound, as it does after a window.
            x = second(jnp.where(is_sound[..., None], x, 0))
            x = x + jnp.asarray(sinusoids(np.arange(sizes.num_positions), sizes.size), x.dtype)
            x = x.reshape(-1, sizes.size)
        # A position is of two frames, and of the sound if the first of them is.
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x = layer(x, len(is_sound), is_sound[:, ::2])
        joined = x.astype(jnp.float32).reshape(-1, _POOLED, sizes.size)
        with jax.named_scope("projector"):
            return self.projector(self.norm(joined.mean(axis=1).astype(x.dtype)))
