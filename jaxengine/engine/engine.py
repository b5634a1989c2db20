"""The loop: schedule, execute, update. Ahead of the device by one step, or by one for each pipeline stage.

Knows token ids only; text is the output processor's. A slot's global number is rank * max_num_seqs + slot.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxengine.engine.output import EmittedTokens, EngineOutput, PromptScores, TokenScores
from jaxengine.engine.stats import BucketUse, RequestStats, StepStats
from jaxengine.engine.timeline import StepRecord, Timeline
from jaxengine.engine.token_bias import TokenBias
from jaxengine.grammars.request_masks import RequestMasks
from jaxengine.runner.model_runner import ModelRunner, PendingStep
from jaxengine.sampling.sampler import param_columns
from scheduler.batch import Emitted, ScheduledStep
from scheduler.buckets import Bucket
from scheduler.request import FinishReason, Request, RequestStatus
from scheduler.scheduler import Scheduler
from scheduler.token_params import BIAS, LOGPROBS, MASK, PENALTIES, PROMPT_LOGPROBS

# How long a step waits for masks where there is nothing else to do: new requests wait so long too.
_MASK_WAIT_SECONDS = 0.005


@dataclass(frozen=True)
class _InFlight:
    """A dispatched step.

    scored_prompts: (request, rank, first token in the rank's batch, its position, number of tokens) of prompts to be
      scored.
    """

    step: ScheduledStep
    pending: PendingStep
    record: StepRecord
    scored_prompts: list[tuple[Request, int, int, int, int]]


class Engine:
    """Runs requests to their end. Not thread-safe: one thread adds, aborts and steps.

    Attributes:
      stats, request_stats, bucket_use, timeline: what was counted about steps and requests.
    """

    def __init__(self, runner: ModelRunner, masks: RequestMasks | None = None):
        """masks: of requests with structured outputs; None without a tokenizer."""
        self.runner = runner
        self.masks = masks
        self.scheduler = Scheduler(
            runner.config.scheduler_config(runner.plan.num_pages, runner.num_ranks, runner.windows)
        )
        self.stats = StepStats()
        self.request_stats = RequestStats(runner.config.max_model_len)
        self.bucket_use = {bucket: BucketUse() for bucket in runner.buckets}
        self.timeline = Timeline()
        ahead = 2 if runner.config.async_scheduling else 1
        self._max_in_flight = max(ahead, self.scheduler.config.num_micro_batches)
        self._in_flight: deque[_InFlight] = deque()
        self._idle_since = time.monotonic()
        self._biases: dict[int, tuple[Request, TokenBias, frozenset[int]]] = {}

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` still has something to do or to collect."""
        return self.scheduler.num_unfinished > 0 or bool(self._in_flight)

    def add_request(self, request: Request) -> None:
        """Queues a request; raises RequestError if it cannot be served."""
        request.held = request.params.grammar is not None
        request.wait_for_token = request.params.waits_for_token
        if not self.has_unfinished:
            self._idle_since = time.monotonic()
        self.scheduler.add_request(request)
        if request.held:
            assert self.masks is not None  # SamplingParams.verify_against saw that there is a tokenizer
            self.masks.add(request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request at once, in whatever state it is."""
        if request.status is not RequestStatus.FINISHED:
            self.scheduler.finish(request, reason, stop_reason)
            self._ended(request)

    def step(self) -> EngineOutput:
        """Dispatches the next step; takes in the oldest in flight once there are enough of them, or none to add.

        Where every request waits for its mask, it waits a moment for them.
        """
        with self.runner.compiles.watch():
            output = EngineOutput()
            if self.masks is not None:
                self._take_masks(self.masks, output)
            dispatched = self._dispatch(output)
            if self._in_flight and (not dispatched or len(self._in_flight) == self._max_in_flight):
                self._collect(self._in_flight.popleft(), output)
            elif self.masks is not None and not (dispatched or output.finished or output.refused) and self.masks.awaits:
                self.masks.wait(_MASK_WAIT_SECONDS)
            for request in output.finished:
                self._ended(request)
            return output

    def shutdown(self) -> None:
        """Ends the process that computes masks."""
        if self.masks is not None:
            self.masks.worker.shutdown()

    def _take_masks(self, masks: RequestMasks, output: EngineOutput) -> None:
        """Lets requests run whose masks have come, and ends those that their grammars end."""
        events = masks.take()
        for request in events.ready:
            self.scheduler.release(request)
        for request, error in events.refused:
            self.finish(request, FinishReason.ERROR, str(error))
        for request, reason, stop_reason in events.ended:
            self.scheduler.finish(request, reason, stop_reason)
            output.finished.append(request)
        output.refused += events.refused

    def _dispatch(self, output: EngineOutput) -> bool:
        """Puts the next step in flight; False if nothing can run now."""
        start = time.monotonic()
        idle_since = self._device_idle_since(start)
        step = self.scheduler.schedule(start)
        output.finished += step.expired
        scheduled = time.monotonic()
        self.stats.schedule_seconds += scheduled - start
        if not step.num_rows:
            return False
        self._set_rows(step)
        message = self.runner.packer.pack(step)
        prepared = time.monotonic()
        pending = self.runner.execute(message)
        dispatched = time.monotonic()
        self._count(step, message.bucket)
        record = self.timeline.dispatched(
            step,
            self.scheduler,
            message.bucket,
            number=self.stats.num_steps,
            times=(start, scheduled, prepared, dispatched),
            idle_since=idle_since,
            num_bytes=message.buffer.nbytes,
        )
        self._in_flight.append(_InFlight(step, pending, record, self._scored_prompts(step)))
        if idle_since is not None:
            self.stats.idle_seconds += dispatched - idle_since
        self.stats.dispatch_seconds += time.monotonic() - scheduled
        return True

    def _collect(self, done: _InFlight, output: EngineOutput) -> None:
        start = time.monotonic()
        token_ids = done.pending.token_ids()
        arrived = time.monotonic()
        self._idle_since = arrived
        self.stats.wait_seconds += arrived - start
        result = self.scheduler.update(done.step, token_ids, arrived)
        scores = done.pending.logprobs() if result.emitted and done.step.features & LOGPROBS else None
        output.emitted += [_with_scores(emitted, scores) for emitted in result.emitted]
        for request, token_id in result.masked:
            assert self.masks is not None
            self._advance(self.masks, request, token_id)
        if done.scored_prompts:
            output.prompt_scores += self._prompt_scores(done)
        output.first_tokens += result.first_tokens
        output.finished += result.finished
        self.stats.num_generated_tokens += result.num_new_tokens
        for intervals in result.intervals:
            self.request_stats.observe_intervals(intervals)
        for request in result.first_tokens:
            self.request_stats.observe_first_token(request)
        updated = time.monotonic()
        self.stats.update_seconds += updated - arrived
        self.timeline.collected(done.record, result, (start, arrived, updated))

    def _device_idle_since(self, now: float) -> float | None:
        """Since when the device has had nothing to do, as far as the host can tell; None if it is at work."""
        if not self._in_flight:
            return self._idle_since
        return now if self._in_flight[-1].pending.is_ready() else None

    def _ended(self, request: Request) -> None:
        if self.masks is not None:
            self.masks.drop(request)
        request.finished_time = time.monotonic()
        self.request_stats.observe_end(request)
        self.timeline.ended(request)

    def _set_rows(self, step: ScheduledStep) -> None:
        """Brings the device's slot rows up to date for this step."""
        rows = []
        for request in [request for batch in step.batches for request in batch.admitted]:
            params, features = request.params, request.params.features
            slot = request.rank * self.scheduler.config.max_num_seqs + request.slot
            rows.append((slot, *param_columns(params, request.seed)))
            if features & PENALTIES:
                output = self.scheduler.output_token_ids(request)
                self.runner.set_token_counts(slot, request.prompt_token_ids, output)
            self._biases.pop(slot, None)
            if features & BIAS:
                bias = TokenBias(request, self.runner.vocab_size)
                forbidden = self._forbidden(request, bias)
                self._biases[slot] = request, bias, forbidden
                self.runner.set_bias(slot, bias.row(forbidden))
            else:
                self.runner.set_bias(slot, None)
        self.runner.set_params(rows)
        self._set_masks(step)
        if step.features & BIAS:
            self._refresh_biases(step)

    def _advance(self, masks: RequestMasks, request: Request, token_id: int) -> None:
        if request.status is not RequestStatus.FINISHED:
            masks.advance(request, token_id)
        elif token_id < 0 and not self._allows_any(masks, request):
            request.stop_reason = "no token is allowed by structured_outputs and the other parameters together"

    def _allows_any(self, masks: RequestMasks, request: Request) -> bool:
        """Whether mask and bias of the token sampled last left anything to sample."""
        for owner, bias, forbidden in self._biases.values():
            if owner is request:
                allowed = np.unpackbits(masks.row(request).view(np.uint8), bitorder="little")[: self.runner.vocab_size]
                return bool(np.isfinite(bias.row(forbidden)[allowed > 0]).any())
        return True

    def _set_masks(self, step: ScheduledStep) -> None:
        """Brings the masks of the rows that sample, and takes away those of former owners of slots."""
        rows: list[tuple[int, np.ndarray | None]] = []
        for rank, batch in enumerate(step.batches):
            slots, first = self.scheduler.ranks[rank].slots, rank * self.scheduler.config.max_num_seqs
            for request in batch.admitted:
                if not slots.features[request.slot] & MASK:
                    rows.append((first + request.slot, None))
            if batch.features & MASK:
                assert self.masks is not None
                sampling = batch.slots[batch.sample]
                for slot in sampling[(slots.features[sampling] & MASK) > 0].tolist():
                    request = slots.requests[slot]
                    assert request is not None
                    rows.append((first + slot, self.masks.row(request)))
        self.runner.set_masks(rows)

    def _refresh_biases(self, step: ScheduledStep) -> None:
        for rank, batch in enumerate(step.batches):
            for slot in (batch.slots[batch.sample] + rank * self.scheduler.config.max_num_seqs).tolist():
                if slot not in self._biases:
                    continue
                request, bias, before = self._biases[slot]
                forbidden = self._forbidden(request, bias)
                if forbidden != before:
                    self._biases[slot] = request, bias, forbidden
                    self.runner.set_bias(slot, bias.row(forbidden))

    def _forbidden(self, request: Request, bias: TokenBias) -> frozenset[int]:
        """The tokens forbidden to the token that the step being dispatched samples."""
        slots, slot = self.scheduler.ranks[request.rank].slots, request.slot
        sampling = int(slots.num_computed[slot] >= slots.num_fed[slot])
        num_output = int(slots.num_tokens[slot] - slots.num_prompt[slot]) - sampling
        return bias.forbidden(num_output, self.scheduler.output_token_ids(request))

    def _scored_prompts(self, step: ScheduledStep) -> list[tuple[Request, int, int, int, int]]:
        if not step.features & PROMPT_LOGPROBS:
            return []
        scored = []
        for rank, batch in enumerate(step.batches):
            slots = self.scheduler.ranks[rank].slots
            first_token = np.cumsum(batch.num_scheduled) - batch.num_scheduled
            for row in range(batch.num_decode, batch.num_rows):
                slot, count = int(batch.slots[row]), int(batch.num_scheduled[row])
                request = slots.requests[slot]
                assert request is not None
                if request.params.prompt_logprobs is not None:
                    position = int(slots.num_computed[slot]) - count
                    count = min(count, request.num_prompt_tokens - 1 - position)
                    if count > 0:
                        scored.append((request, rank, int(first_token[row]), position, count))
        return scored

    def _prompt_scores(self, done: _InFlight) -> list[PromptScores]:
        logprobs, results = done.pending.prompt_logprobs(), []
        for request, rank, token, position, count in done.scored_prompts:
            scores = _scores_at(logprobs, rank, slice(token, token + count))
            results.append(PromptScores(request, position + 1, scores))
        return results

    def _count(self, step: ScheduledStep, bucket: Bucket) -> None:
        stats, num_tokens = self.stats, step.num_tokens
        padding = bucket.num_tokens * len(step.batches) - num_tokens
        for counts in (stats, self.bucket_use[bucket]):
            counts.num_steps += 1
            counts.num_tokens += num_tokens
            counts.num_padding_tokens += padding
        self.request_stats.step_tokens.observe(num_tokens)
        for rank in self.scheduler.ranks:
            held, empty = rank.count_token_slots()
            stats.page_slots_used += held - empty
            stats.page_slots_empty += empty


def _with_scores(emitted: Emitted, scores: Any) -> EmittedTokens:
    """scores: of the step's rows, None when nobody wants any."""
    if scores is None:
        return EmittedTokens(emitted.tags, emitted.token_ids)
    scored = np.flatnonzero((emitted.features & LOGPROBS > 0) & (emitted.token_ids >= 0))
    found = _scores_at(scores, emitted.rank, emitted.rows[scored])
    return EmittedTokens(emitted.tags, emitted.token_ids, scored, found)


def _scores_at(arrays: Any, rank: int, rows: np.ndarray | slice) -> TokenScores:
    return TokenScores(
        arrays.logprob[rank, rows], arrays.rank[rank, rows], arrays.top_ids[rank, rows], arrays.top_logprobs[rank, rows]
    )
