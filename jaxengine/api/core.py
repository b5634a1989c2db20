"""A model ready to serve: prompts in, outputs out, one `step` at a time. What LLM and AsyncLLM both stand on.

`inputs` makes requests of what callers ask for; here they are queued, run and reported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from jaxengine.api.custom_models import has_custom_class
from jaxengine.api.engine_client import EngineDeadError
from jaxengine.cluster.host0 import Cluster
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.engine.engine import Engine
from jaxengine.engine.metrics import Metrics
from jaxengine.engine.output import EngineOutput
from jaxengine.engine.status import engine_status
from jaxengine.grammars.request_masks import RequestMasks
from jaxengine.requests.inputs import InputProcessor, input_processor, make_processor
from jaxengine.requests.outputs import RequestOutput
from jaxengine.requests.pooling_outputs import PoolingOutput, PoolingRequestOutput
from jaxengine.requests.prepared import PreparedRequest
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.open import load_runner, open_resolved
from jaxengine.runner.peers import ALONE
from models.quantization.table import weight_table
from scheduler.errors import RequestError
from scheduler.request import FinishReason, Request

logger = logging.getLogger(__name__)

AnyOutput = RequestOutput | PoolingRequestOutput[PoolingOutput]


class EngineCore:
    """Loads the model, compiles every step, and then serves. Not thread-safe.

    Attributes:
      config: nothing left open.
      inputs: prepares requests for this engine.
      model_path: file or folder of the model.
      dead: why no request is taken and no step made any more, once a step has failed or after `shutdown`.
    """

    def __init__(self, config: EngineConfig, *, devices: Sequence[Any] | None = None, mesh: Mesh | None = None):
        """devices: to take from, default all; or a mesh with axes data, attn and model that says how to use which.

        Raises ConfigError, ModelConfigError or ModelFileError, each saying what to change.
        """
        if config.nnodes > 1 and (devices is not None or mesh is not None):
            raise ConfigError("nnodes", config.nnodes, "1 beside devices or a mesh; it takes those of all processes")
        self.dead: EngineDeadError | None = None
        self._cluster = Cluster(config) if config.nnodes > 1 else None
        try:
            opened = open_resolved(config, devices, mesh)
            if has_custom_class(opened.source.config):
                opened = opened._replace(config=replace(opened.config, compile_cache_dir=""))
            self.config = opened.config
            self.model_path = opened.source.path
            self.inputs = input_processor(opened.source, self.config)
            self.runner = load_runner(*opened, peers=self._cluster or ALONE)
        except BaseException as error:
            if self._cluster is not None:
                self._cluster.shutdown(f"start-up failed: {error}")
            raise
        if not config.disable_log_stats:
            if table := weight_table(self.runner.weight_rows):
                logger.info("weights:\n%s", table)
            for row in self._adapter_forms():
                logger.info("adapters of %s: %s", row["modules"], row["forms"])
            logger.info("memory of a device:\n%s", self.runner.plan.table())
        self.engine = Engine(self.runner, _request_masks(self.inputs, self.runner))
        self._refused: list[tuple[str, RequestError]] = []
        self.metrics = Metrics(self.engine, log_stats=not config.disable_log_stats)
        self._processor = make_processor(self.inputs)

    def shutdown(self, reason: str | None = None) -> None:
        """Ends the engine and its other processes, if it has any; with a reason, as a failure."""
        self.dead = self.dead or EngineDeadError("the engine was shut down")
        self.engine.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown(reason)

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        """What an operator may call between two steps, by name; arguments and results are plain JSON values."""
        return {
            "reset_prefix_cache": self._reset_prefix_cache,
            "reset_mm_cache": self._reset_mm_cache,
            "mm_cache": self._mm_cache,
            "metrics": self.metrics.snapshot,
            "status": lambda: engine_status(self.engine, self.metrics),
            "trace": self._trace,
            "weights": lambda: self.runner.weight_rows,
            "adapter_forms": self._adapter_forms,
            "count_rejections": self._count_rejections,
            "load_adapter": lambda *load: self.engine.require_adapters().begin_load(*load),
            "adapter_is_loaded": lambda ticket: self.engine.require_adapters().is_loaded(ticket),
            "unload_adapter": self.engine.unload_adapter,
            "adapters": self._adapters,
        }

    def utility(self, name: str, *arguments: Any) -> Any:
        """Calls one of them. Raises RequestError for a name that is not there."""
        if name not in self.utilities:
            raise RequestError(f"there is no {name!r}; allowed: {', '.join(self.utilities)}", param="name", value=name)
        return self.utilities[name](*arguments)

    @property
    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished

    def check(self) -> None:
        """Raises EngineDeadError once a step has failed, or after `shutdown`."""
        if self.dead is not None:
            raise self.dead

    def add(self, prepared: PreparedRequest) -> None:
        """Queues a prepared request; raises RequestError, and nothing has changed then, or as `check`."""
        self.check()
        if prepared.request_id in self._processor:
            raise RequestError(
                f"request_id {prepared.request_id!r} is in use", param="request_id", value=prepared.request_id
            )
        self.queue(prepared.requests)
        self._processor.add(prepared)

    def queue(self, requests: Sequence[Request]) -> None:
        """Queues the requests of one caller's request without following them; all of them, or none and an error."""
        added = []
        try:
            for request in requests:
                self.engine.add_request(request)
                added.append(request)
        except Exception:
            for request in added:
                self.engine.finish(request, FinishReason.ABORT)
            raise
        self.engine.request_stats.n.observe(len(added))
        self.engine.media_stats.count(requests[0].media)

    def abort(self, request_id: str) -> list[AnyOutput]:
        """Ends a request and frees its pages; returns its last output, or nothing when there is no such request."""
        running = self._processor.running(request_id)
        for request in running:
            self.engine.finish(request, FinishReason.ABORT)
        return self._process(EngineOutput(finished=running))

    def step(self) -> list[AnyOutput]:
        """Runs one step; returns the outputs it brought. `take_refused` tells of requests that end without one."""
        return self._process(self.advance())

    def advance(self) -> EngineOutput:
        """Runs one step; returns its tokens, for who makes text of them elsewhere.

        What a failed step leaves behind nobody knows, device buffers among it: there is no step after it.
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

    def take_refused(self) -> list[tuple[str, RequestError]]:
        """Requests that `step` has found not to be servable since the last call, by id, and their callers' errors."""
        refused, self._refused = self._refused, []
        return refused

    def text_spans(self) -> list[tuple[float, float, int]]:
        """When text was made of tokens here: (start, end, outputs), seconds of time.monotonic, the last ones."""
        return list(self._processor.spans)

    def _reset_prefix_cache(self) -> bool:
        self.engine.scheduler.reset_prefix_cache()
        return True

    def _reset_mm_cache(self) -> bool:
        """Forgets pictures: those made ready, and embeddings that no running request needs."""
        if self.inputs.media is not None and self.inputs.media.cache is not None:
            self.inputs.media.cache.clear()
        self.engine.scheduler.reset_encoder_cache()
        return True

    def _mm_cache(self) -> dict[str, Any]:
        """Where pictures that were made ready are kept (EncoderOptions.mm_cache_placement), and bytes kept here.

        A server's engine process answers for its API processes too."""
        media = self.inputs.media
        size = media.cache.num_bytes if media is not None and media.cache is not None else 0
        return {**self.config.mm_cache_placement(0), "engine_bytes": size}

    def _adapters(self) -> list[dict[str, Any]]:
        """Those that requests may name."""
        store = self.engine.adapters
        return [
            {"name": each.adapter.name, "path": each.path, "number": each.number, "rank": each.rank}
            for each in ([] if store is None else store.adapters)
        ]

    def _adapter_forms(self) -> list[dict[str, str]]:
        """For people: the forms of products with adapters."""
        pools = self.runner.extensions.get("adapters")
        return [] if pools is None else pools.forms

    def _count_rejections(self, count: int) -> None:
        """Requests that were refused because too many waited, by a process in front of the engine."""
        self.engine.request_stats.num_rejections += count

    def _trace(self, seconds: float) -> dict[str, Any]:
        """The last `seconds` of the engine's timeline, for `jaxengine/server/observe/chrome_trace.py`."""
        return self.engine.timeline.last(seconds, list(self.engine.scheduler.requests))

    def _process(self, result: EngineOutput) -> list[AnyOutput]:
        for request, error in result.refused:
            request_id, siblings = self._processor.forget(request)
            for sibling in siblings:
                self.engine.finish(sibling, FinishReason.ABORT)
            if request_id is not None:
                self._refused.append((request_id, error))
        outputs = self._processor.process(result, time.monotonic(), self._stop)
        for request in result.finished:
            self.engine.count_end(request)
        return [*outputs]

    def _stop(self, request: Request, text: str, num_tokens: int) -> None:
        """A stop string was found."""
        self.engine.finish(request, FinishReason.STOP, text)
        self.engine.count_end(request, FinishReason.STOP, num_tokens)


def _request_masks(inputs: InputProcessor, runner: ModelRunner) -> RequestMasks | None:
    """None without a tokenizer, and where nothing is generated."""
    if inputs.tokenizer is None or "pooling" in runner.extensions:
        return None
    text, vocab_size = inputs.tokenizer.backend.to_str(), inputs.model_config.vocab_size
    # Tokens that must come are worth knowing where a step may have several of a request.
    drafts, ends = runner.config.speculative_config is not None, inputs.eos_token_ids()
    num_words = runner.extension("structured").num_words
    return RequestMasks(text, vocab_size, num_words, ends, inputs.tokenizer, looks_ahead=drafts)
