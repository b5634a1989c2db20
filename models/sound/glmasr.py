"""Tower of GLM-ASR (Z.ai 2025): Whisper's convolutions over each window of a sound, layers of attention with rotary
positions, and an MLP over neighbouring positions, which are joined.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_WINDOW, ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import read_activation
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.sound.encoder import EPS, LARGE, Convolution, EncoderLayer, EncoderNames, EncoderSizes
from jaxengine.models.sound.qwen2_audio import TOWER
from jaxengine.models.vision.base.layers import in_turn, rope_frequencies
from jaxengine.models.vision.llava import Projector

# Positions that become one row.
_JOINED = 4
_NAMES = EncoderNames("input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.fc1", "mlp.fc2")
# transformers' defaults of fields that a file lacks.
_DEFAULTS = {**LARGE, "max_position_embeddings": 1500}


@dataclass(frozen=True, kw_only=True)
class GlmAsrTowerConfig(TowerConfig):
    """Sizes of the tower. A patch is one frame of a spectrogram, and a unit is one window.

    Attributes:
      sizes: sizes of the encoder.
      rotated: number of elements of a head, even, that rotate by the position.
      rope_theta: base of their frequencies.
      activation: activation of the MLP over joined positions.
    """

    sizes: EncoderSizes
    rotated: int
    rope_theta: float
    activation: str

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return GlmAsrTower(self, hidden_size, build)


def read_glmasr(fields: ConfigFields) -> GlmAsrTowerConfig:
    """Return the tower's configuration from the `audio_config` of a config.json, with the sizes of Whisper's large
    models by default. A window has 2 * max_position_embeddings frames.

    Raises ModelConfigError for wrong fields, and for heads that do not divide the size, key heads that do not divide
    the heads, an inner size other than that of the joined positions, and ropes other than the plain one.
    """
    audio = fields.part("audio_config", **_DEFAULTS)
    size, heads = audio.integer("hidden_size"), audio.integer("num_attention_heads")
    if size % heads:
        raise audio.fail("num_attention_heads", f"a divisor of hidden_size {size}")
    if heads % (kv_heads := audio.integer("num_key_value_heads", heads)):
        raise audio.fail("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    audio.require(head_dim=size // heads)
    if audio.integer("intermediate_size") != _JOINED * size:
        raise audio.fail("intermediate_size", f"{_JOINED * size}, the size of {_JOINED} joined positions")
    if (positions := audio.integer("max_position_embeddings")) % _JOINED or positions > MAX_WINDOW:
        raise audio.fail("max_position_embeddings", f"a multiple of {_JOINED} that is at most {MAX_WINDOW}")
    rotated, theta = _read_rope(audio, size // heads)
    return GlmAsrTowerConfig(
        num_features=audio.integer("num_mel_bins"),
        columns=(),
        merge=2 * _JOINED,
        unit=2 * positions,
        hears=True,
        sizes=EncoderSizes(
            num_positions=positions,
            num_bins=audio.integer("num_mel_bins"),
            size=size,
            num_layers=audio.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            intermediate_size=_JOINED * size,
            activation=read_activation(audio, "hidden_act"),
        ),
        rotated=rotated,
        rope_theta=theta,
        activation=read_activation(fields, "projector_hidden_act"),
    )


def _read_rope(audio: ConfigFields, head_dim: int) -> tuple[int, float]:
    """Return (elements of a head that rotate, base of their frequencies) from `rope_parameters`, or else from fields
    outside of it, with transformers' defaults, half of a head and 10,000. Raises ModelConfigError for other ropes, and
    for a number that is odd, below 2 or above head_dim.
    """
    rope = ConfigFields(audio.mapping("rope_parameters") or {})
    if rope.text("rope_type", "default") != "default":
        raise audio.fail("rope_parameters", 'a mapping with the rope_type "default"')
    share = rope.number("partial_rotary_factor", audio.number("partial_rotary_factor", 0.5))
    rotated = int(head_dim * share)
    if rotated < 2 or rotated % 2 or rotated > head_dim:
        allowed = f"a share of the head's {head_dim} elements that is an even number of them, from 2 on"
        raise audio.fail("partial_rotary_factor", allowed)
    return rotated, rope.number("rope_theta", audio.number("rope_theta", 10000.0))


class GlmAsrTower(nnx.Module):
    """Tower of GLM-ASR.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: GlmAsrTowerConfig, hidden_size: int, build: Build):
        self.config, sizes = config, config.sizes
        self.conv1 = Convolution(sizes.num_bins, sizes.size, stride=1, source=f"{TOWER}.conv1", build=build)
        self.conv2 = Convolution(sizes.size, sizes.size, stride=2, source=f"{TOWER}.conv2", build=build)
        layers = (f"{TOWER}.layers.{number}" for number in range(sizes.num_layers))
        self.layers = nnx.List([EncoderLayer(sizes, source=each, build=build, names=_NAMES) for each in layers])
        self.norm = LayerNorm(sizes.size, EPS, source=f"{TOWER}.norm", build=build)
        inner, width = 2 * hidden_size, _JOINED * sizes.size
        self.projector = Projector(width, hidden_size, config.activation, build, inner=inner)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: silence is a part of a window
        config, sizes = self.config, self.config.sizes
        num_sounds = len(patches) // config.unit
        with jax.named_scope("convolutions"):
            x = self.conv2(self.conv1(patches.reshape(num_sounds, config.unit, sizes.num_bins)))
            x = x.reshape(num_sounds * sizes.num_positions, -1)
        with jax.named_scope("rope_table"):
            freqs = rope_frequencies(config.rotated, config.rope_theta).astype(np.float32)
            place = jnp.arange(len(x), dtype=jnp.int32) % sizes.num_positions
            angles = place.astype(jnp.float32)[:, None] * freqs
            turns = jnp.cos(angles), jnp.sin(angles)
        x = in_turn(self.layers, x, num_sounds, None, turns)
        with jax.named_scope("projector"):
            return self.projector(self.norm(x).reshape(len(x) // _JOINED, -1))
