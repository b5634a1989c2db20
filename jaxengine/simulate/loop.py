"""Runs a trace through the engine's own loop, on a simulated device and with a clock that the costs advance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from jaxengine.config.engine_config import ConfigError, ResolvedConfig
from jaxengine.engine.engine import Engine
from jaxengine.engine.extension import LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput
from jaxengine.engine.stats.stats import StepStats
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.scheduler.batches.batch import StepResult
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.scheduler.batches.packing import Packer
from jaxengine.simulate.costs import Costs
from jaxengine.simulate.device import SimulatedRunner, SimulatedStep
from jaxengine.simulate.trace import STOP, Trace

# Option -> what its effect depends on and a trace does not contain.
_UNKNOWN = {
    "speculative_config": "how many drafts are accepted",
    "sleep_idle_seconds": "how long weights take to come back",
    "record_steps": "steps, which are not computed here",
    "logits_processors": "what they choose",
    "enable_lora": "which adapters its requests use",
}

_MOST_IDLE = 1000  # largest number of consecutive steps that change nothing


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step.

    Attributes:
      num_tokens, num_rows: tokens and rows without padding, of all replicas together.
      most_tokens, most_rows: largest numbers of any replica, which decide the bucket.
      seconds: on the device, from the beginning of the first stage to the end of the last.
      keys, pairs: see `costs.Tiles.attended`, summed over all replicas.
      longest: tokens of the longest row.
    """

    bucket: Bucket
    num_tokens: int
    num_rows: int
    most_tokens: int
    most_rows: int
    seconds: float
    keys: float
    pairs: float
    longest: int = 1


@dataclass
class Outcome:
    """Result of a simulated run.

    Attributes:
      trace, config: the trace and the engine's config.
      stats: counts of the engine.
      steps: all steps in order.
      first_token, e2e: seconds from each request's arrival to its first and to its last token.
      intervals: seconds between successive tokens of all requests.
      mean_interval: mean seconds between tokens of each request (0 with one token).
      seconds: from the first arrival to the last end.
      busy: share of `seconds` in which the device's first stage computed.
      refused: messages of requests that the engine refused.
      num_preemptions: preemptions of the scheduler.
      num_prefix_queries, num_prefix_hits: prompt tokens looked up and found in the prefix cache.
      most_waiting: largest number of requests that waited at once.
    """

    trace: Trace
    config: ResolvedConfig
    stats: StepStats
    steps: list[StepTime] = field(default_factory=list)
    first_token: np.ndarray = field(default_factory=lambda: np.empty(0))
    intervals: np.ndarray = field(default_factory=lambda: np.empty(0))
    e2e: np.ndarray = field(default_factory=lambda: np.empty(0))
    mean_interval: np.ndarray = field(default_factory=lambda: np.empty(0))
    seconds: float = 0.0
    busy: float = 0.0
    refused: list[str] = field(default_factory=list)
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    most_waiting: int = 0


class _Observer(LoopExtension):
    """Loop extension that records the times of steps and requests."""

    def __init__(self):
        """Start without steps and requests."""
        self.steps: list[StepTime] = []
        self.intervals: list[np.ndarray] = []
        # For each request that got a token: times of its arrival, first and last token, and its number of tokens.
        self.lives: list[tuple[float, float, float, int]] = []
        self.num_ended = 0

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Record a step's time and the intervals between tokens when the loop has collected its results."""
        pending, own = cast(SimulatedStep, step.pending), step.step
        tokens, rows = (max(getattr(batch, name) for batch in own.batches) for name in ("num_tokens", "num_rows"))
        seconds, (keys, pairs) = pending.ready_at - pending.started, pending.attended.tolist()
        counts, held = (own.num_tokens, own.num_rows, tokens, rows), (keys, pairs, pending.longest)
        self.steps.append(StepTime(step.record.bucket, *counts, seconds, *held))
        self.intervals += result.intervals

    def ended(self, request: Request) -> None:
        """Count a request that has ended, and record its times if it got a token."""
        self.num_ended += 1
        if (first := request.first_token_time) is not None:
            count = len(request.output_token_ids)
            self.lives.append((request.arrival_time, first, request.last_token_time, count))


class SimulatedEngine:
    """Engine loop on a simulated device with its own clock.

    Attributes:
      runner: the simulated device. engine: the Engine on it.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        packer: Packer,
        num_pages: int,
        windows: tuple[int | None, ...],
        costs: Costs,
    ):
        """Create the engine and its simulated device, with the clock at 0. config, packer, num_pages, windows: those of
        the engine to simulate, from a plan or a runner.
        """
        self.runner = SimulatedRunner(config, packer, num_pages, windows, costs)
        self.engine = Engine(cast(Any, self.runner), clock=self.runner.time.monotonic)
        self.runner.scheduler = self.engine.scheduler
        self._idle = 0

    def queue(self, request: Request, tokens: np.ndarray) -> str | None:
        """Queue a request in the engine, with the tokens that it will get.

        Returns None, or the error's message if the engine refuses the request, which is then forgotten.
        """
        self.runner.expect(request, tokens)
        try:
            self.engine.queue([request])
        except RequestError as error:
            self.runner.forget(request)
            return str(error)
        return None

    def step(self) -> EngineOutput:
        """Run one step of the loop and return its results. Advances the clock, and forgets the tokens of finished
        requests. Raises RuntimeError if more than _MOST_IDLE successive calls have changed nothing.
        """
        before = self._progress()
        output = self.engine.step()
        for request in output.finished:
            self.runner.forget(request)
        self._idle = self._idle + 1 if before == self._progress() else 0
        if self._idle > _MOST_IDLE:
            raise RuntimeError(f"{before[2]} requests wait for something that never comes")
        return output

    def _progress(self) -> tuple[int, float, int]:
        """Return (number of steps, time in seconds, unfinished requests). At least one of them changes in a step that
        does something.
        """
        return self.engine.stats.num_steps, self.runner.time.now, self.engine.scheduler.num_unfinished


def check_simulated(config: Any) -> None:
    """Raise ConfigError for a config with an option whose effect a trace does not determine (keys of _UNKNOWN), and for
    a pooling model. config: an EngineConfig or a ResolvedConfig.
    """
    for name, what in _UNKNOWN.items():
        if getattr(config, name):
            raise ConfigError.because(name, f"{name} is given, and a trace does not say {what}", f"leave out {name}")
    if config.runner == "pooling":
        raise ConfigError("runner", config.runner, "generate; a trace has outputs")


def run_trace(
    trace: Trace,
    config: ResolvedConfig,
    packer: Packer,
    num_pages: int,
    windows: tuple[int | None, ...],
    costs: Costs,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Run a trace until all requests have ended, and return the outcome. A request is queued once the clock has reached
    its arrival. Messages of refused requests are listed in the outcome.

    config, packer, num_pages, windows: those of the engine to simulate, from a plan or a runner. progress(ended,
    requests): called after every 256th step. Raises ConfigError for a config that `check_simulated` refuses,
    RuntimeError if requests never end.
    """
    check_simulated(config)
    observer = _Observer()
    simulated = SimulatedEngine(config, packer, num_pages, windows, costs)
    engine, runner = simulated.engine, simulated.runner
    engine.extensions.by_name["simulation"] = observer
    engine.extensions.require("simulation")
    outcome = Outcome(trace, config, engine.stats)
    time, index, total = runner.time, 0, len(trace.requests)
    while index < total or engine.has_unfinished:
        if not engine.has_unfinished:
            time.now = max(time.now, trace.requests[index].arrival)
        while index < total and trace.requests[index].arrival <= time.now:
            refused = simulated.queue(*request_of(trace, index, config.max_model_len))
            outcome.refused += [] if refused is None else [refused]
            index += 1
        outcome.most_waiting = max(outcome.most_waiting, engine.scheduler.num_waiting)
        simulated.step()
        if engine.stats.num_steps % 256 == 0:
            progress(observer.num_ended, total)
    _finish(outcome, engine, runner, observer)
    return outcome


def request_of(trace: Trace, index: int, max_model_len: int) -> tuple[Request, np.ndarray]:
    """Return request `index` of the trace, and its tokens, i32[n]: those of the prompt and those that it will get.

    A request that ended before its token limit has STOP as its last token and as its stop token. The limit is cut to
    fit max_model_len, but is at least 1.
    """
    own, tokens = trace.requests[index], trace.tokens(index)
    limit = min(own.limit, max(1, max_model_len - own.num_prompt))
    stops = ()
    if limit > own.num_output:  # it ended before its limit, which the scheduler learns with its last token
        tokens[-1], stops = STOP, (STOP,)
    prompt = tokens[: own.num_prompt]
    request = Request(str(index), prompt, TokenParams(), limit, stop_token_ids=stops, arrival_time=own.arrival)
    return request, tokens


def _finish(outcome: Outcome, engine: Engine, runner: SimulatedRunner, observer: _Observer) -> None:
    """Complete an outcome with the scheduler's counts, the steps, and the times of all requests that got a token, in
    the order in which they ended. If no request got a token, its times stay empty and `seconds` 0. runner: gives the
    seconds in which the device computed.
    """
    scheduler = engine.scheduler
    outcome.num_preemptions = scheduler.num_preemptions
    outcome.num_prefix_queries, outcome.num_prefix_hits = scheduler.num_prefix_queries, scheduler.num_prefix_hits
    outcome.steps = observer.steps
    outcome.intervals = np.concatenate([np.empty(0), *observer.intervals])
    if not observer.lives:
        return
    arrival, first, last, count = map(np.array, zip(*observer.lives, strict=True))
    outcome.first_token, outcome.e2e = first - arrival, last - arrival
    outcome.mean_interval = (last - first) / np.maximum(1, count - 1)
    outcome.seconds = float(last.max() - arrival.min())
    outcome.busy = min(1.0, runner.busy / outcome.seconds) if outcome.seconds else 0.0
