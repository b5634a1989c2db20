"""Automatic sleep of an engine without requests (`sleep_idle_seconds`); the next request wakes it.

A sleep or pause that a caller has requested is not ended by a request. An automatic sleep is not a pause: a call that
pauses the engine, replaces its weights or puts it to sleep finds it awake.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from jaxengine.engine.extension import LoopExtension
from jaxengine.engine.extensions.weights.weights import Weights
from jaxengine.engine.stats.metric_types import Counter
from jaxengine.scheduler.base.errors import OverloadedError
from jaxengine.scheduler.base.request import Request

logger = logging.getLogger(__name__)


class IdleSleep(LoopExtension):
    """Loop extension that puts an unused engine to sleep at level 1, which keeps its weights in host memory."""

    def __init__(self, weights: Weights, seconds: float):
        """Start the idle time now. weights: the extension that sleeps and wakes. seconds: time without requests after
        which the engine sleeps.
        """
        self._weights, self._seconds = weights, seconds
        self._used = time.monotonic()
        self._num_sleeps, self._wake_seconds = 0, 0.0

    def rest(self) -> float:
        """Put the engine to sleep once it has been unused for the configured time.

        Returns the number of seconds after which to call this again: what is left until then, the configured time if
        falling asleep failed (which is logged), and inf while the engine sleeps or is paused or has requests or steps
        in flight.
        """
        weights, now = self._weights, time.monotonic()
        if weights.asleep or weights.is_held or self.loop.scheduler.num_unfinished or self.loop.in_flight:
            return float("inf")
        if (left := max(self._used, weights.resumed) + self._seconds - now) > 0:
            return left
        try:
            weights.doze()
        except (RuntimeError, MemoryError):  # jax's errors are RuntimeErrors
            logger.exception("the engine could not fall asleep; it tries again in %g s", self._seconds)
            self._used = time.monotonic()
            return self._seconds
        self._num_sleeps += 1
        logger.info("the engine sleeps: no request for %g s", self._seconds)
        return float("inf")

    def prepare(self, request: Request) -> None:
        """Wake the engine for a request if it sleeps automatically, and restart the idle time. Waking up, and a failure
        to do so, are logged.

        Raises OverloadedError if its device memory cannot be allocated; it then sleeps on.
        """
        self._used = start = time.monotonic()
        if not self._weights.dozes:
            return
        try:
            self._weights.rouse()
        except (RuntimeError, MemoryError) as error:  # jax's errors are RuntimeErrors
            logger.exception("the engine could not wake up")
            raise OverloadedError("the engine sleeps and cannot have its memory back; try again later") from error
        self._used = time.monotonic()
        self._wake_seconds += self._used - start
        logger.info("the engine woke up in %.2f s", self._used - start)

    def ended(self, request: Request) -> None:
        """Restart the idle time."""
        self._used = time.monotonic()

    def metrics(self) -> Iterator[Counter]:
        yield Counter("jaxengine:idle_sleeps", self._num_sleeps)
        yield Counter("jaxengine:idle_wake_seconds", self._wake_seconds)
