"""Mamba (Gu & Dao 2023, arXiv:2312.00752), instead of attention.

Inputs pass a short convolution; each channel's state of a few elements then decays by the token's time step for this
channel and adds its input. The recurrence is computed in pallas_kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.state import SelectiveScan
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm, rms_normalized
from jaxengine.models.layers.states.inputs import state_input
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of
from jaxengine.pallas_kernels.state.conv import causal_conv
from jaxengine.pallas_kernels.state.scan import selective_scan

States = tuple[jax.Array, jax.Array]
SELECTED = ("dt", "b", "c")


class Mamba(nnx.Module):
    """Mamba mixer: x -> out(silu(z) * (o + D * u)). u and z are projected from x; u passes the convolution and
    an activation; the state stores u, and o is read from it. Channels are split over devices.
    """

    def __init__(self, state: SelectiveScan, hidden_size: int, *, source: str, build: Build):
        self.state = state
        channels, rank, size = state.channels, state.time_rank, state.state_size
        inputs = parts_of(f"{source}.in_proj", channels, channels)
        self.inputs = Linear(hidden_size, inputs, axes=("embed", "heads"), bias=state.bias, build=build)

        def of_channels(module: str, kind: str, more: tuple[int, ...], dtype: str, std: float | None) -> nnx.Param:
            name = ".".join(filter(None, (source, module, kind)))
            decl = ParamDecl(("heads", *(None for _ in more)), (Source(name, channels),), init_std=std)
            return declare((channels, *more), dtype, decl)

        self.taps = of_channels("conv1d", "weight", (state.conv_kernel,), build.dtype, 0.3)
        self.conv_bias = of_channels("conv1d", "bias", (), build.dtype, 0.3) if state.conv_bias else None
        selected = parts_of(f"{source}.x_proj", rank, size, size)
        self.select = Linear(channels, selected, axes=("heads", "latent"), build=build)
        self.dt = Linear(rank, (Source(f"{source}.dt_proj", channels),), axes=("latent", "heads"), build=build)
        self.dt_bias = of_channels("dt_proj", "bias", (), "float32", 0.5)
        self.log_a = of_channels("A_log", "", (size,), "float32", 0.5)
        self.skip = of_channels("D", "", (), "float32", None)
        norms = {}
        if state.norms == "weighted":
            norm = partial(RMSNorm, eps=state.eps, build=build)
            sizes = zip(SELECTED, (rank, size, size), strict=True)
            norms = {name: norm(width, source=f"{source}.{name}_layernorm") for name, width in sizes}
        self.norms = nnx.Dict(norms)
        out = (Source(f"{source}.out_proj", hidden_size),)
        self.out = Linear(channels, out, axes=("heads", "embed"), bias=state.bias, build=build)

    def __call__(self, x: jax.Array, states: States, rows: StateRows, step: StepInputs) -> tuple[jax.Array, States]:
        """Map x[T, D] to ([T, D], the states after this step's tokens): projections, convolution, with a bias if it has
        one, and activation, selective scan plus skip, SiLU gate, output projection.

        states: the window of the convolution and the vectors, [R, ...] each; SelectiveScan.arrays has the shapes of one
        row. rows: those that sequences read and write.
        """
        window, vectors = states
        with jax.named_scope("inputs"):
            mixed, z = jnp.split(self.inputs(x, step.rows), 2, axis=1)
            mixed = state_input(self, step, 0, mixed)
        with jax.named_scope("causal_conv"):
            mixed, window = causal_conv(mixed, self.taps[...], window, rows)
            mixed = mixed if self.conv_bias is None else mixed + self.conv_bias[...].astype(jnp.float32)
            mixed = ACTIVATIONS[self.state.activation](mixed)
        with jax.named_scope("time_steps"):
            dt, b, c = self._selected(mixed, x.dtype, step)
            dt, b = state_input(self, step, 1, dt), state_input(self, step, 2, b)
            dt = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...].reshape(-1))
        with jax.named_scope("selective_scan"):
            o, vectors = self._scan(mixed, b, c, dt, vectors, rows)
        with jax.named_scope("gate"):
            o = (o + self.skip[...].reshape(-1) * mixed) * jax.nn.silu(z.astype(jnp.float32))
        with jax.named_scope("out_proj"):
            return self.out(o.astype(x.dtype), step.rows), (window, vectors)

    def _selected(self, mixed: jax.Array, dtype: Any, step: StepInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return what depends on a token's inputs `mixed` f32[T, C]: time steps [T, C] without their bias, B and C
        [T, state_size]. dtype: dtype of activations.
        """
        state = self.state
        ends = state.time_rank, state.time_rank + state.state_size
        parts = jnp.split(self.select(mixed.astype(dtype), step.rows), ends, axis=1)
        dt, b, c = (self._norm(name)(part) for name, part in zip(SELECTED, parts, strict=True))
        return self.dt(dt, step.rows), b, c

    def _scan(
        self, mixed: jax.Array, b: jax.Array, c: jax.Array, dt: jax.Array, vectors: jax.Array, rows: StateRows
    ) -> tuple[jax.Array, jax.Array]:
        """Return the outputs of the recurrence, f32[T, C], and the vectors after it. Arguments are those of
        `selective_scan`.
        """
        return selective_scan(mixed, b, c, dt, -jnp.exp(self.log_a[...]), vectors, rows)

    def _norm(self, name: str) -> Callable[[jax.Array], jax.Array]:
        """Return the norm of `name`, one of SELECTED: with weights, without, or the identity, depending on
        SelectiveScan.norms.
        """
        if self.state.norms == "plain":
            return lambda part: rms_normalized(part, self.state.eps).astype(part.dtype)
        return self.norms[name] if self.state.norms else lambda part: part


class HeadedMamba(Mamba):
    """Mamba of heads, as in Zamba: time steps, B and C of a head's channels are projected from these channels alone.
    Rows of u and of z alternate in the checkpoint's projection. Heads are split over devices.
    """

    def __init__(self, state: SelectiveScan, hidden_size: int, *, source: str, build: Build):
        super().__init__(state, hidden_size, source=source, build=build)
        channels, heads, rank, size = state.channels, state.num_heads or 1, state.time_rank, state.state_size
        width = channels // heads
        halves = [
            Source(f"{source}.in_proj", channels, first=first, tensor_rows=2 * channels, stride=2) for first in (0, 1)
        ]
        self.inputs = Linear(hidden_size, halves, axes=("embed", "heads"), bias=state.bias, build=build)

        def of_heads(name: str, elements: int, dtype: str, std: float | None) -> nnx.Param:
            decl = ParamDecl(("heads", None), (Source(f"{source}.{name}", heads),), init_std=std)
            return declare((heads, elements), dtype, decl)

        self.select = of_heads("x_proj_weight", (rank + 2 * size) * width, build.dtype, width**-0.5)
        self.dt = of_heads("dt_proj_weight", width * rank, build.dtype, rank**-0.5)
        self.dt_bias = of_heads("dt_proj_bias", width, "float32", 0.5)
        self.log_a = of_heads("A_log", width * size, "float32", 0.5)
        self.skip = of_heads("D", width, "float32", None)

    def _selected(self, mixed: jax.Array, dtype: Any, step: StepInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return time steps f32[T, C] without their bias, and B and C f32[T, N, state_size] of this device's N heads,
        for inputs `mixed` f32[T, C], which are rounded to `dtype`.
        """
        rank, size = self.state.time_rank, self.state.state_size
        weight, dt = (each[...].astype(jnp.float32) for each in (self.select, self.dt))
        by_head = mixed.astype(dtype).astype(jnp.float32).reshape(len(mixed), len(weight), -1)
        with jax.default_matmul_precision("float32"):
            selected = jnp.einsum("tnw,nkw->tnk", by_head, weight.reshape(len(weight), rank + 2 * size, -1))
            steps, b, c = jnp.split(selected, (rank, rank + size), axis=-1)
            steps = jnp.einsum("tnr,nwr->tnw", steps, dt.reshape(len(dt), -1, rank))
        return steps.reshape(mixed.shape), b, c

    def _scan(
        self, mixed: jax.Array, b: jax.Array, c: jax.Array, dt: jax.Array, vectors: jax.Array, rows: StateRows
    ) -> tuple[jax.Array, jax.Array]:
        """Return the outputs of the heads' recurrences, f32[T, C], and the vectors f32[R, C, state_size] after them.

        A row of the vectors is seen as a row for each head, so that no head's part of them is copied.
        """
        heads, shape = b.shape[1], vectors.shape
        log_a = self.log_a[...].reshape(heads, -1, shape[-1])
        vectors, outputs = vectors.reshape(shape[0] * heads, -1, shape[-1]), []
        parts = (jnp.split(each, heads, axis=1) for each in (mixed, dt))
        for head, (u, steps) in enumerate(zip(*parts, strict=True)):
            own = rows.at(lambda row, head=head: row * heads + head)
            o, vectors = selective_scan(u, b[:, head], c[:, head], steps, -jnp.exp(log_a[head]), vectors, own)
            outputs.append(o)
        return jnp.concatenate(outputs, axis=1), vectors.reshape(shape)
