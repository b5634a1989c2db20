"""Views of a pool by tiles of HBM, and pages of one row of 32-bit words, for attention to selected keys: as few rows as
a copy on a TPU can move.

Rows narrower than 32 bits share words: two rows of bfloat16, four of one byte. XLA stores tiles of eight rows by 128
lanes; of one byte, tiles of 32 rows where these divide a page. Of tiles of eight rows `word_rows` is a view of the same
bytes whose tiles are single rows of words. Of tiles of 32 rows XLA would make that view by copying the pool; they are
read from within.

In both cases VMEM gets the words of a page lane tile by lane tile, and a load with a stride puts those of eight pages
into one register.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxengine.pallas_kernels.attention.tpu.tiles import LANES, SUBLANES


def rows_of_word(data: Any) -> int:
    """Return how many rows of an array share 32-bit words: 1, 2 or 4."""
    return 4 // data.dtype.itemsize


def rows_of_tile(data: Any) -> int:
    """Return the rows of a tile of an array [P, page_size, C] in HBM: SUBLANES; 4 times as many of one-byte elements if
    pages have a multiple of that.
    """
    return 4 * SUBLANES if data.dtype.itemsize == 1 and data.shape[1] % (4 * SUBLANES) == 0 else SUBLANES


def tile_rows(data: jax.Array) -> jax.Array:
    """Return the data [P, page_size, C] of a pool of layout TOKEN_ROWS as [P, page_size / n, n, C] with the n rows of a
    tile. On a TPU it is the same bytes.

    With it, VMEM gets tiles of equal size.
    """
    tile = rows_of_tile(data)
    return data.reshape(data.shape[0], -1, tile, data.shape[2])


def word_rows(data: jax.Array) -> jax.Array:
    """Return the data [P, page_size, C] of a pool of layout TOKEN_ROWS in the form that `page_of` reads: [P * page_size
    / SUBLANES, C / LANES, words, rows, LANES], where words * rows = SUBLANES and `rows` rows share words; for larger
    tiles [P * page_size / n, n, C] with the n rows of a tile. On a TPU it is the same bytes.
    """
    rows, tile, width = rows_of_word(data), rows_of_tile(data), data.shape[2]
    if tile > SUBLANES:
        return data.reshape(-1, tile, width)
    return data.reshape(-1, tile // rows, rows, width // LANES, LANES).transpose(0, 3, 1, 2, 4)


def page_shape(pool: Any, num_lanes: int) -> tuple[int, ...]:
    """Return the shape of a page of num_lanes lanes, a multiple of LANES, of an array from `word_rows`: [tiles, rows,
    LANES], or [rows, num_lanes] for larger tiles than of SUBLANES rows.
    """
    rows = rows_of_word(pool)
    return (rows, num_lanes) if pool.ndim == 3 else (num_lanes // LANES, rows, LANES)


def page_of(pool: Any, page: jax.Array, lanes: tuple[int, int]) -> Any:
    """Return the reference, of `page_shape`, to lanes [first, end), multiples of LANES, of page i32 [] in a reference
    to an array from `word_rows`.
    """
    first, end = lanes
    rows = rows_of_word(pool)
    words = pool.shape[1] // rows if pool.ndim == 3 else pool.shape[2]
    # Shifted and masked: a division takes four more operations for the sign.
    tile, word = lax.shift_right_logical(page, words.bit_length() - 1), page & (words - 1)
    if pool.ndim == 3:
        return pool.at[tile, pl.ds(pl.multiple_of(word * rows, rows), rows), first:end]
    return pool.at[tile, first // LANES : end // LANES, word]


def load(block: Any, start: int, size: int) -> jax.Array:
    """Return columns [start, start + size), multiples of LANES, of the keys in a reference [pages, *page_shape] to
    VMEM, as [pages * rows, size].
    """
    words, pages = _words(block), block.shape[0]
    tiles = range(start // LANES, (start + size) // LANES)
    columns = [words[pl.ds(tile, pages, words.shape[0] // pages), :] for tile in tiles]
    return jnp.concatenate([pltpu.bitcast(column, block.dtype) for column in columns], axis=1)


def zero_from(block: Any, first_row: jax.Array, end_page: int | jax.Array) -> None:
    """Overwrite with 0 the rows from the first_row-th on of a reference [pages, *page_shape] to VMEM, up to page
    `end_page` and then some: whole numbers of SUBLANES pages.
    """
    rows = rows_of_word(block)
    lines, bits = _words(block).shape[0] // block.shape[0] * SUBLANES, 32 // rows
    line = lax.broadcasted_iota(jnp.int32, (lines, LANES), 0)
    page = sum((line >= lines // SUBLANES * page).astype(jnp.int32) for page in range(1, SUBLANES))

    def zero(number: jax.Array, _: None) -> None:
        row = (page + number * SUBLANES) * rows
        keep = jnp.zeros_like(row)
        for part in range(rows):  # row of a page that lies in these bits of its words
            field = np.uint32(((1 << bits) - 1) << bits * part).view(np.int32)
            keep |= jnp.where(row + part < first_row, field, 0)
        words = _words(block.at[pl.ds(number * SUBLANES, SUBLANES)])
        words[...] = words[...] & keep

    lax.fori_loop(first_row // (rows * SUBLANES), pl.cdiv(end_page, SUBLANES), zero, None)


def _words(block: Any) -> Any:
    """Return the reference i32 [pages * tiles, LANES] to the words of a reference [pages, *page_shape]."""
    pages, width = block.shape[0], block.shape[-1]
    if len(block.shape) == 3:
        return block.bitcast(jnp.int32).reshape(pages * width // LANES, LANES)
    return block.reshape(-1, LANES).bitcast(jnp.int32)
