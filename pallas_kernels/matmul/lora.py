"""LoRA addition to a product, reading only the matrices of slots that rows use: the public operation.

Owns which slots are read for which rows (`lora_visits`, computed once a step), validation and the choice of
implementation, not whose adapter a slot holds. Multiplying rows of many adapters in one product over gathered matrices
is Chen et al.'s idea (Punica, 2023, arXiv:2310.18547).
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
    """Whether `platform`, one of registry.PLATFORMS, has this operation."""
    return (OP, platform) in KERNELS


def grouped_form(platform: str, size: int, widths: Sequence[int], rank: int, dtype: Any) -> str:
    """Return the name of the module that multiplies with adapters on `platform`; "MODULE: REASON" if a shape makes the
    platform's own module leave it to XLA.

    size, widths: inputs of the matrix and outputs of its sources. rank, dtype: of the adapters. Raises ValueError if
    the platform does not have this operation.
    """
    module = kernel_module(OP, platform)
    why_xla = getattr(importlib.import_module(f"jaxengine.pallas_kernels.{module}"), "why_xla", None)
    reason = "" if why_xla is None else why_xla(size, widths, rank, jnp.dtype(dtype))
    return f"{kernel_module(OP, 'cpu')}: {reason}" if reason else module


def slots_of_tile(rank: int, sizes: LoraTiles) -> int:
    """Return the number of slots whose matrices, of `rank` columns each, are multiplied together in a tile:
    sizes.columns // rank, at least 1.
    """
    return max(sizes.columns // rank, 1)


def tile_rows_of(num_rows: int, sizes: LoraTiles) -> int:
    """Return the rows of a tile: all num_rows rows if they are at most sizes.rows, else the largest multiple of 16 up
    to sizes.rows that divides them, sizes.rows if none does.
    """
    if num_rows <= sizes.rows:
        return num_rows
    return max((rows for rows in range(16, sizes.rows + 1, 16) if num_rows % rows == 0), default=sizes.rows)


def lora_visits(slots: jax.Array, *, num_slots: int, rank: int, sizes: LoraTiles | None = None) -> LoraVisits:
    """Compute the visits of rows with adapters in slots i32[T], -1 for none, of `num_slots` slots of this rank.

    A tile has rows in order, and slots in the order of their first rows. sizes: those that the product will work with;
    None for the default, which `lora_product` takes.
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
    """Add adapters to y f32[T, out]: (x A) B of each row, summed in float32; rows without an adapter are unchanged.

    x A is rounded to x's dtype. Only tiles of slots that rows use are read. The outputs are those of several sources,
    concatenated, each with a B of its own and the A of a module.

    The implementation is chosen when the program is compiled, by the platform it is compiled for.

    Args:
      x: [T, in], bfloat16 or float32.
      a: [modules * slots * rank, in] in x's dtype, A transposed: rows of a module, then of a slot.
      bs: [slots * rank, out of a source] in x's dtype.
      visits: `lora_visits` of the rows' slots.
      modules: for each source, the module whose A it uses.
      rank: a power of two.

    Raises ValueError when shapes or dtypes do not fit together.
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
