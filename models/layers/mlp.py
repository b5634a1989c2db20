"""The feed-forward part of a layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers.linear import Linear
from models.weights.declare import Source


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, ffn_size: int, *, source: str, bias: bool, dtype: Any):
        self.gate_up = Linear(
            hidden_size,
            (Source(f"{source}.gate_proj", ffn_size), Source(f"{source}.up_proj", ffn_size)),
            axes=("embed", "ffn"),
            bias=bias,
            dtype=dtype,
        )
        down = (Source(f"{source}.down_proj", hidden_size),)
        self.down = Linear(ffn_size, down, axes=("ffn", "embed"), bias=bias, dtype=dtype)

    def __call__(self, x: jax.Array, is_token: jax.Array | None = None) -> jax.Array:
        """[T, D] -> [T, D]; padding (is_token False) costs and gets what tokens do."""
        with jax.named_scope("gate_up"):
            gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
            inner = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        with jax.named_scope("down"):
            return self.down(inner.astype(x.dtype))
