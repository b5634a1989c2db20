"""Tower of VibeVoice-ASR (Microsoft 2026, arXiv:2601.18184): two stacks of causal convolutions over samples, of which
one says how something sounds and the other what is said, and a projector for each, whose results are added.

A convolution adds zeros before its input and sees only what is before. So a sound is encoded in windows, each of which
begins with as many frames of the window before as its results depend on. Further shape letters: U windows, T positions,
C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.vision.base.layers import TowerMLP
from jaxengine.models.vision.base.vit import linear, table, vector
from jaxengine.models.vision.llava import PROJECTOR

ACOUSTIC, SEMANTIC = "acoustic_tokenizer_encoder", "semantic_tokenizer_encoder"
# End of the names of tensors of more than two axes.
CONVOLUTION = ".conv.weight"
_EPS = 1e-6  # of the projector's norms
_RATE = 24_000
_FRAME = 160  # samples in which the engine counts the length of a patch
_DEFAULTS: dict[str, Any] = {
    "channels": 1,
    "kernel_size": 7,
    "num_filters": 32,
    "downsampling_ratios": (2, 2, 4, 5, 5, 8),
    "depths": (3, 3, 3, 3, 3, 3, 8),
    "ffn_expansion": 4,
}
_MOST_TAPS, _MOST_RATIOS, _MOST_HOP, _MOST_CONTEXT = 64, 16, 1 << 15, 1 << 10


@dataclass(frozen=True)
class StackSizes:
    """Sizes of a stack of convolutions.

    Attributes:
      size: elements of a result.
      taps: positions that a convolution of one position's distance adds up.
      filters: channels before the first reduction; each reduction doubles them.
      ratios: positions that each reduction makes one.
      depths: number of layers before the first reduction, and after each.
      expansion: factor of the elements within an MLP.
      eps, activation: epsilon of norms, and activation of the MLPs.
    """

    size: int
    taps: int
    filters: int
    ratios: tuple[int, ...]
    depths: tuple[int, ...]
    expansion: int
    eps: float
    activation: str

    @property
    def hop(self) -> int:
        """Number of samples of a result."""
        return prod(self.ratios)

    @property
    def context(self) -> int:
        """Number of frames of `hop` samples before its own on which a result depends at most."""
        count = self.taps - 1
        for ratio, depth in zip(reversed(self.ratios), reversed(self.depths[1:]), strict=True):
            count = (count + depth * (self.taps - 1) + 1) * ratio
        count += (self.depths[0] + 1) * (self.taps - 1)
        return -(-count // self.hop)


@dataclass(frozen=True, kw_only=True)
class VibeVoiceTowerConfig(TowerConfig):
    """Sizes of the tower. A patch is `num_features` samples, a frame, and becomes one row. A unit is one window.

    Attributes:
      acoustic, semantic: sizes of the stacks.
      context: number of frames at the beginning of a window, other than a sound's first, that are the last ones of the
        window before; their rows are not used.
    """

    acoustic: StackSizes
    semantic: StackSizes
    context: int

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return VibeVoiceTower(self, hidden_size, build)


def read_vibevoice_asr(fields: ConfigFields) -> VibeVoiceTowerConfig:
    """Return the tower's configuration from `acoustic_tokenizer_encoder_config` and `semantic_tokenizer_encoder_config`
    of a config.json, with transformers' defaults for absent fields. A window is a power of two of frames, at least four
    times as long as its context.

    `vae_std` is not read: it is the scale of noise that transformers adds unless sample=False.
    `acoustic_tokenizer_chunk_size` affects no result. Raises ModelConfigError for wrong fields, for sizes that are too
    large, for an `acoustic_tokenizer_chunk_size` of broken frames, and for stacks whose results are of different
    numbers of samples.
    """
    acoustic = _read_stack(fields.part_or_empty(f"{ACOUSTIC}_config", **_DEFAULTS, hidden_size=64))
    own = fields.part_or_empty(f"{SEMANTIC}_config", **_DEFAULTS, hidden_size=64)
    semantic = _read_stack(own)
    if semantic.hop != acoustic.hop:
        raise own.fail("downsampling_ratios", f"integers with the product {acoustic.hop}, as for the acoustic one")
    if fields.integer("acoustic_tokenizer_chunk_size", 1_440_000 // 3200 * acoustic.hop) % acoustic.hop:
        raise fields.fail("acoustic_tokenizer_chunk_size", f"a multiple of {acoustic.hop}, the samples of a frame")
    if (context := max(acoustic.context, semantic.context)) > _MOST_CONTEXT:
        raise own.fail("depths", f"such that a result depends on at most {_MOST_CONTEXT} frames")
    return VibeVoiceTowerConfig(
        num_features=acoustic.hop,
        columns=(),
        merge=1,
        unit=1 << (4 * context - 1).bit_length(),
        hears=True,
        frames=-(-acoustic.hop // _FRAME),
        rate=_RATE,
        acoustic=acoustic,
        semantic=semantic,
        context=context,
    )


def _integers(fields: ConfigFields, name: str, least: int, most: int) -> tuple[int, ...]:
    """Return the field `name`, a list of 1 to _MOST_RATIOS + 1 integers from `least` to `most`. Raises
    ModelConfigError for any other value.
    """
    found = fields.value(name)
    is_list = isinstance(found, list | tuple) and 0 < len(found) <= _MOST_RATIOS + 1
    if not is_list or any(type(one) is not int or not least <= one <= most for one in found):
        raise fields.fail(name, f"a list of at most {_MOST_RATIOS + 1} integers from {least} to {most}")
    return tuple(found)


def _read_stack(fields: ConfigFields) -> StackSizes:
    """Return the sizes in a nested configuration, of sounds of one channel: `hidden_size`, `kernel_size`,
    `num_filters`, `downsampling_ratios`, `depths`, `ffn_expansion`, `hidden_act` (default: gelu) and `rms_norm_eps`
    (1e-5). Depths after those of all reductions count nothing. Raises ModelConfigError for wrong fields and sizes that
    are too large.
    """
    fields.require(channels=1)
    ratios, depths = _integers(fields, "downsampling_ratios", 1, 64), _integers(fields, "depths", 0, MAX_LAYERS)
    if len(depths) <= len(ratios):
        raise fields.fail("depths", f"a list of {len(ratios) + 1} integers, one more than downsampling_ratios")
    if prod(ratios) > _MOST_HOP:
        raise fields.fail("downsampling_ratios", f"integers with a product of at most {_MOST_HOP}")
    if (taps := fields.integer("kernel_size")) > _MOST_TAPS:
        raise fields.fail("kernel_size", f"1 to {_MOST_TAPS}")
    filters, expansion = fields.integer("num_filters"), fields.integer("ffn_expansion")
    if (widest := filters << len(ratios)) > MAX_HIDDEN or widest * expansion > MAX_INTERMEDIATE:
        raise fields.fail("num_filters", f"at most {MAX_HIDDEN} after {len(ratios)} doublings")
    return StackSizes(
        size=fields.integer("hidden_size"),
        taps=taps,
        filters=filters,
        ratios=ratios,
        depths=depths[: len(ratios) + 1],
        expansion=expansion,
        eps=fields.number("rms_norm_eps", 1e-5),
        activation=read_activation(fields, "hidden_act"),
    )


class CausalConvolution(nnx.Module):
    """Convolution over time of which an output sees no input after its own `stride` inputs, and zeros before the first.

    alone: whether each channel is convolved by itself. source: its checkpoint module.
    """

    def __init__(self, channels: int, size: int, taps: int, source: str, build: Build, *, stride: int = 1, alone=False):
        self.taps, self.stride, self.groups, self.dtype = taps, stride, channels if alone else 1, build.dtype
        self.shape = size, channels // self.groups, taps
        self.weight = table(size, channels // self.groups * taps, f"{source}.weight", build)
        self.bias = vector(size, f"{source}.bias", build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the convolution [U, T / stride, size] of x [U, T, channels], each of the U by itself, with taps -
        stride zeros before it.
        """
        y = lax.conv_general_dilated(
            x,
            self.weight[...].reshape(self.shape),
            (self.stride,),
            ((self.taps - self.stride, 0),),
            dimension_numbers=("NHC", "OIH", "NHC"),
            feature_group_count=self.groups,
            preferred_element_type=jnp.float32,
        )
        return (y + self.bias[...].astype(jnp.float32)).astype(self.dtype)


class ConvolutionLayer(nnx.Module):
    """Layer that computes x + scale * convolution(norm(x)), of each channel by itself, then x + scale * mlp(norm(x)),
    with learned scales of channels.
    """

    def __init__(self, size: int, sizes: StackSizes, source: str, build: Build):
        self.norm1, self.norm2 = (
            RMSNorm(size, sizes.eps, source=f"{source}.{name}", build=build) for name in ("norm", "ffn_norm")
        )
        self.scale1, self.scale2 = (vector(size, f"{source}.{name}", build) for name in ("gamma", "ffn_gamma"))
        self.convolution = CausalConvolution(size, size, sizes.taps, f"{source}.mixer.conv", build, alone=True)
        names = {"up": (f"{source}.ffn.linear1",), "down": f"{source}.ffn.linear2"}
        activation = ACTIVATIONS[sizes.activation]
        self.mlp = TowerMLP(size, size * sizes.expansion, **names, activation=activation, build=build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x + scale * convolution(norm(x)), then x + scale * mlp(norm(x)), for x [U, T, C]: [U, T, C]."""
        x = x + self.convolution(self.norm1(x)) * self.scale1[...]
        y = self.mlp(self.norm2(x).reshape(-1, x.shape[2]))
        return x + y.reshape(x.shape) * self.scale2[...]


class ConvolutionStack(nnx.Module):
    """Stack of layers, with a convolution before the first, one that reduces the number of positions between stages,
    and one after the last.
    """

    def __init__(self, sizes: StackSizes, source: str, build: Build):
        def stage(depth: int, size: int, name: str) -> list[nnx.Module]:
            return [ConvolutionLayer(size, sizes, f"{source}.{name}.stage.{number}", build) for number in range(depth)]

        filters, taps = sizes.filters, sizes.taps
        steps: list[nnx.Module] = [CausalConvolution(1, filters, taps, f"{source}.stem.conv.conv", build)]
        steps += stage(sizes.depths[0], filters, "stem")
        for number, (ratio, depth) in enumerate(zip(sizes.ratios, sizes.depths[1:], strict=True)):
            name = f"conv_layers.{number}"
            steps.append(
                CausalConvolution(filters, 2 * filters, 2 * ratio, f"{source}.{name}.conv.conv", build, stride=ratio)
            )
            filters *= 2
            steps += stage(depth, filters, name)
        self.steps = nnx.List([*steps, CausalConvolution(filters, sizes.size, taps, f"{source}.head.conv", build)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the results [U, T / hop, D] of samples [U, T, 1], each window by itself."""
        for step in self.steps:
            x = step(x)
        return x


class VibeVoiceTower(nnx.Module):
    """Tower of VibeVoice-ASR.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: VibeVoiceTowerConfig, hidden_size: int, build: Build):
        self.config, self.dtype = config, build.dtype
        self.acoustic = ConvolutionStack(config.acoustic, ACOUSTIC, build)
        self.semantic = ConvolutionStack(config.semantic, SEMANTIC, build)
        self.projectors = nnx.List(
            [
                _Projector(sizes.size, hidden_size, f"{PROJECTOR}.{name}", build)
                for name, sizes in (("acoustic", config.acoustic), ("semantic", config.semantic))
            ]
        )

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: what comes after a sound affects nothing before
        samples = patches.astype(self.dtype).reshape(len(patches) // self.config.unit, -1, 1)
        stacks: Sequence[ConvolutionStack] = (self.acoustic, self.semantic)
        parts = []
        for name, stack, project in zip(("acoustic", "semantic"), stacks, self.projectors, strict=True):
            with jax.named_scope(name):
                x = stack(samples)
                parts.append(project(x.reshape(-1, x.shape[2])))
        return parts[0] + parts[1]


class _Projector(nnx.Module):
    """Projector linear_2(norm(linear_1(x))). source: beginning of its modules' names."""

    def __init__(self, in_size: int, hidden_size: int, source: str, build: Build):
        axes = ("embed", "embed")
        self.up = linear(in_size, f"{source}_linear_1", hidden_size, axes, build)
        self.norm = RMSNorm(hidden_size, _EPS, source=f"{source}_norm", build=build)
        self.down = linear(hidden_size, f"{source}_linear_2", hidden_size, axes, build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return linear_2(norm(linear_1(x))) for x [P, in_size]: [P, D]."""
        return self.down(self.norm(self.up(x)))
