"""EngineCore: a model that is ready to serve. It takes prompts and returns outputs, one `step` at a time.

LLM and AsyncLLM run it. `inputs` turns prompts and parameters into requests, which EngineCore queues, runs and reports.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import Mesh

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.api.fair_lock import FairLock
from jaxengine.api.owner import Owner
from jaxengine.cluster.host0 import Cluster
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.engine.engine import Engine
from jaxengine.engine.metrics import Metrics
from jaxengine.engine.output import EngineOutput
from jaxengine.engine.prefixes import known_prefixes
from jaxengine.engine.profiler import Profiler
from jaxengine.engine.stats.metric_types import Histogram, Metric, Vector
from jaxengine.engine.status import engine_status
from jaxengine.models.quantization.base.table import weight_table
from jaxengine.requests.inputs import input_processor, make_processor
from jaxengine.requests.output.outputs import AnyOutput
from jaxengine.requests.params.prepared import PreparedRequest
from jaxengine.runner.peers import ALONE
from jaxengine.runner.start.memory_bar import parts_of, text_bar
from jaxengine.runner.start.open import load_runner, open_resolved
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.request import FinishReason, Request

logger = logging.getLogger(__name__)


class EngineCore:
    """Engine with request preparation and output processing. It loads the model, compiles every step, then serves. Not
    thread-safe.

    Attributes:
      config: resolved configuration, in which all defaults are filled in.
      inputs: prepares requests for this engine.
      source: the opened model, without its weights.
      owner: the process that may use the engine.
      dead: error that ends every later request and step, once a step has failed, or a call was interrupted
        (`engine_lock`), or after `shutdown`; None before.
    """

    @jax.transfer_guard("allow")
    def __init__(
        self,
        config: EngineConfig,
        *,
        devices: Sequence[Any] | None = None,
        mesh: Mesh | None = None,
        mesh_axes: Mapping[str, str] | None = None,
    ):
        """Load the model and compile its steps.

        With config.fit, options that fit the devices are chosen first. Tables of weights and memory are logged unless
        disable_log_stats is set.

        devices: devices to choose from, None for all. mesh, mesh_axes: a mesh to use instead, see `LLM`. Raises
        ConfigError, ModelConfigError or ModelFileError, which say what to change, and ClusterError if there are several
        nodes. On an error the cluster is shut down.
        """
        if config.nnodes > 1 and (devices is not None or mesh is not None):
            raise ConfigError("nnodes", config.nnodes, "1 with devices or a mesh; it takes those of all processes")
        self.owner = Owner(has_devices=True)
        self.dead: EngineDeadError | None = None
        self._cluster = Cluster(config) if config.nnodes > 1 else None
        try:
            if config.fit:
                from jaxengine.plan.fit import fitted  # rarely needed

                config = fitted(config, devices, mesh)
            opened = open_resolved(config, devices, mesh, mesh_axes)
            self.config = opened.config
            self.source = opened.source.without_weights()
            with opened.source.closing_on_error():
                self.inputs = input_processor(opened.source, self.config)
            self.runner = load_runner(*opened, peers=self._cluster or ALONE)
            self.engine = Engine(self.runner, self.inputs)
        except BaseException as error:
            if self._cluster is not None:
                self._cluster.shutdown(f"start-up failed: {error}")
            raise
        if not config.disable_log_stats:
            if table := weight_table(self.runner.weight_rows):
                logger.info("weights:\n%s", table)
            plan = self.runner.plan
            logger.info("memory of a device:\n%s\n%s", text_bar(parts_of(plan), plan.total), plan.table())
        self._rejected: list[tuple[str, RequestError]] = []
        self.metrics = Metrics(self.engine, log_stats=not config.disable_log_stats)
        self._processor = make_processor(self.inputs)
        profiler = self.config.profiler_config
        self._profiler = Profiler(None if profiler is None else profiler.profiler_dir)

    def shutdown(self, reason: str | None = None) -> None:
        """End the engine and its other processes, if it has any, and write a profile that is running. Do nothing in a
        fork.

        reason: why the engine has failed, for the other processes; None if it has not. Raises RequestError for a
        profile that cannot be written, after all else has ended.
        """
        if not self.owner.is_here:
            return
        self.dead = self.dead or EngineDeadError("the engine was shut down")
        with contextlib.ExitStack() as others:  # each is ended, even if one before it raises
            if self._cluster is not None:
                others.callback(self._cluster.shutdown, reason)
            others.callback(self.engine.shutdown)
            self._profiler.close()

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        """Functions that an operator may call between two steps, by name. Their arguments and results are plain JSON
        values.
        """
        return {
            "reset_prefix_cache": self._reset_prefix_cache,
            "metrics": self.metrics.snapshot,
            "status": lambda: engine_status(self.engine, self.metrics),
            "load": self._load,
            "prefixes": lambda most_bytes: known_prefixes(self.engine, most_bytes),
            "report": self.metrics.server.report,
            "trace": self._trace,
            "weights": lambda: self.runner.weight_rows,
            "start_profile": self._profiler.start,
            "stop_profile": self._profiler.stop,
            "count_rejections": self._count_rejections,
            **self.engine.extensions.utilities(),
        }

    def utility(self, name: str, *arguments: Any) -> Any:
        """Call a function of `utilities` and return its result. Raises the function's errors, and RequestError for an
        unknown name.
        """
        if name not in self.utilities:
            raise RequestError(f"there is no {name!r}; allowed: {', '.join(self.utilities)}", param="name", value=name)
        return self.utilities[name](*arguments)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has work, as Engine.has_unfinished says."""
        return self.engine.has_unfinished

    def rest(self) -> float:
        """Do the periodic work that is due while `has_unfinished` is False, and return the seconds until the next call
        is due, inf for never. While the scheduler is paused, the next call is due at the latest when a request times
        out.
        """
        scheduler, due = self.engine.scheduler, self.engine.extensions.rest()
        return max(0.0, min(due, scheduler.next_deadline - time.monotonic())) if scheduler.paused else due

    def check_process(self) -> None:
        """Raise EngineDeadError in a fork of the engine's process."""
        if not self.owner.is_here:
            self.owner.check()

    def check(self) -> None:
        """Raise EngineDeadError once a step has failed, after `shutdown`, and in a fork."""
        if not self.owner.is_here:
            self.owner.check()
        if self.dead is not None:
            raise self.dead

    def add(self, prepared: PreparedRequest) -> None:
        """Queue a prepared request: one request of the engine for each of its outputs.

        Raises RequestError, with nothing changed, if its id is in use or it cannot be served. Raises EngineDeadError
        once a step has failed, after `shutdown`, and in a fork.
        """
        self.check()
        if prepared.request_id in self._processor:
            raise RequestError(
                f"request_id {prepared.request_id!r} is in use", param="request_id", value=prepared.request_id
            )
        self.engine.queue(prepared.requests)
        self._processor.add(prepared)

    def abort(self, request_id: str) -> list[AnyOutput]:
        """End all sequences of a request, free their pages, and return its last outputs; [] if there is no such
        request.
        """
        running = self._processor.running(request_id)
        for request in running:
            self.engine.finish(request, FinishReason.ABORT)
        return self._process(EngineOutput(finished=running))

    def step(self) -> list[AnyOutput]:
        """Run one step and return its outputs. `pop_rejected` returns the requests that ended without an output.

        Raises EngineDeadError if the engine is dead or the step fails.
        """
        return self._process(self.advance())

    def advance(self) -> EngineOutput:
        """Run one step and return its tokens, for a caller that turns them into text elsewhere.

        Raises EngineDeadError if the step fails, once a step has failed, after `shutdown`, and in a fork. A failed step
        leaves the device buffers in an unknown state, so no later step can run.
        """
        self.check()
        try:
            output = self.engine.step()
        except Exception as error:
            self.dead = EngineDeadError(f"the engine has failed: {error}")
            self.dead.__cause__ = error
            raise self.dead from error
        self.metrics.stepped()
        return output

    def pop_rejected(self) -> list[tuple[str, RequestError]]:
        """Return (request id, error for its caller) for each request that `step` has refused since the last call of
        this method.
        """
        rejected, self._rejected = self._rejected, []
        return rejected

    def text_spans(self) -> list[tuple[float, float, int]]:
        """Return the latest periods in which this process turned tokens into text, in order.

        Each is (start, end, number of outputs); times are seconds of time.monotonic.
        """
        return list(self._processor.spans)

    def _reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes, and return True. Running requests keep their pages."""
        self.engine.scheduler.reset_prefix_cache()
        return True

    def _count_rejections(self, count: int) -> None:
        """Add `count` to the number of requests that were refused because too many were waiting. They are counted in
        the server's API process.
        """
        self.engine.request_stats.num_rejections += count

    def _load(self) -> dict[str, int]:
        """Return "num_running" and "num_waiting", numbers of requests, and "num_slots", how many can run at once."""
        scheduler = self.engine.scheduler
        num_slots = scheduler.config.max_num_seqs * scheduler.config.num_ranks
        return {"num_running": scheduler.num_running, "num_waiting": scheduler.num_waiting, "num_slots": num_slots}

    def _trace(self, seconds: float) -> dict[str, Any]:
        """Return the engine's timeline of the last `seconds`, with its unfinished requests, as plain JSON values."""
        return self.engine.timeline.last(seconds, list(self.engine.scheduler.requests))

    def _process(self, result: EngineOutput) -> list[AnyOutput]:
        """Return the callers' outputs of an engine step, and record the requests that have ended.

        Refused requests are queued for `pop_rejected`, and the other sequences of their callers' requests are aborted.
        """
        if not any(vars(result).values()):  # true for most steps
            return []
        for request, error in result.refused:
            request_id, siblings = self._processor.forget(request)
            for sibling in siblings:
                self.engine.finish(sibling, FinishReason.ABORT)
            if request_id is not None:
                self._rejected.append((request_id, error))
        outputs = self._processor.process(result, time.monotonic(), self._stop)
        for request in result.finished:
            self.engine.record_finish(request)
        return [*outputs]

    def _stop(self, request: Request, reason: FinishReason, text: str, num_tokens: int) -> None:
        """End a request because of the content of its output, and record its end.

        text: stop_reason of the output: the stop string, or a note that the output repeats itself. num_tokens: number
        of output tokens so far.
        """
        self.engine.finish(request, reason, text)
        self.engine.record_finish(request, reason, num_tokens)


class CoreMethods(ABC):
    """Methods that LLM and LLMEngine share. Each holds the engine's lock, so that it runs between two steps, and raises
    EngineDeadError in a fork.
    """

    _lock: AbstractContextManager[Any]

    @property
    @abstractmethod
    def core(self) -> EngineCore:
        """The engine."""

    def get_metrics(self) -> list[Metric | Vector | Histogram]:
        """Return the engine's counters, gauges and histograms, each with a name and its values."""
        with self._lock:
            return self.core.metrics.collect()

    def reset_mm_cache(self) -> None:
        """Drop cached images and videos, both preprocessed and encoded. Running requests keep theirs."""
        with self._lock:
            self.core.utility("reset_mm_cache")

    def start_profile(self) -> None:
        """Start profiling this process with jax.profiler. Raises RequestError if the engine has no profiler_config, or
        a profile is already running.
        """
        with self._lock:
            self.core.utility("start_profile")

    def stop_profile(self) -> None:
        """End the profile and write it into the folder of profiler_config. Raises RequestError if no profile is
        running or it cannot be written.
        """
        with self._lock:
            self.core.utility("stop_profile")


def transfers_allowed() -> AbstractContextManager[None]:
    """Return a context in which this thread's transfers between host and devices are allowed, whatever
    jax_transfer_guard says: an engine passes host arrays to its programs.
    """
    is_guarded = any(getattr(jax.config, f"jax_transfer_guard_{way}") for way in _WAYS)
    return jax.transfer_guard("allow") if is_guarded else _NOTHING


_WAYS = "host_to_device", "device_to_device", "device_to_host"
_NOTHING = contextlib.nullcontext()


class _EngineLock(FairLock):
    """FairLock whose holder's transfers are allowed (`transfers_allowed`)."""

    def __enter__(self) -> None:
        allowed = transfers_allowed()
        allowed.__enter__()
        try:
            super().__enter__()
        except BaseException:
            allowed.__exit__(None, None, None)
            raise
        self._allowed = allowed  # only the holder writes it

    def __exit__(self, *error: Any) -> None:
        allowed = self._allowed
        try:
            super().__exit__(*error)
        finally:
            allowed.__exit__(None, None, None)


def engine_lock(core: EngineCore) -> FairLock:
    """Return a lock for calls of `core`. Acquiring it raises EngineDeadError in a fork. A call that is interrupted
    while it holds the lock, by a second Ctrl-C for instance, marks the engine as dead.
    """

    def interrupted() -> None:
        core.dead = core.dead or EngineDeadError("the engine was interrupted in the middle of a call; create a new one")

    return _EngineLock(core.check_process, interrupted)
