"""Record of a dispatched step, until its results have been collected."""

from __future__ import annotations

from dataclasses import dataclass

from jaxengine.engine.timeline import StepRecord
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.scheduler.batch import ScheduledStep


@dataclass(eq=False, slots=True)
class InFlight:
    """Dispatched step.

    Attributes:
      step, pending, record: the schedule, the device's results to come, and the step's entry in the timeline.
      seconds: device time of the step as the host sees it; 0 until its results have come.
    """

    step: ScheduledStep
    pending: PendingStep
    record: StepRecord
    seconds: float = 0.0
