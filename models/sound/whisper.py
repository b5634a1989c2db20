"""Encoder of Whisper (Radford et al. 2022, arXiv:2212.04356): spectrograms of fixed length to the keys and values of
all cross-attention layers of the decoder.

Two convolutions, the second of which halves the number of frames, learned or sinusoidal positions, and layers with
norms before their parts. What leaves the tower is not the last hidden state but what every decoder layer makes of it: a
sound then costs each of a request's steps only the reading of its keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.linear import Linear
from jaxengine.models.layers.norm import LayerNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.vision.layers import PatchEmbedding, TowerMLP, gelu
from jaxengine.models.vision.vit import attend_units

ENCODER = "model.encoder"
_TAPS = 3
_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class WhisperTowerConfig(TowerConfig):
    """Sizes of the encoder; a patch is one frame of a spectrogram, and a unit is one sound.

    Attributes:
      num_positions: of an encoded sound, half as many as it has frames.
      num_layers, num_heads, intermediate_size: of the encoder.
      decoder_layers: layers of the decoder, each of which gets keys and values.
    """

    num_positions: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    decoder_layers: int

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return WhisperTower(self, hidden_size, build)


def read_whisper_tower(fields: ConfigFields) -> WhisperTowerConfig:
    """Read the encoder's sizes from a config.json. Raises ModelConfigError."""
    size, heads = fields.integer("d_model"), fields.integer("encoder_attention_heads")
    if size % heads:
        raise fields.fail("encoder_attention_heads", f"a divisor of d_model {size}")
    positions, layers = fields.integer("max_source_positions", 1500), fields.integer("decoder_layers")
    return WhisperTowerConfig(
        num_features=fields.integer("num_mel_bins", 80),
        columns=(),
        merge=2 * positions,
        unit=2 * positions,
        num_parts=2 * layers * positions,
        crosses=True,
        num_positions=positions,
        num_layers=fields.integer("encoder_layers"),
        num_heads=heads,
        intermediate_size=fields.integer("encoder_ffn_dim"),
        decoder_layers=layers,
    )


class Convolution(nnx.Module):
    """Convolution over time with a kernel of three frames and one frame of zeros at each end, then GELU.

    stride: frames from one output to the next.
    """

    def __init__(self, num_features: int, size: int, *, stride: int, source: str, build: Build):
        self.stride = stride
        self.product = PatchEmbedding(_TAPS * num_features, size, source=source, bias=True, build=build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map sounds [U, P, F] -> [U, P / stride, D]."""
        num_sounds, num_frames = x.shape[:2]
        padded, count = jnp.pad(x, ((0, 0), (1, 1), (0, 0))), num_frames // self.stride
        taps = [padded[:, tap : tap + (count - 1) * self.stride + 1 : self.stride] for tap in range(_TAPS)]
        rows = jnp.stack(taps, axis=-1).reshape(num_sounds * count, -1)
        y = self.product(rows).astype(jnp.float32)
        return gelu(y).astype(self.product.dtype).reshape(num_sounds, count, -1)


class WhisperEncoderLayer(nnx.Module):
    """Layer x + attention(norm(x)), then x + mlp(norm(x)); keys have no bias. source: prefix of its modules."""

    def __init__(self, config: WhisperTowerConfig, size: int, *, source: str, build: Build):
        self.head_dim = size // config.num_heads
        attention = f"{source}.self_attn"

        def project(name: str, *, bias: bool) -> Linear:
            own = (Source(f"{attention}.{name}", size, group=self.head_dim),)
            return Linear(size, own, axes=("embed", "heads"), bias=bias, build=build)

        self.q, self.k, self.v = (
            project("q_proj", bias=True),
            project("k_proj", bias=False),
            project("v_proj", bias=True),
        )
        out = (Source(f"{attention}.out_proj", size),)
        self.out = Linear(size, out, axes=("heads", "embed"), bias=True, build=build)
        self.attention_norm = LayerNorm(size, _EPS, source=f"{attention}_layer_norm", build=build)
        self.mlp_norm = LayerNorm(size, _EPS, source=f"{source}.final_layer_norm", build=build)
        names = {"up": (f"{source}.fc1",), "down": f"{source}.fc2"}
        self.mlp = TowerMLP(size, config.intermediate_size, **names, activation=gelu, build=build)

    def __call__(self, x: jax.Array, num_sounds: int) -> jax.Array:
        """Map x [U * S, D] -> the same, each of U sounds by itself."""
        with jax.named_scope("attention"):
            inner = self.attention_norm(x)
            shape = num_sounds, len(x) // num_sounds, -1, self.head_dim
            heads = (part(inner).reshape(shape) for part in (self.q, self.k, self.v))
            x = x + self.out(attend_units(*heads).reshape(len(x), -1))
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x))


class WhisperTower(nnx.Module):
    """The encoder, and the projections of the decoder's cross-attention to keys and values."""

    def __init__(self, config: WhisperTowerConfig, hidden_size: int, build: Build):
        self.config = config
        convolutions = (("conv1", config.num_features, 1), ("conv2", hidden_size, 2))
        self.convolutions = nnx.List(
            [
                Convolution(width, hidden_size, stride=stride, source=f"{ENCODER}.{name}", build=build)
                for name, width, stride in convolutions
            ]
        )
        rows = Source(f"{ENCODER}.embed_positions.weight", config.num_positions)
        shape = config.num_positions, hidden_size
        self.positions = declare(shape, build.dtype, ParamDecl((None, None), (rows,), init_std=0.02))
        layers = (f"{ENCODER}.layers.{number}" for number in range(config.num_layers))
        self.layers = nnx.List([WhisperEncoderLayer(config, hidden_size, source=each, build=build) for each in layers])
        self.norm = LayerNorm(hidden_size, _EPS, source=f"{ENCODER}.layer_norm", build=build)
        self.projections = nnx.List(
            [
                Linear(
                    hidden_size,
                    (Source(f"model.layers.{layer}.encoder_attn.{name}", hidden_size),),
                    axes=("embed", "heads"),
                    bias=name == "v_proj",
                    build=build,
                )
                for layer in range(config.decoder_layers)
                for name in ("k_proj", "v_proj")
            ]
        )

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Encode U sounds: spectrograms f32[U * 2 S, F] -> [U, 2 L * S * D], for each decoder layer the keys [S, D] and
        then the values, of this device's heads alone. columns: unused, i32[0, U * 2 S].
        """
        config, num_sounds = self.config, len(patches) // self.config.unit
        x: Any = patches.reshape(num_sounds, config.unit, config.num_features)
        with jax.named_scope("convolutions"):
            for convolution in self.convolutions:
                x = convolution(x)
            x = (x + self.positions[...]).reshape(num_sounds * config.num_positions, -1)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x = layer(x, num_sounds)
        with jax.named_scope("keys_and_values"):
            x = self.norm(x)
            parts = [project(x).reshape(num_sounds, -1) for project in self.projections]
            return jnp.concatenate(parts, axis=1)
