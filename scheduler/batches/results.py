"""Results of one replica's steps: sampled tokens are applied to its slots, and end some of its requests.

The tokens of a step are handled as arrays. If a row has several tokens, they are adjacent.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxengine.scheduler.base.request import NOT_FINITE, FinishReason, Request, RequestStatus, Wait
from jaxengine.scheduler.base.token_params import LAST_TOKEN, LOGPROBS
from jaxengine.scheduler.batches.batch import ScheduledBatch, StepResult, TokenRows
from jaxengine.scheduler.batches.slots import Slots


class End(NamedTuple):
    """End of a request because of its last token, with its finish reason and stop_reason."""

    request: Request
    reason: FinishReason
    stop_reason: int | str | None = None

    @classmethod
    def by(cls, request: Request, token: int, stopped: bool) -> End:
        """Return the end of a request whose last token is `token`.

        stopped: whether the token is one of the request's stop tokens. The reason is ERROR for a negative token, which
        means that the row's logits were not finite. Otherwise it is STOP if `stopped`, with the token as stop_reason
        unless it is in `eos_token_ids`, and else LENGTH.
        """
        if token < 0:
            return cls(request, FinishReason.ERROR, NOT_FINITE)
        if stopped:
            return cls(request, FinishReason.STOP, None if token in request.eos_token_ids else token)
        return cls(request, FinishReason.LENGTH)


class Results:
    """Application of sampled tokens to the slots of a replica."""

    def __init__(self, slots: Slots, rank: int, max_model_len: int):
        """Store the slots of replica `rank`. max_model_len: most tokens of a request, including its prompt."""
        self._slots = slots
        self._rank = rank
        self._max_model_len = max_model_len
        # Requests preempted while tokens of theirs were in flight, by the (slot, epoch) of these tokens.
        self._late: dict[tuple[int, int], Request] = {}
        self._rows = np.arange(slots.max_num_seqs)

    def expect_late(self, request: Request) -> None:
        """Record that a request is about to lose its slot while some of its tokens are in flight, and set its `wait` to
        Wait.TOKEN. `take` then applies these tokens to the request.
        """
        self._late[request.slot, int(self._slots.epoch[request.slot])] = request
        request.wait = Wait.TOKEN

    def take(
        self, batch: ScheduledBatch, token_ids: np.ndarray, counts: np.ndarray | None, result: StepResult, now: float
    ) -> list[End]:
        """Apply the tokens that a step of this replica has sampled: append them to the outputs of its slots, add them
        to `result`, and return the requests that they end, which the caller must finish. Drafts that were not accepted
        no longer count as computed. The slots' last token times, and the first token times of requests that get their
        first token, become `now`.

        Tokens after the one that ends a request are dropped. So are tokens of requests that have lost their slot,
        unless `expect_late` was called for them. A negative token id, which the sampler returns when it cannot sample,
        ends its request.

        Args:
          batch: the step's batch, from the replica's `commit`.
          token_ids: i32 [>= rows], or i32 [>= rows, W], of which the first `counts` tokens of each row are valid.
          counts: i32 [>= rows], at least 1 each; less than num_scheduled if not all were accepted. None if each row has
            one token.
          result: result of the whole step, to which this replica's tokens are added.
          now: when the tokens arrived, in seconds of the engine's clock.
        """
        s, width = self._slots, 1 if counts is None else token_ids.shape[1]
        # A decode always samples, and what it samples is never a request's first token.
        only_decodes = batch.num_decode == batch.num_rows
        rows = self._rows[: batch.num_rows] if only_decodes else batch.sample.nonzero()[0]
        own, epochs = (batch.slots, batch.epochs) if only_decodes else (batch.slots[rows], batch.epochs[rows])
        current = s.epoch[own] == epochs
        ends: list[End] = []
        if not current.all():
            for row in rows[~current].tolist():
                request = self._late.pop((int(batch.slots[row]), int(batch.epochs[row])), None)
                if request is not None and request.status is not RequestStatus.FINISHED:
                    late = token_ids[row : row + 1] if counts is None else token_ids[row, : counts[row]]
                    self._take_late(request, row * width, late, result, ends, now)
            rows, own = rows[current], own[current]
        # For each token: its slot, its id, the number of its request's known tokens up to it, its index in the step.
        slots = own
        if counts is None:
            tokens, known, indices = token_ids[rows], s.num_known[slots] + 1, rows
        else:
            surplus = batch.num_scheduled[rows] - counts[rows]
            s.num_computed[own] -= surplus
            s.num_tokens[own] -= surplus
            row, column = np.nonzero(np.arange(width) < counts[rows, None])
            slots = own[row]
            tokens, known = token_ids[rows[row], column], s.num_known[slots] + 1 + column
            indices = rows[row] * width + column
        stopped = s.are_stops(slots, tokens) & (known >= s.min_stop[slots])
        ended = stopped | (known >= s.limit[slots]) | (tokens < 0)
        if counts is not None and ended.any():
            last = np.full(s.max_num_seqs, np.iinfo(np.int32).max, np.int32)
            np.minimum.at(last, slots[ended], known[ended])
            kept = known <= last[slots]
            slots, tokens, known, indices = slots[kept], tokens[kept], known[kept], indices[kept]
            stopped, ended = stopped[kept], ended[kept]
        result.num_new_tokens += len(slots)
        s.append_tokens(slots, tokens, known)
        intervals, notable = now - s.last_token_time[own], ended
        s.last_token_time[own] = now
        if not only_decodes:
            first = known == s.num_prompt[slots] + 1
            intervals, notable = intervals[~first], ended | first
        result.intervals.append(intervals)
        if batch.features & LAST_TOKEN:
            followed = (s.features[slots] & LAST_TOKEN) > 0
            result.followed += zip(s.requests[slots[followed]], tokens[followed].tolist(), strict=True)
        wanted = s.per_step[slots]
        if wanted.any():
            emitted = TokenRows(s.tag[slots], tokens, rank=self._rank, rows=indices)
            if not wanted.all():
                emitted = TokenRows(emitted.tags[wanted], tokens[wanted], rank=self._rank, rows=indices[wanted])
            if batch.features & LOGPROBS:
                scored = (s.features[slots[wanted]] & LOGPROBS > 0) & (emitted.token_ids >= 0)
                emitted = emitted._replace(scored=np.flatnonzero(scored))
            result.emitted.append(emitted)
        for index in notable.nonzero()[0].tolist():
            request, token = s.requests[slots[index]], int(tokens[index])
            assert request is not None
            if known[index] == request.num_prompt_tokens + 1:
                request.first_token_time = now
                result.first_tokens.append(request)
            if ended[index]:
                ends.append(End.by(request, token, bool(stopped[index])))
        return ends

    def _take_late(
        self,
        request: Request,
        first_index: int,
        token_ids: np.ndarray,
        result: StepResult,
        ends: list[End],
        now: float,
    ) -> None:
        """Apply tokens i32 [n] of a request that was preempted before they arrived: append them to its output and to
        `result`, and set its `wait` to Wait.NONE.

        If one of them ends the request, the end is appended to `ends`, and the tokens after it are dropped.
        first_index: index of the first token in the step. now: see `take`.
        """
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
                ids, rows = np.array([token], np.int32), np.array([first_index + column])
                result.emitted.append(TokenRows(np.array([request.tag]), ids, scored, None, self._rank, rows))
            if request.params.features & LAST_TOKEN:
                result.followed.append((request, token))
            stopped = token in request.stop_token_ids and num_output >= max(1, request.params.min_tokens)
            length = request.num_prompt_tokens + num_output >= self._max_model_len
            if stopped or token < 0 or num_output >= request.max_tokens or length:
                ends.append(End.by(request, token, stopped))
                return
