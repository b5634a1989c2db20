"""The loop: schedule, execute, update. Ahead of the device by one step, or by one for each pipeline stage.

Knows token ids only; text is the output processor's. A slot's global number is rank * max_num_seqs + slot.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from jaxengine.model_runner import ModelRunner, PendingStep
from jaxengine.sampler import param_columns
from jaxengine.token_bias import TokenBias
from scheduler.batch import BIAS, LOGPROBS, PENALTIES, PROMPT_LOGPROBS, Emitted, ScheduledStep, features_of
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

    scored_prompts: (request, rank, first token in the rank's batch, its position, number of tokens) of prompts to be
      scored.
    """

    step: ScheduledStep
    pending: PendingStep
    scored_prompts: list[tuple[Request, int, int, int, int]]


class Engine:
    """Runs requests to their end. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.scheduler = Scheduler(runner.config.scheduler_config(runner.plan.num_pages, runner.num_ranks))
        self.stats = StepStats()
        ahead = 2 if runner.config.async_scheduling else 1
        self._max_in_flight = max(ahead, self.scheduler.config.num_micro_batches)
        self._in_flight: deque[_InFlight] = deque()
        self._bad_words: dict[Request, list[list[int]]] = {}
        self._biases: dict[int, tuple[Request, TokenBias, frozenset[int]]] = {}

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` still has something to do or to collect."""
        return self.scheduler.num_unfinished > 0 or bool(self._in_flight)

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
        """Dispatches the next step; takes in the oldest in flight once there are enough of them, or none to add."""
        with self.runner.compiles.watch():
            output = EngineOutput()
            dispatched = self._dispatch(output)
            if self._in_flight and (not dispatched or len(self._in_flight) == self._max_in_flight):
                self._collect(self._in_flight.popleft(), output)
            for request in output.finished:
                self._bad_words.pop(request, None)
            return output

    def _dispatch(self, output: EngineOutput) -> bool:
        """Puts the next step in flight; False if nothing can run now."""
        start = time.perf_counter()
        step = self.scheduler.schedule(time.monotonic())
        output.finished += step.expired
        scheduled = time.perf_counter()
        self.stats.schedule_seconds += scheduled - start
        if not step.num_rows:
            return False
        self._set_rows(step)
        message = self.runner.packer.pack(step)
        self._in_flight.append(_InFlight(step, self.runner.execute(message), self._scored_prompts(step)))
        self._count(step, message.bucket.num_tokens)
        self.stats.dispatch_seconds += time.perf_counter() - scheduled
        return True

    def _collect(self, done: _InFlight, output: EngineOutput) -> None:
        start = time.perf_counter()
        token_ids = done.pending.token_ids()
        arrived = time.perf_counter()
        self.stats.wait_seconds += arrived - start
        result = self.scheduler.update(done.step, token_ids)
        scores = done.pending.logprobs() if result.emitted and done.step.features & LOGPROBS else None
        for emitted in result.emitted:
            wanted = scores is not None and emitted.request.params.logprobs is not None and emitted.token_id >= 0
            logprobs = _scores_at(scores, emitted.rank, emitted.row, emitted.token_id) if wanted else None
            output.emitted.append((emitted, logprobs))
        if done.scored_prompts:
            output.prompt_scores += self._prompt_scores(done)
        output.first_tokens += result.first_tokens
        output.finished += result.finished
        self.stats.num_generated_tokens += result.num_new_tokens
        self.stats.update_seconds += time.perf_counter() - arrived

    def _set_rows(self, step: ScheduledStep) -> None:
        """Brings the device's slot rows up to date for this step."""
        rows = []
        for request in [request for batch in step.batches for request in batch.admitted]:
            params, features = request.params, features_of(request.params)
            slot = request.rank * self.scheduler.config.max_num_seqs + request.slot
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
        if step.features & BIAS:
            self._refresh_biases(step)

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
            ids = request.prompt_token_ids[position + 1 : position + 1 + count].tolist()
            scores = [_scores_at(logprobs, rank, token + index, token_id) for index, token_id in enumerate(ids)]
            results.append(PromptScores(request, position + 1, scores))
        return results

    def _count(self, step: ScheduledStep, num_padded: int) -> None:
        """num_padded: tokens of each rank, padding included."""
        stats, num_tokens = self.stats, step.num_tokens
        stats.num_steps += 1
        stats.num_tokens += num_tokens
        stats.num_padding_tokens += num_padded * len(step.batches) - num_tokens
        for rank in self.scheduler.ranks:
            slots = rank.slots
            held = int(slots.num_pages[slots.active].sum()) * self.scheduler.config.page_size
            used = int(slots.num_computed[slots.active].sum())
            stats.page_slots_used += used
            stats.page_slots_empty += held - used


def _scores_at(arrays, rank: int, row: int, token_id: int) -> TokenScore:
    at = rank, row
    return TokenScore(
        token_id, float(arrays.logprob[at]), int(arrays.rank[at]), arrays.top_ids[at], arrays.top_logprobs[at]
    )
