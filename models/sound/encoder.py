"""Whisper's encoder of sounds (Radford et al. 2022, arXiv:2212.04356), which other models have, too: two convolutions
over a log-mel spectrogram and layers of attention over all of a window.

Further shape letters: U windows, P frames of a window, S = P / 2 its positions, F bins of a spectrum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import gelu
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.layers.base.rope import apply_rope
from jaxengine.models.params.declare import Source
from jaxengine.models.vision.base.layers import PatchEmbedding, TowerMLP, in_turn, tower_axis
from jaxengine.models.vision.base.vit import attend_units, heads_of, table

EPS = 1e-5
# transformers' sizes of an encoder as that of Whisper's large models, for fields that a file lacks.
LARGE = {
    "num_mel_bins": 128,
    "hidden_size": 1280,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "intermediate_size": 5120,
}
_TAPS = 3
_LONGEST = 10_000.0  # positions of a period of the slowest sine, over 2 pi


@dataclass(frozen=True, kw_only=True)
class EncoderSizes:
    """Sizes of an encoder: S positions of a window, half as many as it has frames; F bins; D elements; layers, heads
    and inner elements of the MLPs, and a name of jaxengine.models.layers.base.activations.ACTIVATIONS for these.
    num_kv_heads: heads of keys and values, a divisor of num_heads; None for num_heads.
    """

    num_positions: int
    num_bins: int
    size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: str = "gelu"
    num_kv_heads: int | None = None

    @property
    def activate(self) -> Callable[[jax.Array], jax.Array]:
        """The function that `activation` names."""
        return ACTIVATIONS[self.activation]


# Names of the sizes in Whisper's configurations, and in those that use the usual names of encoders.
_NAMES = {
    "size": ("d_model", "hidden_size"),
    "num_layers": ("encoder_layers", "num_hidden_layers"),
    "num_heads": ("encoder_attention_heads", "num_attention_heads"),
    "intermediate_size": ("encoder_ffn_dim", "intermediate_size"),
}


def read_encoder(fields: ConfigFields) -> EncoderSizes:
    """Return the sizes of an encoder from its configuration, which has Whisper's names or the usual ones of encoders.

    `max_source_positions` is 1500 and `activation_function` gelu by default; other fields are required.
    `scale_embedding` is not read: transformers scales nothing by it. Raises ModelConfigError for wrong fields, and if
    the number of heads does not divide the size, or the size is odd or below 4.
    """
    names = {ours: next((name for name in known if fields.has(name)), known[0]) for ours, known in _NAMES.items()}
    found: dict[str, Any] = {ours: fields.integer(name) for ours, name in names.items()}
    if found["size"] % found["num_heads"]:
        raise fields.fail(names["num_heads"], f"a divisor of {names['size']} {found['size']}")
    if found["size"] < 4 or found["size"] % 2:  # sines and cosines of two frequencies or more
        raise fields.fail(names["size"], "an even number >= 4")
    found["activation"] = read_activation(fields, "activation_function")
    positions = fields.integer("max_source_positions", 1500)
    return EncoderSizes(num_positions=positions, num_bins=fields.integer("num_mel_bins"), **found)


def sinusoids(positions: np.ndarray, size: int) -> np.ndarray:
    """Return f32[n, size]: the sines of positions [n] at size / 2 frequencies, from 1 to 1 / 10000 radians per
    position, followed by their cosines.
    """
    count = size // 2
    angles = positions[:, None] * np.exp(-np.log(_LONGEST) / max(count - 1, 1) * np.arange(count))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


class Convolution(nnx.Module):
    """Convolution over time with a kernel of three frames and one frame of zeros at each end, then GELU.

    stride: frames from one output to the next.
    """

    def __init__(self, num_features: int, size: int, *, stride: int, source: str, build: Build):
        self.stride = stride
        self.product = PatchEmbedding(_TAPS * num_features, size, source=source, bias=True, build=build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the convolution of each of U sounds x [U, P, F] by itself, after GELU: [U, P / stride, D], rounded
        down.
        """
        num_sounds, num_frames = x.shape[:2]
        padded, count = jnp.pad(x, ((0, 0), (1, 1), (0, 0))), num_frames // self.stride
        taps = [padded[:, tap : tap + (count - 1) * self.stride + 1 : self.stride] for tap in range(_TAPS)]
        rows = jnp.stack(taps, axis=-1).reshape(num_sounds * count, -1)
        y = self.product(rows).astype(jnp.float32)
        return gelu(y).astype(self.product.dtype).reshape(num_sounds, count, -1)


@dataclass(frozen=True)
class EncoderNames:
    """Checkpoint names of a layer's modules, after the layer's prefix; Whisper's by default."""

    attention_norm: str = "self_attn_layer_norm"
    mlp_norm: str = "final_layer_norm"
    out: str = "self_attn.out_proj"
    up: str = "fc1"
    down: str = "fc2"


_WHISPER_NAMES = EncoderNames()


class EncoderLayer(nnx.Module):
    """Layer that computes x + attention(norm(x)), then x + mlp(norm(x)).

    source: prefix of its modules, which have the names `names`. key_bias: whether keys have a bias, in addition to
    queries and values.
    """

    def __init__(
        self,
        sizes: EncoderSizes,
        *,
        source: str,
        build: Build,
        key_bias: bool = False,
        names: EncoderNames = _WHISPER_NAMES,
    ):
        size = sizes.size
        self.head_dim = size // sizes.num_heads
        attention, heads = f"{source}.self_attn", tower_axis("heads", build)

        def project(own: Source, *, bias: bool) -> Linear:
            return Linear(size, (own,), axes=("embed", heads), bias=bias, build=build)

        q, k, v = heads_of(attention, sizes.num_heads, sizes.num_kv_heads or sizes.num_heads, self.head_dim)
        self.q, self.k, self.v = project(q, bias=True), project(k, bias=key_bias), project(v, bias=True)
        out = (Source(f"{source}.{names.out}", size),)
        self.out = Linear(size, out, axes=(heads, "embed"), bias=True, build=build)
        self.attention_norm = LayerNorm(size, EPS, source=f"{source}.{names.attention_norm}", build=build)
        self.mlp_norm = LayerNorm(size, EPS, source=f"{source}.{names.mlp_norm}", build=build)
        mlp = {"up": (f"{source}.{names.up}",), "down": f"{source}.{names.down}"}
        self.mlp = TowerMLP(size, sizes.intermediate_size, **mlp, activation=sizes.activate, build=build)

    def __call__(
        self,
        x: jax.Array,
        num_sounds: int,
        is_heard: jax.Array | None = None,
        turns: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """Return x + attention(norm(x)), then x + mlp(norm(x)), for x [U * S, D], in which each of the U = num_sounds
        windows attends to itself alone.

        is_heard: bool[U, S], positions that are attended to; None for all. turns: cos and sin [U * S, R / 2] by which
        `apply_rope` rotates queries and keys; None for no rotation.
        """
        with jax.named_scope("attention"):
            inner = self.attention_norm(x)
            q, k, v = (part(inner).reshape(len(x), -1, self.head_dim) for part in (self.q, self.k, self.v))
            if turns is not None:
                q, k = apply_rope(q, *turns), apply_rope(k, *turns)
            q, k, v = (each.reshape(num_sounds, -1, *each.shape[1:]) for each in (q, k, v))
            x = x + self.out(attend_units(q, k, v, is_heard).reshape(len(x), -1))
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x))


class SoundEncoder(nnx.Module):
    """Encoder of two convolutions, learned positions, layers, and a norm.

    source: prefix of its modules. pooled: number of neighbouring positions whose mean is taken before the norm.
    """

    def __init__(self, sizes: EncoderSizes, *, source: str, build: Build, pooled: int = 1):
        self.sizes, self.pooled, size = sizes, pooled, sizes.size
        convolutions = (("conv1", sizes.num_bins, 1), ("conv2", size, 2))
        self.convolutions = nnx.List(
            [
                Convolution(width, size, stride=stride, source=f"{source}.{name}", build=build)
                for name, width, stride in convolutions
            ]
        )
        self.positions = table(sizes.num_positions, size, f"{source}.embed_positions.weight", build)
        layers = (f"{source}.layers.{number}" for number in range(sizes.num_layers))
        self.layers = nnx.List([EncoderLayer(sizes, source=each, build=build) for each in layers])
        self.norm = LayerNorm(size, EPS, source=f"{source}.layer_norm", build=build)

    def __call__(self, patches: jax.Array, is_heard: jax.Array | None = None) -> jax.Array:
        """Return the encoded windows [U * S / pooled, D] for the spectrograms of U windows, f32[U * 2 S, F]:
        convolutions, positions, layers, means of `pooled` neighbours, and the last norm.

        is_heard: bool[U, S], positions that layers attend to; None for all.
        """
        sizes = self.sizes
        num_sounds = len(patches) // (2 * sizes.num_positions)
        x = patches.reshape(num_sounds, 2 * sizes.num_positions, sizes.num_bins)
        with jax.named_scope("convolutions"):
            for convolution in self.convolutions:
                x = convolution(x)
            x = (x + self.positions[...]).reshape(num_sounds * sizes.num_positions, -1)
        x = in_turn(self.layers, x, num_sounds, is_heard)
        if self.pooled > 1:
            joined = x.astype(jnp.float32).reshape(len(x) // self.pooled, self.pooled, -1)
            x = joined.mean(axis=1).astype(x.dtype)
        return self.norm(x)
