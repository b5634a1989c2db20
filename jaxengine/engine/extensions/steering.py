"""Steering: sends each request's steering vectors to the slot that it takes."""

from __future__ import annotations

from collections.abc import Sequence

from jaxengine.engine.extension import LoopExtension
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import ScheduledStep


class Steering(LoopExtension):
    """Loop extension for requests with steering vectors."""

    def __init__(self) -> None:
        """Begin without requests."""
        self._requests: set[Request] = set()
        self._slots: dict[int, Request] = {}  # requests whose slots add vectors, by global slot number

    @property
    def is_idle(self) -> bool:
        return not (self._requests or self._slots)

    def queued(self, requests: Sequence[Request]) -> None:
        self._requests.update(request for request in requests if request.params.steer)

    def before_forward(self, step: ScheduledStep) -> None:
        """Write the vectors of requests that are new in their slots. Switch steering on for the slots of requests with
        vectors, and off for slots that such requests have left.
        """
        rows, device = self.loop.rows, self.loop.runner.extension("steering")
        before, admitted = self._slots, [each for each in rows.admitted(step) if each.params.steer]
        self._slots = {
            slot: request for slot, request in before.items() if request.slot >= 0 and rows.number(request) == slot
        }
        for request in admitted:
            self._slots[rows.number(request)] = request
            device.write(rows.number(request), request.params.steer)
        if admitted or len(self._slots) < len(before):
            slots = list(before.keys() | self._slots.keys())
            device.switch(slots, [int(slot in self._slots) for slot in slots])

    def ended(self, request: Request) -> None:
        self._requests.discard(request)
