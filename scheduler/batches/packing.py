"""Packing of a scheduled step into the flat int32 messages, one per replica, that its bucket's compiled step reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jaxengine.models.forward_batch import StepLayout
from jaxengine.scheduler.base.token_params import PROMPT_FEATURES
from jaxengine.scheduler.batches.batch import PageDeltas, ScheduledBatch, ScheduledStep
from jaxengine.scheduler.batches.buckets import Bucket, Buckets


@dataclass(frozen=True)
class StepInput:
    """Messages of one step, and the bucket that they are for.

    Attributes:
      bucket: the step's bucket.
      buffer: i32 [replicas, layout.size], newly allocated, as the device may read it after the next one is written.
        Each replica numbers its own slots from 0 to max_num_seqs - 1. The header's features are the same for all.
      overflow: page-table entries that did not fit, which must be written before the step. Their rows are numbered over
        all replicas.
    """

    bucket: Bucket
    buffer: np.ndarray
    overflow: PageDeltas


@dataclass(frozen=True)
class Packer:
    """Packer of batches into messages, for one engine.

    Attributes:
      buckets: the fixed set of step shapes.
      page_size: tokens of a page, which limits the page-table entries that a step can write.
      num_ranks: number of replicas, each of which has a message.
      num_groups: number of page tables of a slot: one for each cache group, and one more for saved states, if any.
      sections: functions by the name of a further message field. Each returns the field's shape for a bucket, or None
        if the bucket's messages do not have the field.
    """

    buckets: Buckets
    page_size: int
    num_ranks: int = 1
    num_groups: int = 1
    sections: Mapping[str, Callable[[Bucket], tuple[int, ...] | None]] = field(default_factory=dict)

    @cached_property
    def layouts(self) -> dict[Bucket, StepLayout]:
        """Layout of each bucket's message."""
        return {bucket: self._layout(bucket) for bucket in self.buckets}

    @property
    def num_slots(self) -> int:
        """Number of slots of all replicas. A slot's global number is rank * max_num_seqs + slot, so no slot has this
        number.
        """
        return self.num_ranks * self.buckets.max_num_seqs

    @property
    def num_table_rows(self) -> int:
        """Number of rows of a replica's page tables. The row of a slot is group * max_num_seqs + slot, so no slot has
        this row.
        """
        return self.num_groups * self.buckets.max_num_seqs

    def pack(self, step: ScheduledStep) -> StepInput:
        """Return the messages of a step with at least one row, in the smallest bucket that holds every replica's batch,
        with the page-table entries for which a message has no room as its overflow, whose rows count over all replicas.
        Page-table entries of a batch without rows are left out.

        Raises ValueError if the step has no rows or does not fit any bucket. If decodes have several tokens
        (step.width > 1), raises IndexError for too many rows and KeyError for a width that the buckets lack.
        """
        batches = step.batches
        num_rows = max([batch.num_rows for batch in batches])
        if step.width > 1:
            bucket = self.buckets.round_up_wide(num_rows, step.width)
        else:
            bucket = self.buckets.round_up(
                max([batch.num_tokens for batch in batches]),
                num_rows,
                mixed=max([batch.num_tokens - batch.num_rows for batch in batches]) > 0,
                prompt=step.features & PROMPT_FEATURES > 0,
                sections=step.has_sections,
            )
        layout = self.layouts[bucket]
        buffer = self._empty[bucket].copy()
        overflow = []
        for rank, (row, batch) in enumerate(zip(buffer, batches, strict=True)):
            # Kernels assume that each of the first num_decode rows has one token.
            num_decode = batch.num_decode if step.width == 1 else 0
            layout.view(row, "header")[:] = batch.num_rows, num_decode, step.features
            if batch.num_rows:  # otherwise its entries belong to requests that grew and were preempted in this step
                self._write(layout, row, batch)
                if len(batch.deltas.rows) > layout.num_deltas:
                    rows, columns, pages = (column[layout.num_deltas :] for column in batch.deltas)
                    overflow.append((rows + np.int32(rank * self.num_table_rows), columns, pages))
        return StepInput(bucket, buffer, PageDeltas.concatenate(overflow))

    def nothing(self, bucket: Bucket, features: int) -> np.ndarray:
        """Return newly allocated messages, i32 [replicas, size], of a step without rows in this bucket, whose header
        has these feature bits.
        """
        messages = self._empty[bucket].copy()
        for message in messages:
            self.layouts[bucket].view(message, "header")[2] = features
        return messages

    def _write(self, layout: StepLayout, message: np.ndarray, batch: ScheduledBatch) -> None:
        """Write one replica's rows, tokens, sections and as many new page-table entries (deltas) as fit into its
        message, i32 [layout.size], which holds only padding. The field `sample` gets batch.choice unless that is None.
        """
        num_rows, first = batch.num_rows, batch.num_decode
        slot, num_scheduled, start, sample, next_token = layout.view(message, "rows")
        slot[:num_rows] = batch.slots
        num_scheduled[:num_rows] = batch.num_scheduled
        sample[:num_rows] = batch.sample if batch.choice is None else batch.choice
        start[:num_rows] = batch.start
        if batch.decode_token_ids is not None:
            layout.view(message, "token_ids")[: len(batch.decode_token_ids)] = batch.decode_token_ids
        if first < num_rows:
            next_token[first:num_rows] = batch.next_tokens
            layout.view(message, "token_ids")[first : batch.num_tokens] = np.concatenate(batch.token_ids)
        for name, section in batch.message.items():
            layout.view(message, name)[:, : batch.num_tokens] = section
        count = min(len(batch.deltas.rows), layout.num_deltas)
        if count:
            layout.view(message, "deltas")[:, :count] = [column[:count] for column in batch.deltas]

    def _layout(self, bucket: Bucket) -> StepLayout:
        """Return the layout of a bucket's message. It has room for the page-table entries, in every group, of all pages
        that the step's tokens can begin. Only prefix-cache hits can add more, which `pack` returns as overflow.
        """
        num_deltas = bucket.num_seqs * -(-bucket.width // self.page_size)
        if not bucket.decode_only and bucket.width == 1:
            num_deltas += bucket.num_tokens // self.page_size
        shapes = ((name, shape_of(bucket)) for name, shape_of in self.sections.items())
        sections = tuple((name, shape) for name, shape in shapes if shape is not None)
        return StepLayout(bucket.num_tokens, bucket.num_seqs, self.num_groups * num_deltas, sections)

    @cached_property
    def _empty(self) -> dict[Bucket, np.ndarray]:
        """For each bucket the messages, i32 [replicas, size], of a step without rows: only padding, token ids -1."""
        messages = {}
        for bucket, layout in self.layouts.items():
            message = np.full(layout.size, -1, np.int32)
            layout.view(message, "header")[:] = 0
            slot, num_scheduled, _, sample, _ = layout.view(message, "rows")
            slot[:] = self.buckets.max_num_seqs
            num_scheduled[:] = sample[:] = 0
            layout.view(message, "deltas")[:] = [[self.num_table_rows], [0], [0]]
            messages[bucket] = np.tile(message, (self.num_ranks, 1))
        return messages


def delta_chunks(deltas: PageDeltas, size: int, padding_row: int) -> Iterator[np.ndarray]:
    """Yield page-table deltas in messages i32 [3, size] of rows, columns and pages; nothing if there are no deltas.

    The last message is padded with entries of `padding_row` (a row that no page table has), column 0 and page 0.
    """
    for first in range(0, len(deltas.rows), size):
        chunk = np.zeros((3, size), np.int32)
        chunk[0] = padding_row
        columns = [column[first : first + size] for column in deltas]
        chunk[:, : len(columns[0])] = columns
        yield chunk
