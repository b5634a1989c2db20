"""Mamba (Gu & Dao 2023, arXiv:2312.00752), instead of attention.

Inputs pass a short convolution; each channel's state of a few elements then decays by the token's time step for this
channel and adds its input. The recurrence is computed in pallas_kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.state import SelectiveScan
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm, rms_normalized
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of
from jaxengine.pallas_kernels.state.conv import causal_conv
from jaxengine.pallas_kernels.state.scan import selective_scan

States = tuple[jax.Array, jax.Array]
SELECTED = ("dt", "b", "c")


class Mamba(nnx.Module):
    """Mamba mixer: x -> out(silu(z) * (o + D * u)). u and z are projected from x; u passes the convolution and SiLU;
    the state stores u, and o is read from it. Channels are split over devices.
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
        """Map x[T, D] to ([T, D], the states after this step's tokens).

        states: the window of the convolution and the vectors, [R, ...] each; SelectiveScan.arrays has the shapes of one
        row. rows: the rows that each sequence reads and writes; all others are unchanged.
        """
        state, (window, vectors) = self.state, states
        with jax.named_scope("inputs"):
            mixed, z = jnp.split(self.inputs(x, step.rows), 2, axis=1)
        with jax.named_scope("causal_conv"):
            mixed, window = causal_conv(mixed, self.taps[...], window, rows)
            mixed = jax.nn.silu(mixed if self.conv_bias is None else mixed + self.conv_bias[...].astype(jnp.float32))
        with jax.named_scope("time_steps"):
            ends = state.time_rank, state.time_rank + state.state_size
            parts = jnp.split(self.select(mixed.astype(x.dtype), step.rows), ends, axis=1)
            dt, b, c = (self._norm(name)(part) for name, part in zip(SELECTED, parts, strict=True))
            dt = jax.nn.softplus(self.dt(dt, step.rows).astype(jnp.float32) + self.dt_bias[...])
        with jax.named_scope("selective_scan"):
            o, vectors = selective_scan(mixed, b, c, dt, -jnp.exp(self.log_a[...]), vectors, rows)
        with jax.named_scope("gate"):
            o = (o + self.skip[...] * mixed) * jax.nn.silu(z.astype(jnp.float32))
        with jax.named_scope("out_proj"):
            return self.out(o.astype(x.dtype), step.rows), (window, vectors)

    def _norm(self, name: str) -> Callable[[jax.Array], jax.Array]:
        """Return the norm of `name`, one of SELECTED: with weights, without, or the identity, depending on
        SelectiveScan.norms.
        """
        if self.state.norms == "plain":
            return lambda part: rms_normalized(part, self.state.eps).astype(part.dtype)
        return self.norms[name] if self.state.norms else lambda part: part
