"""Takes in what the steps of one rank sampled, and tells who is to be ended by it.

The rows of a step are handled as arrays, one token of each at a time: where a row's drafts were right it has several.
Knows nothing of pages or of what runs next.
"""

from __future__ import annotations

import numpy as np

from scheduler.batch import ScheduledBatch, StepResult, TokenRows
from scheduler.end import End
from scheduler.request import Request, RequestStatus, Wait
from scheduler.slots import Slots
from scheduler.token_params import LAST_TOKEN, LOGPROBS


class Results:
    """The tokens that come back to the slots of a rank."""

    def __init__(self, slots: Slots, rank: int, max_model_len: int):
        self._slots = slots
        self._rank = rank
        self._max_model_len = max_model_len
        # Requests preempted while tokens of theirs were in flight, by the (slot, epoch) these will come back to.
        self._late: dict[tuple[int, int], Request] = {}

    def expect_late(self, request: Request) -> None:
        """Told of a request that is about to lose its slot while tokens of it are in flight: it is to wait for them."""
        self._late[request.slot, int(self._slots.epoch[request.slot])] = request
        request.wait = Wait.TOKEN

    def take(
        self, batch: ScheduledBatch, token_ids: np.ndarray, counts: np.ndarray | None, result: StepResult, now: float
    ) -> list[End]:
        """Adds to `result` and returns who is to be ended.

        token_ids: i32[>= rows], or i32[>= rows, W] of which each row has as many as `counts` i32[>= rows] says, at
        least one; fewer than it was scheduled where drafts were wrong.
        """
        s = self._slots
        token_ids = token_ids if counts is not None else token_ids[:, None]
        rows = np.flatnonzero(batch.sample)
        current = s.epoch[batch.slots[rows]] == batch.epochs[rows]
        ends: list[End] = []
        if not current.all():
            for row in rows[~current].tolist():
                request = self._late.pop((int(batch.slots[row]), int(batch.epochs[row])), None)
                if request is not None and request.status is not RequestStatus.FINISHED:
                    count = 1 if counts is None else int(counts[row])
                    self._take_late(request, row, token_ids[row, :count], token_ids.shape[1], result, ends, now)
            rows = rows[current]
        if counts is None:
            self._take_one(batch, rows, 0, token_ids, result, ends, now)
            return ends
        slots = batch.slots[rows]
        surplus = batch.num_scheduled[rows] - counts[rows]
        s.num_computed[slots] -= surplus
        s.num_tokens[slots] -= surplus
        for column in range(token_ids.shape[1]):
            rows = rows[counts[rows] > column]
            if not len(rows):
                break
            rows = rows[~self._take_one(batch, rows, column, token_ids, result, ends, now)]
        return ends

    def _take_one(
        self,
        batch: ScheduledBatch,
        rows: np.ndarray,
        column: int,
        token_ids: np.ndarray,
        result: StepResult,
        ends: list[End],
        now: float,
    ) -> np.ndarray:
        """Takes in the token of a column of each of `rows`; which of them it ends, bool[n]."""
        s = self._slots
        slots, tokens, places = batch.slots[rows], token_ids[rows, column], rows * token_ids.shape[1] + column
        result.num_new_tokens += len(rows)
        s.append_tokens(slots, tokens)
        known = s.num_known[slots]
        stopped = s.are_stops(slots, tokens) & (known >= s.min_stop[slots])
        ended = stopped | (known >= s.limit[slots]) | (tokens < 0)
        first = known == s.num_prompt[slots] + 1
        if not column:
            intervals = now - s.last_token_time[slots]
            s.last_token_time[slots] = now
            result.intervals.append(intervals[~first])
        if batch.features & LAST_TOKEN:
            followed = (s.features[slots] & LAST_TOKEN) > 0
            result.followed += zip(s.requests[slots[followed]], tokens[followed].tolist(), strict=True)
        wanted = s.per_step[slots]
        if wanted.any():
            emitted = TokenRows(s.tag[slots], tokens, rank=self._rank, rows=places)
            if not wanted.all():
                emitted = TokenRows(emitted.tags[wanted], tokens[wanted], rank=self._rank, rows=places[wanted])
            if batch.features & LOGPROBS:
                scored = (s.features[slots[wanted]] & LOGPROBS > 0) & (emitted.token_ids >= 0)
                emitted = emitted._replace(scored=np.flatnonzero(scored))
            result.emitted.append(emitted)
        for index in np.flatnonzero(ended | first).tolist():
            request, token = s.requests[slots[index]], int(tokens[index])
            assert request is not None
            if first[index]:
                request.first_token_time = now
                result.first_tokens.append(request)
            if ended[index]:
                ends.append(End.by(request, token, bool(stopped[index])))
        return ended

    def _take_late(
        self,
        request: Request,
        row: int,
        token_ids: np.ndarray,
        width: int,
        result: StepResult,
        ends: list[End],
        now: float,
    ) -> None:
        """Tokens of a request that was preempted before they came."""
        request.wait = Wait.NONE
        for column, token in enumerate(token_ids.tolist()):
            result.num_new_tokens += 1
            request.output_token_ids = np.append(request.output_token_ids, np.int32(token))
            num_output = len(request.output_token_ids)
            if num_output == 1:
                request.first_token_time = now
                result.first_tokens.append(request)
            elif not column:
                result.intervals.append(np.array([now - request.last_token_time]))
            request.last_token_time = now
            if request.per_step:
                scored = np.arange(token >= 0 and request.params.logprobs is not None)
                ids, rows = np.array([token], np.int32), np.array([row * width + column])
                result.emitted.append(TokenRows(np.array([request.tag]), ids, scored, None, self._rank, rows))
            if request.params.features & LAST_TOKEN:
                result.followed.append((request, token))
            stopped = token in request.stop_token_ids and num_output >= max(1, request.params.min_tokens)
            length = request.num_prompt_tokens + num_output >= self._max_model_len
            if stopped or token < 0 or num_output >= request.max_tokens or length:
                ends.append(End.by(request, token, stopped))
                return
