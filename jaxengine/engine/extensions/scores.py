"""Logprobs: the sampler computes those of sampled tokens, a separate program (`score`) those of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxengine.engine.extension import NO_EVENTS, Events, LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput, PromptScores
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import LOGPROBS, PROMPT_LOGPROBS
from jaxengine.scheduler.batches.batch import ScheduledStep, StepResult, TokenScores
from jaxengine.scheduler.rank import Rank


class _ScoredPrompt(NamedTuple):
    """Contiguous tokens of a prompt that a step scores.

    Attributes:
      request, rank: the request and the index of its replica.
      token: index of the first token in the replica's batch.
      position: position of that token in the prompt.
      count: number of tokens.
    """

    request: Request
    rank: int
    token: int
    position: int
    count: int

    @property
    def tokens(self) -> slice:
        """Slice of these tokens in the replica's batch."""
        return slice(self.token, self.token + self.count)


class Scores(LoopExtension):
    """Loop extension for requests with logprobs."""

    def __init__(self) -> None:
        """Begin without requests."""
        self._prompts: dict[InFlight, list[_ScoredPrompt]] = {}
        self._to_score: InFlight | None = None  # a step between its forward pass and its sampler
        self._requests: set[Request] = set()
        self._with_given: set[Request] = set()  # requests among them that name tokens or return the sampling mass

    @property
    def is_idle(self) -> bool:
        return not (self._requests or self._prompts)

    def prepare(self, request: Request) -> None:
        """Raise RequestError for return_sampling_mass in an engine without enable_sampling_mass."""
        if request.params.return_sampling_mass and not self.loop.runner.config.enable_sampling_mass:
            problem = "return_sampling_mass: the engine was started without enable_sampling_mass"
            raise RequestError(problem, param="return_sampling_mass")

    def queued(self, requests: Sequence[Request]) -> None:
        asked = LOGPROBS | PROMPT_LOGPROBS
        self._requests.update(request for request in requests if request.params.features & asked)
        given = (each for each in requests if each.params.logprob_token_ids or each.params.return_sampling_mass)
        self._with_given.update(given)

    def after_forward(self, step: InFlight | None) -> Events:
        """Record the prompt tokens of a step that are to be scored, for `sync` and `collected`. Returns no events."""
        if step is not None and (prompts := _scored_prompts(step.step, self.loop.scheduler.ranks)):
            self._prompts[step] = prompts
            self._to_score = step
        return NO_EVENTS

    def sync(self, step: ScheduledStep) -> None:
        """Dispatch the scoring program if the step has prompt tokens to score. By now the devices have the token ids
        whose logprobs requests name.
        """
        if self._to_score is not None:
            self.loop.runner.extension("scores").score(self._to_score.pending)
            self._to_score = None

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Add the requested logprobs of sampled tokens to `result.emitted`, and those of prompts to
        `output.prompt_scores`.
        """
        if any(len(rows.scored) for rows in result.emitted):
            scores = step.pending.logprobs(given=bool(self._with_given))
            result.emitted = [
                rows._replace(scores=_scores_at(scores, rows.rank, rows.rows[rows.scored])) for rows in result.emitted
            ]
        if prompts := self._prompts.pop(step, None):
            given = any(each.request.params.prompt_logprob_token_ids for each in prompts)
            scores = self.loop.runner.extension("scores").prompt_logprobs(step.pending, given)
            output.prompt_scores += [
                PromptScores(each.request, each.position + 1, _scores_at(scores, each.rank, each.tokens))
                for each in prompts
            ]

    def ended(self, request: Request) -> None:
        self._requests.discard(request)
        self._with_given.discard(request)


def _scored_prompts(step: ScheduledStep, ranks: list[Rank]) -> list[_ScoredPrompt]:
    """Return the prompt tokens that a step just scheduled has to score, for each request with prompt logprobs: tokens
    whose next token is in the prompt, too, from the request's prompt_logprob_start on.

    ranks: the scheduler's replicas.
    """
    if not step.features & PROMPT_LOGPROBS:
        return []
    scored = []
    for rank, batch in zip(ranks, step.batches, strict=True):
        slots = rank.slots
        first_token = np.cumsum(batch.num_scheduled) - batch.num_scheduled
        for row in range(batch.num_decode, batch.num_rows):
            slot, count = int(batch.slots[row]), int(batch.num_scheduled[row])
            request = slots.requests[slot]
            assert request is not None
            if request.params.prompt_logprobs is not None:
                position = int(slots.num_computed[slot]) - count
                count = min(count, request.num_prompt_tokens - 1 - position)
                skipped = max(0, request.params.prompt_logprob_start - position)
                if count > skipped:
                    token, position = int(first_token[row]) + skipped, position + skipped
                    scored.append(_ScoredPrompt(request, rank.index, token, position, count - skipped))
    return scored


def _scores_at(arrays: Any, rank: int, rows: np.ndarray | slice) -> TokenScores:
    """Return the logprobs of some rows of a replica; views for a slice. arrays: object with the fields of TokenScores,
    each [replicas, rows, ...].
    """
    return TokenScores(
        arrays.logprob[rank, rows],
        arrays.rank[rank, rows],
        arrays.top_ids[rank, rows],
        arrays.top_logprobs[rank, rows],
        arrays.given_logprobs[rank, rows],
    )
