"""A model ready to serve: prompts in, outputs out, one `step` at a time. What LLM and AsyncLLM both stand on.

`inputs` makes requests of what callers ask for; here they are queued, run and reported.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh
from tqdm import tqdm

from jaxengine.cluster import ALONE, Cluster, Peers
from jaxengine.config import ConfigError, EngineConfig, ResolvedConfig
from jaxengine.devices import choose_devices, open_stages
from jaxengine.engine import Engine, EngineOutput
from jaxengine.inputs import InputProcessor, PreparedRequest
from jaxengine.metrics import Metrics
from jaxengine.model_runner import ModelRunner
from jaxengine.model_source import ModelSource, open_model
from jaxengine.output_processor import OutputProcessor
from jaxengine.outputs import RequestOutput
from jaxengine.platforms import PLATFORMS, Platform
from models.kv_cache import platform_of
from scheduler.errors import RequestError
from scheduler.request import FinishReason

logger = logging.getLogger(__name__)


class EngineCore:
    """Loads the model, compiles every step, and then serves. Not thread-safe.

    Attributes:
      config: nothing left open.
      inputs: prepares requests for this engine.
    """

    def __init__(self, config: EngineConfig, *, devices: Sequence[Any] | None = None, mesh: Mesh | None = None):
        """devices: to take from, default all; or a mesh with axes data, attn and model that says how to use which.

        Raises ConfigError, ModelConfigError or ModelFileError, each saying what to change.
        """
        if config.nnodes > 1 and (devices is not None or mesh is not None):
            raise ConfigError("nnodes", config.nnodes, "1 beside devices or a mesh; it takes those of all processes")
        self._cluster = Cluster(config) if config.nnodes > 1 else None
        try:
            opened = open_resolved(config, devices, mesh)
            self.config = opened.config
            self.inputs = input_processor(opened.source, self.config)
            self.runner = load_runner(*opened, peers=self._cluster or ALONE)
        except BaseException as error:
            self.shutdown(f"start-up failed: {error}")
            raise
        if not config.disable_log_stats:
            print(self.runner.plan.table(), file=sys.stderr)
        self.engine = Engine(self.runner)
        self.metrics = Metrics(self.engine, log_stats=not config.disable_log_stats)
        self._processor = OutputProcessor(self.inputs.tokenizer)

    def shutdown(self, reason: str | None = None) -> None:
        """Ends the engine's other processes, if it has any; with a reason, as a failure."""
        if self._cluster is not None:
            self._cluster.shutdown(reason)

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        """What an operator may call between two steps, by name; arguments and results are plain JSON values."""
        return {"reset_prefix_cache": self._reset_prefix_cache}

    def utility(self, name: str, *arguments: Any) -> Any:
        """Calls one of them. Raises RequestError for a name that is not there."""
        if name not in self.utilities:
            raise RequestError(f"there is no {name!r}; allowed: {', '.join(self.utilities)}", param="name", value=name)
        return self.utilities[name](*arguments)

    @property
    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished

    def add(self, prepared: PreparedRequest) -> None:
        """Queues a prepared request; raises RequestError, and nothing has changed then."""
        if prepared.request_id in self._processor:
            raise RequestError(
                f"request_id {prepared.request_id!r} is in use", param="request_id", value=prepared.request_id
            )
        added = []
        try:
            for request in prepared.requests:
                self.engine.add_request(request, prepared.bad_words)
                added.append(request)
        except RequestError:
            for request in added:
                self.engine.finish(request, FinishReason.ABORT)
            raise
        arrival = prepared.requests[0].arrival_time
        self._processor.add(prepared.request_id, prepared.prompt, prepared.params, prepared.requests, arrival)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """Ends a request and frees its pages; returns its last output, or nothing when there is no such request."""
        running = self._processor.running(request_id)
        for request in running:
            self.engine.finish(request, FinishReason.ABORT)
        return self._process(EngineOutput(finished=running))

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the outputs it brought."""
        outputs = self._process(self.engine.step())
        self.metrics.maybe_log()
        return outputs

    def _reset_prefix_cache(self) -> bool:
        self.engine.scheduler.reset_prefix_cache()
        return True

    def _process(self, result: EngineOutput) -> list[RequestOutput]:
        outputs = self._processor.process(
            result,
            time.monotonic(),
            lambda request, text: self.engine.finish(request, FinishReason.STOP, text),
        )
        for output in outputs:
            self.metrics.observe(output)
        return outputs


def input_processor(source: ModelSource, config: ResolvedConfig) -> InputProcessor:
    """What prepares requests for an engine of this model; needs no device."""
    return InputProcessor(config, source.config, source.load_tokenizer(config), source.generation_defaults)


class OpenedModel(NamedTuple):
    """What is settled about an engine before anything is loaded. mesh: as the caller gave it."""

    source: ModelSource
    config: ResolvedConfig
    platform: Platform
    devices: Sequence[Any]
    mesh: Mesh | None


def open_resolved(config: EngineConfig, devices: Sequence[Any] | None = None, mesh: Mesh | None = None) -> OpenedModel:
    """Opens the model of a config and settles what the config leaves open. Raises as EngineCore does."""
    config, devices = choose_devices(config, devices, mesh)
    platform = PLATFORMS[kernel_platform(devices[0])]
    source = open_model(config)
    return OpenedModel(source, config.resolved(source.config, platform), platform, devices, mesh)


def load_runner(
    source: ModelSource,
    config: ResolvedConfig,
    platform: Platform,
    devices: Sequence[Any],
    mesh: Mesh | None,
    *,
    peers: Peers = ALONE,
) -> ModelRunner:
    """Loads the weights and compiles, as every process of an engine does."""
    show = not config.disable_log_stats
    with ProgressBar("Loading weights", "B", show) as bar:
        stages = open_stages(source, config, platform, devices, mesh, progress=bar.update)
    with ProgressBar("Compiling steps", "step", show) as bar:
        return ModelRunner(stages, config, progress=bar.update, peers=peers)


class ProgressBar:
    """A bar over (done, total, what) calls; nothing when it is not to be shown."""

    def __init__(self, title: str, unit: str, show: bool):
        self._bar = tqdm(desc=title, unit=unit, unit_scale=unit == "B", disable=not show)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, done: int, total: int, what: str) -> None:
        self._bar.total = total
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update(done - self._bar.n)


def kernel_platform(device: Any) -> str:
    """The kernels a device runs; warns where there are none for it."""
    platform = platform_of(device)
    if platform == "gpu_xla":
        logger.warning(
            "no attention kernels for %s (compute capability %s): attention runs as plain XLA, slower than on a card "
            "with kernels",
            device.device_kind,
            device.compute_capability,
        )
    return platform
