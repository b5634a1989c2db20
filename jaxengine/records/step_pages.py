"""Rows of a step's message, and the pages that these read and write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxengine.models.forward_batch import StepLayout


class StepRow(NamedTuple):
    """A row of one replica's message.

    Attributes:
      slot: of the replica; start: tokens computed before; count: tokens of this step.
      is_sampled: a token is chosen after it.
    """

    slot: int
    start: int
    count: int
    is_sampled: bool


def step_rows(layout: StepLayout, message: np.ndarray, num_computed: np.ndarray) -> list[StepRow]:
    """The rows of one replica's message i32[size], without those that fill it up.

    layout: of the message. num_computed: i32[R], tokens of each of its R slots before the step.
    """
    slots, counts, starts, samples, _ = layout.view(message, "rows")
    return [
        StepRow(slot, start if start >= 0 else int(num_computed[slot]), count, sample > 0)
        for slot, count, start, sample in zip(*map(np.ndarray.tolist, (slots, counts, starts, samples)), strict=True)
        if slot < len(num_computed)
    ]


def page_tables(layout: StepLayout, message: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """One replica's page tables i32[rows, columns] with the new entries of its message."""
    tables = tables.copy()
    rows, columns, pages = layout.view(message, "deltas")
    known = rows < len(tables)
    tables[rows[known], columns[known]] = pages[known]
    return tables


def pages_of(
    table: np.ndarray, rows: Sequence[StepRow], window: int | None, page_size: int, *, written: bool = False
) -> list[int]:
    """Pages that the rows of a step see or write, each once; with `written` only those that they write.

    table: i32[R, columns], of one cache group, by slot. window: how many keys a token of the group sees, None for all.
    """
    found: dict[int, None] = {}
    for row in rows:
        seen = 0 if window is None else max(0, row.start + 1 - window)
        first = row.start if written else seen
        pages = table[row.slot, first // page_size : -(-(row.start + row.count) // page_size)]
        found.update(dict.fromkeys(pages.tolist()))
    return list(found)
