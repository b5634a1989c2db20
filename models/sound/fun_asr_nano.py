"""Tower of Fun-ASR-Nano (FunAudioLLM 2025, arXiv:2509.12508): an encoder whose attention also adds up the values of
nearby positions (SAN-M, Gao et al. 2020, arXiv:2006.01713), an MLP, and further layers of attention.

Every position attends to all of its sound, which is encoded whole. A call may have several sounds. Further shape
letters: P positions, N heads, H elements of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_BINS, MAX_HEAD_DIM, MAX_WINDOW, ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.params.declare import Source
from jaxengine.models.sound.gemma4 import neighbours, shifted
from jaxengine.models.sound.qwen2_audio import TOWER
from jaxengine.models.vision.base.attention import UNIT, segment_attention
from jaxengine.models.vision.base.layers import TowerMLP, in_turn, tower_axis
from jaxengine.models.vision.base.vit import table
from jaxengine.models.vision.llava import PROJECTOR, Projector

# End of the names of tensors of more than two axes.
CONVOLUTION = ".fsmn.conv.weight"
# transformers' defaults of fields that a file lacks.
_DEFAULTS = {
    "num_mel_bins": 80,
    "hidden_size": 512,
    "num_attention_heads": 4,
    "intermediate_size": 2048,
    "num_hidden_layers": 70,
    "max_position_embeddings": 2049,
    "num_stacked_frames": 7,
    "fsmn_kernel_size": 11,
}
_ADAPTOR = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "projector_hidden_size": 2048,
}
_MOST_TAPS, _MOST_STACKED = 64, 64
_STRIDE = 6  # frames from one patch to the next
_LONGEST = 10_000.0  # positions of a period of the slowest sine, over 2 pi


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of layers: elements of hidden states, of a head, and within the MLP; number of layers; epsilon of norms;
    name of the MLP's activation in jaxengine.models.layers.base.activations.ACTIVATIONS.
    """

    size: int
    head_dim: int
    ffn_size: int
    num_layers: int
    eps: float
    activation: str


@dataclass(frozen=True, kw_only=True)
class FunAsrTowerConfig(TowerConfig):
    """Sizes of the tower. A patch is several neighbouring frames of a spectrogram, of which `frames` are its own. Its
    column "segment" has the number of its sound, and "place" its index in the sound, from 1; both are -1 in patches
    after the sounds.

    Attributes:
      stacked: number of frames of a patch.
      longest: largest number of patches of a sound.
      encoder, adaptor: sizes of the layers before and after the MLP.
      taps: number of positions whose values an encoder's layer adds up.
      normed: numbers of the encoder's layers that end with a norm.
      inner_size, activation: elements within the MLP, and its activation.
    """

    stacked: int
    longest: int
    encoder: LayerSizes
    adaptor: LayerSizes
    taps: int
    normed: tuple[int, ...]
    inner_size: int
    activation: str

    @property
    def window(self) -> int:
        return -(-self.longest // self.unit) * self.unit

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return FunAsrTower(self, hidden_size, build)


def read_fun_asr_nano(fields: ConfigFields, hidden_size: int) -> FunAsrTowerConfig:
    """Return the tower's configuration from the `audio_config` and the `adaptor_config` of a config.json, with
    transformers' defaults for absent fields. hidden_size: size of the text model's hidden states. A sound has fewer
    patches than `max_position_embeddings`. The last encoder layer and the one before the last
    `num_timestamp_prediction_layers` (default: 20) end with a norm.

    Raises ModelConfigError for wrong fields, for sizes that are too large, and if the adaptor's `hidden_size` is not
    hidden_size.
    """
    audio, adaptor = (
        fields.part_or_empty("audio_config", **_DEFAULTS),
        fields.part_or_empty("adaptor_config", **_ADAPTOR),
    )
    if adaptor.integer("hidden_size") != hidden_size:
        raise adaptor.fail("hidden_size", f"{hidden_size}, hidden_size of the text model")
    bins, stacked = audio.integer("num_mel_bins"), audio.integer("num_stacked_frames")
    if not 4 <= bins <= MAX_BINS:
        raise audio.fail("num_mel_bins", f"4 to {MAX_BINS}")
    if stacked > _MOST_STACKED or bins * stacked % 2 or bins * stacked < 4:
        allowed = f"at most {_MOST_STACKED}, and even times num_mel_bins {bins}"
        raise audio.fail("num_stacked_frames", allowed)
    if (positions := audio.integer("max_position_embeddings", minimum=2)) > MAX_WINDOW:
        raise audio.fail("max_position_embeddings", f"2 to {MAX_WINDOW}")
    if (taps := audio.integer("fsmn_kernel_size")) > _MOST_TAPS:
        raise audio.fail("fsmn_kernel_size", f"1 to {_MOST_TAPS}")
    encoder = _read_layers(audio)
    timed = audio.integer("num_timestamp_prediction_layers", 20, minimum=0)
    if timed > encoder.num_layers:
        raise audio.fail("num_timestamp_prediction_layers", f"0 to num_hidden_layers {encoder.num_layers}")
    return FunAsrTowerConfig(
        num_features=bins * stacked,
        columns=("segment", "place"),
        merge=1,
        unit=UNIT,
        hears=True,
        frames=_STRIDE,
        stacked=stacked,
        longest=positions - 1,
        encoder=encoder,
        adaptor=_read_layers(adaptor),
        taps=taps,
        normed=(encoder.num_layers - timed - 1, encoder.num_layers - 1),
        inner_size=adaptor.integer("projector_hidden_size"),
        activation=read_activation(adaptor, "projector_hidden_act", "relu"),
    )


def _read_layers(fields: ConfigFields) -> LayerSizes:
    """Return the sizes in a nested configuration. A head has `head_dim` elements, whatever `num_attention_heads` says;
    without the field, size // num_attention_heads. Raises ModelConfigError for wrong fields, heads that do not divide
    the size, and more than MAX_HEAD_DIM elements.
    """
    size, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", max(1, size // heads))
    if size % head_dim or head_dim > MAX_HEAD_DIM:
        name = "head_dim" if fields.has("head_dim") else "num_attention_heads"
        raise fields.fail(name, f"such that heads divide hidden_size {size}")
    return LayerSizes(
        size=size,
        head_dim=head_dim,
        ffn_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        eps=fields.number("layer_norm_eps", 1e-5),
        activation=read_activation(fields, "hidden_act", "relu"),
    )


class FunAsrAttention(nnx.Module):
    """Attention of all positions of a sound to each other.

    in_size: elements of its input. taps: number of positions, with its own in the middle, whose values are added up
    with weights and then, with the value itself, added to the result; 0 for no such sum.
    """

    def __init__(self, in_size: int, sizes: LayerSizes, taps: int, source: str, build: Build):
        self.head_dim, self.taps, size = sizes.head_dim, taps, sizes.size
        # The sum of values is of all heads, and is added after the product of heads. So no device has a part of them.
        heads = "embed" if taps else tower_axis("heads", build)
        parts = tuple(Source(f"{source}.{name}_proj", size, group=sizes.head_dim) for name in "qkv")
        self.qkv = Linear(in_size, parts, axes=("embed", heads), bias=True, build=build)
        self.out = Linear(size, (Source(f"{source}.o_proj", size),), axes=(heads, "embed"), bias=True, build=build)
        self.weight = table(size, taps, f"{source}{CONVOLUTION}", build) if taps else None

    def __call__(self, x: jax.Array, segment: jax.Array) -> jax.Array:
        """Return the attention output [P, D], without the residual, of x [P, in_size], plus, with `taps`, the sum of
        near values.

        segment: i32[P], the sound of each position, -1 for none; no position sees another sound's.
        """
        heads = self.qkv(x).reshape(len(x), -1, self.head_dim)
        q, k, v = jnp.split(heads, 3, axis=1)
        o = segment_attention(q, k, v, segment, scale=self.head_dim**-0.5)
        y = self.out(o.reshape(len(x), -1))
        if self.weight is None:
            return y
        near, weight = v.reshape(len(x), -1).astype(jnp.float32), self.weight[...].astype(jnp.float32)
        total = near
        for tap in range(self.taps):
            steps = (self.taps - 1) // 2 - tap
            total = total + jnp.where(neighbours(segment, steps)[:, None], shifted(near, steps), 0) * weight[:, tap]
        return y + total.astype(y.dtype)


class FunAsrLayer(nnx.Module):
    """Layer that computes x + attention(norm(x)), without x itself if its size changes, then x + mlp(norm(x)), and, if
    `normed`, a norm of that. Other arguments are those of FunAsrAttention.
    """

    def __init__(self, in_size: int, sizes: LayerSizes, taps: int, normed: bool, source: str, build: Build):
        self.is_residual, size = in_size == sizes.size, sizes.size
        self.attention = FunAsrAttention(in_size, sizes, taps, f"{source}.self_attn", build)
        names = {"up": (f"{source}.mlp.fc1",), "down": f"{source}.mlp.fc2"}
        self.mlp = TowerMLP(size, sizes.ffn_size, **names, activation=ACTIVATIONS[sizes.activation], build=build)

        def norm(name: str, size: int) -> LayerNorm:
            return LayerNorm(size, sizes.eps, source=f"{source}.{name}", build=build)

        self.norm1, self.norm2 = norm("input_layernorm", in_size), norm("post_attention_layernorm", size)
        self.norm = norm("final_layernorm", size) if normed else None

    def __call__(self, x: jax.Array, segment: jax.Array) -> jax.Array:
        """Return x + attention(norm(x)), without x if its size changes, then x + mlp(norm(x)), [P, D], for x [P,
        in_size], normed if the layer is. segment: i32[P], the positions' sounds, -1 for none.
        """
        with jax.named_scope("attention"):
            y = self.attention(self.norm1(x), segment)
            x = x + y if self.is_residual else y
        with jax.named_scope("mlp"):
            x = x + self.mlp(self.norm2(x))
        return x if self.norm is None else self.norm(x)


class FunAsrTower(nnx.Module):
    """Tower of Fun-ASR-Nano.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: FunAsrTowerConfig, hidden_size: int, build: Build):
        self.config, self.dtype, encoder, adaptor = config, build.dtype, config.encoder, config.adaptor
        sizes = (config.num_features, *[encoder.size] * (encoder.num_layers - 1))
        self.layers = nnx.List(
            [
                FunAsrLayer(size, encoder, config.taps, index in config.normed, f"{TOWER}.layers.{index}", build)
                for index, size in enumerate(sizes)
            ]
        )
        self.projector = Projector(encoder.size, hidden_size, config.activation, build, inner=config.inner_size)
        self.adaptor = nnx.List(
            [
                FunAsrLayer(adaptor.size, adaptor, 0, False, f"{PROJECTOR}.layers.{index}", build)
                for index in range(adaptor.num_layers)
            ]
        )

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        config, (segment, place) = self.config, columns
        angles = place[:, None].astype(jnp.float32) * _frequencies(config.num_features)
        turns = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
        x = patches.astype(self.dtype) * jnp.asarray(config.encoder.size**0.5, self.dtype) + turns.astype(self.dtype)
        x = in_turn(self.layers, x, segment)
        with jax.named_scope("projector"):
            x = self.projector(x)
        return in_turn(self.adaptor, x, segment, name="adaptor")


def _frequencies(size: int) -> np.ndarray:
    """Return f32[size / 2]: radians per position, geometrically spaced from 1 to 1 / 10000, both included."""
    count = size // 2
    step = np.float32(np.log(_LONGEST) / (count - 1))
    return np.exp(-step * np.arange(count, dtype=np.float32))
