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
        """How each bucket's message is laid out."""
        return {bucket: self._layout(bucket) for bucket in self.buckets}

    def pack(self, batch: ScheduledBatch) -> StepInput:
        """The message for a batch of at least one row."""
        num_rows, first = batch.num_rows, batch.num_decode
        bucket = self.buckets.round_up(batch.num_tokens, num_rows)
        layout = self.layouts[bucket]
        buffer = self._empty[bucket].copy()
        header = layout.view(buffer, "header")
        features = batch.features
        header[:] = num_rows, first, *[features & flag for flag in _FLAGS]
        slot, num_scheduled, start, sample, next_token = layout.view(buffer, "rows")
        slot[:num_rows] = batch.slots
        num_scheduled[:num_rows] = batch.num_scheduled
        sample[:num_rows] = batch.sample
        if first < num_rows:
            start[:num_rows] = batch.start
            next_token[first:num_rows] = batch.next_tokens
            layout.view(buffer, "token_ids")[first : batch.num_tokens] = np.concatenate(batch.token_ids)
        deltas = batch.deltas
        if len(deltas.slots):
            count = min(len(deltas.slots), layout.num_deltas)
            layout.view(buffer, "deltas")[:, :count] = [column[:count] for column in deltas]
            deltas = PageDeltas(*(column[count:] for column in deltas))
        return StepInput(bucket, buffer, deltas)

    def _layout(self, bucket: Bucket) -> StepLayout:
        """Room for the pages a step can newly fill; only a prefix-cache hit can bring more."""
        num_deltas = bucket.num_seqs
        if not bucket.decode_only:
            num_deltas += bucket.num_tokens // self.page_size
        return StepLayout(bucket.num_tokens, bucket.num_seqs, num_deltas)

    @cached_property
    def _empty(self) -> dict[Bucket, np.ndarray]:
        """Messages of padding alone, in which every token is the one sampled last."""
        messages = {}
        for bucket, layout in self.layouts.items():
            buffer = np.full(layout.size, -1, np.int32)
            layout.view(buffer, "header")[:] = 0
            slot, num_scheduled, _, sample, _ = layout.view(buffer, "rows")
            slot[:] = self.buckets.max_num_seqs
            num_scheduled[:] = sample[:] = 0
            layout.view(buffer, "deltas")[:] = [[self.buckets.max_num_seqs], [0], [0]]
            messages[bucket] = buffer
        return messages


def delta_chunks(deltas: PageDeltas, size: int, padding_slot: int) -> Iterator[np.ndarray]:
    """Splits deltas into messages i32[3, size]; entries left over name `padding_slot`."""
    for first in range(0, len(deltas.slots), size):
        chunk = np.zeros((3, size), np.int32)
        chunk[0] = padding_slot
        columns = [column[first : first + size] for column in deltas]
        chunk[:, : len(columns[0])] = columns
        yield chunk
