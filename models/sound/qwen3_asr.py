"""Tower of Qwen3-ASR (Qwen Team 2026): three convolutions over time and frequency in chunks of a second, positions in
their chunk, and layers of attention over windows of several chunks.

Further shape letters: G chunks, B bins of a spectrum, C channels of the convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.mlp import gelu
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.sound.encoder import EPS, EncoderLayer, EncoderSizes, read_encoder, sinusoids
from jaxengine.models.sound.qwen2_audio import TOWER
from jaxengine.models.vision.base.layers import in_turn
from jaxengine.models.vision.base.vit import linear, table, vector
from jaxengine.models.vision.llava import Projector

# Frames that become one position: each of three convolutions halves their number.
STRIDE = 8
# In a column: the chunk ends before this frame, as in Qwen3-Omni if a sound is shorter than a chunk.
CUT = -2
_CONVOLUTIONS = ("conv2d1", "conv2d2", "conv2d3")
# transformers' defaults of fields that a file lacks.
_DEFAULTS = {
    "num_mel_bins": 128,
    "d_model": 1024,
    "encoder_layers": 24,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "downsample_hidden_size": 480,
    "n_window": 50,
    "n_window_infer": 800,
    "output_dim": 3584,
}


@dataclass(frozen=True, kw_only=True)
class Qwen3ASRTowerConfig(TowerConfig):
    """Sizes of the tower. A patch is one frame of a spectrogram, and a unit is one window. Its column "sound" is 0 for
    frames of the sound, -1 for those after it, and CUT for frames that do not exist for the convolutions.

    Attributes:
      sizes: sizes of the encoder; its positions are those of a window.
      chunk: number of frames that are convolved together.
      channels: channels of the convolutions.
    """

    sizes: EncoderSizes
    chunk: int
    channels: int

    @property
    def stride(self) -> int:
        """STRIDE, 8: the number of frames of a position."""
        return STRIDE

    @property
    def cut(self) -> int:
        """CUT, -2: the number in the column of frames that do not exist for the convolutions."""
        return CUT

    @property
    def num_slots(self) -> int:
        """Number of rows of a chunk, chunk / merge. The first of these rows are its positions, and the others are not
        used.
        """
        return self.chunk // self.merge

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Qwen3ASRTower(self, hidden_size, build)


def read_qwen3_asr(fields: ConfigFields, hidden_size: int, **defaults: int) -> Qwen3ASRTowerConfig:
    """Return the tower's configuration from the `audio_config` of a config.json, with transformers' defaults for absent
    fields. A window has `n_window_infer` frames, in chunks of 2 * n_window. hidden_size: size of the text model's
    hidden states. defaults: another family's values of absent fields, where they are not those of Qwen3-ASR. Raises
    ModelConfigError for wrong fields, and if `n_window_infer` is not a multiple of twice `n_window`, or `output_dim` is
    not hidden_size.
    """
    audio = fields.part("audio_config", **{**_DEFAULTS, **defaults})
    chunk, window = 2 * audio.integer("n_window"), audio.integer("n_window_infer")
    if window % chunk:
        raise audio.fail("n_window_infer", f"a multiple of twice n_window, {chunk}")
    if audio.integer("output_dim") != hidden_size:
        raise audio.fail("output_dim", f"{hidden_size}, hidden_size of the text model")
    positions = -(-chunk // STRIDE)
    count = window // chunk * positions
    sizes = read_encoder(ConfigFields({**audio.raw, f"{audio.prefix}max_source_positions": count}, audio.prefix))
    return Qwen3ASRTowerConfig(
        num_features=sizes.num_bins,
        columns=("sound",),
        # Rows of a chunk are a divisor of its frames, and as many as its positions or more.
        merge=max(size for size in range(1, STRIDE + 1) if chunk % size == 0 and chunk // size >= positions),
        unit=window,
        hears=True,
        sizes=sizes,
        chunk=chunk,
        channels=audio.integer("downsample_hidden_size"),
    )


class Halving(nnx.Module):
    """Convolution of 3 x 3 with a stride of two and zeros around its input, then GELU. It halves B and T of [G, B, T,
    C'], rounded up.
    """

    def __init__(self, in_channels: int, channels: int, *, source: str, build: Build):
        self.channels, self.dtype = channels, build.dtype
        self.weight = table(channels, 9 * in_channels, f"{source}.weight", build)
        self.bias = vector(channels, f"{source}.bias", build)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.weight[...].reshape(self.channels, -1, 3, 3)
        y = lax.conv_general_dilated(
            x.astype(self.dtype),
            kernel,
            (2, 2),
            ((1, 1), (1, 1)),
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
            preferred_element_type=jnp.float32,
        )
        return gelu(y + self.bias[...].astype(jnp.float32)).astype(self.dtype)


class Qwen3ASRTower(nnx.Module):
    """Tower of Qwen3-ASR.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: Qwen3ASRTowerConfig, hidden_size: int, build: Build):
        self.config, sizes, channels = config, config.sizes, config.channels
        bins = sizes.num_bins
        for _ in _CONVOLUTIONS:
            bins = (bins + 1) // 2
        widths = (1, *[channels] * (len(_CONVOLUTIONS) - 1))
        self.convolutions = nnx.List(
            [
                Halving(width, channels, source=f"{TOWER}.{name}", build=build)
                for name, width in zip(_CONVOLUTIONS, widths, strict=True)
            ]
        )
        axes, size = ("embed", "embed"), sizes.size
        self.joined = linear(channels * bins, f"{TOWER}.conv_out", size, axes, build, bias=False)
        layers = (f"{TOWER}.layers.{number}" for number in range(sizes.num_layers))
        self.layers = nnx.List([EncoderLayer(sizes, source=each, build=build, key_bias=True) for each in layers])
        self.norm = LayerNorm(size, EPS, source=f"{TOWER}.ln_post", build=build)
        self.projector = Projector(size, hidden_size, sizes.activation, build, inner=size)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        config = self.config
        num_chunks, num_windows = len(patches) // config.chunk, len(patches) // config.unit
        with jax.named_scope("convolutions"):
            kind = columns[0].reshape(num_chunks, config.chunk)
            x = self._convolved(patches.reshape(num_chunks, config.chunk, config.num_features), kind != CUT)
        # A position is of eight frames, and of the sound if the first of them is.
        is_heard = (kind[:, ::STRIDE] >= 0).reshape(num_windows, -1)
        x = in_turn(self.layers, x, num_windows, is_heard)
        with jax.named_scope("projector"):
            x = self.projector(self.norm(x))
        rows = x.reshape(num_chunks, -1, x.shape[1])
        return jnp.pad(rows, ((0, 0), (0, config.num_slots - rows.shape[1]), (0, 0))).reshape(-1, x.shape[1])

    def _convolved(self, frames: jax.Array, is_frame: jax.Array) -> jax.Array:
        """Return the convolved chunks, joined and with their positions added, [G * positions, D], of frames f32[G,
        frames, B]. is_frame: bool[G, frames], False for frames that do not exist.
        """
        x = frames.swapaxes(1, 2)[..., None]
        for convolution in self.convolutions:
            # Outputs for frames that do not exist are zeros, as they are after a chunk.
            x, is_frame = convolution(x), is_frame[:, ::2]
            x = jnp.where(is_frame[:, None, :, None], x, 0)
        num_chunks, _, count, _ = x.shape
        x = self.joined(x.transpose(0, 2, 3, 1).reshape(num_chunks * count, -1))
        positions = jnp.asarray(sinusoids(np.arange(count), x.shape[1]), x.dtype)
        return (x.reshape(num_chunks, count, -1) + positions).reshape(num_chunks * count, -1)
