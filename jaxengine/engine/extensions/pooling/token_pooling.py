"""Token pooling: returns the rows of their tokens to the requests that ask for them, once a prompt is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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

    A preempted request is computed again from its first token, perhaps with other weights: its earlier rows are then
    replaced.
    """

    def __init__(self) -> None:
        """Begin without requests."""
        self._steps: dict[InFlight, list[_Rows]] = {}
        self._parts: dict[Request, list[np.ndarray]] = {}  # rows so far, from the first token on

    @property
    def is_idle(self) -> bool:
        return not (self._parts or self._steps)

    def queued(self, requests: Sequence[Request]) -> None:
        """Begin to return rows to those of the requests that ask for them."""
        self._parts |= {request: [] for request in requests if request.params.token_results}

    def after_forward(self, step: InFlight | None) -> Events:
        """Dispatch the program that computes token rows if the step has tokens of requests that asked for rows. Returns
        no events.
        """
        if step is not None and (rows := self._rows_of(step.step)):
            self._steps[step] = rows
            self.loop.runner.extension("token_pooling").pool(step.pending)
        return NO_EVENTS

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Fetch the rows of the step's tokens, and add those of complete prompts to output.found, under the name
        "tokens".
        """
        own = [each for each in self._steps.pop(step, ()) if each.request in self._parts]
        if not own:
            return
        found = self.loop.runner.extension("token_pooling").rows(step.pending)
        for each in own:
            if not each.position:
                self._parts[each.request] = []
            parts = self._parts[each.request]
            assert sum(map(len, parts)) == each.position
            parts.append(found[each.rank, each.token : each.token + each.count].copy())
            if each.position + each.count == each.request.num_prompt_tokens:
                output.found.append(Found(each.request, "tokens", np.concatenate(parts)))
                self._parts[each.request] = []

    def ended(self, request: Request) -> None:
        self._parts.pop(request, None)

    def _rows_of(self, step: ScheduledStep) -> list[_Rows]:
        """Return the tokens, one entry per request, of a step that has just been scheduled, for those requests that
        asked for rows.
        """
        found = []
        for rank, batch in zip(self.loop.scheduler.ranks, step.batches, strict=True):
            slots, token = rank.slots, 0
            for slot, count in zip(batch.slots.tolist(), batch.num_scheduled.tolist(), strict=True):
                request = slots.requests[slot]
                if request in self._parts:
                    position = int(slots.num_computed[slot]) - count
                    found.append(_Rows(request, rank.index, token, position, count))
                token += count
        return found
