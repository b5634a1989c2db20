"""What one step computes and what came of it: the scheduler's two messages to the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxengine.scheduler.request import Request


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
      slots, num_scheduled, start, sample, epochs: i32/i64/bool[n]; see `jaxengine.models.forward_batch.StepLayout`.
      num_rows: n.
      num_tokens: sum of num_scheduled.
      num_decode: leading rows whose first token is the one sampled last; others of theirs may turn out to be wrong.
      decode_token_ids: the decodes' tokens, i32, -1 where the device takes the one it knows, or one it proposes;
        None where all are such.
      token_ids: for each row after the decodes, its i32 token ids.
      next_tokens: for each row after the decodes, the known token that follows its chunk, or -1.
      deltas: page-table entries the device does not have yet.
      admitted: requests that took a slot in this step.
      sections: what extensions say of the step to the engine, by capability; those with nothing to say have no entry.
      message: likewise what they send the device: i32[n, num_tokens], a message section of the capability's name.
      choice: i32[n], the message's `sample` where it is more than that of `sample`
        (jaxengine.models.forward_batch.StepLayout).
      features: union of the features of the rows; PROMPT_FEATURES only where a known prompt token follows one of the
        step's.
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
    """One step: a batch for each rank, possibly empty. It is to be dispatched if any rank has rows.

    Attributes:
      expired: requests ended in this step because their deadline had passed, or because they could not be taken in.
      num_rows, num_tokens: of all ranks.
      features: union over the ranks, which all take the same branches.
      has_sections: some rank fills message sections of extensions.
      width: the most tokens that a decode has, over all ranks; of more than 1 the step has no other rows.
    """

    batches: list[ScheduledBatch]
    expired: list[Request]
    width: int = 1
    num_rows: int = field(init=False)
    num_tokens: int = field(init=False)
    features: int = field(init=False)
    has_sections: bool = field(init=False)

    def __post_init__(self):
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
      logprobs: f32[n].
      ranks: i32[n], 1 is best.
      top_ids, top_logprobs: i32[n, k], f32[n, k], best first.
      given_logprobs: f32[n, g], of a request's logprob_token_ids in the order that it has; g may be larger, and is 0
        where no request has any. The last three are what return_sampling_mass asks for, of an engine that has it.
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    given_logprobs: np.ndarray


_NONE = np.empty(0, np.int64)


class TokenRows(NamedTuple):
    """One token of each of n requests that follow every step: arrays, because a loop over requests takes longer than
    all else.

    Attributes:
      tags: i32[n] or i64[n], the requests' own.
      token_ids: i32[n]; a negative one is no token, its request ends with an error.
      scored: i64[m], the indexes of those whose logprobs were asked for; scores are theirs, None until they are known
        and without any.
      rank, rows: the rank, and i64[n], its rows in the step; of no meaning once the scores are known.
      vectors: f32[n, N], answers of requests whose answer is no text; None where it is.
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
    """What `update` learnt: requests that ended, tokens for those that follow every step, and first tokens.

    Attributes:
      followed: a token of each of these requests, whose next choice depends on it (LAST_TOKEN).
      intervals: for every token that was not a request's first, the seconds since the one before it; f64[n] each.
    """

    finished: list[Request] = field(default_factory=list)
    emitted: list[TokenRows] = field(default_factory=list)
    followed: list[tuple[Request, int]] = field(default_factory=list)
    first_tokens: list[Request] = field(default_factory=list)
    num_new_tokens: int = 0
    intervals: list[np.ndarray] = field(default_factory=list)
