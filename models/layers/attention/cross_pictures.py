"""Cross-attention of a decoder's tokens to the images of their sequence (Llama 3.2 Vision).

Keys and values of all layers are made once for an image and lie in one row of a pool (models/vision/mllama.py). A token
attends to the used tiles of the images that its place in the prompt gives it; a token before the first image to all
tiles of all images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.base.section import Given, Section
from jaxengine.models.params.declare import Source

# Tokens of a sequence that meet its images at once, in steps with prompts.
_TILE = 8
# What a token attends to: StepPictures.sees.
NOTHING, BEFORE, PICTURES = 0, 1, 2


class StepPictures(NamedTuple):
    """Images of a step, of which a row has at most M.

    Attributes:
      pool: [B, 2 * L * S * W], keys and values of images, W the width of this device's heads.
      counts: i32[R], images of each of the step's rows.
      rows, begins, ends, positions: i32[R, M], the pool's row of each image, the first token of the sequence that
        attends to it and the one after the last, and its positions in use.
      sees: i32[T], what each token attends to: NOTHING for a sequence without images, BEFORE for a token before the
        first, else PICTURES.
      is_needed: bool[], whether any token attends to images, of this replica or of another that it exchanges with.
      places: i32[T], positions of the tokens.
      cu_q_lens: i32[R + 1], index of the first token of each row.
      num_rows: i32[], rows in use.
    """

    pool: jax.Array
    counts: jax.Array
    rows: jax.Array
    begins: jax.Array
    ends: jax.Array
    positions: jax.Array
    sees: jax.Array
    is_needed: jax.Array
    places: jax.Array
    cu_q_lens: jax.Array
    num_rows: jax.Array


class PictureAttention(nnx.Module):
    """Cross-attention of tokens to their sequence's images, with an RMS norm of each head of queries.

    Args:
      sizes: (L, 2, S), the layers with cross-attention and the positions of an image.
      num_heads: of queries, each group of which shares a head of keys.
      source: prefix of the checkpoint's modules; the projections to keys and values belong to the tower.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        sizes: tuple[int, int, int],
        *,
        eps: float,
        source: str,
        build: Build,
    ):
        self.head_dim, self.sizes = head_dim, sizes
        q = (Source(f"{source}.q_proj", num_heads * head_dim, group=head_dim),)
        self.q = Linear(hidden_size, q, axes=("embed", "heads"), build=build)
        out = (Source(f"{source}.o_proj", hidden_size),)
        self.out = Linear(num_heads * head_dim, out, axes=("heads", "embed"), build=build)
        self.norm = RMSNorm(head_dim, eps, source=f"{source}.q_norm", build=build)

    def __call__(self, x: jax.Array, rows: Rows, step: StepPictures, layer: jax.Array) -> jax.Array:
        """Return the projected attention output [T, D] of x [T, D], with normed queries, over the images in `step`;
        zeros for tokens without any. layer: i32[], this layer's index among those with cross-attention.
        """
        q = self.norm(self.q(x, rows).reshape(len(x), -1, self.head_dim))
        pool = step.pool.reshape(len(step.pool), *self.sizes, -1, self.head_dim)
        with jax.named_scope("cross_attend"):
            o = cross_attend(q, step._replace(pool=pool), layer)
        return self.out(o.reshape(len(x), -1), rows)


class WithPictures(nnx.Module):
    """PictureAttention of one layer together with the step's images."""

    is_needed: Any

    def __init__(self, module: PictureAttention, step: StepPictures, layer: int):
        self.module = module
        for name, value in step._asdict().items():
            setattr(self, name, Given(value))
        self.layer = Given(jnp.int32(layer))  # an array: equal layers share a trace

    def __call__(self, x: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """Return (the projected attention output [T, D], StepPictures.sees) of x [T, D]."""
        step = StepPictures(*(getattr(self, name)[...] for name in StepPictures._fields))
        return self.module(x, rows, step, self.layer[...]), step.sees


@dataclass(frozen=True)
class CrossPictures(Section):
    """Section that passes the step's images to each layer's PictureAttention, its attribute `cross`. It is created and
    used within one trace. layers: numbers of the layers with cross-attention.
    """

    step: StepPictures
    layers: Sequence[int]

    def tapped(self, layer: int, module: nnx.Module) -> nnx.Module:
        """Return a copy of `module` whose `cross` is its PictureAttention together with the step's images; `module`
        itself for a layer without cross-attention.
        """
        if layer not in self.layers:
            return module
        copied: Any = nnx.merge(*nnx.split(module))
        copied.cross = WithPictures(copied.cross, self.step, self.layers.index(layer))
        return copied


def what_is_seen(step: StepPictures, token_row: jax.Array, is_token: jax.Array) -> jax.Array:
    """Return StepPictures.sees, i32[T], from the step's other fields: PICTURES for a token within the range of some
    image of its row, else BEFORE if the row has images, else NOTHING. token_row: i32[T], the row of each token.
    is_token: bool[T], False for padding, which sees nothing.
    """
    place, is_one = step.places[:, None], jnp.arange(step.rows.shape[1]) < step.counts[:, None]
    seen = (step.begins[token_row] <= place) & (place < step.ends[token_row]) & is_one[token_row]
    found = jnp.where(seen.any(axis=1), PICTURES, jnp.where(step.counts[token_row] > 0, BEFORE, NOTHING))
    return jnp.where(is_token, found, NOTHING).astype(jnp.int32)


def cross_attend(q: jax.Array, step: StepPictures, layer: jax.Array) -> jax.Array:
    """Return softmax(q k^T / sqrt(H)) v of each token over its images' positions in use, [T, N, H]; for a token before
    the first image over all positions of all of its row's images; zeros for tokens without images.

    q: [T, N, H]. step: images of the step, with the pool as [B, L, 2, S, K, H]. layer: i32[], the layer's index in the
    pool.
    """
    num_tokens, tile = q.shape[0], 1 if q.shape[0] == len(step.counts) else _TILE
    heads, size = step.pool.shape[4], q.shape[2]
    has_any = (jnp.arange(len(step.counts)) < step.num_rows) & (step.counts > 0)
    tiles = -(-jnp.where(has_any, jnp.diff(step.cu_q_lens), 0) // tile)
    ends = jnp.cumsum(tiles)
    queries = jnp.pad(q, ((0, tile), (0, 0), (0, 0))).reshape(num_tokens + tile, heads, -1, size)
    places, sees = (jnp.pad(each, (0, tile)) for each in (step.places, step.sees))

    def attend(number: jax.Array, o: jax.Array) -> jax.Array:
        row = jnp.searchsorted(ends, number, side="right")
        start = step.cu_q_lens[row] + (number - ends[row] + tiles[row]) * tile
        query, place, seen = (lax.dynamic_slice_in_dim(each, start, tile) for each in (queries, places, sees))
        nothing = jnp.full(query.shape[:3], -jnp.inf, jnp.float32)

        def picture(index: jax.Array, running: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            largest, total, out = running
            where = (step.rows[row, index], layer, 0, 0, 0, 0)
            keys, values = lax.dynamic_slice(step.pool, where, (1, 1, *step.pool.shape[2:]))[0, 0]
            scores = jnp.einsum("tkgh,skh->tkgs", query, keys, preferred_element_type=jnp.float32) * size**-0.5
            own = (step.begins[row, index] <= place) & (place < step.ends[row, index])
            used = jnp.arange(len(keys)) < step.positions[row, index]
            visible = (seen == BEFORE)[:, None] | (own[:, None] & used)
            scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
            new = jnp.maximum(largest, scores.max(axis=-1))
            base = jnp.where(new == -jnp.inf, 0.0, new)
            kept, weights = jnp.exp(largest - base), jnp.exp(scores - base[..., None])
            more = jnp.einsum(
                "tkgs,skh->tkgh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
            )
            return new, kept * total + weights.sum(axis=-1), kept[..., None] * out + more

        begin = nothing, jnp.zeros_like(nothing), jnp.zeros(query.shape, jnp.float32)
        _, total, out = lax.fori_loop(0, cast(Any, step.counts[row]), picture, begin)
        own = (out / jnp.where(total > 0, total, 1.0)[..., None]).astype(q.dtype)
        is_own = start + jnp.arange(tile) < step.cu_q_lens[row + 1]
        kept = lax.dynamic_slice_in_dim(o, start, tile)
        return lax.dynamic_update_slice_in_dim(o, jnp.where(is_own[:, None, None, None], own, kept), start, 0)

    o = lax.fori_loop(0, cast(Any, ends[-1]), attend, jnp.zeros_like(queries))
    return o[:num_tokens].reshape(q.shape)
