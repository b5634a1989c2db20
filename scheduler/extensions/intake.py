"""Temporary closure of admission: requests that arrive in the meantime wait, and earlier ones continue."""

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
        """Start open, with no request held back."""
        self.first: int | None = None
        self._waiting: list[Request] = []
        self._ready: list[Request] = []

    def close(self, first: int) -> None:
        """Hold back all requests from arrival index `first` on. Does nothing if it is already closed."""
        self.first = first if self.first is None else self.first

    def open(self) -> None:
        """Admit all requests again. `ready` then returns those held back, even if `close` is called before."""
        self.first = None
        self._ready, self._waiting = [*self._ready, *self._waiting], []

    def admits(self, request: Request) -> bool:
        """Return whether the request arrived before the closure, or there is none; any other request is stored for
        `ready`.
        """
        if self.first is None or request.arrival_index < self.first:
            return True
        self._waiting.append(request)
        return False

    def ready(self) -> Iterable[Request]:
        """Return the requests that were held back until `open`, each only once."""
        if not self._ready:
            return ()
        ready, self._ready = self._ready, []
        return ready
