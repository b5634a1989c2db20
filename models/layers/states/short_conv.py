"""Gated short convolution (Liquid AI 2025, LFM2), used instead of attention.

Its state of a sequence is the window of the convolution. In a model whose tokens see their whole prompt (LFM2.5's
embedders) there is no state: the window has tokens on both sides of a token; an even window has one more before it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.state import ShortConvolution
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.states.inputs import state_input
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of
from jaxengine.pallas_kernels.state.conv import causal_conv


class ShortConv(nnx.Module):
    """Gated short convolution: x -> out(c * conv(b * v)), with b, c and v projected from x. Channels are split over
    devices by the logical axis "heads".
    """

    def __init__(self, state: ShortConvolution, hidden_size: int, *, source: str, build: Build):
        channels = state.channels
        inputs = parts_of(f"{source}.in_proj", channels, channels, channels)
        self.inputs = Linear(hidden_size, inputs, axes=("embed", "heads"), bias=state.bias, build=build)
        taps = ParamDecl(("heads", None), (Source(f"{source}.conv.weight", channels),), init_std=0.3)
        self.conv = declare((channels, state.conv_kernel), build.dtype, taps)
        biases = ParamDecl(("heads",), (Source(f"{source}.conv.bias", channels),), init_std=0.3)
        self.conv_bias = declare((channels,), build.dtype, biases) if state.bias else None
        out = (Source(f"{source}.out_proj", hidden_size),)
        self.out = Linear(channels, out, axes=("heads", "embed"), bias=state.bias, build=build)

    def __call__(
        self, x: jax.Array, states: tuple[jax.Array], rows: StateRows, step: StepInputs
    ) -> tuple[jax.Array, tuple[jax.Array]]:
        """Map x [T, D] to ([T, D], the states after this step's tokens): `_gated` of the second part of `inputs` and
        the causal convolution of the first times the third.

        states: the windows alone, [R, ...]; ShortConvolution.arrays has the shape of one row. rows: those that
        sequences read and write.
        """
        with jax.named_scope("inputs"):
            before, after, x = jnp.split(self.inputs(x, step.rows), 3, axis=1)
        with jax.named_scope("causal_conv"):
            mixed = state_input(self, step, 0, before * x)
            mixed, windows = causal_conv(mixed, self.conv[...], states[0], rows)
        return self._gated(after, mixed, step), (windows,)

    def _gated(self, gates: jax.Array, mixed: jax.Array, step: StepInputs) -> jax.Array:
        """Return out(gates * (mixed + the convolution's bias, if any)), [T, D]. gates: [T, C]. mixed: f32[T, C]."""
        with jax.named_scope("out_proj"):
            mixed = mixed if self.conv_bias is None else mixed + self.conv_bias[...].astype(jnp.float32)
            return self.out((gates.astype(jnp.float32) * mixed).astype(gates.dtype), step.rows)


class WholeShortConv(ShortConv):
    """ShortConv with the token in the middle of the convolution's window: tap number kernel // 2 is its own. Prompts
    are not divided, so that no state is needed.
    """

    def __call__(self, x: jax.Array, states: Any, rows: Any, step: StepInputs) -> tuple[jax.Array, Any]:
        """Map x [T, D] to ([T, D], `states` unchanged): a convolution to both sides of gated inputs, then `_gated`.
        step: its `of_layer` is the result of `taps_within`, [T, kernel]. `rows` is not used.
        """
        assert step.of_layer is not None
        with jax.named_scope("inputs"):
            before, after, x = jnp.split(self.inputs(x, step.rows), 3, axis=1)
        with jax.named_scope("conv"):
            mixed, taps, within = (before * x).astype(jnp.float32), self.conv[...], step.of_layer
            total = jnp.zeros_like(mixed)
            for tap in range(taps.shape[1]):
                seen = jnp.roll(mixed, taps.shape[1] // 2 - tap, axis=0)
                total += seen * within[:, tap, None].astype(jnp.float32) * taps[:, tap].astype(jnp.float32)
        return self._gated(after, total, step), states


class ResidualConv(nnx.Module):
    """Sum x + conv(x) with a causal convolution of each channel, whose weights are float32.

    taps: declaration's source of the weights [C, kernel]. axis: logical axis of the channels; None if devices do not
    split them.
    """

    def __init__(self, taps: Source, kernel: int, *, axis: str | None = None):
        channels = taps.num_contributed
        self.taps = declare((channels, kernel), jnp.float32, ParamDecl((axis, None), (taps,), init_std=0.3))

    def __call__(self, x: jax.Array, windows: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
        """Map x [T, C] to (x plus its causal convolution, the windows [R, kernel - 1, C] after this step's tokens),
        summed in float32.
        """
        with jax.named_scope("causal_conv"):
            mixed, windows = causal_conv(x, self.taps[...], windows, rows)
        return (x.astype(jnp.float32) + mixed).astype(x.dtype), windows


def taps_of_layers(self: Any, batch: ForwardBatch, x: jax.Array, rows: Rows) -> jax.Array:
    """Return the result of `taps_within` for each layer, [T, L, kernel], in the dtype of x. It is the method
    `make_layer_inputs` of decoders.
    """
    within = taps_within(batch.positions, rows.is_token, self.config.layer_input_size).astype(x.dtype)
    return jnp.broadcast_to(within[:, None], (len(within), self.config.num_layers, within.shape[1]))


def taps_within(positions: jax.Array, is_token: jax.Array, kernel: int) -> jax.Array:
    """Return bool[T, kernel]: whether the token under each tap of WholeShortConv belongs to the same prompt.

    positions: i32[T], within each prompt; prompts follow each other whole. is_token: bool[T], False for padding.
    """
    offsets = jnp.arange(kernel) - kernel // 2
    others = jnp.arange(len(positions))[:, None] + offsets
    inside = (others >= 0) & (others < len(positions))
    others = jnp.clip(others, 0, len(positions) - 1)
    both = is_token[:, None] & is_token[others]
    return inside & both & (positions[others] == positions[:, None] + offsets)
