"""A gated delta net (Yang et al. 2024, arXiv:2412.06464) instead of attention, as in Qwen3-Next, or Kimi's, in which
each element of a key decays by itself (Kimi Team 2025, arXiv:2510.26692).

Queries, keys and values pass a short convolution; a matrix for each head then stores values by their keys, decays,
and is read by queries. So a sequence has a state of a fixed size, however long it is. The recurrence is computed in
pallas_kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.state import GatedDelta
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.base.activations import ACTIVATIONS, SILU
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.states.inputs import state_input
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of
from jaxengine.pallas_kernels.state.conv import causal_conv
from jaxengine.pallas_kernels.state.delta import gated_delta_rule

L2_EPS = 1e-6


class DeltaNames(NamedTuple):
    """Checkpoint names of a delta net's modules besides its inputs.

    Attributes:
      convs: the convolution, or the convolutions of q, k and v.
      norm, out: the norm and the projection of the state's output.
      decay, gate: the two projections of decays, and of gates, if these have a rank.
    """

    convs: tuple[str, ...] = ("conv1d",)
    norm: str = "norm"
    out: str = "out_proj"
    decay: tuple[str, str] = ("f_a_proj", "f_b_proj")
    gate: tuple[str, str] = ("g_a_proj", "g_b_proj")


QWEN_NAMES = DeltaNames()
# Names in checkpoints with separate modules of q, k and v.
APART = DeltaNames(convs=("q_conv1d", "k_conv1d", "v_conv1d"), norm="o_norm", out="o_proj")
# Ends of the names of their convolutions, and of the one that transformers 5 has in memory instead.
CONVS = tuple(f".{name}.weight" for name in APART.convs)
JOINED = {f".{name}.weight": CONVS for name in QWEN_NAMES.convs}


def l2_normalized(x: jax.Array) -> jax.Array:
    """Return x / sqrt(|x|^2 + L2_EPS) over the last axis, as float32."""
    y = x.astype(jnp.float32)
    return y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + L2_EPS)


class GatedDeltaNet(nnx.Module):
    """Gated delta net: x -> out(norm(o) * silu(z)), where o is read by queries from the state. GatedDelta has the
    variants. Its `ngrams` are another module's.

    Heads are split over devices, each head of keys together with the heads of values that it serves. inputs: the
    checkpoint modules of q, k, v, z, beta and decay; if these have a rank, without decay and, unless gates are whole,
    without z. They form one product, or two if beta and decay are stored in another format: a checkpoint that quantises
    the others may leave them plain. names: names of the other modules within `source`.
    """

    def __init__(
        self,
        state: GatedDelta,
        hidden_size: int,
        *,
        eps: float,
        source: str,
        build: Build,
        inputs: Sequence[Source],
        names: DeltaNames = QWEN_NAMES,
    ):
        devices, per_key = build.mesh.num_shards("heads"), state.num_v_heads // state.num_k_heads
        self.state = state
        values, decays = per_key * state.v_head_dim, per_key * (state.k_head_dim if state.by_element else 1)
        groups = (state.k_head_dim, state.k_head_dim, values, values, per_key, decays)
        if state.rank is not None:
            groups = (*groups[: 4 if state.whole_gates else 3], per_key)
        inputs = [part._replace(group=group) for part, group in zip(inputs, groups, strict=True)]
        self.ends = tuple(np.cumsum([part.rows // devices for part in inputs]).tolist())
        self.num_k_heads, self.num_v_heads = state.num_k_heads // devices, state.num_v_heads // devices
        num_joined = len(inputs) if build.stores_alike(inputs) else len(inputs) - (2 if state.rank is None else 1)
        joined, apart = inputs[:num_joined], inputs[num_joined:]
        self.inputs = Linear(hidden_size, joined, axes=("embed", "heads"), build=build)
        self.gates = Linear(hidden_size, apart, axes=("embed", "heads"), build=build) if apart else None
        num_decays = decays * state.num_k_heads
        sizes = {"decay": num_decays} if state.rank else {}
        if state.rank and not state.whole_gates:
            sizes["gate"] = state.value_size
        down = [Source(f"{source}.{getattr(names, kind)[0]}", state.rank or 0) for kind in sizes]
        self.down = Linear(hidden_size, down, axes=("embed", "latent"), build=build) if sizes else None
        ups = {kind: (Source(f"{source}.{getattr(names, kind)[1]}", size),) for kind, size in sizes.items()}
        axes = "latent", "heads"
        self.ups = nnx.List([Linear(state.rank or 0, up, axes=axes, build=build) for up in ups.values()])
        sizes = state.key_size, state.key_size, state.value_size
        convolved = [Source(f"{source}.{name}.weight", size) for name, size in zip(names.convs, sizes, strict=False)]
        convolved = parts_of(convolved[0].name, *sizes) if len(convolved) == 1 else tuple(convolved)
        convolved = tuple(part._replace(group=group) for part, group in zip(convolved, groups, strict=False))
        channels = sum(part.rows for part in convolved)
        taps = ParamDecl(("heads", None), convolved, init_std=0.3)
        self.conv = declare((channels, state.conv_kernel), build.dtype, taps)

        def of_heads(name: str, count: int) -> nnx.Param:
            heads = Source(f"{source}.{name}", count, group=count // state.num_k_heads)
            return declare((count,), jnp.float32, ParamDecl(("heads",), (heads,), init_std=0.5))

        self.log_a, self.decay_bias = of_heads("A_log", state.num_v_heads), of_heads("dt_bias", num_decays)
        self.norm = RMSNorm(state.v_head_dim, eps, source=f"{source}.{names.norm}", build=build)
        out = (Source(f"{source}.{names.out}", hidden_size),)
        self.out = Linear(state.value_size, out, axes=("heads", "embed"), build=build)

    def __call__(
        self, x: jax.Array, states: tuple[jax.Array, jax.Array], rows: StateRows, step: StepInputs
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Map x[T, D] to ([T, D], the states after this step's tokens): projections, convolution, gated delta rule of
        queries and keys of length 1 (queries divided by the root of their size), norm, gate, output projection.

        states: windows of the convolution and matrices, [R, ...] each; GatedDelta.arrays has the shapes of one row.
        rows: those that sequences read and write.
        """
        state, num_tokens, (windows, matrices) = self.state, x.shape[0], states
        with jax.named_scope("inputs"):
            q_end, k_end, *_ = self.ends
            mixed, z, beta, decay = self._project(x, step)
            mixed, beta, decay = (state_input(self, step, *each) for each in enumerate((mixed, beta, decay)))
        with jax.named_scope("causal_conv"):
            mixed, windows = causal_conv(mixed, self.conv[...], windows, rows)
            q, k, v = jnp.split(ACTIVATIONS[state.activation](mixed), (q_end, k_end), axis=1)
        with jax.named_scope("gates"):
            q, k = (part.reshape(num_tokens, self.num_k_heads, state.k_head_dim) for part in (q, k))
            q, k = l2_normalized(q) * state.k_head_dim**-0.5, l2_normalized(k)
            v = v.reshape(num_tokens, self.num_v_heads, state.v_head_dim)
            beta = jax.nn.sigmoid(beta.astype(jnp.float32)) * state.beta_scale
            decay = self._decays(decay.astype(jnp.float32) + self.decay_bias[...])
        with jax.named_scope("gated_delta_rule"):
            o, matrices = gated_delta_rule(q, k, v, decay, beta, matrices, rows)
        with jax.named_scope("gate"):
            gate = state.gate or ("sigmoid" if state.by_element else SILU)
            o = self.norm(o).reshape(num_tokens, -1) * ACTIVATIONS[gate](z.astype(jnp.float32))
        with jax.named_scope("out_proj"):
            return self.out(o.astype(x.dtype), step.rows), (windows, matrices)

    def _project(self, x: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return (q, k and v side by side, z, beta, the inputs of decays), [T, .] each, of this device's heads."""
        inputs = self.inputs(x, step.rows)
        if self.gates is not None:
            inputs = jnp.concatenate([inputs, self.gates(x, step.rows)], axis=1)
        if self.down is None:
            mixed, z, beta, decay = jnp.split(inputs, self.ends[2:5], axis=1)
            return mixed, z, beta, decay
        mixed, *whole, beta = jnp.split(inputs, self.ends[2:-1], axis=1)
        parts = zip(self.ups, jnp.split(self.down(x, step.rows), len(self.ups), axis=1), strict=True)
        decay, *gates = (up(part, step.rows) for up, part in parts)
        (z,) = (*whole, *gates)
        return mixed, z, beta, decay

    def _decays(self, inputs: jax.Array) -> jax.Array:
        """Return the logarithms of decays, f32[T, N] or [T, N, H], for their inputs f32[T, N] or [T, N * H]:
        -exp(A_log) * softplus(input), or lower_bound * sigmoid(exp(A_log) * input) if the state has a lower bound.
        """
        rate = jnp.exp(self.log_a[...])
        if self.state.by_element:
            inputs, rate = inputs.reshape(*inputs.shape[:1], self.num_v_heads, -1), rate[:, None]
        if self.state.lower_bound is not None:
            return self.state.lower_bound * jax.nn.sigmoid(rate * inputs)
        return -rate * jax.nn.softplus(inputs)
