"""Tower of sounds of Gemma 4 (Google 2026), a conformer as in Universal Speech Models (Zhang et al. 2023,
arXiv:2303.01037): two convolutions over time and frequency, and layers that see few positions before their own.

All that is local, so that a call has frames of several sounds one after the other; no position sees another sound's.
Further shape letters: F bins of a spectrum, S = P / 4 positions, N heads, H elements of a head, W distances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_BINS, MAX_HEAD_DIM, ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm, UnbiasedLayerNorm, rms_normalized
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.sound.encoder import sinusoids
from jaxengine.models.vision.base.layers import in_turn, tower_axis
from jaxengine.models.vision.base.vit import linear, table
from jaxengine.models.vision.gemma4 import ClippedLinear

TOWER, PROJECTOR = "model.audio_tower", "model.embed_audio"
LAYER = f"{TOWER}.layers.{{layer}}"
# Ends of the names of the convolutions' tensors.
CONVOLUTIONS = (".layer0.conv.weight", ".layer1.conv.weight", ".depthwise_conv1d.weight")
# transformers' defaults of fields that a file lacks.
DEFAULTS = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "hidden_act": "silu",
    "subsampling_conv_channels": [128, 32],
    "conv_kernel_size": 5,
    "residual_weight": 0.5,
    "attention_chunk_size": 12,
    "attention_context_left": 13,
    "attention_context_right": 0,
    "attention_logit_cap": 50.0,
    "use_clipped_linears": True,
    "rms_norm_eps": 1e-6,
    "gradient_clipping": 1e10,
    "output_proj_dims": 1536,
}
# Frames that become one position: each of two convolutions halves their number.
_STRIDE = 4
# Frames of 30 seconds, filled up to a multiple of those at which a sound may begin.
_WINDOW, _UNIT = 3072, 128
_MOST_CONTEXT, _MOST_TAPS = 64, 64
_EPS = 1e-6  # of norms that no configuration gives one
_NEVER = -1e30


@dataclass(frozen=True, kw_only=True)
class Gemma4SoundConfig(TowerConfig):
    """Sizes of the tower. A patch is one frame of a spectrogram. Its column "segment" has the number of the frame's
    sound, and -1 in the frames after a sound, of which there are at least two for each sound.

    Attributes:
      hidden_size, num_layers, num_heads, norm_eps: sizes of the layers.
      activation: a name of jaxengine.models.layers.base.activations.ACTIVATIONS.
      channels: channels of the two convolutions.
      taps: number of positions that the layers' convolutions add up.
      left, right: a position sees those less than `left` before it, itself included, and those less than `right`
        after it.
      far: distance after a position beyond which there is no relative key.
      logit_cap: cap of attention's logits.
      residual_weight: factor of the output of a feed-forward block.
      clip: limit of the magnitude of hidden states.
      clipped: whether products have limits.
      output_size: elements before the last product.
      filler_id: Gemma4TowerConfig's filler_id.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    activation: str
    norm_eps: float
    channels: tuple[int, int]
    taps: int
    left: int
    right: int
    far: int
    logit_cap: float
    residual_weight: float
    clip: float
    clipped: bool
    output_size: int
    filler_id: int

    @property
    def window(self) -> int:
        return _WINDOW

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Gemma4SoundTower(self, hidden_size, build)


def read_gemma4_sound(fields: ConfigFields, *, filler_id: int) -> Gemma4SoundConfig:
    """Return the tower's configuration from the `audio_config` of a config.json, with transformers' defaults for absent
    fields: the usual sizes, `subsampling_conv_channels`, `conv_kernel_size`, `attention_context_left`, `_right`,
    `attention_chunk_size` and `attention_logit_cap`, `residual_weight`, `gradient_clipping`, `use_clipped_linears` and
    `output_proj_dims`.

    filler_id: Gemma4TowerConfig's filler_id. Raises ModelConfigError for wrong fields, and for sizes that do not fit
    each other or are too large.
    """
    audio = fields.part("audio_config", **DEFAULTS)
    size, heads = audio.integer("hidden_size"), audio.integer("num_attention_heads")
    if size % heads or size % 2:
        raise audio.fail("num_attention_heads", f"a divisor of hidden_size {size}, which is even")
    channels = audio.value("subsampling_conv_channels")
    if not isinstance(channels, Sequence) or [type(each) for each in channels] != [int, int] or min(channels) < 1:
        raise audio.fail("subsampling_conv_channels", "two integers >= 1")
    if not _STRIDE <= channels[0] <= MAX_BINS or channels[1] > MAX_HEAD_DIM:
        allowed = f"{_STRIDE} to {MAX_BINS}, the bins of a spectrum, and 1 to {MAX_HEAD_DIM}"
        raise audio.fail("subsampling_conv_channels", allowed)
    left, right = (audio.integer(f"attention_context_{side}", minimum=0) for side in ("left", "right"))
    if not 2 <= left <= _MOST_CONTEXT or right > _MOST_CONTEXT:
        name = "attention_context_right" if right > _MOST_CONTEXT else "attention_context_left"
        raise audio.fail(name, f"at most {_MOST_CONTEXT}, on the left at least 2")
    if (taps := audio.integer("conv_kernel_size")) > _MOST_TAPS:
        raise audio.fail("conv_kernel_size", f"1 to {_MOST_TAPS}")
    # transformers shifts products with relative keys so that distances begin at half of what a block of positions sees.
    context = audio.integer("attention_chunk_size") + left - 1 + right
    return Gemma4SoundConfig(
        num_features=channels[0] // _STRIDE * _STRIDE,
        columns=("segment",),
        merge=_STRIDE,
        unit=_UNIT,
        hears=True,
        hidden_size=size,
        num_layers=audio.integer("num_hidden_layers"),
        activation=read_activation(audio, "hidden_act"),
        num_heads=heads,
        norm_eps=audio.number("rms_norm_eps"),
        channels=(channels[0], channels[1]),
        taps=taps,
        left=left - 1,
        right=right,
        far=context // 2 - (left - 1),
        logit_cap=audio.number("attention_logit_cap"),
        residual_weight=audio.number("residual_weight"),
        clip=audio.number("gradient_clipping"),
        clipped=audio.boolean("use_clipped_linears"),
        output_size=audio.integer("output_proj_dims"),
        filler_id=filler_id,
    )


def shifted(x: jax.Array, steps: int, fill: int = 0) -> jax.Array:
    """Return y, of the shape of x [S, ...], with y[i] = x[i - steps], and `fill` where that index is outside x. steps
    may be negative.
    """
    count = min(abs(steps), len(x))
    missing = jnp.full((count, *x.shape[1:]), fill, x.dtype)
    parts = (missing, x[: len(x) - count]) if steps >= 0 else (x[count:], missing)
    return jnp.concatenate(parts)


def neighbours(segment: jax.Array, steps: int) -> jax.Array:
    """Return bool[S]: whether each position and the one `steps` before it belong to the same sound. It is False if
    either belongs to none (-1) or does not exist. steps may be negative. segment: i32[S], sounds of positions.
    """
    return (shifted(segment, steps, -1) == segment) & (segment >= 0)


def limited(x: jax.Array, most: float) -> jax.Array:
    """Return x clipped to the range from -most to most, or to the finite range of its dtype if that is smaller."""
    most = min(most, float(jnp.finfo(x.dtype).max))
    return jnp.clip(x, -most, most)


def _product(
    config: Gemma4SoundConfig, in_size: int, name: str, out: int, axes: tuple[str, str], build: Build, group: int = 1
) -> nnx.Module:
    """Return a new product of a layer, in_size -> out, with limits if the model has them.

    name: its checkpoint module within the layer. axes: logical axes of (in, out), which are not split if each device
    has the whole tower. group: number of outputs that stay on one device.
    """
    source = Source(f"{LAYER}.{name}.linear", out, group=group)
    split = tower_axis(axes[0], build), tower_axis(axes[1], build)
    return (
        ClippedLinear(in_size, source, split, build)
        if config.clipped
        else Linear(in_size, (source,), axes=split, build=build)
    )


class Halving(nnx.Module):
    """Convolution of 3 x 3 with a stride of two and zeros around its input, a norm and ReLU. It halves S and B of [S,
    B, C'].
    """

    def __init__(self, in_channels: int, channels: int, eps: float, *, source: str, build: Build):
        self.weight = table(channels, 9 * in_channels, f"{source}.conv.weight", build)
        self.norm = UnbiasedLayerNorm(channels, eps, source=f"{source}.norm", build=build)

    def __call__(self, x: jax.Array, is_heard: jax.Array) -> jax.Array:
        """Return the convolution of x [S, B, C'] after norm and ReLU, [S / 2, B / 2, C], both rounded up. is_heard:
        bool[S], False for positions of no sound, which count as zeros.
        """
        kernel = self.weight[...]
        x = jnp.where(is_heard[:, None, None], x, 0).astype(kernel.dtype)[None]
        kernel = kernel.reshape(len(kernel), -1, 3, 3)
        numbers = ("NHWC", "OIHW", "NHWC")
        y = lax.conv_general_dilated(
            x, kernel, (2, 2), ((1, 1), (1, 1)), dimension_numbers=numbers, preferred_element_type=jnp.float32
        )[0]
        return jax.nn.relu(self.norm(y.astype(x.dtype)))


class FeedForward(nnx.Module):
    """Feed-forward block that computes x + weight * norm(down(activation(up(norm(x))))), with hidden states limited to
    the range of `clip`.
    """

    def __init__(self, config: Gemma4SoundConfig, name: str, build: Build):
        self.config, size = config, config.hidden_size
        self.input_norm, self.norm = (
            RMSNorm(size, _EPS, source=f"{LAYER}.{name}.{place}_layer_norm", build=build) for place in ("pre", "post")
        )
        self.up = _product(config, size, f"{name}.ffw_layer_1", 4 * size, ("embed", "ffn"), build)
        self.down = _product(config, 4 * size, f"{name}.ffw_layer_2", size, ("ffn", "embed"), build)

    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        y = self.down(ACTIVATIONS[config.activation](self.up(self.input_norm(limited(x, config.clip)))))
        return x + self.norm(limited(y, config.clip)) * config.residual_weight


class LocalAttention(nnx.Module):
    """Attention to near positions, with keys of their distances (Dai et al. 2019, arXiv:1901.02860) and capped
    products.
    """

    def __init__(self, config: Gemma4SoundConfig, build: Build):
        self.config, size = config, config.hidden_size
        self.head_dim, name = size // config.num_heads, "self_attn"
        self.q, self.k, self.v = (
            _product(config, size, f"{name}.{part}_proj", size, ("embed", "heads"), build, self.head_dim)
            for part in "qkv"
        )
        self.out = _product(config, size, f"{name}.post", size, ("heads", "embed"), build)
        relative = Source(f"{LAYER}.{name}.relative_k_proj", size, group=self.head_dim)
        axes = tower_axis("embed", build), tower_axis("heads", build)
        self.relative = Linear(size, (relative,), axes=axes, build=build)
        scale = ParamDecl((None,), (Source(f"{LAYER}.{name}.per_dim_scale", self.head_dim),))
        self.scale = declare((self.head_dim,), build.dtype, scale)

    def __call__(self, x: jax.Array, segment: jax.Array) -> jax.Array:
        """Return the output [S, D] of attention of x [S, D] to near positions of the same sound, from `left` - 1 before
        to `right` - 1 after a position (none after it for 0).

        Products with a key, to which that of the distance is added from -`far` on, are capped. segment: i32[S], the
        sound of each position, -1 for none.
        """
        config = self.config
        q, k, v = (part(x).astype(jnp.float32).reshape(len(x), -1, self.head_dim) for part in (self.q, self.k, self.v))
        scale = jax.nn.softplus(self.scale[...].astype(jnp.float32))
        q = q * (self.head_dim**-0.5 / math.log(2)) * scale
        k = k * (math.log(1 + math.e) / math.log(2))
        distances = range(1 - config.right if config.right else 0, config.left)
        places = jnp.asarray(sinusoids(np.asarray(distances) + config.far, config.hidden_size), x.dtype)
        relative = self.relative(places).astype(jnp.float32).reshape(len(places), -1, self.head_dim)
        scores = []
        for row, distance in zip(relative, distances, strict=True):
            near = shifted(k, distance)
            near = near + row if distance + config.far >= 0 else near
            score = config.logit_cap * jnp.tanh(jnp.sum(q * near, axis=-1) / config.logit_cap)
            scores.append(jnp.where(neighbours(segment, distance)[:, None], score, _NEVER))
        shares = jax.nn.softmax(jnp.stack(scores), axis=0)
        o = jnp.zeros_like(v)
        for share, distance in zip(shares, distances, strict=True):
            o = o + share[..., None] * shifted(v, distance)
        return self.out(o.reshape(len(x), -1).astype(x.dtype))


class LightConvolution(nnx.Module):
    """Convolution block that computes x + end(activation(norm(convolution(gated(start(norm(x))))))). The convolution is
    causal, within a sound, of each element by itself, and its result limited to `clip`.
    """

    def __init__(self, config: Gemma4SoundConfig, build: Build):
        self.config, size, name = config, config.hidden_size, f"{LAYER}.lconv1d"
        self.input_norm, self.norm = (
            RMSNorm(size, config.norm_eps, source=f"{name}.{part}_norm", build=build) for part in ("pre_layer", "conv")
        )
        self.start = _product(config, size, "lconv1d.linear_start", 2 * size, ("embed", "embed"), build)
        self.end = _product(config, size, "lconv1d.linear_end", size, ("embed", "embed"), build)
        self.weight = table(size, config.taps, f"{name}.depthwise_conv1d.weight", build)

    def __call__(self, x: jax.Array, segment: jax.Array) -> jax.Array:
        value, gate = jnp.split(self.start(self.input_norm(x)), 2, axis=-1)
        inner, weight = (value * jax.nn.sigmoid(gate)).astype(jnp.float32), self.weight[...].astype(jnp.float32)
        y = jnp.zeros_like(inner)
        for steps in range(self.config.taps):
            near = jnp.where(neighbours(segment, steps)[:, None], shifted(inner, steps), 0)
            y = y + near * weight[:, self.config.taps - 1 - steps]
        y = self.norm(limited(y.astype(x.dtype), self.config.clip))
        return x + self.end(ACTIVATIONS[self.config.activation](y))


class Gemma4SoundLayer(nnx.Module):
    """Layer of a feed-forward block with a factor, attention, a convolution, a second feed-forward block with a factor,
    and a norm.
    """

    def __init__(self, config: Gemma4SoundConfig, build: Build):
        self.config = config
        self.before, self.after = (FeedForward(config, f"feed_forward{number}", build) for number in (1, 2))
        self.attention, self.convolution = LocalAttention(config, build), LightConvolution(config, build)
        self.input_norm, self.attention_norm, self.norm = (
            RMSNorm(config.hidden_size, _EPS, source=f"{LAYER}.norm_{name}", build=build)
            for name in ("pre_attn", "post_attn", "out")
        )

    def __call__(self, x: jax.Array, segment: jax.Array) -> jax.Array:
        clip = self.config.clip
        x = self.before(x)
        with jax.named_scope("attention"):
            attended = self.attention(self.input_norm(limited(x, clip)), segment)
            x = x + self.attention_norm(limited(attended, clip))
        with jax.named_scope("convolution"):
            x = self.convolution(x, segment)
        return self.norm(limited(self.after(x), clip))


class Gemma4SoundTower(nnx.Module):
    """Tower of sounds of Gemma 4 and the product that follows it.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: Gemma4SoundConfig, hidden_size: int, build: Build):
        self.config = config
        source, widths = f"{TOWER}.subsample_conv_projection", (1, *config.channels)
        self.convolutions = nnx.List(
            [
                Halving(before, after, config.norm_eps, source=f"{source}.layer{number}", build=build)
                for number, (before, after) in enumerate(pairwise(widths))
            ]
        )
        joined, axes = config.num_features // _STRIDE * config.channels[1], ("embed", "embed")
        self.joined = linear(joined, f"{source}.input_proj_linear", config.hidden_size, axes, build, bias=False)
        self.layers = nnx.List(
            [Gemma4SoundLayer(config, replace(build, layer=layer)) for layer in range(config.num_layers)]
        )
        self.output = linear(config.hidden_size, f"{TOWER}.output_proj", config.output_size, axes, build)
        last = f"{PROJECTOR}.embedding_projection"
        self.projector = linear(config.output_size, last, hidden_size, axes, build, bias=False)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        segment = columns[0]
        x = patches[..., None]
        with jax.named_scope("convolutions"):
            for convolution in self.convolutions:
                x, segment = convolution(x, segment >= 0), segment[::2]
            x = self.joined(x.reshape(len(segment), -1))
        x = in_turn(self.layers, x, segment)
        with jax.named_scope("projector"):
            x = self.output(x)
            return self.projector(rms_normalized(x, self.config.norm_eps).astype(x.dtype))
