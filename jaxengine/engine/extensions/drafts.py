"""Speculative decoding in the engine loop: host inputs of drafts, and counts of accepted drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxengine.config.features.speculation import MAX_DRAFTS, SpeculativeConfig
from jaxengine.drafts.registry import proposer_of
from jaxengine.engine.extension import LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput
from jaxengine.engine.stats.metric_types import Counter, Vector
from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import ScheduledStep, StepResult
from jaxengine.scheduler.extensions.drafts import NAME, DraftOptions


@dataclass
class DraftStats:
    """Counts of drafts.

    Attributes:
      num_drafts: number of rows of steps that had drafts.
      num_tokens: number of drafted tokens.
      accepted: i64[MAX_DRAFTS], accepted drafts by their position in the row.
      num_forced: tokens scheduled as grammar drafts, where the grammar allowed no other token; not in the other counts.
    """

    num_drafts: int = 0
    num_tokens: int = 0
    accepted: np.ndarray = field(default_factory=lambda: np.zeros(MAX_DRAFTS, np.int64))
    num_forced: int = 0

    def count(self, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """Add a step's drafts to the counts, except num_forced: rows with drafts to num_drafts, drafts to num_tokens,
        and to accepted[i] the rows of which more than i drafts were accepted.

        drafts, accepted: i64[n], numbers of drafts and of accepted drafts of each row.
        """
        self.num_drafts += int(np.count_nonzero(drafts))
        self.num_tokens += int(drafts.sum())
        self.accepted += (accepted[:, None] > np.arange(len(self.accepted))).sum(axis=0)


class Drafts(LoopExtension):
    """Loop extension of speculative decoding.

    Attributes:
      stats: counts of drafts and of accepted ones.
    """

    def __init__(self, config: SpeculativeConfig, *, guided: bool):
        """Select the configuration's proposer, with all counts 0. guided: whether each draft of a request with a
        grammar has its own token mask.
        """
        self.stats = DraftStats()
        self._config = config
        self._guided = guided
        self._proposer = proposer_of(config)

    def configure(self, config: SchedulerConfig) -> SchedulerConfig:
        """Return the configuration with DraftOptions added: whether drafts are proposed, whether they have grammar
        masks and, with several pipeline stages, the function with which the scheduler proposes them.
        """
        # With several pipeline stages the host has all tokens of a row when it schedules the row.
        is_staged = self._proposer is not None and config.num_micro_batches > 1
        draft = self._proposer.propose_one if self._proposer is not None and is_staged else None
        options = DraftOptions(guesses=self._config.guesses, draft=draft, guided=self._guided)
        return replace(config, extensions=(*config.extensions, options))

    def sync(self, step: ScheduledStep) -> None:
        loop, drafts = self.loop, self.loop.runner.extension(NAME)
        if drafts.keeps_history:
            histories = []
            for request in loop.rows.admitted(step):
                known = request.prompt_token_ids, loop.scheduler.output_token_ids(request)
                histories.append((loop.rows.number(request), np.concatenate(known)))
            drafts.set_histories(histories)

    def of_newest(self, request: Request, num_output: int) -> Sequence[int] | None:
        """Return the drafts that a request with a grammar has in the step dispatched last; waits for them if the device
        makes them.

        num_output: number of output tokens before the drafts. Returns None if no step is in flight, or the request has
        no slot, another number of known output tokens, or no drafts in that step.
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
        """Count the drafts and accepted drafts of a step, and pass the step's time in seconds to the scheduler, which
        chooses the number of drafts to propose by it. Does nothing for steps that also computed prompts.

        Grammar drafts count in num_forced only. The numbers of the others are also stored in step.record.
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
            # Grammar drafts are always accepted, so they are left out of the acceptance rate.
            is_forced = [batch.sections[NAME].is_forced for batch in batches if batch.num_rows]
            guessed = ~np.concatenate(is_forced)
            self.stats.num_forced += int(drafts[~guessed].sum())
            drafts, accepted = drafts[guessed], counts[guessed] - 1
            self.stats.count(drafts, accepted)
            step.record.num_drafts, step.record.num_accepted = int(drafts.sum()), int(accepted.sum())
        most = max(batch.num_rows for batch in batches)
        self.loop.scheduler.extension(NAME).width.observe(step.step.width, most, accepted, step.seconds)

    def metrics(self) -> Iterator[Counter | Vector]:
        stats = self.stats
        yield Counter("vllm:spec_decode_num_drafts", stats.num_drafts)
        yield Counter("vllm:spec_decode_num_draft_tokens", stats.num_tokens)
        yield Counter("jaxengine:forced_tokens", stats.num_forced)
        yield Counter("vllm:spec_decode_num_accepted_tokens", int(stats.accepted.sum()))
        by_position = stats.accepted[: self._config.num_speculative_tokens].tolist()
        yield Vector("vllm:spec_decode_num_accepted_tokens_per_pos", by_position)

    def _made_on_device(self, step: InFlight, request: Request) -> list[int]:
        """Return the drafts that a draft model or an EAGLE draft head proposed for a request in a step, after waiting
        for them; [] if the step has no drafts or no row of the request.
        """
        if (drafts := self.loop.runner.extension(NAME).drafts(step.pending)) is None:
            return []
        rows = np.flatnonzero(step.step.batches[request.rank].slots == request.slot)
        return drafts[request.rank, rows[0]].tolist() if len(rows) else []
