"""The program that turns patches of pictures into embeddings and leaves them in a pool, and the messages it reads.

One program for each size of a closed set, in patches; pictures of several requests share a call. On a mesh every rank
has a pool and pictures of its own. Its devices either split the tower's weights or, with mm_encoder_tp_mode "data",
each has all of these and encodes pictures of its own; what they made is then gathered once, behind the tower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxengine.models.config.tower import TowerConfig
from jaxengine.scheduler.extensions.pictures import Encode
from jaxengine.sharding.collectives import gather_parts

# The column that says whose a patch is (jaxengine.models.config.tower): numbered within an item, and then within a
# call.
SEGMENT = "segment"
# In the place of a size: the call that puts embeddings into the pool as they came.
PLACE = 0
# Each size is so many times the next smaller one, down to a call that costs little more than reading the weights.
_STEP, _LEAST = 4, 1024


class EncoderInput(NamedTuple):
    """One call's message, for R ranks with n devices each that encode pictures of their own.

    Attributes:
      patches: f32[R * n, P, F]; columns: i32[R * n, C, P], -1 in padding.
      targets: i32[R, n * P / merge], the rank's rows that get the tower's, or the number of its rows for none.
    """

    patches: np.ndarray
    columns: np.ndarray
    targets: np.ndarray


class PlaceInput(NamedTuple):
    """A message of embeddings that came as such, for R ranks: values f32[R, N, E], targets i32[R, N] as above."""

    values: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class EncoderLayout:
    """The sizes of calls, and how pictures are put into one.

    Attributes:
      tower: of the model.
      num_rows: of a rank's pool.
      max_patches: of all pictures that a rank encodes in one call.
      num_ranks: ranks.
      parts: devices of a rank that encode pictures of their own; 1 where they split the tower.
      num_placed: N, rows of a call that puts embeddings into the pool as they came; 0 where none come.
    """

    tower: TowerConfig
    num_rows: int
    max_patches: int
    num_ranks: int = 1
    parts: int = 1
    num_placed: int = 0

    @property
    def programs(self) -> tuple[int, ...]:
        """Sizes, and PLACE where embeddings may come."""
        return (*((PLACE,) if self.num_placed else ()), *self.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Patches of a device in one call, ascending."""
        unit = self.tower.unit
        sizes = {-(-self.max_patches // unit) * unit}
        while (size := min(sizes) // _STEP // unit * unit) >= max(_LEAST, unit):
            sizes.add(size)
        return tuple(sorted(sizes))

    def pack(self, encodes: Sequence[Sequence[Encode]]) -> EncoderInput:
        """The message of one call that encodes each rank's pictures, in the smallest size that holds them.

        encodes: of each rank, none of EMBEDS. A rank's pictures may have at most max_patches patches; StopIteration
        where a device's do not fit into the largest size.
        """
        shares = [share for own in encodes for share in self._shares(own)]
        most = max(sum(each.item.num_patches for each in share) for share in shares)
        size = next(size for size in self.sizes if size >= most)
        tower = self.tower
        patches = np.zeros((len(shares), size, tower.num_features), np.float32)
        columns = np.full((len(shares), len(tower.columns), size), -1, np.int32)
        targets = np.full((len(shares), size // tower.merge), self.num_rows, np.int32)
        for share, own_patches, own_columns, own_targets in zip(shares, patches, columns, targets, strict=True):
            first = num_segments = 0
            for item, rows in share:
                last = first + item.num_patches
                own_patches[first:last] = item.patches
                own_columns[:, first:last] = item.columns
                if SEGMENT in tower.columns:
                    segment = own_columns[tower.columns.index(SEGMENT), first:last]
                    segment[segment >= 0] += num_segments
                    num_segments = int(segment.max()) + 1
                used = np.flatnonzero(item.rows >= 0)
                own_targets[first // tower.merge + used] = rows[item.rows[used]]
                first = last
        return EncoderInput(patches, columns, targets.reshape(self.num_ranks, -1))

    def place(self, placed: Sequence[Sequence[Encode]]) -> Iterator[PlaceInput]:
        """Yields the messages of each rank's embeddings that came as such, `num_placed` rows of a rank at a time; none
        where nothing came. placed: of each rank, EMBEDS alone."""
        rows = [[row for each in own for row in each.rows.tolist()] for own in placed]
        values = [[row for each in own for row in each.item.patches[each.item.rows]] for own in placed]
        for first in range(0, max(map(len, rows)), max(1, self.num_placed)):
            span = slice(first, first + self.num_placed)
            size = next(len(each[0]) for each in values if each)
            message = np.zeros((len(rows), self.num_placed, size), np.float32)
            targets = np.full((len(rows), self.num_placed), self.num_rows, np.int32)
            for rank, (own_rows, own_values) in enumerate(zip(rows, values, strict=True)):
                if chosen := own_rows[span]:
                    targets[rank, : len(chosen)], message[rank, : len(chosen)] = chosen, own_values[span]
            yield PlaceInput(message, targets)

    def _shares(self, encodes: Sequence[Encode]) -> list[list[Encode]]:
        """A rank's pictures divided among its `parts`, a list for each, possibly empty: the largest first, each to the
        one with the fewest patches."""
        shares: list[list[Encode]] = [[] for _ in range(self.parts)]
        loads = [0] * self.parts
        for encode in sorted(encodes, key=lambda each: -each.item.num_patches):
            least = loads.index(min(loads))
            shares[least].append(encode)
            loads[least] += encode.item.num_patches
        return shares


def make_encode(graph: nnx.GraphDef, params_tree: Any, *, parts: int) -> Callable:
    """Makes the program that encodes: (params: list of arrays, pool [N, E], patches, columns, targets) -> the pool with
    the new embeddings; the latter are a device's parts of an EncoderInput.

    graph, params_tree: of the model. parts: as EncoderLayout's; with several, devices gather what each has made.
    """

    def encode(params: Any, pool: jax.Array, patches: jax.Array, columns: jax.Array, targets: jax.Array) -> jax.Array:
        model = nnx.merge(graph, jax.tree.unflatten(params_tree, params))
        with jax.named_scope("tower"):
            rows = model.tower(patches[0], columns[0])
        if parts > 1:
            with jax.named_scope("gather"):
                rows = gather_parts(rows, "heads", dimension=0)
        return pool.at[targets[0]].set(rows.astype(pool.dtype), mode="drop")

    return encode


def place(pool: jax.Array, values: jax.Array, targets: jax.Array) -> jax.Array:
    """The pool [N, E] with the embeddings of a PlaceInput."""
    return pool.at[targets[0]].set(values[0].astype(pool.dtype), mode="drop")
