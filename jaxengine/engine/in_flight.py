"""Record of a dispatched step, until its results have been collected."""

from __future__ import annotations

from dataclasses import dataclass

from jaxengine.engine.stats.timeline import StepRecord
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.scheduler.batches.batch import ScheduledStep


@dataclass(eq=False, slots=True)
class InFlight:
    """Dispatched step."""

    step: ScheduledStep  # its schedule
    pending: PendingStep  # the device's results to come
    record: StepRecord  # its entry in the timeline
    seconds: float = 0.0  # device time as the host measures it; 0 until the results have come
