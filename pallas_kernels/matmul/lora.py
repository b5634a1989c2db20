"""LoRA addition to a product, reading only the matrices of slots that rows use: the public operation.

Determines which slots are read for which rows (`lora_visits`, computed once a step), checks the arguments and chooses
the implementation. Whose adapter a slot holds does not matter here. Multiplying rows of many adapters in one product
over gathered matrices is Chen et al.'s idea (Punica, 2023, arXiv:2310.18547).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.registry import KERNELS, kernel, kernel_module, platform_rows
from jaxengine.pallas_kernels.tuning import LoraTiles, Tuning

OP = "lora_product"


class LoraVisits(NamedTuple):
    """Pairs of a tile of rows and a tile of slots that some of these rows use.

    Slots are in the order of their first rows, so that consecutive rows of one adapter meet few tiles.

    Attributes:
      slot_index: i32[T], index in `slots` of a row's slot; -1 for none.
      slots: i32[N], the used slots, padded to full tiles with copies of the last one.
      row_tile, slot_tile: i32[V], tiles of each visit, in the order of the rows; entries past `count` are never used.
      count: i32[1], number of visits.
    """

    slot_index: jax.Array
    slots: jax.Array
    row_tile: jax.Array
    slot_tile: jax.Array
    count: jax.Array


def has_lora_product(platform: str) -> bool:
    """Return whether `platform`, one of registry.PLATFORMS, has an implementation of lora_product."""
    return (OP, platform) in KERNELS


def grouped_form(platform: str, size: int, widths: Sequence[int], rank: int, dtype: Any) -> str:
    """Return the name of the module that computes lora_product on `platform`, or "MODULE: REASON", with the name of the
    plain XLA module, if the platform's own module leaves these shapes to XLA.

    size, widths: inputs of the matrix and outputs of its sources. rank, dtype: those of the adapters. Raises ValueError
    if the platform does not have this operation.
    """
    module = kernel_module(OP, platform)
    why_xla = getattr(importlib.import_module(f"jaxengine.pallas_kernels.{module}"), "why_xla", None)
    reason = "" if why_xla is None else why_xla(size, widths, rank, jnp.dtype(dtype))
    return f"{kernel_module(OP, 'cpu')}: {reason}" if reason else module


def slots_of_tile(rank: int, sizes: LoraTiles) -> int:
    """Return the number of slots in a tile, whose matrices of `rank` columns each are multiplied together:
    sizes.columns // rank, at least 1.
    """
    return max(sizes.columns // rank, 1)


def tile_rows_of(num_rows: int, sizes: LoraTiles) -> int:
    """Return the number of rows of a tile: num_rows if that is at most sizes.rows, else the largest multiple of 16 up
    to sizes.rows that divides num_rows, or sizes.rows if none does.
    """
    if num_rows <= sizes.rows:
        return num_rows
    return max((rows for rows in range(16, sizes.rows + 1, 16) if num_rows % rows == 0), default=sizes.rows)


def lora_visits(slots: jax.Array, *, num_slots: int, rank: int, sizes: LoraTiles | None = None) -> LoraVisits:
    """Return the visits of rows whose adapters are in `slots`, i32 [T] with -1 for rows without an adapter, out of
    `num_slots` slots of this rank.

    Rows are cut into tiles in order, and slots in the order of their first rows. sizes: tile sizes, the same that the
    product will use; None for the default, which `lora_product` uses.
    """
    sizes = Tuning().lora_tiles if sizes is None else sizes
    num_rows, each = slots.shape[0], slots_of_tile(rank, sizes)
    tile_rows, num_tiles = tile_rows_of(num_rows, sizes), -(-min(num_slots, num_rows) // each)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    own = slots[:, None] == jnp.arange(num_slots, dtype=jnp.int32)
    first = jnp.min(jnp.where(own, row[:, None], num_rows), axis=0)
    last = jnp.maximum(jnp.sum(first < num_rows, dtype=jnp.int32) - 1, 0)
    # Compared rather than searched: a search is a loop of its own. No two slots have the same first row.
    order_of_slot = jnp.sum(first < first[:, None], axis=1, dtype=jnp.int32)
    slot_index = jnp.where(slots >= 0, order_of_slot[jnp.maximum(slots, 0)], -1)
    order = jnp.argsort(first).astype(jnp.int32)[jnp.minimum(jnp.arange(num_tiles * each), last)]
    tiles = -(-num_rows // tile_rows)
    meets = (slot_index // each)[:, None] == jnp.arange(num_tiles, dtype=jnp.int32)
    meets = jnp.pad(meets, ((0, tiles * tile_rows - num_rows), (0, 0))).reshape(tiles, tile_rows, num_tiles).any(axis=1)
    visit = jnp.argsort(~meets.ravel(), stable=True).astype(jnp.int32)
    count = jnp.sum(meets, dtype=jnp.int32)[None]
    return LoraVisits(slot_index, order, visit // num_tiles, visit % num_tiles, count)


def lora_product(
    y: jax.Array,
    x: jax.Array,
    a: jax.Array,
    bs: Sequence[jax.Array],
    visits: LoraVisits,
    *,
    modules: Sequence[int],
    rank: int,
) -> jax.Array:
    """Return y f32 [T, out] plus (x A) B of each row's adapter, summed in float32; rows without an adapter are
    unchanged.

    x A is rounded to x's dtype. Only tiles of slots that rows use are read. The outputs are those of several sources,
    concatenated; each source has its own B and uses the A of a module.

    The implementation is chosen when the program is compiled, by the platform it is compiled for.

    Args:
      y: f32 [T, out], the product without adapters.
      x: [T, in], bfloat16 or float32.
      a: [modules * slots * rank, in] in x's dtype, A transposed: rows of a module, then of a slot.
      bs: for each source [slots * rank, its outputs] in x's dtype.
      visits: `lora_visits` of the rows' slots.
      modules: for each source, the module whose A it uses.
      rank: a power of two.

    Raises ValueError if shapes or dtypes do not fit together.
    """
    slot_rows = bs[0].shape[0]
    widths = [b.shape[1] for b in bs]
    shapes = [y.shape, x.shape, a.shape, *(b.shape for b in bs)]
    fits = (
        x.ndim == 2
        and y.shape == (x.shape[0], sum(widths))
        and a.shape == ((max(modules) + 1) * slot_rows, x.shape[1])
        and all(b.shape[0] == slot_rows for b in bs)
        and len(modules) == len(bs)
        and visits.slot_index.shape == x.shape[:1]
        and slot_rows % rank == 0
    )
    if not fits:
        raise ValueError(f"{OP}: y, x, a and each b of modules {tuple(modules)}, rank {rank}, must agree, got {shapes}")
    if {a.dtype, *(b.dtype for b in bs)} != {x.dtype} or x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"{OP}: x, a and b must all be bfloat16 or float32, got {x.dtype}, {a.dtype}, {bs[0].dtype}")
    by_platform = {
        platform: partial(kernel(OP, row), modules=tuple(modules), rank=rank)
        for platform, row in platform_rows().items()
        if has_lora_product(row)
    }
    return lax.platform_dependent(y, x, a, list(bs), visits, **by_platform)
