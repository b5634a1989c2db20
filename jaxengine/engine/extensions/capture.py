"""Captured activations: returns to each request that asked for them the activations of its tokens, each once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxengine.engine.extension import NO_EVENTS, Events, LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput, Found
from jaxengine.models.config.taps import HIDDEN_STATES, Tap, TapError, layers_of, read_taps
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import CAPTURE
from jaxengine.scheduler.batches.batch import ScheduledStep, StepResult
from jaxengine.scheduler.rank import Rank


class _Rows(NamedTuple):
    """Captured tokens of one request in a step.

    Attributes:
      request, rank: the request and the index of its replica.
      row: index of the request's row in the replica's batch.
      token: index of the request's first token among the batch's tokens.
      position: position of the first token in the request; None for a decode, which begins at its first uncomputed
        token.
      count: number of the request's tokens.
    """

    request: Request
    rank: int
    row: int
    token: int
    position: int | None
    count: int


class _Progress:
    """Activations that a request asks for, and how many positions it has received so far.

    Attributes:
      taps: taps (named points of the model) that the request asked for, without "hidden_states".
      dtype: structured dtype of one token's activations, with a field for each tap; None before the first token.
      num_returned: number of leading positions whose activations have been returned to the request.
    """

    def __init__(self, taps: tuple[Tap, ...]):
        """Set `taps`, with no activations returned yet."""
        self.taps = taps
        self.dtype: np.dtype | None = None
        self.num_returned = 0

    def rows(self, found: dict[Tap, np.ndarray], rank: int, tokens: slice) -> np.ndarray:
        """Return the activations of some tokens of a step as a structured array [n] with a field for each of `taps`.

        They are copied, so that the step's arrays can be freed. The first call sets `dtype`. found: array [replicas,
        tokens, ...] of each tap. rank: index of the replica. tokens: slice of its tokens, with start and stop.
        """
        columns = {tap: found[tap][rank, tokens] for tap in self.taps}
        if self.dtype is None:
            self.dtype = np.dtype([(tap.name, column.dtype, column.shape[1:]) for tap, column in columns.items()])
        rows = np.empty(tokens.stop - tokens.start, self.dtype)
        for tap, column in columns.items():
            rows[tap.name] = column
        return rows


class Capture(LoopExtension):
    """Loop extension that returns activations to the requests that ask for them, once for each position.

    A preempted or held request is computed again from its first token; the activations of positions that it already
    has are then not returned again.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self._rows: dict[InFlight, list[_Rows]] = {}
        self._progress: dict[Request, _Progress] = {}

    @property
    def is_idle(self) -> bool:
        return not (self._progress or self._rows)

    def prepare(self, request: Request) -> None:
        """Raise RequestError if the request asks for taps that the engine was not started to capture."""
        if request.params.features & CAPTURE:
            self._taps_of(request)

    def queued(self, requests: Sequence[Request]) -> None:
        """Start to return activations to those of the requests that ask for them."""
        for request in requests:
            if request.params.features & CAPTURE:
                self._progress[request] = _Progress(self._taps_of(request))

    def after_forward(self, step: InFlight | None) -> Events:
        """Record which tokens of the step are captured, and keep its activations on the devices until `collected`.
        Returns no events.
        """
        if step is not None and (rows := _rows_of(step.step, self.loop.scheduler.ranks)):
            self._rows[step] = rows
            self.loop.runner.extension("capture").keep(step.pending)
        return NO_EVENTS

    def sync(self, step: ScheduledStep) -> None:
        """Drop the recorded tokens of requests that have lost their slots since the step's forward pass.

        Tokens that the step samples for such requests are dropped, so activations of accepted drafts must be, too.
        """
        for in_flight, rows in self._rows.items():
            if in_flight.step is step:
                self._rows[in_flight] = [each for each in rows if each.request.slot >= 0]

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Fetch the step's activations if unfinished requests asked for them, and add those of positions not returned
        yet to output.found.

        They are named "hidden_states" ([n, layers, ...]) and "captured" (a structured array). Rejected drafts are left
        out.
        """
        rows = [each for each in self._rows.pop(step, ()) if each.request in self._progress]
        if not rows:
            return
        capture, counts = self.loop.runner.extension("capture"), step.pending.result("counts")
        found, layers = capture.fetch(step.pending), capture.taps.layers
        for each in rows:
            progress = self._progress[each.request]
            position, count = each.position, each.count
            if position is None:
                position = progress.num_returned
                # Activations of rejected drafts were computed, too, and follow those of the accepted ones.
                count = count if counts is None else min(count, int(counts[each.rank, each.row]))
            assert position <= progress.num_returned
            skip = progress.num_returned - position
            if count <= skip:
                continue
            tokens = slice(each.token + skip, each.token + count)
            if HIDDEN_STATES in each.request.params.capture:
                states = np.stack([found[tap][each.rank, tokens] for tap in layers], axis=1)
                output.found.append(Found(each.request, "hidden_states", states))
            if progress.taps:
                output.found.append(Found(each.request, "captured", progress.rows(found, each.rank, tokens)))
            progress.num_returned = position + count

    def ended(self, request: Request) -> None:
        self._progress.pop(request, None)

    def _taps_of(self, request: Request) -> tuple[Tap, ...]:
        """Return the taps that a request asks for, without "hidden_states".

        Raises RequestError for a tap that the engine was not started to capture.
        """
        taps, asked = self.loop.runner.extension("capture").taps, request.params.capture
        names = [name for name in asked if name != HIDDEN_STATES]
        try:
            return read_taps(names, layers_of(taps.named), taps.model)
        except TapError as error:
            problem = f"capture names {error.name!r}; the engine was started with {error.allowed}"
            raise RequestError(problem, param="capture", value=error.name) from None


def _rows_of(step: ScheduledStep, ranks: list[Rank]) -> list[_Rows]:
    """Return the tokens of a newly scheduled step that are captured, with one entry for each request that asked for
    activations.

    ranks: the scheduler's replicas.
    """
    if not step.features & CAPTURE:
        return []
    found = []
    for rank, batch in zip(ranks, step.batches, strict=True):
        slots = rank.slots
        first_token = np.cumsum(batch.num_scheduled) - batch.num_scheduled
        for row in np.flatnonzero(slots.features[batch.slots] & CAPTURE).tolist():
            slot, count = int(batch.slots[row]), int(batch.num_scheduled[row])
            request = slots.requests[slot]
            assert request is not None
            position = None if row < batch.num_decode else int(slots.num_computed[slot]) - count
            found.append(_Rows(request, rank.index, row, int(first_token[row]), position, count))
    return found
