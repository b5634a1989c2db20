"""Ragged batches for the proof of attention, with lengths, page tables and slots as a scheduler could make them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec

# Mixes of lengths: decodes, then runs, with padding after them; one sequence with all tokens; a single token.
MIXES = ("ragged", "one", "least")
# Most keys of a sequence: longer ones show nothing new, and plain XLA takes long for them.
MOST_KEYS = 4096


class Sizes(NamedTuple):
    """Static sizes of a batch.

    Attributes:
      num_tokens, num_seqs, num_columns: T, S and W, the columns of the page table.
      page_size: tokens of a page.
      num_pages: pages of the pool.
    """

    num_tokens: int
    num_seqs: int
    num_columns: int
    page_size: int
    num_pages: int


class Batch(NamedTuple):
    """Ragged batch in numpy, int32, with the fields of RaggedBatch, and the slots that no token sees.

    Attributes:
      unseen: bool [pages, page_size], slots of the pool that no token sees.
    """

    cu_q_lens: np.ndarray
    kv_lens: np.ndarray
    page_table: np.ndarray
    slot_mapping: np.ndarray
    num_seqs: np.ndarray
    num_decode: np.ndarray
    unseen: np.ndarray


def least_pages(num_seqs: int) -> int:
    """Return the smallest number of pages of a pool for batches of `num_seqs` sequences: page 0, which no sequence
    reads, the last page of each sequence, and eight that they share.
    """
    return num_seqs + 1 + 8


def ragged_batch(
    mix: str, sizes: Sizes, spec: AttentionSpec, rng: np.random.Generator, *, most_new: int | None = None
) -> Batch:
    """Return a random batch of this mix, one of MIXES, with `sizes`. most_new: limit of a sequence's new tokens, None
    for no limit.

    The last page of a sequence belongs to it alone; earlier ones are drawn from shared pages. Page-table entries that
    no token sees, also because of the window or chunk of `spec`, are page 0. That page, and slots after a sequence's
    end, are `unseen`.
    """
    q_lens, num_decode = _new_tokens(mix, sizes, rng, min(most_new or sizes.num_tokens, sizes.num_tokens))
    longest, page_size = sizes.num_columns * sizes.page_size, sizes.page_size
    context = np.minimum(rng.integers(0, min(longest, MOST_KEYS), len(q_lens)), longest - q_lens)
    context[0] = 0 if mix == "least" else min(longest, MOST_KEYS) - q_lens[0]
    context[-1] = context[-1] if len(q_lens) == 1 else 0
    context = np.maximum(context, 0)
    kv_lens = np.zeros(sizes.num_seqs, np.int32)
    kv_lens[: len(q_lens)] = context + q_lens
    page_table = np.zeros((sizes.num_seqs, sizes.num_columns), np.int32)
    unseen = np.zeros((sizes.num_pages, page_size), np.bool_)
    unseen[0] = True  # the page of entries that may not be read
    slot_mapping = np.full(sizes.num_tokens, -1, np.int32)
    cu_q_lens = np.full(sizes.num_seqs + 1, q_lens.sum(), np.int32)
    cu_q_lens[: len(q_lens) + 1] = np.concatenate([[0], np.cumsum(q_lens)])
    for seq, (first, length) in enumerate(zip(context, kv_lens, strict=False)):
        count, seen = -(-length // page_size), _first_seen(first, spec) // page_size
        page_table[seq, seen:count] = rng.integers(sizes.num_seqs + 1, sizes.num_pages, count - seen)
        page_table[seq, count - 1] = seq + 1
        unseen[seq + 1, length - (count - 1) * page_size :] = True
        positions = np.arange(first, length)
        slots = page_table[seq, positions // page_size] * page_size + positions % page_size
        slot_mapping[cu_q_lens[seq] : cu_q_lens[seq + 1]] = slots
    count, decodes = np.asarray(len(q_lens), np.int32), np.asarray(num_decode, np.int32)
    return Batch(cu_q_lens, kv_lens, page_table, slot_mapping, count, decodes, unseen)


def written_slots(num_tokens: int, page_size: int, num_pages: int, rng: np.random.Generator) -> np.ndarray:
    """Return i32 [T] slots to write, T = num_tokens: runs of one or more consecutive slots that begin anywhere in a
    page, then -1 for the last eighth of the tokens and for those for which the `num_pages` pages do not suffice.

    No two runs share a page, and a run's pages are drawn at random.
    """
    slots, pages = np.full(num_tokens, -1, np.int32), iter(rng.permutation(num_pages))
    used, end = 0, num_tokens - num_tokens // 8
    while used < end:
        length = 1 if rng.random() < 0.5 else int(rng.integers(1, 3 * page_size + 1))
        length, first = min(length, end - used), int(rng.integers(0, page_size))
        positions = np.arange(first, first + length)
        own = [next(pages, None) for _ in range(positions[-1] // page_size + 1)]
        if None in own:
            break
        slots[used : used + length] = np.asarray(own)[positions // page_size] * page_size + positions % page_size
        used += length
    return slots


def _new_tokens(mix: str, sizes: Sizes, rng: np.random.Generator, most: int) -> tuple[np.ndarray, int]:
    """Return the numbers of new tokens, i64, of the sequences that have some, and how many of the first sequences are
    decodes of one token.

    mix: one of MIXES; "least" has one decode, "one" a single sequence of all tokens (decodes, if these are no more than
    the sequences), others random lengths that leave some tokens unused. most: most tokens of one sequence.
    """
    num_tokens, num_seqs = sizes.num_tokens, sizes.num_seqs
    if mix == "least":
        return np.ones(1, np.int64), 1
    if num_tokens <= num_seqs:  # decodes alone
        count = num_tokens if mix == "one" else max(num_tokens - num_tokens // 4, 1)
        return np.ones(count, np.int64), count
    if mix == "one" and most == num_tokens:
        return np.full(1, num_tokens), 0
    singles = min(num_seqs // 2, num_tokens // 4)
    lengths, left = [1] * singles, num_tokens - num_tokens // 8 - singles
    while left > 0 and len(lengths) < num_seqs:
        limit = min(left, most)
        lengths.append(limit if len(lengths) == num_seqs - 1 else int(rng.integers(min(2, limit), limit + 1)))
        left -= lengths[-1]
    return np.asarray(lengths), singles


def _first_seen(position: int, spec: AttentionSpec) -> int:
    """Return the position of the first key that a token at `position` sees: the begin of its chunk if `spec` has
    chunks, else of its window, 0 without either.
    """
    if spec.chunk is not None:
        return position // spec.chunk * spec.chunk
    return 0 if spec.window is None else max(position - spec.window + 1, 0)
