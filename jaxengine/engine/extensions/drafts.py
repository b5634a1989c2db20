"""Speculative decoding: what the host knows of drafts, and what became of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxengine.config.speculation import MAX_DRAFTS, SpeculativeConfig
from jaxengine.drafts.registry import proposer_of
from jaxengine.engine.extension import LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.metric_types import Counter
from jaxengine.engine.output import EngineOutput
from jaxengine.scheduler.batch import ScheduledStep, StepResult
from jaxengine.scheduler.config import SchedulerConfig
from jaxengine.scheduler.extensions.drafts import NAME, DraftOptions
from jaxengine.scheduler.request import Request


@dataclass
class DraftStats:
    """What became of drafts.

    Attributes:
      num_drafts: times that a request had any, num_tokens of them together.
      accepted: i64[MAX_DRAFTS], of these how many were right, by their place.
      num_forced: tokens that were no drafts: grammars allowed nothing else in their places.
    """

    num_drafts: int = 0
    num_tokens: int = 0
    accepted: np.ndarray = field(default_factory=lambda: np.zeros(MAX_DRAFTS, np.int64))
    num_forced: int = 0

    def count(self, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """Counts a step. drafts, accepted: i64[n], of each row how many drafts it had and how many were right."""
        self.num_drafts += int(np.count_nonzero(drafts))
        self.num_tokens += int(drafts.sum())
        self.accepted += (accepted[:, None] > np.arange(len(self.accepted))).sum(axis=0)


class Drafts(LoopExtension):
    """The drafts of steps.

    Attributes:
      stats: what became of them.
    """

    def __init__(self, config: SpeculativeConfig, *, guided: bool):
        """guided: drafts of requests with grammars have a mask each."""
        self.stats = DraftStats()
        self._config = config
        self._guided = guided
        self._proposer = proposer_of(config)

    def configure(self, config: SchedulerConfig) -> SchedulerConfig:
        # Where stages follow each other the host knows all tokens of a row that it schedules.
        is_staged = self._proposer is not None and config.num_micro_batches > 1
        draft = self._proposer.propose_one if self._proposer is not None and is_staged else None
        options = DraftOptions(guesses=self._config.guesses, draft=draft, guided=self._guided)
        return replace(config, extensions=(*config.extensions, options))

    def sync(self, step: ScheduledStep) -> None:
        """Sends the devices prompt and output of requests that are new in their slots, if drafts are made of these."""
        loop, drafts = self.loop, self.loop.runner.extension(NAME)
        if drafts.keeps_history:
            histories = []
            for request in loop.rows.admitted(step):
                known = request.prompt_token_ids, loop.scheduler.output_token_ids(request)
                histories.append((loop.rows.number(request), np.concatenate(known)))
            drafts.set_histories(histories)

    def of_newest(self, request: Request, num_output: int) -> Sequence[int] | None:
        """Returns the drafts that a request with a grammar has in the step dispatched last.

        num_output: tokens of output in front of the drafts. None if the request has another number of known ones, or no
        slot, or no drafts in that step.
        """
        slots, slot = self.loop.scheduler.ranks[request.rank].slots, request.slot
        if not self.loop.in_flight or slot < 0 or slots.num_known[slot] - slots.num_prompt[slot] != num_output:
            return None
        count = int(slots.num_tokens[slot] - slots.num_known[slot]) - 1
        if count <= 0:
            return None
        if self._proposer is not None:
            return self._proposer.propose_one(slots.known_token_ids(slot), count).tolist()
        return self._made_on_device(self.loop.in_flight[-1], request)[:count] or None

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Counts what became of the drafts of a step, and how long it took, by which the scheduler chooses how many
        drafts to make. Leaves out steps that also computed prompts.
        """
        batches, num_rows = step.step.batches, step.step.num_rows
        if num_rows > sum(batch.num_decode for batch in batches):
            return
        accepted = np.zeros(num_rows, np.int64)
        counts, num_drafts = step.pending.result("counts"), step.pending.result("num_drafts")
        if counts is not None and num_drafts is not None:
            counts, drafts = (
                np.concatenate([each[: batch.num_rows] for each, batch in zip(found, batches, strict=True)])
                for found in (counts, num_drafts)
            )
            # Tokens that a grammar leaves no choice say nothing of drafts that may be wrong.
            is_forced = [batch.sections[NAME].is_forced for batch in batches if batch.num_rows]
            guessed = ~np.concatenate(is_forced)
            self.stats.num_forced += int(drafts[~guessed].sum())
            drafts, accepted = drafts[guessed], counts[guessed] - 1
            self.stats.count(drafts, accepted)
            step.record.num_drafts, step.record.num_accepted = int(drafts.sum()), int(accepted.sum())
        most = max(batch.num_rows for batch in batches)
        self.loop.scheduler.extension(NAME).width.observe(step.step.width, most, accepted, step.seconds)

    def metrics(self) -> Iterator[Counter]:
        stats = self.stats
        yield Counter("vllm:spec_decode_num_drafts", stats.num_drafts)
        yield Counter("vllm:spec_decode_num_draft_tokens", stats.num_tokens)
        yield Counter("jaxengine:forced_tokens", stats.num_forced)
        yield Counter("vllm:spec_decode_num_accepted_tokens", int(stats.accepted.sum()))
        for position, count in enumerate(stats.accepted[: self._config.num_speculative_tokens].tolist()):
            yield Counter("vllm:spec_decode_num_accepted_tokens_per_pos", count, {"position": str(position)})

    def _made_on_device(self, step: InFlight, request: Request) -> list[int]:
        """The drafts that a model or a head has made for a request of a step."""
        if (drafts := self.loop.runner.extension(NAME).drafts(step.pending)) is None:
            return []
        rows = np.flatnonzero(step.step.batches[request.rank].slots == request.slot)
        return drafts[request.rank, rows[0]].tolist() if len(rows) else []
