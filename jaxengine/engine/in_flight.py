"""A dispatched step until its results are taken in."""

from __future__ import annotations

from dataclasses import dataclass

from jaxengine.engine.timeline import StepRecord
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.scheduler.batch import ScheduledStep


@dataclass(eq=False, slots=True)
class InFlight:
    """A dispatched step.

    Attributes:
      seconds: for which the device was at work on it, as far as the host can tell; 0 until its results have come.
    """

    step: ScheduledStep
    pending: PendingStep
    record: StepRecord
    seconds: float = 0.0
