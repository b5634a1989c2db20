"""Program that encodes image patches and writes the embeddings into a pool, and the messages that it reads.

There is one program for each of a closed set of sizes, in patches; images of several requests share a call. On a mesh
every replica has a pool and images of its own. Its devices either split the tower's weights or, with mm_encoder_tp_mode
"data", each have all weights and encode different images; the embeddings are then gathered once, after the tower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.config.tower import TOWER, TowerConfig
from jaxengine.scheduler.base.media import AUDIO, EMBEDS, MediaItem
from jaxengine.scheduler.extensions.pictures import Encode
from jaxengine.sharding.collectives import gather_parts

# The column with the segment of a patch (jaxengine.models.config.tower): numbered within an item, then within a call.
SEGMENT = "segment"
# Key, in place of a size, of the call that writes embeddings of requests into the pool.
PLACE = 0
# Ratio of neighbouring sizes, and the least size: that of a call that costs little more than reading the weights.
_STEP, _LEAST = 4, 1024


class EncoderInput(NamedTuple):
    """Message of one encoder call, for R replicas with n devices each that encode different images.

    Attributes:
      patches: f32[R * n, P, F], flattened patches; columns: i32[R * n, C, P], per-patch inputs of the tower, -1 in
        padding.
      targets: i32[R, n * P / merge], rows of the replica's pool for the embeddings, the number of its rows for none.
    """

    patches: np.ndarray
    columns: np.ndarray
    targets: np.ndarray


class PlaceInput(NamedTuple):
    """Message of embeddings that are in requests, for R replicas.

    Attributes:
      values: f32[R, N, E] embeddings.
      targets: i32[R, N] rows of the replica's pool that they go to, the number of its rows for none.
    """

    values: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class EncoderLayout:
    """Sizes of encoder calls, and the packing of images into a call.

    Attributes:
      tower: configuration of the tower that encodes.
      num_rows: rows of a replica's pool.
      max_patches: most patches, over all images, that a replica encodes in one call.
      num_ranks: number of replicas.
      parts: devices of a replica that encode different images; 1 if they split the tower.
      num_placed: N, rows of a call that writes embeddings of requests; 0 if requests have none.
      part: name of the model's attribute that is the tower, one of jaxengine.models.config.tower.TOWERS.
    """

    tower: TowerConfig
    num_rows: int
    max_patches: int
    num_ranks: int = 1
    parts: int = 1
    num_placed: int = 0
    part: str = TOWER

    @property
    def programs(self) -> tuple[int, ...]:
        """Keys of all programs: PLACE if requests may have embeddings, then the sizes."""
        return (*((PLACE,) if self.num_placed else ()), *self.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Compiled sizes, ascending: patches of one device in one call, multiples of the tower's unit: from
        max_patches, rounded up, down by a factor of _STEP each, rounded down, to no less than _LEAST.
        """
        unit = self.tower.unit
        sizes = {-(-self.max_patches // unit) * unit}
        while (size := min(sizes) // _STEP // unit * unit) >= max(_LEAST, unit):
            sizes.add(size)
        return tuple(sorted(sizes))

    def encodes(self, item: MediaItem) -> bool:
        """Whether this tower encodes an item: sounds for a tower of sounds, images and videos for another; never
        embeddings.
        """
        return item.modality != EMBEDS and (item.modality == AUDIO) == self.tower.hears

    def pack(self, encodes: Sequence[Sequence[Encode]]) -> EncoderInput:
        """Return the message of one call that encodes each replica's items, in the smallest size that holds them.

        encodes: items of each replica, none of them of modality EMBEDS, with at most max_patches patches in all. Raises
        StopIteration if the items of a device do not fit into the largest size.
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
        """Yield messages that write embeddings of requests into the pool, `num_placed` rows of a replica at a time;
        nothing without embeddings. placed: items of each replica, all of modality EMBEDS.
        """
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
        """Return a replica's images divided among its `parts` devices, one list for each, possibly empty: the largest
        image first, each to the device with the fewest patches, the first of equals.
        """
        shares: list[list[Encode]] = [[] for _ in range(self.parts)]
        loads = [0] * self.parts
        for encode in sorted(encodes, key=lambda each: -each.item.num_patches):
            least = loads.index(min(loads))
            shares[least].append(encode)
            loads[least] += encode.item.num_patches
        return shares


def make_encode(graph: nnx.GraphDef, params_tree: Any, layout: EncoderLayout) -> Callable:
    """Return the function that encodes images: (params: list of arrays, pool [N, E], patches, columns, targets) -> the
    pool with the new embeddings. The last three are one device's parts of an EncoderInput.

    graph, params_tree: static parts of the model. layout: layout of the calls. With several parts, devices gather each
    other's embeddings. If rows of the pool are wider than the tower's embeddings, the rest is zeros.
    """

    def encode(params: Any, pool: jax.Array, patches: jax.Array, columns: jax.Array, targets: jax.Array) -> jax.Array:
        model = nnx.merge(graph, jax.tree.unflatten(params_tree, params))
        with jax.named_scope("tower"):
            rows = getattr(model, layout.part)(patches[0], columns[0])
        if layout.parts > 1:
            with jax.named_scope("gather"):
                rows = gather_parts(rows, "heads", dimension=0)
        rows = jnp.pad(rows.astype(pool.dtype), ((0, 0), (0, pool.shape[1] - rows.shape[1])))
        return pool.at[targets[0]].set(rows, mode="drop")

    return encode


def place(pool: jax.Array, values: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the pool [N, E] with the embeddings of one replica's part of a PlaceInput written: values [1, N', E] at
    the rows `targets`, i32[1, N']. Rows outside of the pool are dropped.
    """
    return pool.at[targets[0]].set(values[0].astype(pool.dtype), mode="drop")
