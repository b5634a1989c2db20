"""A dispatched step until its results are taken in, and the logprobs among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxengine.engine.output import PromptScores
from jaxengine.engine.timeline import StepRecord
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.programs.pending_step import PendingStep
from scheduler.batch import ScheduledStep, TokenRows, TokenScores
from scheduler.rank import Rank
from scheduler.request import Request
from scheduler.token_params import PROMPT_LOGPROBS


class ScoredPrompt(NamedTuple):
    """Where a step scores a stretch of a prompt.

    Attributes:
      token: its first token in the rank's batch; position: in the prompt; count: how many.
    """

    request: Request
    rank: int
    token: int
    position: int
    count: int

    @property
    def tokens(self) -> slice:
        """Of the rank's batch."""
        return slice(self.token, self.token + self.count)


@dataclass(frozen=True)
class InFlight:
    """A dispatched step. prompts: those that it scores."""

    step: ScheduledStep
    pending: PendingStep
    record: StepRecord
    prompts: list[ScoredPrompt]

    def with_results(self, emitted: list[TokenRows], runner: ModelRunner) -> list[TokenRows]:
        """The step's tokens with the logprobs that were asked for, or with what pooling made."""
        if emitted and "pooling" in runner.extensions:
            vectors = runner.extension("pooling").vectors(self.pending)
            return [rows._replace(vectors=vectors[rows.rank, rows.rows]) for rows in emitted]
        if not any(len(rows.scored) for rows in emitted):
            return emitted
        scores = self.pending.logprobs()
        return [rows._replace(scores=_scores_at(scores, rows.rank, rows.rows[rows.scored])) for rows in emitted]

    def drafts_of(self, request: Request, runner: ModelRunner) -> list[int]:
        """What a model or a head on the devices has drafted for a request of the step."""
        batches = self.step.batches
        if (drafts := runner.extension("drafts").drafts(self.pending)) is None:
            return []
        rows = np.flatnonzero(batches[request.rank].slots == request.slot)
        return drafts[request.rank, rows[0]].tolist() if len(rows) else []

    def prompt_scores(self, runner: ModelRunner) -> list[PromptScores]:
        """Logprobs of the prompts."""
        if not self.prompts:
            return []
        scores = runner.extension("scores").prompt_logprobs(self.pending)
        return [
            PromptScores(each.request, each.position + 1, _scores_at(scores, each.rank, each.tokens))
            for each in self.prompts
        ]


def scored_prompts(step: ScheduledStep, ranks: list[Rank]) -> list[ScoredPrompt]:
    """What a step that has just been scheduled has to score."""
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
                if count > 0:
                    scored.append(ScoredPrompt(request, rank.index, int(first_token[row]), position, count))
    return scored


def _scores_at(arrays: Any, rank: int, rows: np.ndarray | slice) -> TokenScores:
    return TokenScores(
        arrays.logprob[rank, rows], arrays.rank[rank, rows], arrays.top_ids[rank, rows], arrays.top_logprobs[rank, rows]
    )
