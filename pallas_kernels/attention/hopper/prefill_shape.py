"""Compile-time parameters of the Hopper prefill kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxengine.pallas_kernels.attention.hopper.schedule import prefill_rows
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec
from jaxengine.pallas_kernels.mosaic_gpu import SHARED_MEMORY_BYTES, WARPGROUP_ROWS

RAW_STAGES = 2  # buffers for blocks of a one-byte pool: one is being widened while the next arrives
OUTPUT_COLUMNS = 64  # columns of outputs are stored in multiples of this, 128 bytes
RESERVED_BYTES = 4096  # shared memory for maxima, sinks, barriers, the compiler's reductions


class Shape(NamedTuple):
    """Compile-time parameters of the prefill kernel, and the buffer sizes that follow from them.

    Attributes:
      spec: of this device's heads.
      num_tokens: tokens of queries and outputs: a multiple of 8, at least block_q.
      page_size, block_q: tokens of a page, and of a tile.
      dtype, kv_dtype: dtype of queries and outputs, and of the pool.
      num_ctas: CTAs of the launch.
      has_sinks: whether attention sinks are given.
      max_stages: most blocks in shared memory.
      warpgroup_rows: rows of a tile that a warpgroup computes.
      tensor_memory: whether products are tcgen05's, with sums in tensor memory, as on Blackwell.
    """

    spec: AttentionSpec
    num_tokens: int
    page_size: int
    block_q: int
    dtype: Any
    kv_dtype: Any
    num_ctas: int
    has_sinks: bool
    max_stages: int
    warpgroup_rows: int = WARPGROUP_ROWS
    tensor_memory: bool = False

    @property
    def tile_rows(self) -> int:
        """Number of query rows of a tile, over all computing warpgroups."""
        return prefill_rows(self.spec, 2 * self.warpgroup_rows)

    @property
    def computing(self) -> int:
        """Number of warpgroups that compute."""
        return self.tile_rows // self.warpgroup_rows

    @property
    def heads(self) -> int:
        """Number of query heads of a tile, all of one kv head."""
        return self.tile_rows // self.block_q

    @property
    def num_groups(self) -> int:
        """Number of tiles of one item: one per `heads` query heads."""
        return self.spec.num_q_heads // self.heads

    @property
    def part(self) -> int:
        """Number of rows of a warpgroup that are consecutive tokens of one head."""
        return min(self.block_q, self.warpgroup_rows)

    @property
    def parts(self) -> int:
        """Number of `part`-row ranges in a warpgroup's rows."""
        return self.warpgroup_rows // self.part

    @property
    def widens(self) -> bool:
        """Whether keys and values have to be widened to `dtype` in shared memory before they are multiplied, because
        the pool has another dtype.
        """
        return self.kv_dtype != self.dtype

    @property
    def block_kv(self) -> int:
        """Number of keys of a block: 128 if the head dim is at most 128, nothing is widened, tensor memory is not used
        and the page size divides 128 or is a multiple of it; else 64.
        """
        fits = self.spec.head_dim <= 128 and not self.widens and not self.tensor_memory
        return 128 if fits and (self.page_size % 128 == 0 or 128 % self.page_size == 0) else 64

    @property
    def box(self) -> int:
        """Number of keys of a TMA box: a page's, or a block's if pages are larger."""
        return min(self.block_kv, self.page_size)

    @property
    def boxes(self) -> int:
        """Number of TMA boxes that load the keys of a block; its values take as many."""
        return self.block_kv // self.box

    @property
    def output_width(self) -> int:
        """Number of columns of the kernel's output: the head dim rounded up to a multiple of 64, because each of its
        rows must begin at a multiple of 128 bytes.
        """
        return -(-self.spec.head_dim // OUTPUT_COLUMNS) * OUTPUT_COLUMNS

    @property
    def output_columns(self) -> int:
        """Number of output columns stored at a time: 32 with tensor memory, else all of them up to 128, else 64."""
        if self.tensor_memory:
            return OUTPUT_COLUMNS // 2
        return OUTPUT_COLUMNS if self.output_width > 2 * OUTPUT_COLUMNS else self.output_width

    @property
    def stages(self) -> int:
        """Number of blocks of keys and values that shared memory holds, at most max_stages. Raises ValueError if two do
        not fit.
        """
        head_dim, width = self.spec.head_dim, jnp.dtype(self.dtype).itemsize
        used = RESERVED_BYTES + self.tile_rows * (head_dim + self.output_columns) * width
        if self.tensor_memory:
            used += self.tile_rows * (self.block_kv * width + 8)
        if self.widens:
            used += RAW_STAGES * 2 * self.block_kv * head_dim
        stages = (SHARED_MEMORY_BYTES - used) // (2 * self.block_kv * head_dim * width)
        if stages < 2:
            raise ValueError(f"head_dim {head_dim} overflows shared memory on platform 'gpu'")
        return min(stages, self.max_stages)
