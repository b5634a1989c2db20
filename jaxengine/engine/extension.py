"""The moments of the engine's loop at which an optional capability takes part.

A capability is one LoopExtension, in a file of its name in `extensions`. The loop calls those that an engine has, in
the order in which it got them, and names none of them. `extensions.build` decides which ones those are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.metric_types import Histogram, Metric
from jaxengine.engine.output import EngineOutput
from jaxengine.engine.slot_rows import SlotRows
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.scheduler.batch import ScheduledStep, StepResult
from jaxengine.scheduler.config import SchedulerConfig
from jaxengine.scheduler.errors import RequestError
from jaxengine.scheduler.request import FinishReason, Request
from jaxengine.scheduler.scheduler import Scheduler


class Events(NamedTuple):
    """What an extension learnt about requests.

    Attributes:
      ready: requests that wait for nothing any more.
      ended: requests that are over, with their reasons.
      rejected: requests that are over without an output, and the errors that their callers get.
    """

    ready: Sequence[Request] = ()
    ended: Sequence[tuple[Request, FinishReason, str | None]] = ()
    rejected: Sequence[tuple[Request, RequestError]] = ()


NO_EVENTS = Events()


class Loop(NamedTuple):
    """What an extension sees of its engine. in_flight: the steps whose tokens are not known, oldest first."""

    runner: ModelRunner
    scheduler: Scheduler
    rows: SlotRows
    in_flight: deque[InFlight]


class LoopExtension:
    """A capability's part of the loop: a subclass overrides the moments that concern it.

    Attributes:
      loop: of the engine, from `attach` on.
      epilogue: what runs on the device after each forward pass, in place of the sampler; None for the sampler.
    """

    loop: Loop
    epilogue: Callable[[PendingStep], None] | None = None

    def configure(self, config: SchedulerConfig) -> SchedulerConfig:
        """Returns the scheduler's configuration for an engine that starts with this extension."""
        return config

    def attach(self, loop: Loop) -> None:
        """Joins an engine. Called once, before every other moment but `configure`."""
        self.loop = loop

    def prepare(self, request: Request) -> None:
        """Completes a request before it is queued. Raises RequestError, and the request is not queued then."""

    def queued(self, requests: Sequence[Request]) -> None:
        """Takes note of the requests that one caller's request became, all of which have been queued."""

    def poll(self) -> Events:
        """Returns what has happened since the last call; does not wait. Called before each step is scheduled."""
        return NO_EVENTS

    def before_forward(self, step: ScheduledStep) -> None:
        """Dispatches what the forward pass of a step depends on."""

    def after_forward(self, step: InFlight | None) -> Events:
        """Dispatches what follows a step's forward pass and precedes its sampler. None: nothing could be scheduled."""
        return NO_EVENTS

    def is_behind(self, step: ScheduledStep) -> bool:
        """Whether a choice of this step depends on tokens of steps in flight, so that these must come first."""
        return False

    def before_sample(self, step: ScheduledStep) -> bool:
        """Whether the sampler of a step may be dispatched. If not, it is asked again after a `poll` of this extension.

        May wait, but not for long: other requests have rows in the step.
        """
        return True

    def sync(self, step: ScheduledStep) -> None:
        """Writes what has changed in the slots for the sampler of this step, which is dispatched next."""

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Takes in the results of a step that the scheduler has been updated with."""

    def ended(self, request: Request) -> None:
        """Releases what is held for a request that has ended."""

    def wait(self, seconds: float) -> bool:
        """Waits until `poll` may have something, for `seconds` at most; returns False at once if nothing is due."""
        return False

    def rest(self) -> float:
        """Acts while no request is there; returns after how many seconds it wants to again, inf for never."""
        return float("inf")

    def shutdown(self) -> None:
        """Ends threads and processes."""

    @property
    def is_idle(self) -> bool:
        """Whether steps may leave it out until a request needs it."""
        return False

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        """Functions that an operator may call between two steps; arguments and results are plain JSON values."""
        return {}

    def metrics(self) -> Iterator[Metric | Histogram]:
        """Yields the capability's metrics."""
        yield from ()

    def status(self) -> dict[str, Any]:
        """Returns entries for the status page, plain JSON values."""
        return {}
