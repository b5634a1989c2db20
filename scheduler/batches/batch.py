"""Messages between scheduler and engine: the rows that a step computes, and their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxengine.scheduler.base.request import Request


class PageDeltas(NamedTuple):
    """Page-table entries written since the last step: rows (group * max_num_seqs + slot), columns and page ids, each
    i32 [n].
    """

    rows: np.ndarray
    columns: np.ndarray
    pages: np.ndarray

    @staticmethod
    def concatenate(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> PageDeltas:
        """Return the joined (rows, columns, pages) of several writes, in order; three empty i32 arrays if there are
        none.
        """
        if not parts:
            empty = np.empty(0, np.int32)
            return PageDeltas(empty, empty, empty)
        return PageDeltas(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@dataclass(slots=True)
class ScheduledBatch:
    """The n rows of one replica in a step, decodes first.

    Attributes:
      slots: i64 [n], the replica's slot of each row.
      num_scheduled, start, sample: i32 [n], i32 [n], bool [n]; see `jaxengine.models.forward_batch.StepLayout`.
      epochs: i64 [n], Slots.epoch of each slot. If it has changed when the results arrive, the slot has lost the
        request that they are for.
      num_rows: n.
      num_tokens: sum of num_scheduled.
      num_decode: number of leading rows whose first token is the last sampled one; their further tokens are verified.
      decode_token_ids: i32, tokens of the decodes, -1 where the device has the token or proposes it; None if all are
        -1.
      token_ids: for each row after the decodes, its i32 token ids.
      next_tokens: for each row after the decodes, the known token that follows its chunk, or -1.
      deltas: page-table entries that the device does not have yet.
      admitted: requests that took a slot in this step.
      sections: data of extensions for the engine, by capability; extensions without data have no entry.
      message: data of extensions for the device, by message section: i32 [n, num_tokens].
      choice: i32 [n], the message's `sample` field if an extension has marked rows in it
        (jaxengine.models.forward_batch.StepLayout); otherwise None.
      features: union of the features of the rows. PROMPT_FEATURES are only included if the step has a prompt token
        whose successor is known.
    """

    slots: np.ndarray
    num_scheduled: np.ndarray
    start: np.ndarray
    sample: np.ndarray
    epochs: np.ndarray
    num_rows: int
    num_tokens: int
    num_decode: int
    decode_token_ids: np.ndarray | None
    token_ids: list[np.ndarray]
    next_tokens: list[int]
    deltas: PageDeltas
    admitted: list[Request]
    features: int
    sections: dict[str, Any] = field(default_factory=dict)
    message: dict[str, np.ndarray] = field(default_factory=dict)
    choice: np.ndarray | None = None


@dataclass(slots=True)
class ScheduledStep:
    """One step: a batch, possibly empty, for each replica. It is dispatched if any replica has rows.

    Attributes:
      batches: the batch of each replica.
      expired: requests that were ended instead of run: their deadline had passed, or their values did not fit a column.
      num_rows, num_tokens: sums over all replicas.
      features: union over the replicas, which must all take the same branches.
      has_sections: whether some replica fills message sections of extensions.
      width: largest number of tokens of a decode, over all replicas. If it is more than 1, the step has only decodes.
    """

    batches: list[ScheduledBatch]
    expired: list[Request]
    width: int = 1
    num_rows: int = field(init=False)
    num_tokens: int = field(init=False)
    features: int = field(init=False)
    has_sections: bool = field(init=False)

    def __post_init__(self):
        """Compute num_rows, num_tokens, features and has_sections, which hold for all `batches` together."""
        self.num_rows = self.num_tokens = self.features = 0
        self.has_sections = False
        for batch in self.batches:
            self.num_rows += batch.num_rows
            self.num_tokens += batch.num_tokens
            self.features |= batch.features
            self.has_sections |= bool(batch.message)


class TokenScores(NamedTuple):
    """Logprobs of n tokens.

    Attributes:
      logprobs: f32 [n].
      ranks: i32 [n], the token's rank among all by logprob; 1 is the most likely.
      top_ids, top_logprobs: i32 [n, k], f32 [n, k], best first.
      given_logprobs: f32 [n, g], those of a request's logprob_token_ids in their order, then unused columns; g is 0 if
        no request has any. In an engine with return_sampling_mass the last columns are the values that it reports.
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    given_logprobs: np.ndarray


_NONE = np.empty(0, np.int64)


class TokenRows(NamedTuple):
    """One token for each of n requests that stream every step.

    Attributes:
      tags: i32 [n] or i64 [n], Request.tag of each.
      token_ids: i32 [n]; a negative one is not a token: its request ends with an error.
      scored: i64 [m], indices of the requests with logprobs. scores: their logprobs; None until they are known, or if
        no request has any.
      rank, rows: the replica, and i64 [n], indices of the tokens in the step; meaningless once the scores are known.
      vectors: f32 [n, N], results of requests that generate no text; None for generated tokens.
    """

    tags: np.ndarray
    token_ids: np.ndarray
    scored: np.ndarray = _NONE
    scores: TokenScores | None = None
    rank: int = 0
    rows: np.ndarray = _NONE
    vectors: np.ndarray | None = None


@dataclass(slots=True)
class StepResult:
    """Results of a step for the engine.

    Attributes:
      finished: requests that have ended. emitted: tokens of requests that stream every step.
      followed: (request, token) for requests whose next choice depends on this token (LAST_TOKEN).
      first_tokens: requests that got their first token.
      num_new_tokens: number of tokens that all requests got.
      intervals: f64[n] each, the seconds since the previous token, for every token that is not a request's first.
    """

    finished: list[Request] = field(default_factory=list)
    emitted: list[TokenRows] = field(default_factory=list)
    followed: list[tuple[Request, int]] = field(default_factory=list)
    first_tokens: list[Request] = field(default_factory=list)
    num_new_tokens: int = 0
    intervals: list[np.ndarray] = field(default_factory=list)
