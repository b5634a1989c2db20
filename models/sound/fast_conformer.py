"""Fast Conformer (Rekesh et al. 2023, arXiv:2305.05084): an encoder of sounds whose positions attend to all others with
keys of their distances (Dai et al. 2019, arXiv:1901.02860). Modules have NeMo's names.

Further shape letters: U sounds, P frames of a sound's spectrogram, B bins, S = P / 8 positions, C channels, N heads, H
elements of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_BINS, MAX_HIDDEN, ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.layers.base.scale import scaled
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.vision.base.layers import PatchEmbedding, TowerMLP, in_turn, tower_axis
from jaxengine.models.vision.base.vit import linear, table, vector

SUBSAMPLING = "pre_encode"  # in the encoder
# Ends of the names of tensors of more than two axes.
CONVOLUTIONS = (
    *(f".{name}.weight" for name in ("pointwise_conv1", "pointwise_conv2", "depthwise_conv")),
    *(f".{SUBSAMPLING}.conv.{number}.weight" for number in (0, 2, 3, 5, 6)),
)
STRIDE = 8  # frames of a position
_MOST_TAPS, _MOST_CHANNELS = 64, 4096
_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class ConformerConfig(TowerConfig):
    """Sizes of a tower with the encoder. A patch is one frame of a spectrogram.

    Attributes:
      hidden_size, num_layers, num_heads, ffn_size, activation: sizes of the encoder.
      channels: of the convolutions before it.
      taps: number of positions that a layer's convolution adds up, odd.
      bias, convolution_bias: whether a layer's products, and its convolutions, have biases.
      input_multiplier: factor of the first layer's input.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    activation: str
    channels: int
    taps: int
    bias: bool
    convolution_bias: bool
    input_multiplier: float


def conformer_fields(audio: ConfigFields, *, bias: bool = True, scales: bool = False) -> dict[str, Any]:
    """Return the keyword arguments of ConformerConfig, `num_features` included, from the configuration of an encoder.

    bias: default of `attention_bias`; scales: of `scale_input`. Raises ModelConfigError for wrong fields, and for sizes
    that do not fit each other or are too large.
    """
    audio.require(subsampling_factor=STRIDE, subsampling_conv_kernel_size=3, subsampling_conv_stride=2)

    def bounded(name: str, most: int) -> int:
        if (found := audio.integer(name)) > most:
            raise audio.fail(name, f"an integer >= 1 and <= {most}")
        return found

    size, heads = bounded("hidden_size", MAX_HIDDEN), audio.integer("num_attention_heads")
    if size % heads or size % 2:
        raise audio.fail("num_attention_heads", f"a divisor of hidden_size {size}, which must be even")
    audio.require(num_key_value_heads=heads)
    if (bins := bounded("num_mel_bins", MAX_BINS)) % STRIDE:
        raise audio.fail("num_mel_bins", f"a multiple of {STRIDE}")
    if (taps := bounded("conv_kernel_size", _MOST_TAPS)) % 2 == 0:
        raise audio.fail("conv_kernel_size", "odd")
    return {
        "num_features": bins,
        "hidden_size": size,
        "num_layers": audio.integer("num_hidden_layers"),
        "num_heads": heads,
        "ffn_size": audio.integer("intermediate_size"),
        "activation": read_activation(audio, "hidden_act", "silu"),
        "channels": bounded("subsampling_conv_channels", _MOST_CHANNELS),
        "taps": taps,
        "bias": audio.boolean("attention_bias", bias),
        "convolution_bias": audio.boolean("convolution_bias", True),
        "input_multiplier": size**0.5 if audio.boolean("scale_input", scales) else 1.0,
    }


class Kernel(nnx.Module):
    """Weights [C, taps] and biases [C] of a convolution of each channel by itself. bias: whether there are any."""

    def __init__(self, channels: int, taps: int, *, source: str, build: Build, bias: bool = True):
        self.weight = table(channels, taps, f"{source}.weight", build)
        self.bias = vector(channels, f"{source}.bias", build) if bias else None

    def added(self, parts: Any) -> jax.Array:
        """Return f32[..., C], the sum of `parts`, one array [..., C or 1] for each tap, times the weights, plus the
        biases.
        """
        weight = self.weight[...].astype(jnp.float32)
        y: Any = sum(part.astype(jnp.float32) * weight[:, tap] for tap, part in enumerate(parts))
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)


def _halved(x: jax.Array, kernel: Kernel) -> jax.Array:
    """Return the convolution of x [U, T, F, C or 1] by 3 x 3 weights of each channel, with a stride of two and zeros
    around x: f32[U, T / 2, F / 2, C]. T and F are even.
    """
    times, bins = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    taps = ((row, column) for row in range(3) for column in range(3))
    return kernel.added(padded[:, row : row + times : 2, column : column + bins : 2] for row, column in taps)


class Subsampling(nnx.Module):
    """Three convolutions that halve frames and bins, the last two of each channel by itself and then over channels, and
    a product of what is left of a frame.
    """

    def __init__(self, config: ConformerConfig, encoder: str, build: Build):
        channels, source = config.channels, f"{encoder}.{SUBSAMPLING}"
        conv = f"{source}.conv"
        self.kernels = nnx.List([Kernel(channels, 9, source=f"{conv}.{number}", build=build) for number in (0, 2, 5)])
        self.mixers = nnx.List(
            [PatchEmbedding(channels, channels, source=f"{conv}.{number}", bias=True, build=build) for number in (3, 6)]
        )
        inner = channels * config.num_features // STRIDE
        self.out = linear(inner, f"{source}.out", config.hidden_size, ("embed", "embed"), build)

    def __call__(self, x: jax.Array, lengths: jax.Array) -> jax.Array:
        """Return [U * S, D] of spectrograms x [U, P, B], of which lengths i32[U] frames belong to the sounds:
        convolutions with ReLU that each halve P and B, then a projection. What comes after a sound is zero before each
        convolution.
        """
        dtype = self.mixers[0].dtype

        def masked(y: jax.Array, count: jax.Array) -> jax.Array:
            return jnp.where((jnp.arange(y.shape[1]) < count[:, None])[:, :, None, None], y, 0)

        y = x[..., None].astype(dtype)
        for number, kernel in enumerate(self.kernels):
            lengths = (lengths + 1) // 2
            y = _halved(y, kernel)
            if number:
                y = masked(y, lengths).astype(dtype)
                y = self.mixers[number - 1](y.reshape(-1, y.shape[3])).reshape(y.shape)
            y = jax.nn.relu(masked(y, lengths)).astype(dtype)
        return self.out(y.transpose(0, 1, 3, 2).reshape(y.shape[0] * y.shape[1], -1))


def distances(num_positions: int, size: int) -> np.ndarray:
    """Return f32[2 S - 1, size]: sines and cosines, alternating, of the distances S - 1, S - 2, ..., -(S - 1) at
    size / 2 frequencies, 10000 ** (-2 i / size) radians for pair i.
    """
    steps = np.arange(num_positions - 1, -num_positions, -1)
    angles = steps[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(steps), size).astype(np.float32)


class DistanceAttention(nnx.Module):
    """Attention of a sound's positions to each other: queries meet keys and, apart from that, keys of distances, each
    after a bias of its own is added.
    """

    def __init__(self, config: ConformerConfig, layer: str, build: Build):
        self.config, size, source = config, config.hidden_size, f"{layer}.self_attn"
        self.head_dim, heads = size // config.num_heads, tower_axis("heads", build)
        self.norm = LayerNorm(size, _EPS, source=f"{layer}.norm_self_att", build=build)

        def project(*names: str, bias: bool) -> Linear:
            parts = tuple(Source(f"{source}.{name}", size, group=self.head_dim) for name in names)
            return Linear(size, parts, axes=("embed", heads), bias=bias, build=build)

        self.qkv = project("linear_q", "linear_k", "linear_v", bias=config.bias)
        self.distances = project("linear_pos", bias=False)
        self.out = linear(size, f"{source}.linear_out", size, ("heads", "embed"), build, bias=config.bias)
        self.key_bias, self.distance_bias = (
            declare(
                (config.num_heads, self.head_dim),
                build.dtype,
                ParamDecl((heads if heads == "heads" else None, None), (Source(f"{source}.{name}", config.num_heads),)),
            )
            for name in ("pos_bias_u", "pos_bias_v")
        )

    def __call__(self, x: jax.Array, is_heard: jax.Array) -> jax.Array:
        """Return the attention output [U * S, D], without the residual, of norm(x), x [U * S, D], with products of
        queries with keys and with vectors of distances. is_heard: bool[U, S], positions that are attended to.
        """
        count, exact = is_heard.shape[1], {"preferred_element_type": jnp.float32}
        q, k, v = (
            each.reshape(len(is_heard), count, -1, self.head_dim)
            for each in jnp.split(self.qkv(self.norm(x)), 3, axis=-1)
        )
        table = jnp.asarray(distances(count, self.config.hidden_size)).astype(x.dtype)
        of_distance = self.distances(table).reshape(2 * count - 1, -1, self.head_dim)
        to_keys, to_distances = (q + bias[...] for bias in (self.key_bias, self.distance_bias))

        def sound(own: tuple[jax.Array, ...]) -> jax.Array:
            to_key, to_distance, key, value, seen = own
            far = jnp.einsum("snh,dnh->nsd", to_distance, of_distance, **exact)
            # Row s of `far` begins with the distance S - 1: shifted by s + 1, its column t has the distance s - t.
            far = jnp.pad(far, ((0, 0), (0, 0), (1, 0))).reshape(len(far), 2 * count, count)[:, 1:]
            far = far.reshape(len(far), count, 2 * count - 1)[:, :, :count]
            scores = (jnp.einsum("snh,tnh->nst", to_key, key, **exact) + far) * self.head_dim**-0.5
            weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min), axis=-1)
            return jnp.einsum("nst,tnh->snh", weights.astype(value.dtype), value, **exact).astype(value.dtype)

        o = lax.map(sound, (to_keys, to_distances, k, v, is_heard))
        return self.out(o.reshape(len(x), -1))


class ConformerConvolution(nnx.Module):
    """Convolution block down(act(batch_norm(convolution(gated(up(norm(x))))))). The convolution is of each element by
    itself, and the batch norm has the checkpoint's means and variances.
    """

    def __init__(self, config: ConformerConfig, layer: str, build: Build):
        self.config, size, source, bias = config, config.hidden_size, f"{layer}.conv", config.convolution_bias
        self.norm = LayerNorm(size, _EPS, source=f"{layer}.norm_conv", build=build)
        self.up = PatchEmbedding(size, 2 * size, source=f"{source}.pointwise_conv1", bias=bias, build=build)
        self.down = PatchEmbedding(size, size, source=f"{source}.pointwise_conv2", bias=bias, build=build)
        self.kernel = Kernel(size, config.taps, source=f"{source}.depthwise_conv", build=build, bias=bias)

        def column(name: str) -> nnx.Param:
            return declare((size,), build.dtype, ParamDecl((None,), (Source(f"{source}.batch_norm.{name}", size),)))

        self.mean, self.variance = column("running_mean"), column("running_var")
        self.scale, self.bias = column("weight"), column("bias")

    def __call__(self, x: jax.Array, is_heard: jax.Array) -> jax.Array:
        """Return down(act(batch_norm(convolution(gated(up(norm(x))))))) for x [U * S, D], without the residual.
        is_heard: bool[U, S]; other positions are zeros to the convolution.
        """
        value, gate = jnp.split(self.up(self.norm(x)), 2, axis=-1)
        inner = value.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
        inner = jnp.where(is_heard[..., None], inner.reshape(*is_heard.shape, -1), 0)
        taps, count = self.config.taps, is_heard.shape[1]
        padded = jnp.pad(inner, ((0, 0), (taps // 2, taps // 2), (0, 0)))
        y = self.kernel.added(padded[:, tap : tap + count] for tap in range(taps)).reshape(x.shape)
        mean, variance, scale, bias = (
            each[...].astype(jnp.float32) for each in (self.mean, self.variance, self.scale, self.bias)
        )
        y = (y - mean) * (scale * lax.rsqrt(variance + _EPS)) + bias
        return self.down(ACTIVATIONS[self.config.activation](y).astype(x.dtype))


class ConformerLayer(nnx.Module):
    """Layer of half a feed-forward block, attention, a convolution, the other half, and a norm."""

    def __init__(self, config: ConformerConfig, layer: str, build: Build):
        size, activation = config.hidden_size, ACTIVATIONS[config.activation]

        def feed_forward(name: str) -> tuple[nnx.Module, nnx.Module]:
            source = f"{layer}.{name}"
            names = {"up": (f"{source}.linear1",), "down": f"{source}.linear2"}
            mlp = TowerMLP(size, config.ffn_size, **names, activation=activation, bias=config.bias, build=build)
            return LayerNorm(size, _EPS, source=f"{layer}.norm_{name}", build=build), mlp

        self.norm1, self.mlp1 = feed_forward("feed_forward1")
        self.attention = DistanceAttention(config, layer, build)
        self.convolution = ConformerConvolution(config, layer, build)
        self.norm2, self.mlp2 = feed_forward("feed_forward2")
        self.norm = LayerNorm(size, _EPS, source=f"{layer}.norm_out", build=build)

    def __call__(self, x: jax.Array, sounds: jax.Array) -> jax.Array:
        """Return x [U * S, D] after adding half of an MLP, then attention, a convolution and half of another MLP, each
        computed from the sum so far, and after a final norm. sounds: bool[U, S], positions of the sounds, or what
        attention and convolution of a subclass take.
        """
        x = x + scaled(self.mlp1(self.norm1(x)), 0.5)
        with jax.named_scope("attention"):
            x = x + self.attention(x, sounds)
        with jax.named_scope("convolution"):
            x = x + self.convolution(x, sounds)
        return self.norm(x + scaled(self.mlp2(self.norm2(x)), 0.5))


class FastConformer(nnx.Module):
    """Encoder of a tower, which subclasses complete. encoder: checkpoint module of it."""

    def __init__(self, config: ConformerConfig, encoder: str, build: Build):
        self.config: Any = config
        self.subsampling = Subsampling(config, encoder, build)
        layer = f"{encoder}.layers.{{layer}}"
        numbers = range(config.num_layers)
        self.layers = nnx.List([ConformerLayer(config, layer, replace(build, layer=number)) for number in numbers])

    def encoded(self, patches: jax.Array, lengths: jax.Array) -> jax.Array:
        """Return the positions [U * S, D] of the spectrograms f32[U * P, B] of U units, of which lengths i32[U] frames
        belong to the sounds. What comes after a sound does not affect it.
        """
        config = self.config
        with jax.named_scope("convolutions"):
            x = self.subsampling(patches.reshape(-1, config.unit, config.num_features), lengths)
            x = scaled(x, config.input_multiplier)
        is_heard = jnp.arange(config.unit // STRIDE) < -(-lengths // STRIDE)[:, None]
        return in_turn(self.layers, x, is_heard)
