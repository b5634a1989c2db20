"""Temporary closure of admission: requests that arrive meanwhile wait apart, and earlier ones go on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.scheduler_extension import SchedulerExtension


class Intake(SchedulerExtension):
    """Scheduler extension that admits only requests that arrived before it was closed.

    Attributes:
      first: arrival index of the first request that waits; None while all are admitted.
    """

    name: ClassVar[str] = "intake"

    def __init__(self) -> None:
        """Start open, with nobody held back."""
        self.first: int | None = None
        self._waiting: list[Request] = []
        self._ready: list[Request] = []

    def close(self, first: int) -> None:
        """Hold back all requests from this arrival index on. Changes nothing if it is closed already."""
        self.first = first if self.first is None else self.first

    def open(self) -> None:
        """Admit all requests again; `ready` then returns those held back, also if it is closed again before: they
        arrived earlier than the next closure.
        """
        self.first = None
        self._ready, self._waiting = [*self._ready, *self._waiting], []

    def admits(self, request: Request) -> bool:
        """Whether the request arrived before the closure, or there is none; any other is kept for `ready`."""
        if self.first is None or request.arrival_index < self.first:
            return True
        self._waiting.append(request)
        return False

    def ready(self) -> Iterable[Request]:
        """Return, once, the requests that were held back until `open`."""
        if not self._ready:
            return ()
        ready, self._ready = self._ready, []
        return ready
