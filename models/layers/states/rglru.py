"""Gated linear recurrence (De et al. 2024, Griffin, arXiv:2402.19427), instead of attention.

Inputs pass a short convolution; each channel's state, one number, then decays by a gate of the token and adds the gated
input. The recurrence is that of Mamba with one element per channel, computed in pallas_kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.state import GatedRecurrence
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.states.inputs import state_input
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.pallas_kernels.state.conv import causal_conv
from jaxengine.pallas_kernels.state.scan import selective_scan

States = tuple[jax.Array, jax.Array]
# Factor of gates in the negative logarithm of a decay, and that logarithm's least value: inputs are divided by it.
_SHARPNESS, _LEAST = 8.0, 1e-20


class BlockGates(nnx.Module):
    """Sigmoid of a product with a matrix and a bias for each head: f32[T, C] -> f32[T, C]. Heads are split over
    devices. source: beginning of the names of the checkpoint's tensors, `source`_weight [N, C / N * C / N], in which
    each row has a head's matrix [in, out], and `source`_bias [N, C / N].
    """

    def __init__(self, state: GatedRecurrence, source: str, build: Build):
        heads, size = state.num_heads, state.channels // state.num_heads
        weight = ParamDecl(("heads", None), (Source(f"{source}_weight", heads),), init_std=size**-0.5)
        self.weight = declare((heads, size * size), build.dtype, weight)
        bias = ParamDecl(("heads", None), (Source(f"{source}_bias", heads),), init_std=0.3)
        self.bias = declare((heads, size), build.dtype, bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        weight, bias = self.weight[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        by_head, weight = x.reshape(len(x), *bias.shape), weight.reshape(*bias.shape, bias.shape[1])
        with jax.default_matmul_precision("float32"):
            products = jnp.einsum("tni,nio->tno", by_head, weight)
        return jax.nn.sigmoid(products + bias).reshape(x.shape)


class RecurrentBlock(nnx.Module):
    """Griffin's recurrent block: x -> out(act(y) * h), where act is GELU by default. y and u are projected from x, u
    passes a convolution, and h is the state after each token: h[t] = a * h[t - 1] + sqrt(1 - a^2) * i * u, where log a
    = -8 * r * softplus(p), and i and r are gates of u. The first token of a sequence has no factor sqrt(1 - a^2).
    Channels are split over devices.
    """

    def __init__(self, state: GatedRecurrence, hidden_size: int, *, source: str, build: Build):
        channels = state.channels
        self.activation = ACTIVATIONS[state.activation]

        def projected(name: str) -> Linear:
            axes = "embed", "heads"
            return Linear(hidden_size, (Source(f"{source}.{name}", channels),), axes=axes, bias=True, build=build)

        def of_channels(name: str, more: tuple[int, ...], dtype: str) -> nnx.Param:
            decl = ParamDecl(("heads", *(None for _ in more)), (Source(f"{source}.{name}", channels),), init_std=0.3)
            return declare((channels, *more), dtype, decl)

        self.gate, self.inputs = projected("linear_y"), projected("linear_x")
        self.taps = of_channels("conv_1d.weight", (state.conv_kernel,), build.dtype)
        self.conv_bias = of_channels("conv_1d.bias", (), build.dtype)
        self.input_gates = BlockGates(state, f"{source}.rg_lru.input_gate", build)
        self.decay_gates = BlockGates(state, f"{source}.rg_lru.recurrent_gate", build)
        self.decays = of_channels("rg_lru.recurrent_param", (), "float32")
        out = (Source(f"{source}.linear_out", hidden_size),)
        self.out = Linear(channels, out, axes=("heads", "embed"), bias=True, build=build)

    def __call__(self, x: jax.Array, states: States, rows: StateRows, step: StepInputs) -> tuple[jax.Array, States]:
        """Map x[T, D] to ([T, D], the states after this step's tokens): projection, convolution, gated recurrence
        (RG-LRU) with decays of at least _LEAST, activated gate, output projection.

        states: the window of the convolution and the channels' states, [R, ...] each; GatedRecurrence.arrays has the
        shapes of one row. rows: those that sequences read and write.
        """
        window, before = states
        with jax.named_scope("inputs"):
            gate = self.activation(self.gate(x, step.rows, out_dtype=jnp.float32))
            mixed = state_input(self, step, 0, self.inputs(x, step.rows))
        with jax.named_scope("causal_conv"):
            mixed, window = causal_conv(mixed, self.taps[...], window, rows)
            mixed = mixed + self.conv_bias[...].astype(jnp.float32)
        with jax.named_scope("gates"):
            decay = _SHARPNESS * self.decay_gates(mixed) * jax.nn.softplus(self.decays[...])
            decay = jnp.maximum(decay, _LEAST)
            scale = jnp.where(_begins(rows, len(x))[:, None], 1.0, jnp.sqrt(-jnp.expm1(-2 * decay)))
            added = self.input_gates(mixed) * mixed * scale
        with jax.named_scope("recurrence"):
            # The scan multiplies its inputs by its time steps, which are the decays here.
            ones, rate = jnp.ones((len(x), 1), jnp.float32), -jnp.ones((mixed.shape[1], 1), jnp.float32)
            after, before = selective_scan(added / decay, ones, ones, decay, rate, before, rows)
        with jax.named_scope("out_proj"):
            return self.out((gate * after).astype(x.dtype), step.rows), (window, before)


def _begins(rows: StateRows, num_tokens: int) -> jax.Array:
    """Return bool[T]: whether a token is the first of its sequence, which then reads no state."""
    new = (rows.reads < 0) & (jnp.arange(rows.reads.size) < rows.num_seqs)
    firsts = jnp.where(new & (rows.cu_q_lens[1:] > rows.cu_q_lens[:-1]), rows.cu_q_lens[:-1], num_tokens)
    return jnp.zeros(num_tokens, bool).at[firsts].set(True, mode="drop")
