"""Protocol between the engine loop and its optional capabilities.

A capability is one subclass of LoopExtension, in a file of its name in `extensions`. The loop calls the hooks of its
extensions in the order in which they were added, and names none of them. `extensions.build` decides which extensions an
engine has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput
from jaxengine.engine.slot_rows import SlotRows
from jaxengine.engine.stats.metric_types import Histogram, Metric
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.request import FinishReason, Request
from jaxengine.scheduler.batches.batch import ScheduledStep, StepResult
from jaxengine.scheduler.scheduler import Scheduler


class Events(NamedTuple):
    """Changes in the state of requests that an extension reports to the loop.

    Attributes:
      ready: requests that no longer wait for the extension and may be scheduled.
      ended: (request, finish reason, stop_reason) of requests that are to end now.
      rejected: (request, error) of requests that end without output; their callers get the error.
    """

    ready: Sequence[Request] = ()
    ended: Sequence[tuple[Request, FinishReason, str | None]] = ()
    rejected: Sequence[tuple[Request, RequestError]] = ()


NO_EVENTS = Events()


class Loop(NamedTuple):
    """Parts of an engine that its extensions use."""

    runner: ModelRunner  # of the devices
    scheduler: Scheduler  # of the requests
    rows: SlotRows  # writes the slots' sampling parameters to the devices
    in_flight: deque[InFlight]  # dispatched steps without results, oldest first


class LoopExtension:
    """Base class of a capability's part of the engine loop; a subclass overrides the hooks that it needs.

    Attributes:
      loop: the engine's runner, scheduler and slot rows; set by `attach`.
      epilogue: function that dispatches a program after each forward pass, in place of the sampler; None: the sampler.
    """

    loop: Loop
    epilogue: Callable[[PendingStep], None] | None = None

    def configure(self, config: SchedulerConfig) -> SchedulerConfig:
        """Return the scheduler's configuration, changed where an engine with this extension needs it."""
        return config

    def attach(self, loop: Loop) -> None:
        """Store the engine's parts in `loop`. Called once, before every hook but `configure`."""
        self.loop = loop

    def prepare(self, request: Request) -> None:
        """Complete a request before it is queued. Raises RequestError to refuse it; it is not queued then.

        The scheduler may still refuse the request, and `ended` is not called then: what must be released is taken in
        `queued`.
        """

    def queued(self, requests: Sequence[Request]) -> None:
        """Record that these requests, all made of one caller's request, have been queued."""

    def poll(self) -> Events:
        """Return events of requests since the last call, without waiting. Called before each step is scheduled."""
        return NO_EVENTS

    def before_forward(self, step: ScheduledStep) -> None:
        """Dispatch device work that the step's forward pass depends on. Called after scheduling, before the forward
        pass.
        """

    def after_forward(self, step: InFlight | None) -> Events:
        """Dispatch device work that follows a step's forward pass and precedes its sampler; return events of requests.

        step: None if no step could be scheduled.
        """
        return NO_EVENTS

    def is_behind(self, step: ScheduledStep) -> bool:
        """Whether what the step may sample depends on tokens of steps in flight, so that the loop must collect those
        first.
        """
        return False

    def before_sample(self, step: ScheduledStep) -> bool:
        """Whether the step's sampler may be dispatched now. If not, the loop calls `poll` and then this again.

        May wait, but not for long: other requests have rows in the step.
        """
        return True

    def sync(self, step: ScheduledStep) -> None:
        """Send the devices the changed per-slot inputs of this step's sampler, which is dispatched next."""

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Read the results of a step, with which the scheduler has been updated; may add to `output`."""

    def ended(self, request: Request) -> None:
        """Release what the extension holds for a request that has ended."""

    def wait(self, seconds: float) -> bool:
        """Wait until `poll` may have events, for `seconds` at most; return False at once if none are expected."""
        return False

    def rest(self) -> float:
        """Do the extension's periodic work while the engine has no requests.

        Returns in how many seconds to call again; inf for never.
        """
        return float("inf")

    def shutdown(self) -> None:
        """End the extension's threads and processes."""

    @property
    def is_idle(self) -> bool:
        """Whether the loop may skip this extension until a request needs it."""
        return False

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        """Return the functions, by name, that an operator may call between two steps; their arguments and results are
        plain JSON values.
        """
        return {}

    def metrics(self) -> Iterator[Metric | Histogram]:
        """Yield the capability's metrics."""
        yield from ()

    def status(self) -> dict[str, Any]:
        """Return entries for the status page, plain JSON values."""
        return {}


class Hooks:
    """Hooks of a step that the active extensions override, in their order, so that a step calls no others.

    Attributes: a list of bound methods for each hook, changed in place by `update`.
    """

    def __init__(self) -> None:
        """Begin without extensions."""
        self.poll: list[Callable[[], Events]] = []
        self.before_forward: list[Callable[[ScheduledStep], None]] = []
        self.after_forward: list[Callable[[InFlight | None], Events]] = []
        self.is_behind: list[Callable[[ScheduledStep], bool]] = []
        self.before_sample: list[Any] = []
        self.sync: list[Callable[[ScheduledStep], None]] = []
        self.collected: list[Callable[[InFlight, StepResult, EngineOutput], None]] = []
        self.ended: list[Callable[[Request], None]] = []
        self.wait: list[Callable[[float], bool]] = []

    def update(self, active: Sequence[LoopExtension]) -> None:
        """Take the hooks of these extensions, in their order, and of no others."""
        for name, hooks in vars(self).items():
            methods = [getattr(each, name) for each in active]
            hooks[:] = [each for each in methods if each.__func__ is not getattr(LoopExtension, name)]
