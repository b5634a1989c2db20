"""The work of one step on a GPU: which CTA attends which keys of which rows.

Owns integers only. It sees lengths, never page ids, queries or keys, so that all layers of equal window share one
schedule; it is computed by XLA once per step. Two kernels read it:

- `DecodeItems`: rows with few new tokens. All rows, kv heads and blocks of keys stand in one line, which is cut into
  equal parts, one per CTA ("stream-K", Osama et al. 2023, arXiv 2301.03598). A (row, kv head) that a cut falls into
  has several items; their partial softmaxes are merged by log-sum-exp.
- `PrefillItems`: tiles of BLOCK_Q tokens of the longer runs. Their queries are copied to aligned rows: every run
  starts at a multiple of 8 there, because a TMA box must start at such a row.

`prefill_attention(q, kv, batch, items, *, spec, sinks, num_ctas, interpret) -> (o [T, N, Hv] in q's dtype, lse f32
[T, N])` of paged_attention_gpu_prefill.py takes `PrefillItems`. Both scales, soft cap, window and sinks are its own
matter. Its results are used for the tokens with `token_rows[t] < num_rows` and for no others.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

BLOCK_Q = 128  # tokens of a prefill tile

# Columns of `PrefillItems.items`.
PREFILL_SEQ = 0  # row of the page table
PREFILL_ROW8 = 1  # first aligned row of the tile / 8
PREFILL_ROWS = 2  # tokens of the tile, 1 .. BLOCK_Q
PREFILL_POSITION = 3  # position of its first token
PREFILL_BEGIN = 4  # first key that any of its tokens sees (0 without a window)
PREFILL_END = 5  # one past the last key that any of its tokens sees
PREFILL_FIELDS = 8  # columns 6 and 7 are 0: an item is one aligned 32-byte read


class PrefillItems(NamedTuple):
    """Tiles in falling token order, so that the long ones of a causal run start first. Each serves all query heads.

    num_rows = T + 8 * S' + BLOCK_Q rounded up to BLOCK_Q, S' = the most runs that T tokens can hold: a tile may read
    and write BLOCK_Q rows from its first one without leaving the array, whatever its length.
    """

    num_items: jax.Array  # i32 [1]
    items: jax.Array  # i32 [I, PREFILL_FIELDS]; rows past num_items hold 0
    row_tokens: jax.Array  # i32 [num_rows] token of an aligned row, T for a row that holds none
    token_rows: jax.Array  # i32 [T] aligned row of a token, num_rows if no tile holds it
