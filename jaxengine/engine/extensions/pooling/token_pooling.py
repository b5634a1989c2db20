"""Token pooling: returns the rows of their tokens to the requests that ask for them, each position once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxengine.engine.extension import NO_EVENTS, Events, LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput, Found
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import ScheduledStep, StepResult


class _Rows(NamedTuple):
    """Tokens of one request in a step.

    Attributes:
      request, rank: the request and the index of its replica.
      token: index of the request's first token among the replica's tokens.
      position: position of that token in the request.
      count: number of the request's tokens.
    """

    request: Request
    rank: int
    token: int
    position: int
    count: int


class TokenPooling(LoopExtension):
    """Loop extension for requests with a row for each token.

    A preempted request is computed again from its first token; the rows that it already has are then left out.
    """

    def __init__(self) -> None:
        """Begin without requests."""
        self._steps: dict[InFlight, list[_Rows]] = {}
        self._num_found: dict[Request, int] = {}

    @property
    def is_idle(self) -> bool:
        return not (self._num_found or self._steps)

    def queued(self, requests: Sequence[Request]) -> None:
        """Begin to return rows to those of the requests that ask for them."""
        self._num_found |= {request: 0 for request in requests if request.params.token_results}

    def after_forward(self, step: InFlight | None) -> Events:
        """Dispatch the program that computes token rows if the step has tokens of requests that asked for rows. Returns
        no events.
        """
        if step is not None and (rows := self._rows_of(step.step)):
            self._steps[step] = rows
            self.loop.runner.extension("token_pooling").pool(step.pending)
        return NO_EVENTS

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Fetch the rows of the step's tokens, and add those that unfinished requests lack to output.found, under the
        name "tokens".
        """
        own = [each for each in self._steps.pop(step, ()) if each.request in self._num_found]
        if not own:
            return
        found = self.loop.runner.extension("token_pooling").rows(step.pending)
        for each in own:
            skip = self._num_found[each.request] - each.position
            assert skip >= 0
            if each.count > skip:
                rows = found[each.rank, each.token + skip : each.token + each.count].copy()
                output.found.append(Found(each.request, "tokens", rows))
                self._num_found[each.request] = each.position + each.count

    def ended(self, request: Request) -> None:
        self._num_found.pop(request, None)

    def _rows_of(self, step: ScheduledStep) -> list[_Rows]:
        """Return the tokens, one entry per request, of a step that has just been scheduled, for those requests that
        asked for rows.
        """
        found = []
        for rank, batch in zip(self.loop.scheduler.ranks, step.batches, strict=True):
            slots, token = rank.slots, 0
            for slot, count in zip(batch.slots.tolist(), batch.num_scheduled.tolist(), strict=True):
                request = slots.requests[slot]
                if request in self._num_found:
                    position = int(slots.num_computed[slot]) - count
                    found.append(_Rows(request, rank.index, token, position, count))
                token += count
        return found
