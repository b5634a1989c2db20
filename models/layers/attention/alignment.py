"""Alignment of a transcript's tokens with its sound, from the cross-attention of some heads (Radford et al. 2022,
arXiv:2212.04356): what these heads attend to moves through the sound as a text is read.

Further shape letters: A alignment heads, S positions of a sound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.layers.attention.cross_attention import CrossQueries, Sounds
from jaxengine.models.layers.base.section import notes_of
from jaxengine.sharding.collectives import shard_index, sum_same_tokens


class Span(NamedTuple):
    """Part of a sequence, and of its sound, that is aligned.

    Attributes:
      first, end: i32[], the aligned tokens are those from `first` to `end` - 1.
      positions: i32[], number of the sound's positions, counted from its start.
    """

    first: jax.Array
    end: jax.Array
    positions: jax.Array


@dataclass(frozen=True)
class NotedSounds(Sounds):
    """Section of sounds that also records the queries of cross-attention in the layers of `heads`. It is created and
    read within one trace.

    Attributes:
      heads: (layer, head) of each of the A alignment heads.
    """

    heads: Sequence[tuple[int, int]]
    _queries: dict[int, jax.Array] = field(default_factory=dict)

    def tapped(self, layer: int, module: nnx.Module) -> nnx.Module:
        """Return a copy of `module` with the step's sounds for its cross-attention, which records its queries if layer
        number `layer` has alignment heads.
        """
        copied: Any = super().tapped(layer, module)
        copied.cross.notes_queries = any(layer == own for own, _ in self.heads)
        return copied

    def observe(self, count: int, x: jax.Array, notes: nnx.State | None = None) -> None:
        """Store the queries among `notes`, if any, as those of layer number count - 1. x: not used."""
        for _, queries in notes_of(notes, CrossQueries):
            self._queries[count - 1] = queries[...]

    def aligned(self, row: jax.Array, num_positions: int, num_layers: int, span: Span, width: int) -> jax.Array:
        """Return f32[T, S]: the mean over the alignment heads of their standardised, smoothed attention weights. Only
        rows of tokens in `span` are meaningful.

        row: i32[], the sound's row in the pool. num_positions: S. num_layers: the decoder's number of layers. width:
        entries of the median's window in `smoothed`. The layers must have run within this trace, so that `observe` has
        recorded their queries. Devices that split the heads add up their shares, so that all have the same result.
        """
        num_tokens, num_heads, head_dim = next(iter(self._queries.values())).shape
        # Devices that split the heads compute all, and add up their own.
        own = jnp.asarray([head for _, head in self.heads]) - shard_index("heads") * num_heads
        sound = self.step.pool[row].reshape(num_layers, 2, num_positions, num_heads, head_dim)
        numbers = jnp.clip(own, 0, num_heads - 1)
        queries = [self._queries[layer][:, numbers[index]] for index, (layer, _) in enumerate(self.heads)]
        keys = [sound[layer, 0, :, numbers[index]] for index, (layer, _) in enumerate(self.heads)]

        def add(total: jax.Array, head: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            """Return (the sum over heads with this head's smoothed weights added if the device has the head, None)."""
            query, key, is_own = head
            scores = jnp.einsum("th,sh->ts", query, key, preferred_element_type=jnp.float32) * head_dim**-0.5
            found = smoothed(standardised(jax.nn.softmax(scores, axis=-1), span), span.positions, width)
            return jnp.where(is_own, total + found, total), None

        is_own = (own >= 0) & (own < num_heads)
        nothing = jnp.zeros((num_tokens, num_positions), jnp.float32)
        total, _ = lax.scan(add, nothing, (jnp.stack(queries), jnp.stack(keys), is_own))
        return sum_same_tokens(total, "heads") / len(self.heads)


def standardised(weights: jax.Array, span: Span) -> jax.Array:
    """Return `weights` f32[T, S] shifted and scaled to mean 0 and standard deviation 1 over the tokens of `span`,
    separately for each of the S positions. The result is 0 at positions where the weights do not differ, and for tokens
    outside `span`.
    """
    token = jnp.arange(len(weights))[:, None]
    is_token, count = (span.first <= token) & (token < span.end), span.end - span.first
    off = weights - jnp.sum(jnp.where(is_token, weights, 0), axis=0) / count
    spread = jnp.sqrt(jnp.sum(jnp.where(is_token, off * off, 0), axis=0) / count)
    return jnp.where(is_token, off, 0) / jnp.where(spread > 0, spread, 1)


def smoothed(weights: jax.Array, positions: jax.Array, width: int) -> jax.Array:
    """Return f32[T, S] in which each of the first `positions` entries of a row of `weights` f32[T, S] is replaced by
    the median of the `width` entries (an odd number) around it; beyond both ends the row is mirrored. The entries after
    them are meaningless.

    Returns `weights` unchanged if `positions` is at most width // 2.
    """
    reach, num_positions = width // 2, weights.shape[1]
    at = jnp.abs(jnp.arange(-reach, num_positions + reach))
    at = jnp.clip(jnp.where(at < positions, at, 2 * (positions - 1) - at), 0, num_positions - 1)
    mirrored = weights[:, at]
    near = [mirrored[:, first : first + num_positions] for first in range(width)]
    for number in range(width):  # odd-even transposition: XLA sorts short rows slowly
        for left in range(number % 2, width - 1, 2):
            low, high = jnp.minimum(near[left], near[left + 1]), jnp.maximum(near[left], near[left + 1])
            near[left], near[left + 1] = low, high
    return jnp.where(positions > reach, near[reach], weights)
