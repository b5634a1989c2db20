"""Pauses of several callers at once: steps continue when the last pause has been released."""

from __future__ import annotations

import time
from typing import Any

from jaxengine.engine.extension import NO_EVENTS, Events, LoopExtension
from jaxengine.engine.weight_types import PauseMode
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.request import FinishReason, Request
from jaxengine.scheduler.extensions.intake import Intake

_RECOMPUTE = "recompute"  # the key of a pause that lasts until no step is in flight


class Pauses(LoopExtension):
    """Loop extension that records pauses by key and pauses the scheduler while there are any. The key None is the
    operator's pause.

    Attributes:
      resumed: time.monotonic seconds at which the last pause ended.
    """

    def __init__(self) -> None:
        """Begin without pauses."""
        self._intake = Intake()
        self._aborts = False
        # By key, the mode of each pause for requests that arrived before it: "keep" once it is complete.
        self._pauses: dict[Any, PauseMode] = {}
        self.resumed = time.monotonic()

    def hold(self, key: Any, mode: PauseMode) -> None:
        """Begin a pause in addition to those of other keys, or change the mode of the key's pause; `release` with the
        same key ends it. mode: effect on unfinished requests (PauseMode).

        Modes other than "keep" stop the admission of requests that arrive from now on.
        """
        if mode != "keep":
            self._intake.close(1 + max((each.arrival_index for each in self.loop.scheduler.requests), default=-1))
            self._aborts |= mode == "abort"
        self._pauses[key] = mode
        self._apply()

    def check_wait(self, mode: PauseMode, *, of_update: bool, asleep: bool) -> None:
        """Raise RequestError for mode "wait" if the requests that it waits for cannot run to their end.

        That is so if there are such requests and the engine sleeps (`asleep`), or, for a weight update (`of_update`),
        if the operator's pause is complete or of mode "keep", which only the operator may end. Other modes are always
        allowed.
        """
        if mode != "wait" or not self._earlier():
            return
        if asleep:
            raise RequestError("the engine sleeps: its requests cannot run to their end", param="mode", value=mode)
        if of_update and self._pauses.get(None) == "keep":
            text = 'the engine is paused, and requests that it keeps cannot run to their end; allowed: "keep", "abort"'
            raise RequestError(f"{text}, or any mode after resume_generation (/resume)", param="mode", value=mode)

    def release(self, key: Any) -> None:
        """End the pause of a key, complete or not; steps continue when no pause is left. Does nothing for an unknown
        key.
        """
        if key in self._pauses:
            del self._pauses[key]
            self._apply()

    def _apply(self) -> None:
        """Pause the scheduler if there are pauses and all are of mode "keep", else let it run.

        If no pause is left, also admit new requests again and set `resumed`. If no pause has mode "abort" any more,
        requests that were to be aborted go on.
        """
        modes = self._pauses.values()
        self.loop.scheduler.paused = bool(modes) and all(mode == "keep" for mode in modes)
        self._aborts = self._aborts and "abort" in modes
        if not modes:
            self._intake.open()
            self.resumed = time.monotonic()

    def recompute(self) -> bool:
        """Drop all cached prefixes and preempt running requests, to be computed again from their first token: at once
        if no step is in flight, else as soon as none is, before any other step. Returns True.
        """
        self.hold(_RECOMPUTE, "keep")
        self.recompute_if_still()
        return True

    def recompute_if_still(self) -> bool:
        """Carry out a pending `recompute` if no step is in flight; return whether that was done now."""
        if _RECOMPUTE not in self._pauses or not self.is_still:
            return False
        self.loop.scheduler.preempt_all()
        self.loop.scheduler.reset_prefix_cache()
        self.release(_RECOMPUTE)
        return True

    @property
    def is_held(self) -> bool:
        """Whether there is a pause that has not been released, of the operator, a weight update or a sleep."""
        return bool(self._pauses)

    def settle(self, key: Any = None) -> bool:
        """Return whether a pause is complete: no step is in flight, and no pause still waits for requests to end. Does
        not wait.

        On True, all pauses become "keep" and the scheduler is paused. The caller must act on True before another call
        that may begin a pause. key: the one given to `hold`. Raises RequestError if its pause has been ended in the
        meantime.
        """
        if key not in self._pauses:
            raise RequestError("the pause has been ended before it was complete; request it again", param="mode")
        if self.loop.in_flight or not (self.loop.scheduler.paused or not self._earlier()):
            return False
        self._pauses = dict.fromkeys(self._pauses, "keep")
        self._apply()
        return True

    @property
    def is_still(self) -> bool:
        """Whether the scheduler is paused and no step is in flight."""
        return self.loop.scheduler.paused and not self.loop.in_flight

    def poll(self) -> Events:
        """Carry out a pending `recompute`; return, once after the begin of a pause of mode "abort", the requests that
        it ends.
        """
        self.recompute_if_still()
        if not self._aborts:
            return NO_EVENTS
        self._aborts = False
        return Events(ended=[(request, FinishReason.ABORT, None) for request in self._earlier()])

    def _earlier(self) -> list[Request]:
        """Return the unfinished requests that arrived before the first pause of mode "wait" or "abort"; all unfinished
        requests without such a pause.
        """
        first = self._intake.first
        return [each for each in self.loop.scheduler.requests if first is None or each.arrival_index < first]
