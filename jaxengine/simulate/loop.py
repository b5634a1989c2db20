"""Runs a trace through the engine's own loop, on a simulated device and by a clock that the costs move on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
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

# Options whose effect depends on what a trace does not say.
_UNKNOWN = {
    "speculative_config": "how many drafts are accepted",
    "sleep_idle_seconds": "how long weights take to come back",
    "record_steps": "steps, which are not computed here",
    "logits_processors": "what they choose",
    "enable_lora": "which adapters its requests use",
}

_MOST_IDLE = 1000  # calls of a step that change nothing


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step.

    Attributes:
      num_tokens, num_rows: real ones, of all replicas.
      most_tokens, most_rows: the most of any replica, which decide the bucket.
      seconds: on the device, from the beginning of the first stage to the end of the last.
      keys, pairs: as of `costs.Tiles.attended`, over all replicas.
      longest: tokens of the longest row.
      since_prompts: as of `Costs.seconds`.
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
    since_prompts: float = inf


@dataclass
class Outcome:
    """Result of a simulated run.

    Attributes:
      trace, config: what ran.
      stats: the engine's own counts.
      steps: in order.
      first_token, intervals, e2e, mean_interval: seconds: to the first token of each request, between successive
        tokens of all, to the end of each, and the mean between tokens of each (0 with one token).
      seconds: from the first arrival to the last end.
      busy: share of these in which the device computed, its first stage.
      refused: messages of requests that the engine refused.
      num_preemptions, num_prefix_queries, num_prefix_hits: the scheduler's; the last two in tokens.
      most_waiting: requests that waited at once.
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
    """Loop extension that notes what steps and requests took."""

    def __init__(self):
        """Start without steps and requests."""
        self.steps: list[StepTime] = []
        self.intervals: list[np.ndarray] = []
        # Of each request that got a token: its arrival, first and last token, and how many it got.
        self.lives: list[tuple[float, float, float, int]] = []
        self.num_ended = 0

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Note a step's time and the intervals between tokens, when the loop has collected its results."""
        pending, own = cast(SimulatedStep, step.pending), step.step
        tokens, rows = (max(getattr(batch, name) for batch in own.batches) for name in ("num_tokens", "num_rows"))
        seconds, (keys, pairs) = pending.ready_at - pending.started, pending.attended.tolist()
        counts, held = (own.num_tokens, own.num_rows, tokens, rows), (keys, pairs, pending.longest)
        self.steps.append(StepTime(step.record.bucket, *counts, seconds, *held, pending.since_prompts))
        self.intervals += result.intervals

    def ended(self, request: Request) -> None:
        """Count a request that has ended, and note its times if it got a token."""
        self.num_ended += 1
        if (first := request.first_token_time) is not None:
            count = len(request.output_token_ids)
            self.lives.append((request.arrival_time, first, request.last_token_time, count))


class SimulatedEngine:
    """An engine's loop on a simulated device, with a clock of its own."""

    def __init__(
        self,
        config: ResolvedConfig,
        packer: Packer,
        num_pages: int,
        windows: tuple[int | None, ...],
        costs: Costs,
    ):
        """Make the engine on a simulated device, its clock at 0. config, packer, num_pages, windows: of the engine to
        simulate, as a plan or a runner has them.
        """
        self.runner = SimulatedRunner(config, packer, num_pages, windows, costs)
        self.engine = Engine(cast(Any, self.runner), clock=self.runner.time.monotonic)
        self.runner.scheduler = self.engine.scheduler
        self._idle = 0

    def queue(self, request: Request, tokens: np.ndarray) -> str | None:
        """Give the engine a request with its tokens; returns why it refuses it, None if it does not.

        A refused request is forgotten.
        """
        self.runner.expect(request, tokens)
        try:
            self.engine.queue([request])
        except RequestError as error:
            self.runner.forget(request)
            return str(error)
        return None

    def step(self) -> EngineOutput:
        """Run a step of the loop; returns its results. Raises RuntimeError if nothing has changed in many calls.

        Advances the clock. Tokens of ended requests are forgotten.
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
        """Return (steps, time in seconds, unfinished requests), which differ after a step that did something."""
        return self.engine.stats.num_steps, self.runner.time.now, self.engine.scheduler.num_unfinished


def check_simulated(config: Any) -> None:
    """Raise ConfigError for a config with an option whose effect a trace does not tell (keys of _UNKNOWN), and for a
    pooling one.
    """
    for name, what in _UNKNOWN.items():
        if getattr(config, name):
            raise ConfigError.because(name, f"{name} is given, and a trace does not tell {what}", f"leave out {name}")
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
    """Run a trace to its end.

    config, packer, num_pages, windows: of the engine to simulate, as a plan or a runner has them. progress(ended,
    requests): called now and then. Raises ConfigError as `check_simulated`. A request is queued once the clock has
    reached its arrival; refused ones are listed in the outcome. Raises RuntimeError if requests never end.
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
    """Return request `index` of the trace, and its tokens with those that it is to get, i32[n].

    A request that ended before its limit has STOP as its last token and stop token. The limit is cut to
    `max_model_len`, but at least 1.
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
    """Complete an outcome with the counts of the scheduler, the steps, and the times of all requests that got a token,
    in the order in which they ended.

    Without one, times stay empty and seconds 0. runner: for the time in which the device computed.
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
