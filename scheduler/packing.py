"""Writes a scheduled batch into the flat message its bucket's compiled step reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from models.forward_batch import HEADER, StepLayout
from scheduler.batch import (
    BIAS,
    LOGPROBS,
    PENALTIES,
    PROMPT_LOGPROBS,
    RANDOM,
    TRUNCATION,
    PageDeltas,
    ScheduledBatch,
)
from scheduler.buckets import Bucket, Buckets

_FLAGS = (RANDOM, TRUNCATION, PENALTIES, BIAS, LOGPROBS, PROMPT_LOGPROBS)
assert len(_FLAGS) + 2 == len(HEADER)


@dataclass(frozen=True)
class StepInput:
    """One step's message and the bucket it is for.

    Attributes:
      buffer: i32[layout.size], fresh: the device may read it after the next one is written.
      overflow: page-table entries that did not fit and must be written before the step.
    """

    bucket: Bucket
    buffer: np.ndarray
    overflow: PageDeltas


@dataclass(frozen=True)
class Packer:
    """Packs batches for one engine.

    Attributes:
      buckets: the closed set of shapes.
      page_size: tokens a page holds; bounds the page-table entries a step can bring.
    """

    buckets: Buckets
    page_size: int

    @cached_property
    def layouts(self) -> dict[Bucket, StepLayout]:
        return {bucket: self._layout(bucket) for bucket in self.buckets}

    def pack(self, batch: ScheduledBatch) -> StepInput:
        """The message for a batch of at least one row."""
        num_rows, num_tokens = batch.num_rows, batch.num_tokens
        bucket = self.buckets.round_up(num_tokens, num_rows)
        layout = self.layouts[bucket]
        buffer = np.zeros(layout.size, np.int32)
        header = layout.view(buffer, "header")
        header[:2] = num_rows, batch.num_decode
        header[2:] = [bool(batch.features & flag) for flag in _FLAGS]
        slot = layout.view(buffer, "slot")
        slot[:num_rows] = batch.slots
        slot[num_rows:] = self.buckets.max_num_seqs
        layout.view(buffer, "num_scheduled")[:num_rows] = batch.num_scheduled
        layout.view(buffer, "start")[:num_rows] = batch.start
        layout.view(buffer, "sample")[:num_rows] = batch.sample
        next_token = layout.view(buffer, "next_token")
        next_token[: batch.num_decode] = -1
        next_token[batch.num_decode : num_rows] = batch.next_tokens
        token_ids = layout.view(buffer, "token_ids")
        token_ids[: batch.num_decode] = -1
        if batch.token_ids:
            token_ids[batch.num_decode : num_tokens] = np.concatenate(batch.token_ids)
        return StepInput(bucket, buffer, self._write_deltas(layout, buffer, batch.deltas))

    def _layout(self, bucket: Bucket) -> StepLayout:
        """Room for the pages a step can newly fill; only a prefix-cache hit can bring more."""
        num_deltas = bucket.num_seqs
        if not bucket.decode_only:
            num_deltas += bucket.num_tokens // self.page_size
        return StepLayout(bucket.num_tokens, bucket.num_seqs, num_deltas)

    def _write_deltas(self, layout: StepLayout, buffer: np.ndarray, deltas: PageDeltas) -> PageDeltas:
        count = min(len(deltas.slots), layout.num_deltas)
        write_deltas(
            PageDeltas(*(layout.view(buffer, f"delta_{name}") for name in ("slot", "column", "page"))),
            PageDeltas(*(column[:count] for column in deltas)),
            self.buckets.max_num_seqs,
        )
        return PageDeltas(*(column[count:] for column in deltas))


def write_deltas(target: PageDeltas, deltas: PageDeltas, padding_slot: int) -> None:
    """Fills the three columns of `target`; entries left over name a slot that does not exist."""
    count = len(deltas.slots)
    for column, values in zip(target, deltas, strict=True):
        column[:count] = values
    target.slots[count:] = padding_slot


def delta_chunks(deltas: PageDeltas, size: int, padding_slot: int) -> Iterator[np.ndarray]:
    """Splits deltas into messages i32[3, size]."""
    for first in range(0, len(deltas.slots), size):
        chunk = np.zeros((3, size), np.int32)
        write_deltas(
            PageDeltas(*chunk), PageDeltas(*(column[first : first + size] for column in deltas)), padding_slot
        )
        yield chunk
