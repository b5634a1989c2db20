"""Record of a step from its dispatch until its results have been collected."""

from __future__ import annotations

from dataclasses import dataclass

from jaxengine.engine.stats.timeline import StepRecord
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.scheduler.batches.batch import ScheduledStep


@dataclass(eq=False, slots=True)
class InFlight:
    """Step that has been dispatched and not been collected.

    Attributes:
      step: its schedule.
      pending: the results that the devices are computing.
      record: its entry in the timeline.
      seconds: device time as the host measures it; 0 until the results have arrived.
    """

    step: ScheduledStep
    pending: PendingStep
    record: StepRecord
    seconds: float = 0.0
