"""Alignment: returns, to a request that asks for it, where in its sound the tokens of its prompt are spoken."""

from __future__ import annotations

from collections.abc import Sequence

from jaxengine.engine.extension import NO_EVENTS, Events, LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput, Found
from jaxengine.runner.extensions.sounds.alignment import NAME, Read
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import ScheduledStep, StepResult
from jaxengine.scheduler.extensions.sounds import NAME as SOUNDS


class Alignment(LoopExtension):
    """Loop extension that aligns prompts with their sounds, in the step in which a request takes a slot, when its sound
    is encoded.
    """

    def __init__(self) -> None:
        self._waiting: set[Request] = set()
        self._running: set[Request] = set()
        self._texts: dict[InFlight, list[list[Request]]] = {}

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._running or self._texts)

    def prepare(self, request: Request) -> None:
        """Raise RequestError if a request's alignment begins after its prompt's last token or has more positions than
        the device's buffer.
        """
        if (asked := request.params.alignment) is None:
            return
        most, positions = request.num_prompt_tokens - 1, self.loop.runner.extension(NAME).num_positions
        if asked[0] > most or asked[1] > positions:
            allowed = f"a token up to {most}, the prompt's last, and at most {positions} positions"
            raise RequestError(f"{NAME} is {list(asked)}; allowed: {allowed}", param=NAME, value=list(asked))

    def queued(self, requests: Sequence[Request]) -> None:
        """Add the requests that ask for an alignment to those waiting for a slot."""
        self._waiting.update(request for request in requests if request.params.alignment is not None)

    def after_forward(self, step: InFlight | None) -> Events:
        """Dispatch the alignment of requests that ask for one and took a slot in this step. Returns no events."""
        if step is not None and (texts := self._texts_of(step.step)):
            ranks = self.loop.scheduler.extension(SOUNDS).ranks
            reads = [[self._read(request, ranks[rank].row(request)) for request in own] for rank, own in texts.items()]
            self.loop.runner.extension(NAME).align(step.pending, reads)
            self._texts[step] = list(texts.values())
        return NO_EVENTS

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Wait for the alignment dispatched with this step, and add each unfinished request's rows, from its first
        token to the end of the prompt, to output.found. Does nothing for a step without one.
        """
        if (texts := self._texts.pop(step, None)) is None:
            return
        found = self.loop.runner.extension(NAME).fetch(step.pending)
        for rank, own in enumerate(texts):
            for request, rows in zip(own, found, strict=False):
                if request in self._running:
                    first, positions = request.params.alignment or (0, 0)
                    own_rows = rows[rank, first : request.num_prompt_tokens, :positions].copy()
                    output.found.append(Found(request, NAME, own_rows))

    def ended(self, request: Request) -> None:
        self._waiting.discard(request)
        self._running.discard(request)

    def _texts_of(self, step: ScheduledStep) -> dict[int, list[Request]]:
        """Move the requests that are to be aligned in a step from waiting to running, and return a dict from the index
        of each replica to its list of them; {} if no replica has any.
        """
        found = [request for request in self.loop.rows.admitted(step) if request in self._waiting]
        self._waiting.difference_update(found)
        self._running.update(found)
        ranks = range(len(self.loop.scheduler.ranks))
        return {rank: [each for each in found if each.rank == rank] for rank in ranks} if found else {}

    @staticmethod
    def _read(request: Request, row: int) -> Read:
        assert request.params.alignment is not None
        return Read(row, request.prompt_token_ids, *request.params.alignment)
