"""Admission that is closed for a while: what arrives meanwhile waits apart, and what came before goes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from jaxengine.scheduler.request import Request
from jaxengine.scheduler.scheduler_extension import SchedulerExtension


class Intake(SchedulerExtension):
    """Admits the requests that were there when it was closed.

    Attributes:
      first: arrival index of the first request that waits; None while all are admitted.
    """

    name: ClassVar[str] = "intake"

    def __init__(self) -> None:
        self.first: int | None = None
        self._waiting: list[Request] = []

    def close(self, first: int) -> None:
        """Has all requests wait that arrive from that arrival index on. Changes nothing where it is closed already."""
        self.first = first if self.first is None else self.first

    def open(self) -> None:
        self.first = None

    def admits(self, request: Request) -> bool:
        if self.first is None or request.arrival_index < self.first:
            return True
        self._waiting.append(request)
        return False

    def ready(self) -> Iterable[Request]:
        if self.first is not None or not self._waiting:
            return ()
        waiting, self._waiting = self._waiting, []
        return waiting
