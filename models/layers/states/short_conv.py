"""Gated short convolution (Liquid AI 2025, LFM2), used instead of attention.

Its state of a sequence is the window of the convolution.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.state import ShortConvolution
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of
from jaxengine.pallas_kernels.state.conv import causal_conv


class ShortConv(nnx.Module):
    """Gated short convolution: x -> out(c * conv(b * v)), with b, c and v projected from x. Channels are split over
    devices by the logical axis "heads".
    """

    def __init__(self, state: ShortConvolution, hidden_size: int, *, source: str, build: Build):
        channels = state.channels
        inputs = parts_of(f"{source}.in_proj", channels, channels, channels)
        self.inputs = Linear(hidden_size, inputs, axes=("embed", "heads"), build=build)
        taps = ParamDecl(("heads", None), (Source(f"{source}.conv.weight", channels),), init_std=0.3)
        self.conv = declare((channels, state.conv_kernel), build.dtype, taps)
        out = (Source(f"{source}.out_proj", hidden_size),)
        self.out = Linear(channels, out, axes=("heads", "embed"), build=build)

    def __call__(
        self, x: jax.Array, states: tuple[jax.Array], rows: StateRows, step: StepInputs
    ) -> tuple[jax.Array, tuple[jax.Array]]:
        """Map x[T, D] to ([T, D], the states after this step's tokens).

        states: the windows alone, [R, ...]; ShortConvolution.arrays has the shape of one row. rows: the rows that each
        sequence reads and writes; all others are unchanged.
        """
        with jax.named_scope("inputs"):
            before, after, x = jnp.split(self.inputs(x, step.rows), 3, axis=1)
        with jax.named_scope("causal_conv"):
            mixed, windows = causal_conv(before * x, self.conv[...], states[0], rows)
        with jax.named_scope("out_proj"):
            return self.out((after.astype(jnp.float32) * mixed).astype(x.dtype), step.rows), (windows,)
