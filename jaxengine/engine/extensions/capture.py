"""Hidden states: rows of steps are handed to the requests that asked for them, each position once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxengine.engine.extension import NO_EVENTS, Events, LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput, Found
from jaxengine.scheduler.batch import ScheduledStep, StepResult
from jaxengine.scheduler.rank import Rank
from jaxengine.scheduler.request import Request
from jaxengine.scheduler.token_params import HIDDEN_STATES


class _Rows(NamedTuple):
    """Tokens of one request in a step.

    Attributes:
      token: the first one in the rank's batch; position: of it in the request; count: how many.
    """

    request: Request
    rank: int
    token: int
    position: int
    count: int


class HiddenStates(LoopExtension):
    """Hidden states for requests that ask for them.

    A request that was preempted is computed again from its first token; positions that it has had are left out then.
    """

    def __init__(self) -> None:
        self._rows: dict[InFlight, list[_Rows]] = {}
        self._num_found: dict[Request, int] = {}

    @property
    def is_idle(self) -> bool:
        return not (self._num_found or self._rows)

    def queued(self, requests: Sequence[Request]) -> None:
        self._num_found.update((request, 0) for request in requests if request.params.features & HIDDEN_STATES)

    def after_forward(self, step: InFlight | None) -> Events:
        if step is not None and (rows := _rows_of(step.step, self.loop.scheduler.ranks)):
            self._rows[step] = rows
            self.loop.runner.extension("capture").keep(step.pending)
        return NO_EVENTS

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        rows = [each for each in self._rows.pop(step, ()) if each.request in self._num_found]
        if not rows:
            return
        states = self.loop.runner.extension("capture").fetch(step.pending)
        for each in rows:
            known = self._num_found[each.request]
            assert each.position <= known
            if skip := known - each.position:
                each = each._replace(token=each.token + skip, count=each.count - skip)
            if each.count > 0:
                # A copy: the other tokens of the step are not kept with it.
                own = states[each.rank, each.token : each.token + each.count].copy()
                output.found.append(Found(each.request, "hidden_states", own))
                self._num_found[each.request] = known + each.count

    def ended(self, request: Request) -> None:
        self._num_found.pop(request, None)


def _rows_of(step: ScheduledStep, ranks: list[Rank]) -> list[_Rows]:
    """The rows of a step that has just been scheduled whose requests asked for hidden states."""
    if not step.features & HIDDEN_STATES:
        return []
    found = []
    for rank, batch in zip(ranks, step.batches, strict=True):
        slots = rank.slots
        first_token = np.cumsum(batch.num_scheduled) - batch.num_scheduled
        for row in np.flatnonzero(slots.features[batch.slots] & HIDDEN_STATES):
            slot, count = int(batch.slots[row]), int(batch.num_scheduled[row])
            request = slots.requests[slot]
            assert request is not None
            position = int(slots.num_computed[slot]) - count
            found.append(_Rows(request, rank.index, int(first_token[row]), position, count))
    return found
