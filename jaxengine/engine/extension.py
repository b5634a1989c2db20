"""Protocol between the engine loop and optional capabilities.

A capability is a subclass of LoopExtension, in a file of `extensions` that has its name. The loop calls the hooks of
its extensions in the order in which they were added. `extensions.build` decides which extensions an engine has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput
from jaxengine.engine.slot_rows import SlotRows
from jaxengine.engine.stats.metric_types import Histogram, Metric, Vector
from jaxengine.engine.weight_types import KVMode
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
      ended: (request, finish reason, stop_reason) of requests that must end now.
      rejected: (request, error) of requests that end without an output; their callers get the error.
    """

    ready: Sequence[Request] = ()
    ended: Sequence[tuple[Request, FinishReason, str | None]] = ()
    rejected: Sequence[tuple[Request, RequestError]] = ()


NO_EVENTS = Events()


class Loop(NamedTuple):
    """Parts of an engine that its extensions use.

    Attributes:
      runner: executes steps on the devices.
      scheduler: schedules requests.
      rows: sends the slots' sampling parameters to the devices.
      in_flight: dispatched steps that have not been collected, oldest first.
    """

    runner: ModelRunner
    scheduler: Scheduler
    rows: SlotRows
    in_flight: deque[InFlight]


class Inputs(Protocol):
    """The part of jaxengine.requests.inputs.InputProcessor that extensions use."""

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model; None if it has none."""
        ...

    @property
    def media(self) -> Any:
        """Processor of images, videos and sounds; None for a text model."""
        ...

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the token ids that end a text."""
        ...


class LoopExtension:
    """Base class of a capability's part of the engine loop. A subclass overrides the hooks that it needs; the others do
    nothing, return no events, and let the step go on.

    Attributes:
      loop: the engine's runner, scheduler, slot rows and steps in flight; set by `attach`.
      epilogue: function that dispatches a program after each forward pass in place of the sampler; None to sample.
    """

    loop: Loop
    epilogue: Callable[[PendingStep], None] | None = None

    def configure(self, config: SchedulerConfig) -> SchedulerConfig:
        """Return the scheduler's configuration with the changes that this extension needs."""
        return config

    def attach(self, loop: Loop) -> None:
        """Store the engine's parts in `loop`. Called once, before all other hooks except `configure`."""
        self.loop = loop

    def prepare(self, request: Request) -> None:
        """Check and complete a request before it is queued. Raises RequestError to refuse it.

        The scheduler may still refuse the request, and then `ended` is not called. So resources that have to be
        released must be acquired in `queued`.
        """

    def queued(self, requests: Sequence[Request]) -> None:
        """Register the n requests of a caller's request, which have been queued."""

    def poll(self) -> Events:
        """Return the events since the last call, without waiting. Called before each step is scheduled."""
        return NO_EVENTS

    def before_forward(self, step: ScheduledStep) -> None:
        """Dispatch the device work on which the step's forward pass depends. Called after the step was scheduled."""

    def after_forward(self, step: InFlight | None) -> Events:
        """Dispatch the device work that follows a step's forward pass and precedes its sampler, and return events.
        step: None if no step could be scheduled.
        """
        return NO_EVENTS

    def is_behind(self, step: ScheduledStep) -> bool:
        """Return whether the inputs of the step's sampler depend on tokens of steps in flight. The loop then collects a
        step and calls this again.
        """
        return False

    def before_sample(self, step: ScheduledStep) -> bool:
        """Return whether the step's sampler may be dispatched now. If not, the loop calls `poll` and then this again.
        It may wait, but not for long.
        """
        return True

    def sync(self, step: ScheduledStep) -> None:
        """Send the changed inputs of this step's sampler to the devices. The sampler is dispatched next."""

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Process the results of a collected step, with which the scheduler has already been updated. May change
        `result` and add to `output`.
        """

    def ended(self, request: Request) -> None:
        """Release what the extension holds for a request that has ended."""

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds` until `poll` may have events, and return True. If no events are expected, return
        False at once.
        """
        return False

    def rest(self) -> float:
        """Do the extension's periodic work while the engine has no requests. Return the seconds after which to call
        this again, inf for never.
        """
        return float("inf")

    def shutdown(self) -> None:
        """End the extension's threads and processes."""

    @property
    def is_idle(self) -> bool:
        """Whether the loop may drop this extension from its hooks until a request needs it again."""
        return False

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        """Functions that an operator may call between two steps, by name. Arguments and results are JSON values."""
        return {}

    def metrics(self) -> Iterator[Metric | Vector | Histogram]:
        """Yield the capability's metrics."""
        yield from ()

    def status(self) -> dict[str, Any]:
        """Return entries for the status page, as JSON values."""
        return {}


def reset_caches(scheduler: Scheduler, *, prefixes: bool = True) -> None:
    """Drop what only later requests could use: all cached prefixes, if `prefixes`, and the cached state of the
    scheduler's extensions. Running requests keep what they have.
    """
    if prefixes:
        scheduler.reset_prefix_cache()
    for extension in scheduler.extensions:
        extension.reset_cache()


def preempt_stale(loop: Loop, kv: KVMode, which: Callable[[Request], bool] | None = None) -> None:
    """Preempt running requests, whose keys and values earlier weights have computed. Must be called with no step in
    flight. Does nothing for kv="keep", unless the model pools: one result would then be of several weights.

    which: selects the requests; None for all.
    """
    if kv != "keep" or "pooling" in loop.runner.extensions:
        loop.scheduler.preempt_all(which)


class Hooks:
    """For each hook of a step, the methods of the active extensions that override it, in the order of the extensions.

    A step calls only these. Each attribute is a list of bound methods, which `update` changes in place.
    """

    def __init__(self) -> None:
        """Create an empty list for each hook."""
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
        """Replace all lists by the hooks that these extensions override, in the order of the extensions."""
        for name, hooks in vars(self).items():
            methods = [getattr(each, name) for each in active]
            hooks[:] = [each for each in methods if each.__func__ is not getattr(LoopExtension, name)]
