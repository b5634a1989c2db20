"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) with the frequency scalings checkpoints use.

The rotation pairs element i with element i + R/2 of the first R elements of a head, as most Hugging Face checkpoints
expect, or neighbours; R is the head dimension or less. Frequencies are computed on the host in float64; angles and
the rotation itself are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxengine.models.config.rope import Rope
from jaxengine.models.layers.base.step_inputs import StepContext, StepInput


def rope_table(positions: jax.Array, rope: Rope, factors: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin of the rotation angles, each f32[T, R/2], multiplied by the scaling's attention factor, if
    any.

    positions: i32[T]; or one for each section of a rope with sections, i32[sections, T]. factors: f32[R / 2] of the
    frequencies; None for none. Raises ModelConfigError if the scaling does not have one factor for each pair.
    """
    freqs = jnp.asarray(rope.frequencies(), jnp.float32)
    freqs = freqs if factors is None else freqs * factors
    if positions.ndim == 2:
        turns = positions.astype(jnp.float32).T[:, rope.section_of_pairs()]
    else:
        turns = positions.astype(jnp.float32)[:, None]
    angles = turns * freqs[None, :]
    scale = rope.scaling.attention_factor if rope.scaling is not None else 1.0
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Return x[T, heads, H] with its first R elements rotated and the others unchanged; computed in float32, in x's
    dtype.

    cos, sin: [T, R / 2], `rope_table` of the rows' positions. interleaved: whether neighbours are pairs; otherwise
    elements i and i + R / 2 are. In the result the first elements of all pairs come before the second ones: products of
    q and k do not depend on it.
    """
    half = cos.shape[-1]
    low, high, kept = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    if interleaved:
        pairs = jnp.concatenate([low, high], axis=-1)
        low, high = pairs[..., ::2], pairs[..., 1::2]
    cos, sin = cos[:, None, :], sin[:, None, :]
    parts = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate([*parts, kept] if kept.shape[-1] else parts, axis=-1).astype(x.dtype)


def _of_step(rope: Rope, step: StepContext) -> tuple[jax.Array, jax.Array]:
    """Return `rope_table` of the positions of a step's tokens.

    If the rope has sections and the batch has the section "mrope_positions", the positions are those, in time, height
    and width, i32[3, T], or i32[T] if the three are equal, after the plain ones for a rope with four sections.
    Otherwise they are the plain positions.
    """
    positions = step.batch.sections.get("mrope_positions") if rope.sections else None
    if positions is not None and positions.ndim == 2 and len(rope.sections) == 4:
        positions = jnp.concatenate([step.batch.positions[None], positions])
    return rope_table(step.batch.positions if positions is None else positions, rope)


ROPE = StepInput(
    "rope_table", lambda attention, build: None if attention.learned_positions else attention.rope, _of_step
)
