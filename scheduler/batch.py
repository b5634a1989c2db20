"""What one step computes and what came of it: the scheduler's two messages to the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from scheduler.request import Request


class PageDeltas(NamedTuple):
    """Page-table entries written since the last step, i32[n] each; a row is group * max_num_seqs + slot."""

    rows: np.ndarray
    columns: np.ndarray
    pages: np.ndarray

    @staticmethod
    def concatenate(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> PageDeltas:
        if not parts:
            empty = np.empty(0, np.int32)
            return PageDeltas(empty, empty, empty)
        return PageDeltas(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@dataclass(slots=True)
class ScheduledBatch:
    """One rank's rows of a step, decodes first, n rows.

    Attributes:
      slots, num_scheduled, start, sample, epochs: i32/i64/bool[n]; see `models.forward_batch.StepLayout`.
      num_tokens: sum of num_scheduled.
      num_decode: leading rows whose token is the one sampled last.
      decode_token_ids: i32[num_decode], that token; None where the device is to take the one it remembers.
      token_ids: for each row after the decodes, its i32 token ids.
      next_tokens: for each row after the decodes, the known token that follows its chunk, or -1.
      deltas: page-table entries the device does not have yet.
      admitted: requests that took a slot in this step.
      features: union of the features of the rows.
    """

    slots: np.ndarray
    num_scheduled: np.ndarray
    start: np.ndarray
    sample: np.ndarray
    epochs: np.ndarray
    num_tokens: int
    num_decode: int
    decode_token_ids: np.ndarray | None
    token_ids: list[np.ndarray]
    next_tokens: list[int]
    deltas: PageDeltas
    admitted: list[Request]
    features: int

    @property
    def num_rows(self) -> int:
        return len(self.slots)


@dataclass(slots=True)
class ScheduledStep:
    """One step: a batch for each rank, possibly empty. It is to be dispatched if any rank has rows.

    Attributes:
      expired: requests ended in this step because their deadline had passed.
    """

    batches: list[ScheduledBatch]
    expired: list[Request]

    @property
    def num_rows(self) -> int:
        return sum([batch.num_rows for batch in self.batches])

    @property
    def num_tokens(self) -> int:
        return sum([batch.num_tokens for batch in self.batches])

    @property
    def features(self) -> int:
        """Union over the ranks, which all take the same branches."""
        features = 0
        for batch in self.batches:
            features |= batch.features
        return features


class Emitted(NamedTuple):
    """A token of each of n requests of a rank, whose every token somebody wants.

    Attributes:
      rank: whose rows they are.
      rows: i64[n], in the step.
      tags: i64[n], the requests' own: to go through the requests themselves takes longer than all else.
      token_ids: i32[n].
      features: u8[n], the requests'.
    """

    rank: int
    rows: np.ndarray
    tags: np.ndarray
    token_ids: np.ndarray
    features: np.ndarray


@dataclass(slots=True)
class StepResult:
    """What `update` learnt: requests that ended, tokens for those that follow every step, and first tokens.

    Attributes:
      masked: a token of each of these masked requests; those that have not ended are held now.
      intervals: for every token that was not a request's first, the seconds since the one before it; f64[n] each.
    """

    finished: list[Request] = field(default_factory=list)
    emitted: list[Emitted] = field(default_factory=list)
    masked: list[tuple[Request, int]] = field(default_factory=list)
    first_tokens: list[Request] = field(default_factory=list)
    num_new_tokens: int = 0
    intervals: list[np.ndarray] = field(default_factory=list)
