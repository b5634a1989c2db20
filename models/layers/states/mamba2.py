"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060), instead of attention or in addition to it.

Inputs, B (writes to states) and C (reads from them) pass a short convolution; a matrix for each head then decays by a
token's time step and adds its input. So a sequence has a state of a fixed size, however long it is. The recurrence is
computed in pallas_kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.state import LinearState, StateSpace
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.scale import scaled
from jaxengine.models.layers.states.inputs import state_input
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of
from jaxengine.pallas_kernels.state.conv import causal_conv
from jaxengine.pallas_kernels.state.space import state_space
from jaxengine.sharding.collectives import num_shards, shard_index, sum_parts

States = tuple[jax.Array, jax.Array, jax.Array]


class GroupsRMSNorm(nnx.Module):
    """RMS norm over each group of heads, x / rms(x) * weight, in float32. Devices that share a group add up its sums of
    squares.
    """

    def __init__(self, state: StateSpace | LinearState, eps: float, *, source: str, build: Build):
        rows = Source(source, state.inner_size, group=state.head_dim).tensor("weight")
        self.weight = declare((state.inner_size,), build.dtype, ParamDecl(("heads",), (rows,)))
        self.eps, self.num_groups, self.width = eps, state.num_groups, state.inner_size // state.num_groups

    def __call__(self, y: jax.Array) -> jax.Array:
        """Return y f32[T, I] divided by the RMS of each group, which may lie on several devices, times the weight, I
        being the elements of this device's heads, in the same shape and dtype.
        """
        sharing = num_shards("heads") // self.num_groups
        grouped = y.reshape(y.shape[0], max(1, self.num_groups // num_shards("heads")), -1)
        squares = jnp.sum(grouped * grouped, axis=-1)
        if sharing > 1:
            own = shard_index("heads") // sharing
            squares = sum_parts(jax.nn.one_hot(own, self.num_groups) * squares, "heads")
            squares = jax.lax.dynamic_slice_in_dim(squares, own, 1, axis=1)
        normed = grouped * jax.lax.rsqrt(squares[..., None] / self.width + self.eps)
        return normed.reshape(y.shape) * self.weight[...].astype(jnp.float32)


class Mamba2(nnx.Module):
    """Mamba-2 mixer: x -> out(norm(o * silu(z))), where z is projected from x and o is the state's output plus D times
    its input, which has passed the convolution. StateSpace.norm decides whether the norm comes after the gate, before
    it, or not at all.

    Heads are split over devices. If there are fewer groups than devices, each device has a copy of its heads' group.
    """

    def __init__(self, state: StateSpace, hidden_size: int, *, eps: float, source: str, build: Build):
        devices, inner, group = build.mesh.num_shards("heads"), state.inner_size, state.group_size
        copies = max(1, devices // state.num_groups)
        self.state = state
        self.num_heads, self.num_groups = state.num_heads // devices, max(1, state.num_groups // devices)

        def in_groups(parts: tuple[Source, ...]) -> tuple[Source, ...]:
            return tuple(part._replace(group=state.state_size, repeat=copies) for part in parts)

        z, x, b, c, dt = parts_of(f"{source}.in_proj", inner, inner, group, group, state.num_heads)
        z, x = z._replace(group=state.head_dim), x._replace(group=state.head_dim)
        inputs = z, x, *in_groups((b, c)), dt
        self.ends = tuple(np.cumsum([part.num_contributed // devices for part in inputs[:-1]]).tolist())
        self.inputs = Linear(hidden_size, inputs, axes=("embed", "heads"), bias=state.bias, build=build)
        convolved = parts_of(f"{source}.conv1d", inner, group, group)
        convolved = (convolved[0]._replace(group=state.head_dim),), in_groups(convolved[1:])

        def of_convolution(kind: str, parts: tuple[Source, ...], more: tuple[int, ...]) -> nnx.Param:
            tensors = tuple(part.tensor(kind) for part in parts)
            channels = sum(part.num_contributed for part in parts)
            axes = "heads", *(None for _ in more)
            return declare((channels, *more), build.dtype, ParamDecl(axes, tensors, init_std=0.3))

        self.taps = nnx.List([of_convolution("weight", parts, (state.conv_kernel,)) for parts in convolved])
        biases = [of_convolution("bias", parts, ()) for parts in convolved] if state.conv_bias else []
        self.conv_biases = nnx.List(biases)

        def of_heads(name: str, init_std: float | None = None) -> nnx.Param:
            heads = (Source(f"{source}.{name}", state.num_heads),)
            return declare((state.num_heads,), jnp.float32, ParamDecl(("heads",), heads, init_std=init_std))

        self.log_a, self.dt_bias, self.skip = of_heads("A_log", 0.5), of_heads("dt_bias", 0.5), of_heads("D")
        norm = None if state.norm is None else GroupsRMSNorm(state, eps, source=f"{source}.norm", build=build)
        self.norm = norm
        out = (Source(f"{source}.out_proj", hidden_size),)
        self.out = Linear(inner, out, axes=("heads", "embed"), bias=state.output_bias, build=build)

    def __call__(self, x: jax.Array, states: States, rows: StateRows, step: StepInputs) -> tuple[jax.Array, States]:
        """Map x[T, D] to ([T, D], the states after this step's tokens): projections, convolutions, state space plus
        skip with time steps limited to `dt_limits`, SiLU gate with norm, output projection.

        states: both windows of the convolutions and the matrices, [R, ...] each; StateSpace.arrays has the shapes of
        one row. rows: those that sequences read and write.
        """
        state, num_tokens, matrices = self.state, x.shape[0], states[2]
        with jax.named_scope("inputs"):
            parts = jnp.split(self.inputs(x, step.rows), self.ends, axis=1)
            z, mixed, b, c, dt = map(scaled, parts, state.multipliers)
            shared = jnp.concatenate([b, c], axis=1)
            mixed, shared, dt = (state_input(self, step, *each) for each in enumerate((mixed, shared, dt)))
        with jax.named_scope("causal_conv"):
            mixed, windows = self._convolved(0, mixed, states[0], rows)
            shared, shared_windows = self._convolved(1, shared, states[1], rows)
            mixed = mixed.reshape(num_tokens, self.num_heads, state.head_dim)
            b, c = jnp.moveaxis(shared.reshape(num_tokens, 2, self.num_groups, state.state_size), 1, 0)
        with jax.named_scope("time_steps"):
            dt = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...])
            dt = jnp.clip(dt, *state.dt_limits)
            decay = -jnp.exp(self.log_a[...]) * dt
        with jax.named_scope("state_space"):
            o, matrices = state_space(mixed, b, c, decay, dt, matrices, rows)
            o = (o + self.skip[...][:, None] * mixed).reshape(num_tokens, -1)
        with jax.named_scope("gate"):
            o = self._gated(o, jax.nn.silu(z.astype(jnp.float32)))
        with jax.named_scope("out_proj"):
            return self.out(o.astype(x.dtype), step.rows), (windows, shared_windows, matrices)

    def _convolved(self, index: int, x: jax.Array, windows: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
        """Return f32[T, C], x [T, C] after convolution 0, of inputs, or 1, of B and C, with bias and activation,
        and the windows after this step.
        """
        y, windows = causal_conv(x, self.taps[index][...], windows, rows)
        if self.state.conv_bias:
            y = y + self.conv_biases[index][...].astype(jnp.float32)
        return ACTIVATIONS[self.state.activation](y), windows

    def _gated(self, o: jax.Array, gate: jax.Array) -> jax.Array:
        """Return o multiplied by its gate, both f32[T, I], and normed before or after that, or not at all, depending on
        StateSpace.norm.
        """
        if self.norm is None:
            return o * gate
        return self.norm(o) * gate if self.state.norm == "before" else self.norm(o * gate)
