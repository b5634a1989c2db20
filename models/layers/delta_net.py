"""A gated delta net (Yang et al. 2024, arXiv:2412.06464), as Qwen3-Next uses it instead of attention.

Queries, keys and values pass a short convolution; a matrix for each head then stores values by their keys, decays,
and is read by queries. So a sequence has a state of a fixed size, however long it is. The recurrence is computed in
pallas_kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.state import GatedDelta
from jaxengine.models.layers.attention import StepInputs
from jaxengine.models.layers.linear import Linear
from jaxengine.models.layers.norm import RMSNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of
from jaxengine.pallas_kernels.state.conv import causal_conv
from jaxengine.pallas_kernels.state.delta import gated_delta_rule

L2_EPS = 1e-6


def l2_normalized(x: jax.Array) -> jax.Array:
    """Compute x / sqrt(|x|^2 + L2_EPS) over the last axis, in float32."""
    y = x.astype(jnp.float32)
    return y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + L2_EPS)


class GatedDeltaNet(nnx.Module):
    """Gated delta net: x -> out(norm(o) * silu(z)), where o is read by queries from the state.

    Heads are split over devices, each head of keys together with the heads of values that it serves.

    inputs: the checkpoint modules of q, k, v, z, beta and decay. They form one product, or two where the last two are
      stored in another format: a checkpoint that quantises the others may leave them plain.
    """

    def __init__(
        self, state: GatedDelta, hidden_size: int, *, eps: float, source: str, build: Build, inputs: Sequence[Source]
    ):
        devices, per_key = build.mesh.num_shards("heads"), state.num_v_heads // state.num_k_heads
        self.state = state
        values = per_key * state.v_head_dim
        groups = (state.k_head_dim, state.k_head_dim, values, values, per_key, per_key)
        inputs = [part._replace(group=group) for part, group in zip(inputs, groups, strict=True)]
        self.ends = tuple(np.cumsum([part.rows // devices for part in inputs]).tolist())
        self.num_k_heads, self.num_v_heads = state.num_k_heads // devices, state.num_v_heads // devices
        num_joined = len(inputs) if build.stores_alike(inputs) else len(inputs) - 2
        joined, apart = inputs[:num_joined], inputs[num_joined:]
        self.inputs = Linear(hidden_size, joined, axes=("embed", "heads"), build=build)
        self.gates = Linear(hidden_size, apart, axes=("embed", "heads"), build=build) if apart else None
        convolved = parts_of(f"{source}.conv1d.weight", state.key_size, state.key_size, state.value_size)
        convolved = tuple(part._replace(group=group) for part, group in zip(convolved, groups, strict=False))
        channels = sum(part.rows for part in convolved)
        taps = ParamDecl(("heads", None), convolved, init_std=0.3)
        self.conv = declare((channels, state.conv_kernel), build.dtype, taps)

        def of_heads(name: str) -> nnx.Param:
            heads = Source(f"{source}.{name}", state.num_v_heads, group=per_key)
            return declare((state.num_v_heads,), jnp.float32, ParamDecl(("heads",), (heads,), init_std=0.5))

        self.log_a, self.decay_bias = of_heads("A_log"), of_heads("dt_bias")
        self.norm = RMSNorm(state.v_head_dim, eps, source=f"{source}.norm", build=build)
        out = (Source(f"{source}.out_proj", hidden_size),)
        self.out = Linear(state.value_size, out, axes=("heads", "embed"), build=build)

    def __call__(
        self, x: jax.Array, states: tuple[jax.Array, jax.Array], rows: StateRows, step: StepInputs
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Map x[T, D] to ([T, D], the states after this step's tokens).

        states: windows and matrices, [R, ...] as GatedDelta.arrays has one row. rows: which each sequence reads and
        writes; the others stay.
        """
        state, num_tokens, (windows, matrices) = self.state, x.shape[0], states
        with jax.named_scope("inputs"):
            q_end, k_end, v_end, z_end, beta_end, _ = self.ends
            inputs = self.inputs(x, step.rows)
            if self.gates is not None:
                inputs = jnp.concatenate([inputs, self.gates(x, step.rows)], axis=1)
            mixed, z, beta, decay = jnp.split(inputs, (v_end, z_end, beta_end), axis=1)
        with jax.named_scope("causal_conv"):
            mixed, windows = causal_conv(mixed, self.conv[...], windows, rows)
            q, k, v = jnp.split(jax.nn.silu(mixed), (q_end, k_end), axis=1)
        with jax.named_scope("gates"):
            q, k = (part.reshape(num_tokens, self.num_k_heads, state.k_head_dim) for part in (q, k))
            q, k = l2_normalized(q) * state.k_head_dim**-0.5, l2_normalized(k)
            v = v.reshape(num_tokens, self.num_v_heads, state.v_head_dim)
            beta = jax.nn.sigmoid(beta.astype(jnp.float32))
            decay = -jnp.exp(self.log_a[...]) * jax.nn.softplus(decay.astype(jnp.float32) + self.decay_bias[...])
        with jax.named_scope("gated_delta_rule"):
            o, matrices = gated_delta_rule(q, k, v, decay, beta, matrices, rows)
        with jax.named_scope("gate"):
            o = self.norm(o).reshape(num_tokens, -1) * jax.nn.silu(z.astype(jnp.float32))
        with jax.named_scope("out_proj"):
            return self.out(o.astype(x.dtype), step.rows), (windows, matrices)
