"""The attention kernels that `python -m benchmarks tpu_cycles` compares, each bare and with loops of fixed length.

This module knows the inside of each kernel as far as needed for that: which loop walks the keys, and which of our
functions works on one block. It runs in the child process of `tpu_profile`, so it may change the kernels' modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as jax_kernel

from benchmarks.tpu.tpu_profile import bare_kernel, fix_trips
from jaxengine.pallas_kernels.attention.op import AttentionSpec
from jaxengine.pallas_kernels.attention.ragged_batch import RaggedBatch
from jaxengine.pallas_kernels.attention.tpu import attend
from jaxengine.pallas_kernels.attention.tpu.profile import block_profile

Case = tuple[Callable, Any, dict]  # what a builder returns to `tpu_profile.profile`
VMEM_LIMIT_BYTES = 48 << 20  # for jax's kernel, whose default does not fit its own block sizes


def ours(
    *,
    heads: tuple[int, int],
    head_dim: int,
    in_keys: int | None,
    page_size: int,
    max_pages: int,
    num_tokens: int,
    decode: bool,
    part: str,
    trips: int,
    kv_dtype: str = "bfloat16",
    checked: bool = False,
) -> Case:
    """Build one grid step of our TPU attention kernel that runs `part` `trips` times; return (function, operands, block
    sizes).

    num_tokens: tokens of the step, which determine the block sizes. heads: query heads and KV heads. decode: rows of
    one token; otherwise tiles of several. part: "block" computes one block of keys that all rows see, "edge" one with a
    mask, "tile" opens and closes a tile around an "edge"; "fetch" and "wait" start and await the copies of a block.
    in_keys: if values are the first elements of keys, how many; None for separate values. checked: with bounds checks,
    which are off on a chip; they then stay on in this process.
    """
    if checked:
        attend.compiler_params = functools.partial(_checked, attend.compiler_params)
    spec = AttentionSpec(*heads, head_dim, in_keys or head_dim, head_dim**-0.5, values_in_keys=in_keys is not None)
    fn, args, sizes = block_profile(
        spec,
        decode=decode,
        num_tokens=num_tokens,
        page_size=page_size,
        max_pages=max_pages,
        dtype=jnp.bfloat16,
        kv_dtype=kv_dtype,
        part=part,
        trips=trips,
    )
    bare, operands = bare_kernel(fn, args, "paged_attention_single" if decode else "paged_attention_runs")
    return bare, operands, sizes[0]._asdict()


def _checked(compiler_params: Callable, interpret: Any, *semantics: Any, **options: Any) -> Any:
    """Return the compiler parameters of `compiler_params` with bounds checks enabled."""
    return replace(compiler_params(interpret, *semantics, **options), disable_bounds_checks=False)


def theirs(
    *, heads: tuple[int, int], head_dim: int, page_size: int, max_pages: int, block_pages: int, block_q: int, trips: int
) -> Case:
    """Build one grid step of jax's own TPU attention kernel, which walks `trips` blocks of keys of one sequence; return
    (function, operands, {}).

    heads: query heads and KV heads. Changes that kernel's module for the rest of the process: its loops have fixed
    lengths, and its copies do nothing.
    """
    fix_trips(jax_kernel, lambda cond: trips if "kv_blk" in cond.__name__ else 1)
    jax_kernel.MultiPageAsyncCopyDescriptor.start = lambda self: None
    jax_kernel.MultiPageAsyncCopyDescriptor.wait = lambda self: self._vmem_buf
    call = functools.partial(
        jax_kernel.ragged_paged_attention,
        sm_scale=head_dim**-0.5,
        num_kv_pages_per_block=block_pages,
        num_queries_per_block=block_q,
        vmem_limit_bytes=VMEM_LIMIT_BYTES,
    )
    batch = _batch(block_q, block_q, max_pages)
    args = (
        jax.ShapeDtypeStruct((block_q, heads[0], head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((64, page_size, 2 * heads[1], head_dim), jnp.bfloat16),
        batch.kv_lens,
        batch.page_table,
        batch.cu_q_lens,
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    return *bare_kernel(call, args, "ragged_paged_attention_kernel"), {}


def _batch(num_seqs: int, num_tokens: int, max_pages: int) -> RaggedBatch:
    """Return a RaggedBatch of int32 shapes."""
    shapes: tuple[Any, ...] = ((num_seqs + 1,), (num_seqs,), (num_seqs, max_pages), (num_tokens,), (), ())
    return RaggedBatch(*(cast(jax.Array, jax.ShapeDtypeStruct(shape, jnp.int32)) for shape in shapes))
