"""Tower of Moonshine (Jeffries et al. 2024, arXiv:2410.15608): convolutions over samples, a norm over all of a sound,
and layers of attention with rope, to the keys and values of all cross-attention layers of the decoder.

Further shape letters: U sounds, P patches of a sound, S positions, N heads, H elements of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.rope import Rope
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import UnbiasedLayerNorm
from jaxengine.models.layers.base.rope import apply_rope, rope_table
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.sound.crossed import HEARD, CrossedSoundConfig, CrossProjections, row_size
from jaxengine.models.vision.base.layers import PatchEmbedding, TowerMLP, gelu, in_turn, tower_axis
from jaxengine.models.vision.base.vit import attend_units, linear

ENCODER = "model.encoder"
_LAYER = f"{ENCODER}.layers.{{layer}}"
# Samples of a patch: the product of the strides of the convolutions. Of each: elements that are added up, and stride.
PATCH = 384
_FIRST, _SECOND, _THIRD = (127, 64), (7, 3), (3, 2)
# Samples of the longest sound, 30 seconds, and of the shortest: all that its one position depends on.
LONGEST, SHORTEST = 480_000, 895
EPS = 1e-5


def num_positions(num_samples: int) -> int:
    """Return the number of positions of a sound of so many samples; 0 below SHORTEST."""
    for taps, stride in (_FIRST, _SECOND, _THIRD):
        num_samples = max(0, (num_samples - taps) // stride + 1)
    return num_samples


@dataclass(frozen=True, kw_only=True)
class MoonshineTowerConfig(CrossedSoundConfig):
    """Sizes of the tower. A patch is PATCH samples, of which as many as its column HEARD says belong to the sound.

    Attributes:
      size, num_layers, num_heads, ffn_size, activation: sizes of the encoder.
      rope: rotation of its queries and keys.
      decoder_activation: of the gates of the decoder's MLPs.
      has_bias: whether queries, keys and values of both parts have a bias.
    """

    size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    activation: str
    rope: Rope
    decoder_activation: str
    has_bias: bool

    @property
    def activate_decoder(self) -> Callable[[jax.Array], jax.Array]:
        """The function that `decoder_activation` names."""
        return ACTIVATIONS[self.decoder_activation]

    @property
    def shortest(self) -> int:
        """Least number of samples of a sound: those of one position."""
        return SHORTEST

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return MoonshineTower(self, build)

    def positions_of(self, columns: np.ndarray) -> int:
        """Return the number of positions of a sound, at least 1: that of its samples."""
        return max(1, num_positions(int(columns[0][columns[0] > 0].sum())))


def read_moonshine_tower(fields: ConfigFields, rope: Rope) -> MoonshineTowerConfig:
    """Return the tower's configuration from a config.json, in which numbers of layers and activations of the two parts
    begin with "encoder_" and "decoder_". The encoder has the decoder's heads. Biases of queries, keys and values
    (`attention_bias`) are false by default. rope: rotation of its heads. Raises ModelConfigError for wrong fields.
    """
    layers, heads = fields.integer("decoder_num_hidden_layers"), fields.integer("decoder_num_attention_heads")
    positions, patches = num_positions(LONGEST), LONGEST // PATCH
    return MoonshineTowerConfig(
        num_features=PATCH,
        columns=(HEARD,),
        merge=patches,
        unit=patches,
        **row_size(layers, positions),
        num_positions=positions,
        decoder_layers=layers,
        decoder_heads=heads,
        size=fields.integer("hidden_size"),
        num_layers=fields.integer("encoder_num_hidden_layers"),
        num_heads=heads,
        ffn_size=fields.integer("intermediate_size"),
        activation=read_activation(fields, "encoder_hidden_act"),
        rope=rope,
        decoder_activation=read_activation(fields, "decoder_hidden_act", "silu"),
        has_bias=fields.boolean("attention_bias", False),
    )


class Convolution(nnx.Module):
    """Convolution over time without padding. taps: elements that are added up, which are `stride` apart from one output
    to the next.
    """

    def __init__(self, in_size: int, size: int, taps: int, stride: int, *, source: str, bias: bool, build: Build):
        self.taps, self.stride = taps, stride
        self.product = PatchEmbedding(in_size * taps, size, source=source, bias=bias, build=build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the convolution of each of U sounds x [U, T, C] by itself, f32[U, (T - taps) // stride + 1, D]."""
        count = (x.shape[1] - self.taps) // self.stride + 1
        last = (count - 1) * self.stride + 1
        parts = [x[:, tap : tap + last : self.stride] for tap in range(self.taps)]
        rows = jnp.stack(parts, axis=-1).reshape(len(x) * count, -1)
        return self.product(rows).astype(jnp.float32).reshape(len(x), count, -1)


class SoundNorm(nnx.Module):
    """Norm by mean and standard deviation over all positions and elements of a sound, then a weight and a bias for each
    element (Wu & He 2018, arXiv:1803.08494, with one group).
    """

    def __init__(self, size: int, *, source: str, build: Build):
        self.weight, self.bias = (
            declare((size,), build.dtype, ParamDecl((None,), (Source(f"{source}.{name}", size),), init_std=std))
            for name, std in (("weight", None), ("bias", 0.02))
        )

    def __call__(self, x: jax.Array, counts: jax.Array) -> jax.Array:
        """Return x f32[U, T, D] less the mean, and divided by the deviation, of the first counts i32[U] positions of
        each sound (0 counts as 1), times the weight and plus the bias, in f32.
        """
        own = (jnp.arange(x.shape[1]) < counts[:, None])[..., None]
        total = (jnp.maximum(counts, 1) * x.shape[2]).astype(jnp.float32)[:, None, None]
        mean = jnp.where(own, x, 0).sum(axis=(1, 2), keepdims=True) / total
        variance = jnp.where(own, jnp.square(x - mean), 0).sum(axis=(1, 2), keepdims=True) / total
        y = (x - mean) * jax.lax.rsqrt(variance + EPS)
        return y * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)


class MoonshineEncoderLayer(nnx.Module):
    """Layer that computes x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: MoonshineTowerConfig, build: Build):
        size, source = config.size, f"{_LAYER}.self_attn"
        self.head_dim, heads = size // config.num_heads, tower_axis("heads", build)
        parts = tuple(Source(f"{source}.{name}_proj", size, group=self.head_dim) for name in "qkv")
        self.qkv = Linear(size, parts, axes=("embed", heads), bias=config.has_bias, build=build)
        self.out = linear(size, f"{source}.o_proj", size, ("heads", "embed"), build, bias=False)
        self.attention_norm, self.mlp_norm = (
            UnbiasedLayerNorm(size, EPS, source=f"{_LAYER}.{name}", build=build)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        names = {"up": (f"{_LAYER}.mlp.fc1",), "down": f"{_LAYER}.mlp.fc2"}
        self.mlp = TowerMLP(size, config.ffn_size, **names, activation=ACTIVATIONS[config.activation], build=build)

    def __call__(self, x: jax.Array, is_heard: jax.Array, turns: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Return x + attention(norm(x)), then x + mlp(norm(x)), for x [U * S, D]. is_heard: bool[U, S], positions that
        are attended to. turns: cos and sin [U * S, R / 2] by which queries and keys are rotated.
        """
        with jax.named_scope("attention"):
            inner = self.qkv(self.attention_norm(x))
            q, k, v = (part.reshape(len(x), -1, self.head_dim) for part in jnp.split(inner, 3, axis=-1))
            q, k = (apply_rope(part, *turns, interleaved=True) for part in (q, k))
            q, k, v = (part.reshape(*is_heard.shape, *part.shape[1:]) for part in (q, k, v))
            x = x + self.out(attend_units(q, k, v, is_heard).reshape(len(x), -1))
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x))


class MoonshineTower(nnx.Module):
    """Moonshine's encoder, and the projections of its output to the keys and values of all cross-attention layers."""

    def __init__(self, config: MoonshineTowerConfig, build: Build):
        self.config, size = config, config.size
        self.first = Convolution(1, size, *_FIRST, source=f"{ENCODER}.conv1", bias=False, build=build)
        self.first_norm = SoundNorm(size, source=f"{ENCODER}.groupnorm", build=build)
        self.second = Convolution(size, 2 * size, *_SECOND, source=f"{ENCODER}.conv2", bias=True, build=build)
        self.third = Convolution(2 * size, size, *_THIRD, source=f"{ENCODER}.conv3", bias=True, build=build)
        layers = range(config.num_layers)
        self.layers = nnx.List([MoonshineEncoderLayer(config, replace(build, layer=layer)) for layer in layers])
        self.norm = UnbiasedLayerNorm(size, EPS, source=f"{ENCODER}.layer_norm", build=build)
        source, bias = "model.layers.{number}.encoder_attn", (config.has_bias, config.has_bias)
        self.cross = CrossProjections(config, size, size, source=source, bias=bias, build=build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the keys and values of U sounds for L decoder layers, [U, 2 L * S * D], for their samples
        f32[U * P, PATCH]. columns: i32[1, U * P], HEARD.
        """
        config = self.config
        samples = patches.reshape(-1, config.unit * PATCH, 1)
        length = jnp.maximum(columns[0], 0).reshape(-1, config.unit).sum(axis=1)
        counts = []
        for taps, stride in (_FIRST, _SECOND, _THIRD):
            length = jnp.maximum((length - taps) // stride + 1, 0)
            counts.append(length)
        with jax.named_scope("convolutions"):
            dtype = self.first.product.dtype
            x = self.first_norm(jnp.tanh(self.first(samples)), counts[0])
            x = gelu(self.third(gelu(self.second(x.astype(dtype))).astype(dtype))).astype(dtype)
        is_heard = jnp.arange(x.shape[1]) < counts[-1][:, None]
        cos, sin = rope_table(jnp.arange(x.shape[1], dtype=jnp.int32), config.rope)
        turns = (jnp.tile(cos, (len(x), 1)), jnp.tile(sin, (len(x), 1)))
        x = x.reshape(-1, config.size)
        x = in_turn(self.layers, x, is_heard, turns)
        return self.cross(self.norm(x), len(is_heard))
