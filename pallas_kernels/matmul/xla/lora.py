"""LoRA addition as plain XLA: a loop over visits, each of which gathers the matrices of a few slots."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.matmul.lora import LoraVisits, slots_of_tile, tile_rows_of
from jaxengine.pallas_kernels.matmul.xla.dense import matmul
from jaxengine.pallas_kernels.tuning import LoraTiles, Tuning


def lora_product(
    y: jax.Array,
    x: jax.Array,
    a: jax.Array,
    bs: Sequence[jax.Array],
    visits: LoraVisits,
    *,
    modules: tuple[int, ...],
    rank: int,
    sizes: LoraTiles | None = None,
) -> jax.Array:
    """Return y f32 [T, out] plus (x A) B of each row that has an adapter, computed in plain XLA.

    Arguments are those of matmul.lora.lora_product, which has checked them: x [T, in], a [modules * slots * rank, in],
    each of bs [slots * rank, out of a source], modules: for each of bs the module whose A it uses. sizes: the sizes
    that the visits were made with, None for the default.
    """
    sizes = Tuning().lora_tiles if sizes is None else sizes
    num_rows, each = len(x), slots_of_tile(rank, sizes)
    tile_rows = tile_rows_of(num_rows, sizes)
    in_tile = jnp.arange(tile_rows, dtype=jnp.int32)
    slot_of_column = jnp.arange(each * rank, dtype=jnp.int32) // rank

    def add_visit(index: jax.Array, y: jax.Array) -> jax.Array:
        # Without the barrier XLA:CPU converts all of bfloat16 matrices to float32 before the loop.
        all_a, all_b, index = lax.optimization_barrier((a, bs, index))
        first, tile = visits.row_tile[index] * tile_rows, visits.slot_tile[index] * each
        slots = lax.dynamic_slice_in_dim(visits.slots, tile, each)
        start = jnp.minimum(first, num_rows - tile_rows)
        slot_index = lax.dynamic_slice_in_dim(visits.slot_index, start, tile_rows)
        # The last tile begins among the rows of the previous one, whose visits have already been added.
        slot_index = jnp.where(start + in_tile >= first, slot_index, -1)
        own = slot_index[:, None] == tile + slot_of_column
        rows = lax.dynamic_slice_in_dim(x, start, tile_rows)
        of_module = all_a.reshape(max(modules) + 1, -1, rank, x.shape[1])[:, slots]
        added = []
        for module, b in zip(modules, all_b, strict=True):
            inner = matmul(rows, of_module[module].reshape(each * rank, -1), contract=1)
            inner = jnp.where(own, inner, 0).astype(x.dtype)
            own_b = b.reshape(-1, rank, b.shape[1])[slots].reshape(each * rank, -1)
            added.append(matmul(inner, own_b, contract=0))
        y_rows = lax.dynamic_slice_in_dim(y, start, tile_rows) + jnp.concatenate(added, axis=1)
        return lax.dynamic_update_slice_in_dim(y, y_rows, start, axis=0)

    return lax.fori_loop(0, visits.count[0], add_visit, y)
