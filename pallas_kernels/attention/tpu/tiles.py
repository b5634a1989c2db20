"""Sizes of the TPU attention kernel: the columns of each head in a row of the pool, and the blocks of work.

Contains the rules that choose blocks within the sizes of `tuning.TpuAttention`. Everything here is static.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec
from jaxengine.pallas_kernels.kv.pages import LANES
from jaxengine.pallas_kernels.tuning import TpuAttention

SUBLANES = 8
MOST_COPIES = 64  # most copies that are unrolled, each of a page
PACKED_SUBLANES = 16  # rows of a register of bfloat16


class Window(NamedTuple):
    """Range of full lane tiles of a pool row that contains one head's keys or values.

    Elements of the window outside of the head are multiplied by zeros of the query, or cut off the result.

    Attributes:
      start, size: columns [start, start + size) of the row, both multiples of LANES.
      offset: column of the window at which the head begins.
    """

    start: int
    size: int
    offset: int


class Blocks(NamedTuple):
    """Sizes that determine how the kernel divides keys, tiles and heads.

    Attributes:
      pages: pages of one sequence per block of keys.
      buffers: blocks in VMEM: one being processed, the others in transit.
      tiles: tiles per grid step.
      heads: kv heads processed together: their softmax overlaps with the scores of the next ones.
    """

    pages: int
    buffers: int
    tiles: int
    heads: int


def key_windows(num_kv_heads: int, spec: AttentionSpec) -> tuple[Window, ...]:
    """Return the window of the key of each of `num_kv_heads` kv heads in a row of the pool."""
    return tuple(_window(head * _stride(spec), spec.head_dim) for head in range(num_kv_heads))


def value_windows(num_kv_heads: int, spec: AttentionSpec) -> tuple[Window, ...]:
    """Return the windows of the values of each of `num_kv_heads` heads in a row of the pool. A value follows its head's
    key, or begins where the key does if spec.values_in_keys.
    """
    first = 0 if spec.values_in_keys else spec.head_dim
    return tuple(_window(head * _stride(spec) + first, spec.v_head_dim) for head in range(num_kv_heads))


def _stride(spec: AttentionSpec) -> int:
    """Return the number of columns between the starts of consecutive kv heads in a row of the pool: H + Hv, or H if
    spec.values_in_keys.
    """
    return spec.head_dim if spec.values_in_keys else spec.head_dim + spec.v_head_dim


def _window(column: int, size: int) -> Window:
    """Return the smallest window that contains columns [column, column + size)."""
    start = column // LANES * LANES
    return Window(start, _round_up(column + size, LANES) - start, column - start)


def lies_by_token(num_kv_heads: int, group: int) -> bool:
    """Return whether tiles of several tokens order their rows token by token, which saves a transpose of queries and
    results. True for one kv head whose number of query heads, `group`, is a multiple of 16.
    """
    return num_kv_heads == 1 and group % PACKED_SUBLANES == 0


def buffer_lanes(row_lanes: int) -> int:
    """Return the number of lanes that a page row of `row_lanes` lanes takes in VMEM: one lane tile (128) more if it is
    a multiple of four tiles.

    Otherwise tiles of one head, which lie a row apart, would share a bank of VMEM.
    """
    return row_lanes + (LANES if row_lanes % (4 * LANES) == 0 else 0)


def choose_blocks(
    sizes: TpuAttention,
    *,
    rows: int,
    num_kv_heads: int,
    row_bytes: int,
    page_size: int,
    max_pages: int,
    num_tiles: int,
    single: bool,
) -> Blocks:
    """Return the block sizes for tiles of `rows` query rows per kv head over a pool of `row_bytes` bytes a token.

    A block holds at least a lane tile of keys, and there are at least two buffers, even if that takes more memory than
    `sizes` allows.

    Args:
      sizes: limits and preferred sizes of the chip.
      num_kv_heads: kv heads. Blocks of a single one are longer for tiles of one token.
      page_size: tokens of a page.
      max_pages: columns of the page table.
      num_tiles: tiles of the kernel call.
      single: whether tiles are of one token, whose blocks are longer.
    """
    # Keys lie along lanes in the scores: a block is a multiple of a lane tile.
    unit = LANES // math.gcd(page_size, LANES)
    wanted = sizes.single_keys if single else sizes.run_keys
    if single and num_kv_heads == 1:  # longer, unless the unrolled copies of its pages would be too many
        wanted = max(wanted, min(wanted * sizes.single_parts, MOST_COPIES * page_size))
    fitting = sizes.buffer_bytes // 3 // (row_bytes * page_size)
    pages = max(min(wanted // page_size, fitting, _round_up(max_pages, unit)) // unit, 1) * unit
    block_bytes = pages * page_size * row_bytes
    buffers = 1 + max(2, min(-(-sizes.in_flight_bytes // block_bytes), sizes.max_buffers - 1))
    while buffers > 2 and buffers * block_bytes > sizes.buffer_bytes:
        buffers -= 1
    scores = rows * pages * page_size * (4 + 4)
    phases = -(-num_kv_heads // max(min(sizes.score_bytes // scores, sizes.max_heads), 1))
    heads = -(-num_kv_heads // phases)
    return Blocks(pages, buffers, min(sizes.single_tiles, num_tiles) if single else 1, heads)


def choose_parts(
    sizes: TpuAttention, *, num_kv_heads: int, group: int, block_q: int, pages: int, page_size: int
) -> int:
    """Return the number of parts into which a tile's work on a block of `pages` pages is cut: 1 for several kv heads,
    which overlap with each other instead.

    The softmax of one part is computed with the scores of the next. For a tile of block_q = 1 token they are equal
    parts of the block's pages, as many, up to sizes.single_parts, as are each a multiple of a lane tile of keys; else
    equal parts of the tile's tokens (`lies_by_token`) or query heads, of about sizes.part_rows rows. page_size: tokens
    of a page. group: query heads per kv head.
    """
    if num_kv_heads > 1:
        return 1
    if block_q == 1:  # a part is a multiple of a lane tile
        counts = range(1, sizes.single_parts + 1)
        return max(count for count in counts if pages % count == 0 and pages // count * page_size % LANES == 0)
    rows, units = group * block_q, block_q if lies_by_token(num_kv_heads, group) else group
    counts = [count for count in range(1, units + 1) if units % count == 0]
    most = max(count for count in counts if count == 1 or rows // count >= sizes.part_rows)
    if most > 1 or rows < 2 * sizes.part_rows:
        return most
    # The number of heads has no such divisor, such as 7: parts of half the rows rather than none.
    return next((count for count in counts[1:] if rows // count >= sizes.part_rows // 2), 1)


def fits_smem(sizes: TpuAttention, page_table_shape: tuple[int, ...]) -> bool:
    """Return whether all of an i32 page table of this shape, [S, W], fits in sizes.smem_table_bytes of SMEM.

    Its size is counted in whole register tiles.
    """
    num_seqs, width = page_table_shape
    return _round_up(num_seqs, SUBLANES) * _round_up(width, LANES) * 4 <= sizes.smem_table_bytes


def check_dtypes(query: np.dtype, pool: np.dtype) -> None:
    """Raise ValueError unless the queries are float32 or bfloat16, and the pool float32, bfloat16, float8_e4m3fn,
    float8_e5m2 or int8.
    """
    if query not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"TPU attention needs queries of float32 or bfloat16, got {query}")
    if pool not in (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8):
        raise ValueError(f"TPU attention cannot read a KV pool of {pool}: there is no such type on TPU")


def check_page_size(page_size: int) -> None:
    """Raise ValueError unless page_size is a multiple of SUBLANES, the 8 rows of a register tile."""
    if page_size % SUBLANES:
        raise ValueError(f"TPU attention needs page_size to be a multiple of {SUBLANES}, got {page_size}")


def _round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
