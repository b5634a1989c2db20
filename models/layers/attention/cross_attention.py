"""Cross-attention of a decoder's tokens to the encoded sound of their sequence.

Keys and values of all layers are made once for a sound and lie in one row of a pool (models/sound). They have no
positions: each token sees all of its sound, wherever it is in its sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.base.section import Given, Note, Section
from jaxengine.models.params.declare import Source

# Tokens of a sequence that meet its sound at once, in steps with prompts. Prompts are short.
_TILE = 8


class StepSounds(NamedTuple):
    """Sounds of a step.

    Attributes:
      pool: [B, 2 * L * S * W], encoded sounds, W the width of this device's heads (jaxengine.models.sound).
      of_row: i32[R], the pool's row of each of the step's rows.
      positions: i32[R], positions of the sound of each row, counted from the first, that are attended to; at least 1.
      cu_q_lens: i32[R + 1], index of the first token of each row.
      num_rows: i32[], rows in use.
    """

    pool: jax.Array
    of_row: jax.Array
    positions: jax.Array
    cu_q_lens: jax.Array
    num_rows: jax.Array


class CrossQueries(Note):
    """Queries [T, N, H] of one layer's cross-attention in one step, recorded if `notes_queries`."""


class CrossAttention(nnx.Module):
    """Cross-attention of tokens to their sequence's sound.

    Args:
      num_positions: S, positions of an encoded sound.
      num_layers: L, layers of the decoder.
      source: prefix of the checkpoint's modules; the projections to keys and values belong to the tower.
      names: of the projections to queries and after attention.
      biases: whether each of the two has a bias.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_positions: int,
        num_layers: int,
        *,
        source: str,
        build: Build,
        names: tuple[str, str] = ("q_proj", "out_proj"),
        biases: tuple[bool, bool] = (True, True),
    ):
        self.head_dim, self.sizes = head_dim, (num_layers, 2, num_positions)
        q = (Source(f"{source}.{names[0]}", hidden_size, group=head_dim),)
        self.q = Linear(hidden_size, q, axes=("embed", "heads"), bias=biases[0], build=build)
        out = (Source(f"{source}.{names[1]}", hidden_size),)
        self.out = Linear(hidden_size, out, axes=("heads", "embed"), bias=biases[1], build=build)

    def queries(self, x: jax.Array, rows: Rows) -> jax.Array:
        """Return the projected queries [T, N, H] of hidden states x [T, D]."""
        return self.q(x, rows).reshape(x.shape[0], -1, self.head_dim)

    def __call__(self, x: jax.Array, rows: Rows, step: StepSounds, layer: jax.Array) -> jax.Array:
        """Return the projected attention output [T, D] of x [T, D] over the sounds in `step`. layer: i32[], this
        layer's index in the decoder. Tokens of no row get the bias of the output projection alone, or zeros without
        one.
        """
        q = self.queries(x, rows)
        step = step._replace(pool=step.pool.reshape(len(step.pool), *self.sizes, *q.shape[1:]))
        with jax.named_scope("cross_attend"):
            o = cross_attend(q, step, layer)
        return self.out(o.reshape(x.shape[0], -1), rows)


class _WithSounds(nnx.Module):
    """CrossAttention of one layer together with the step's sounds.

    Attributes:
      notes_queries: whether a call also sets the attribute `noted` to the CrossQueries of its tokens.
    """

    notes_queries = False

    def __init__(self, module: CrossAttention, step: StepSounds, layer: int):
        self.module = module
        for name, value in step._asdict().items():
            setattr(self, name, Given(value))
        self.layer = Given(jnp.int32(layer))  # an array: equal layers share a trace

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        step = StepSounds(*(getattr(self, name)[...] for name in StepSounds._fields))
        if self.notes_queries:
            self.noted = CrossQueries(self.module.queries(x, rows))
        return self.module(x, rows, step, self.layer[...])


@dataclass(frozen=True)
class Sounds(Section):
    """Section that passes the step's sounds to each layer's CrossAttention, its attribute `cross`. It is created and
    used within one trace.
    """

    step: StepSounds

    def tapped(self, layer: int, module: nnx.Module) -> nnx.Module:
        """Return a copy of `module` whose `cross` is its CrossAttention together with the step's sounds."""
        copied: Any = nnx.merge(*nnx.split(module))
        copied.cross = _WithSounds(copied.cross, self.step, layer)
        return copied


def cross_attend(q: jax.Array, step: StepSounds, layer: jax.Array) -> jax.Array:
    """Return softmax(q k^T / sqrt(H)) v of each token over the first `positions` of the sound of its row, [T, N, H];
    zeros for tokens of no row.

    q: [T, N, H]. step: sounds of the step, with the pool as [B, L, 2, S, N, H]. layer: i32[], the index of the
    decoder's layer.
    """
    num_tokens, tile = q.shape[0], 1 if q.shape[0] == len(step.of_row) else _TILE
    lengths = jnp.where(jnp.arange(len(step.of_row)) < step.num_rows, jnp.diff(step.cu_q_lens), 0)
    tiles = -(-lengths // tile)
    ends = jnp.cumsum(tiles)
    queries = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def attend(number: jax.Array, o: jax.Array) -> jax.Array:
        row = jnp.searchsorted(ends, number, side="right")
        start = step.cu_q_lens[row] + (number - ends[row] + tiles[row]) * tile
        where = (step.of_row[row], layer, 0, 0, 0, 0)
        keys, values = lax.dynamic_slice(step.pool, where, (1, 1, *step.pool.shape[2:]))[0, 0]
        query = lax.dynamic_slice_in_dim(queries, start, tile)
        scores = jnp.einsum("tnh,snh->nts", query, keys, preferred_element_type=jnp.float32) * q.shape[2] ** -0.5
        is_heard = jnp.arange(scores.shape[-1]) < step.positions[row]
        weights = jax.nn.softmax(jnp.where(is_heard, scores, -jnp.inf), axis=-1).astype(values.dtype)
        own = jnp.einsum("nts,snh->tnh", weights, values, preferred_element_type=jnp.float32).astype(q.dtype)
        is_own = start + jnp.arange(tile) < step.cu_q_lens[row + 1]
        kept = lax.dynamic_slice_in_dim(o, start, tile)
        return lax.dynamic_update_slice_in_dim(o, jnp.where(is_own[:, None, None], own, kept), start, 0)

    o = lax.fori_loop(0, cast(Any, ends[-1]), attend, jnp.zeros_like(queries))
    return o[:num_tokens]
