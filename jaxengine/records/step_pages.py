"""Rows of a step's message, and the pages that these rows read and write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxengine.models.forward_batch import StepLayout


class StepRow(NamedTuple):
    """A row (sequence) of one replica's step message.

    Attributes:
      slot: the sequence's slot on its replica.
      start: number of its tokens computed before the step. count: number that the step computes.
      is_sampled: whether a token is sampled after the row.
    """

    slot: int
    start: int
    count: int
    is_sampled: bool


def step_rows(layout: StepLayout, message: np.ndarray, num_computed: np.ndarray) -> list[StepRow]:
    """Return the rows of one replica's message i32[size], without padding rows.

    layout: layout of the message. num_computed: i32[R], tokens computed before the step of the sequence in each of R
    slots.
    """
    slots, counts, starts, samples, _ = layout.view(message, "rows")
    return [
        StepRow(slot, start if start >= 0 else int(num_computed[slot]), count, sample > 0)
        for slot, count, start, sample in zip(*map(np.ndarray.tolist, (slots, counts, starts, samples)), strict=True)
        if slot < len(num_computed)
    ]


def page_tables(layout: StepLayout, message: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Return one replica's page tables i32[slots, columns] with the new entries that its message carries.

    layout: layout of `message`, i32[size]. tables: page tables before the step, not changed.
    """
    tables = tables.copy()
    rows, columns, pages = layout.view(message, "deltas")
    known = rows < len(tables)
    tables[rows[known], columns[known]] = pages[known]
    return tables


def pages_of(
    table: np.ndarray, rows: Sequence[StepRow], window: int | None, page_size: int, *, written: bool = False
) -> list[int]:
    """Return the pages that the rows of a step read or write, each once, in the order of the rows and, within a row, of
    positions.

    table: i32[R, columns], page table of one cache group, a row for each slot. window: number of keys that a token of
    the group sees; None for all. page_size: tokens per page. written: return only the pages that the rows write.
    """
    found: dict[int, None] = {}
    for row in rows:
        seen = 0 if window is None else max(0, row.start + 1 - window)
        first = row.start if written else seen
        pages = table[row.slot, first // page_size : -(-(row.start + row.count) // page_size)]
        found.update(dict.fromkeys(pages.tolist()))
    return list(found)
