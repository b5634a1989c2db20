"""The loop: schedule, execute, update. One step ahead of the device unless told otherwise.

Knows token ids only; text is the output processor's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from jaxengine.model_runner import ModelRunner, PendingStep
from jaxengine.sampler import param_columns
from jaxengine.token_bias import TokenBias
from scheduler.batch import BIAS, LOGPROBS, PENALTIES, PROMPT_LOGPROBS, Emitted, ScheduledBatch, features_of
from scheduler.request import FinishReason, Request
from scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class TokenScore:
    """Logprobs at one position: of the token there, its rank (1 is best), and the best ones, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(frozen=True)
class PromptScores:
    """Logprobs of a stretch of a prompt: `scores[i]` is of prompt token `first + i`."""

    request: Request
    first: int
    scores: list[TokenScore]


@dataclass
class EngineOutput:
    """What one call of `Engine.step` brought.

    Attributes:
      emitted: tokens of requests that follow every step, with their logprobs where asked for.
      prompt_scores: logprobs of prompts.
      first_tokens: requests whose first token came.
      finished: requests that ended, deadlines included.
    """

    emitted: list[tuple[Emitted, TokenScore | None]] = field(default_factory=list)
    prompt_scores: list[PromptScores] = field(default_factory=list)
    first_tokens: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)


@dataclass
class StepStats:
    """Sums over the engine's life.

    Attributes:
      num_steps: steps dispatched; num_padding_tokens of them were padding.
      schedule_seconds, dispatch_seconds, wait_seconds, update_seconds: host time by part of the step.
      page_slots_used, page_slots_empty: token slots of the pages held by running requests, summed over steps.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_padding_tokens: int = 0
    num_generated_tokens: int = 0
    schedule_seconds: float = 0.0
    dispatch_seconds: float = 0.0
    wait_seconds: float = 0.0
    update_seconds: float = 0.0
    page_slots_used: int = 0
    page_slots_empty: int = 0


@dataclass(frozen=True)
class _InFlight:
    """A dispatched step.

    scored_prompts: (request, first token in the step, its position, number of tokens) of prompts to be scored.
    """

    batch: ScheduledBatch
    pending: PendingStep
    scored_prompts: list[tuple[Request, int, int, int]]


class Engine:
    """Runs requests to their end. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.scheduler = Scheduler(runner.config.scheduler_config(runner.plan.num_pages))
        self.stats = StepStats()
        self._in_flight: _InFlight | None = None
        self._bad_words: dict[Request, list[list[int]]] = {}
        self._biases: dict[int, tuple[Request, TokenBias, frozenset[int]]] = {}

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` still has something to do or to collect."""
        return self.scheduler.num_unfinished > 0 or self._in_flight is not None

    def add_request(self, request: Request, bad_words: list[list[int]] | None = None) -> None:
        """Queues a request; raises RequestError if it cannot be served.

        bad_words: token sequences the request must not complete.
        """
        bad_words = bad_words or []
        request.wait_for_token = any(len(word) > 1 for word in bad_words)
        self.scheduler.add_request(request)
        if bad_words:
            self._bad_words[request] = bad_words

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request at once, in whatever state it is."""
        self.scheduler.finish(request, reason, stop_reason)
        self._bad_words.pop(request, None)

    def step(self) -> EngineOutput:
        """Dispatches the next step and takes in the results of the one before it."""
        with self.runner.compiles.watch():
            output = EngineOutput()
            before = self._in_flight
            self._in_flight = self._dispatch(output)
            if before is not None:
                self._collect(before, output)
            if not self.runner.config.async_scheduling and self._in_flight is not None:
                self._collect(self._in_flight, output)
                self._in_flight = None
            for request in output.finished:
                self._bad_words.pop(request, None)
            return output

    def _dispatch(self, output: EngineOutput) -> _InFlight | None:
        start = time.perf_counter()
        batch = self.scheduler.schedule(time.monotonic())
        output.finished += batch.expired
        scheduled = time.perf_counter()
        self.stats.schedule_seconds += scheduled - start
        if not batch.num_rows:
            return None
        self._set_rows(batch)
        step = self.runner.packer.pack(batch)
        in_flight = _InFlight(batch, self.runner.execute(step, batch.num_rows), self._scored_prompts(batch))
        self._count(batch, step.bucket.num_tokens)
        self.stats.dispatch_seconds += time.perf_counter() - scheduled
        return in_flight

    def _collect(self, done: _InFlight, output: EngineOutput) -> None:
        start = time.perf_counter()
        token_ids = done.pending.token_ids()
        arrived = time.perf_counter()
        self.stats.wait_seconds += arrived - start
        result = self.scheduler.update(done.batch, token_ids)
        scores = done.pending.logprobs() if result.emitted and done.batch.features & LOGPROBS else None
        for emitted in result.emitted:
            wanted = scores is not None and emitted.request.params.logprobs is not None and emitted.token_id >= 0
            logprobs = _scores_at(scores, emitted.row, emitted.token_id) if wanted else None
            output.emitted.append((emitted, logprobs))
        if done.scored_prompts:
            output.prompt_scores += self._prompt_scores(done)
        output.first_tokens += result.first_tokens
        output.finished += result.finished
        self.stats.num_generated_tokens += result.num_new_tokens
        self.stats.update_seconds += time.perf_counter() - arrived

    def _set_rows(self, batch: ScheduledBatch) -> None:
        """Brings the device's slot rows up to date for this batch."""
        rows = []
        for request in batch.admitted:
            slot, params, features = request.slot, request.params, features_of(request.params)
            rows.append((slot, *param_columns(params, request.seed)))
            if features & PENALTIES:
                output = self.scheduler.output_token_ids(request)
                self.runner.set_token_counts(slot, request.prompt_token_ids, output)
            self._biases.pop(slot, None)
            if features & BIAS:
                bias = TokenBias(request, self._bad_words.get(request, []), self.runner.vocab_size)
                forbidden = self._forbidden(request, bias)
                self._biases[slot] = request, bias, forbidden
                self.runner.set_bias(slot, bias.row(forbidden))
            else:
                self.runner.set_bias(slot, None)
        self.runner.set_params(rows)
        if batch.features & BIAS:
            self._refresh_biases(batch)

    def _refresh_biases(self, batch: ScheduledBatch) -> None:
        for slot in batch.slots[batch.sample].tolist():
            if slot not in self._biases:
                continue
            request, bias, before = self._biases[slot]
            forbidden = self._forbidden(request, bias)
            if forbidden != before:
                self._biases[slot] = request, bias, forbidden
                self.runner.set_bias(slot, bias.row(forbidden))

    def _forbidden(self, request: Request, bias: TokenBias) -> frozenset[int]:
        """The tokens forbidden to the token that the step being dispatched samples."""
        slots, slot = self.scheduler.slots, request.slot
        sampling = int(slots.num_computed[slot] >= slots.num_fed[slot])
        num_output = int(slots.num_tokens[slot] - slots.num_prompt[slot]) - sampling
        return bias.forbidden(num_output, self.scheduler.output_token_ids(request))

    def _scored_prompts(self, batch: ScheduledBatch) -> list[tuple[Request, int, int, int]]:
        if not batch.features & PROMPT_LOGPROBS:
            return []
        scored = []
        slots = self.scheduler.slots
        first_token = np.cumsum(batch.num_scheduled) - batch.num_scheduled
        for row in range(batch.num_decode, batch.num_rows):
            slot, count = int(batch.slots[row]), int(batch.num_scheduled[row])
            request = slots.requests[slot]
            assert request is not None
            if request.params.prompt_logprobs is not None:
                position = int(slots.num_computed[slot]) - count
                count = min(count, request.num_prompt_tokens - 1 - position)
                if count > 0:
                    scored.append((request, int(first_token[row]), position, count))
        return scored

    def _prompt_scores(self, done: _InFlight) -> list[PromptScores]:
        logprobs, results = done.pending.prompt_logprobs(), []
        for request, token, position, count in done.scored_prompts:
            ids = request.prompt_token_ids[position + 1 : position + 1 + count].tolist()
            scores = [_scores_at(logprobs, token + index, token_id) for index, token_id in enumerate(ids)]
            results.append(PromptScores(request, position + 1, scores))
        return results

    def _count(self, batch: ScheduledBatch, num_padded: int) -> None:
        stats, slots = self.stats, self.scheduler.slots
        num_tokens = batch.num_tokens
        stats.num_steps += 1
        stats.num_tokens += num_tokens
        stats.num_padding_tokens += num_padded - num_tokens
        held = int(slots.num_pages[slots.active].sum()) * self.scheduler.config.page_size
        used = int(slots.num_computed[slots.active].sum())
        stats.page_slots_used += used
        stats.page_slots_empty += held - used


def _scores_at(arrays, row: int, token_id: int) -> TokenScore:
    return TokenScore(
        token_id, float(arrays.logprob[row]), int(arrays.rank[row]), arrays.top_ids[row], arrays.top_logprobs[row]
    )
