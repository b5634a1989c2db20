"""Pauses of several callers beside each other: requests go on when none is left."""

from __future__ import annotations

import time
from typing import Any

from jaxengine.engine.extension import NO_EVENTS, Events, LoopExtension
from jaxengine.engine.weight_types import PauseMode
from jaxengine.scheduler.errors import RequestError
from jaxengine.scheduler.extensions.intake import Intake
from jaxengine.scheduler.request import FinishReason, Request


class Pauses(LoopExtension):
    """Pauses by key, of which None is the operator's.

    Attributes:
      resumed: when the last pause ended, in seconds of time.monotonic.
    """

    def __init__(self) -> None:
        self._intake = Intake()
        self._aborts = False
        # What is left to become of the requests that each pause found. One that is there has nothing left to do but
        # "keep".
        self._pauses: dict[Any, PauseMode] = {}
        self.resumed = time.monotonic()

    def hold(self, key: Any, mode: PauseMode) -> None:
        """Begins a pause beside others, which `release` with the same key ends. mode: see PauseMode."""
        if mode != "keep":
            self._intake.close(1 + max((each.arrival_index for each in self.loop.scheduler.requests), default=-1))
            self._aborts |= mode == "abort"
        self._pauses[key] = mode
        self._apply()

    def release(self, key: Any) -> None:
        """Ends the pause of a key, there or begun; requests go on once no other is left. Unknown keys are ignored."""
        if key in self._pauses:
            del self._pauses[key]
            self._apply()

    def _apply(self) -> None:
        """Has steps go on where no pause is left, and where one waits for requests that an earlier one has stopped."""
        modes = self._pauses.values()
        self.loop.scheduler.paused = bool(modes) and all(mode == "keep" for mode in modes)
        self._aborts = self._aborts and "abort" in modes
        if not modes:
            self._intake.open()
            self.resumed = time.monotonic()

    @property
    def is_held(self) -> bool:
        """Whether requests wait for the end of any pause, the operator's or an update's, or the engine sleeps."""
        return bool(self._pauses)

    def settle(self, key: Any = None) -> bool:
        """Whether the pause is there: no step is in flight, and nobody is left for whom it or another one waits. Does
        not wait. What depends on it must follow before another call that may begin a pause.

        key: as of `hold`. Raises RequestError if its pause has been ended meanwhile.
        """
        if key not in self._pauses:
            raise RequestError("the pause has been ended before it was there; ask for it again", param="mode")
        if self.loop.in_flight or not (self.loop.scheduler.paused or not self._earlier()):
            return False
        self._pauses = dict.fromkeys(self._pauses, "keep")
        self._apply()
        return True

    @property
    def is_still(self) -> bool:
        """Whether no step is in flight and none may begin."""
        return self.loop.scheduler.paused and not self.loop.in_flight

    def poll(self) -> Events:
        if not self._aborts:
            return NO_EVENTS
        self._aborts = False
        return Events(ended=[(request, FinishReason.ABORT, None) for request in self._earlier()])

    def _earlier(self) -> list[Request]:
        """Requests that do not wait for the pause to end."""
        first = self._intake.first
        return [each for each in self.loop.scheduler.requests if first is None or each.arrival_index < first]
