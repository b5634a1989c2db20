"""Lightning attention (Qin et al. 2024, arXiv:2401.04658), as in MiniMax-01: linear attention whose past decays by a
constant for each head.

A matrix for each head stores values by their keys and is read by queries. So a sequence has a state of a fixed size,
however long it is. The recurrence is computed in pallas_kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.state import LinearState
from jaxengine.models.layers.attention.attention import StepInputs, own_slopes
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import HeadsRMSNorm, RMSNorm
from jaxengine.models.layers.base.rope import apply_rope
from jaxengine.models.layers.states.inputs import state_input
from jaxengine.models.layers.states.mamba2 import GroupsRMSNorm
from jaxengine.models.params.declare import Source, parts_of
from jaxengine.pallas_kernels.state.space import state_space

NORM_EPS = 1e-6


class LightningAttention(nnx.Module):
    """Lightning attention: x -> out(norm(o) * sigmoid(z)), where z is projected from x and o is read by queries from
    the state. Queries, keys and values pass the state's activation. Heads are split over devices.

    slopes: for all heads, the negated logarithm of the decay of one token.
    """

    def __init__(self, state: LinearState, hidden_size: int, *, slopes: tuple[float, ...], source: str, build: Build):
        size, inner = state.head_dim, state.inner_size
        self.size, self.slopes, self.num_heads = size, slopes, state.num_heads // build.mesh.num_shards("heads")
        self.activation = ACTIVATIONS[state.activation]
        turns = {"tensor_rows": 3 * inner, "stride": 3 * size, "run": size, "group": size}
        qkv = [Source(f"{source}.qkv_proj", inner, first=part * size, **turns) for part in range(3)]
        gate = Source(f"{source}.output_gate", inner, group=size)
        self.inputs = Linear(hidden_size, (*qkv, gate), axes=("embed", "heads"), build=build)
        self.norm = HeadsRMSNorm(state.num_heads, size, NORM_EPS, source=f"{source}.norm", build=build)
        out = (Source(f"{source}.out_proj", hidden_size),)
        self.out = Linear(inner, out, axes=("heads", "embed"), build=build)

    def __call__(
        self, x: jax.Array, states: tuple[jax.Array], rows: StateRows, step: StepInputs
    ) -> tuple[jax.Array, tuple[jax.Array]]:
        """Map x[T, D] to ([T, D], the states after this step's tokens): linear attention of activated q, k and v with a
        constant decay of each head, normed, times a sigmoid gate and projected.

        states: the matrices alone, [R, ...]; LinearState.arrays has the shape of one row. rows: those that
        sequences read and write.
        """
        shape = x.shape[0], self.num_heads, self.size
        with jax.named_scope("inputs"):
            parts = jnp.split(self.inputs(x, step.rows).astype(jnp.float32), 4, axis=1)
            *qkv, gate = (part.reshape(shape) for part in parts)
            q, k, v = map(self.activation, qkv)
            k, v = (state_input(self, step, *each) for each in enumerate((k, v)))
        with jax.named_scope("linear_attention"):
            decay = jnp.broadcast_to(-own_slopes(self.slopes, self.num_heads), shape[:2])
            o, matrices = state_space(v, k, q, decay, jnp.ones_like(decay), states[0], rows)
        with jax.named_scope("gate"):
            o = self.norm(o) * jax.nn.sigmoid(gate)
        with jax.named_scope("out_proj"):
            return self.out(o.reshape(x.shape[0], -1).astype(x.dtype), step.rows), (matrices,)


class RotatedLightningAttention(nnx.Module):
    """Lightning attention of Ling 2.5: x -> o_proj(norm(o) * sigmoid(z)), where z is projected from x and o is read by
    queries from the state. Queries, keys and values pass the state's activation; if the state says so, queries and keys
    are then normed. Both have rope; queries are divided by the root of their size. The norm is over groups of heads.
    Heads are split over devices.

    slopes: for all heads, the negated logarithm of the decay of one token. eps: epsilon of all norms.
    """

    def __init__(
        self,
        state: LinearState,
        hidden_size: int,
        *,
        slopes: tuple[float, ...],
        eps: float,
        source: str,
        build: Build,
    ):
        size, inner = state.head_dim, state.inner_size
        self.size, self.slopes, self.num_heads = size, slopes, state.num_heads // build.mesh.num_shards("heads")
        self.activation = ACTIVATIONS[state.activation]
        qkv = tuple(part._replace(group=size) for part in parts_of(f"{source}.query_key_value", inner, inner, inner))
        gate = (Source(f"{source}.g_proj", inner, group=size),)
        self.qkv = Linear(hidden_size, qkv, axes=("embed", "heads"), build=build)
        self.gate = Linear(hidden_size, gate, axes=("embed", "heads"), build=build)
        names = ("query_layernorm", "key_layernorm") if state.qk_norm else ()
        self.qk_norms = nnx.List([RMSNorm(size, eps, source=f"{source}.{name}", build=build) for name in names])
        self.norm = GroupsRMSNorm(state, eps, source=f"{source}.g_norm", build=build)
        out = (Source(f"{source}.o_proj", hidden_size),)
        self.out = Linear(inner, out, axes=("heads", "embed"), build=build)

    def __call__(
        self, x: jax.Array, states: tuple[jax.Array], rows: StateRows, step: StepInputs
    ) -> tuple[jax.Array, tuple[jax.Array]]:
        """Map x[T, D] to ([T, D], the states after this step's tokens): linear attention with a constant decay of each
        head, of activated q, k and v, the former two normed if the layer has such norms and rotated if the step has
        rope, q then divided by the root of its size; its norm, times a sigmoid gate, projected.

        states: the matrices alone, [R, ...]; LinearState.arrays has the shape of one row. rows: those that
        sequences read and write.
        """
        shape = x.shape[0], self.num_heads, self.size
        with jax.named_scope("inputs"):
            joined = self.qkv(x, step.rows).astype(jnp.float32)
            parts = jnp.split(self.activation(joined), 3, axis=1)
            q, k, v = (part.reshape(shape) for part in parts)
            if self.qk_norms:
                q, k = self.qk_norms[0](q), self.qk_norms[1](k)
            if step.rope is not None:
                q, k = (apply_rope(part, *step.rope) for part in (q, k))
            k, v = (state_input(self, step, *each) for each in enumerate((k, v)))
        with jax.named_scope("linear_attention"):
            decay = jnp.broadcast_to(-own_slopes(self.slopes, self.num_heads), shape[:2])
            o, matrices = state_space(v, k, q * self.size**-0.5, decay, jnp.ones_like(decay), states[0], rows)
        with jax.named_scope("gate"):
            gate = jax.nn.sigmoid(self.gate(x, step.rows).astype(jnp.float32))
            o = self.norm(o.reshape(x.shape[0], -1)) * gate
        with jax.named_scope("out_proj"):
            return self.out(o.astype(x.dtype), step.rows), (matrices,)


def lightning_slopes(num_heads: int, layer: int, num_layers: int) -> tuple[float, ...]:
    """Return the slopes of a layer's heads.

    Head h has 2 ** (-8 (h + 1) / num_heads), multiplied by a share that falls linearly from 1 in layer 0 to nearly 0 in
    the last layer.
    """
    share = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return tuple(2.0 ** (-8.0 * (head + 1) / num_heads) * share for head in range(num_heads))
