"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) with the frequency scalings checkpoints use.

The rotation pairs element i with element i + H/2, as Hugging Face checkpoints expect. Frequencies are worked out on
the host in float64; angles and the rotation itself are float32. Knows nothing of layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from models.config.rope import RopeScaling, rope_frequencies


def rope_table(
    positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of positions i32[T], each f32[T, H/2]."""
    freqs = jnp.asarray(rope_frequencies(head_dim, theta, scaling), jnp.float32)
    angles = positions.astype(jnp.float32)[:, None] * freqs[None, :]
    scale = scaling.attention_factor if scaling is not None else 1.0
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x[T, heads, H] by the table of its rows; computed in float32, returned in x's dtype."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
