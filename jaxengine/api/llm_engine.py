"""vLLM's LLMEngine: the caller adds requests and runs the steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

from jax.sharding import Mesh

from jaxengine.api.adapters import load_first
from jaxengine.api.core import EngineCore
from jaxengine.api.engine_client import prefix_reset
from jaxengine.api.not_built import VllmMethods
from jaxengine.config.engine_args import engine_options
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.execution.idle_sleep import refuse_idle_sleep
from jaxengine.engine.stats.metric_types import Histogram, Metric
from jaxengine.requests.output.outputs import AnyOutput
from jaxengine.requests.params.lora import LoRARequest
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.prepared import Prompt
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.scheduler.base.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class LLMEngine(VllmMethods):
    """Engine without a loop: `step` runs one step for all requests that were added. For one thread at a time.

    Args:
      model, devices, mesh, mesh_axes, options: as for `LLM`.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        devices: Sequence[Any] | None = None,
        mesh: Mesh | None = None,
        mesh_axes: Mapping[str, str] | None = None,
        **options: Any,
    ):
        config = EngineConfig.from_options(model=model, **options)
        refuse_idle_sleep(config.sleep_idle_seconds, "LLMEngine")
        self.core = EngineCore(config, devices=devices, mesh=mesh, mesh_axes=mesh_axes)
        # Of steps whose requests' errors `step` still has to raise.
        self._outputs: list[AnyOutput] = []
        self._errors: list[RequestError] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, usage_context: Any = None) -> Self:
        """Make an engine from `EngineArgs` or an EngineConfig. usage_context: for vLLM's usage statistics, which are
        not collected here.

        Raises the same errors as `LLM`.
        """
        return cls(**engine_options(engine_args))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id. Its outputs come from `step`, as `params.output_kind` specifies.

        Args:
          arrival_time: seconds of time.time; None for now.
          lora_request: the adapter to use; it is loaded unless it already is.

        Raises:
          RequestError: the request cannot be served; nothing has changed.
          ModelFileError: the adapter cannot be read.
          EngineDeadError: the engine has failed or was shut down.
        """
        self.core.check()
        name = load_first(self.core, threading.Lock(), lora_request)
        options = RequestOptions(priority, lora=name)
        if arrival_time is not None:
            options = replace(options, arrival=options.arrival - (time.time() - arrival_time))
        prompt = self.core.inputs.make_ready(prompt)
        self.core.add(self.core.inputs.prepare(prompt, params, request_id=request_id, options=options))
        return request_id

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End one or several requests, which have no further output; unknown ids are ignored."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            self.core.abort(each)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work left."""
        return self.core.has_unfinished or bool(self._outputs or self._errors)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that wait or run, `n` sequences of a prompt counted as `n`."""
        return self.core.engine.scheduler.num_unfinished

    def step(self) -> list[AnyOutput]:
        """Run one step and return its outputs.

        Raises:
          RequestError: a request turned out to be invalid, such as one whose grammar cannot be compiled. It has ended
            and others go on. The next call runs no step: it raises the next such error or returns the outputs of this
            step.
          EngineDeadError: the engine has failed or was shut down.
        """
        if not self._outputs and not self._errors:
            self._outputs = self.core.step()
            self._errors = [error for _, error in self.core.pop_rejected()]
        if self._errors:
            raise self._errors.pop(0)
        outputs, self._outputs = self._outputs, []
        return outputs

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer as a transformers object. Raises RequestError if the engine was started without one."""
        return self.core.inputs.require_tokenizer().hf

    def get_metrics(self) -> list[Metric | Histogram]:
        """Return counters, gauges and histograms, each with `name` and `value`."""
        return self.core.metrics.collect()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached prefixes; running requests keep their pages. Returns True.

        reset_running_requests: also compute running requests again from their first token, as soon as no step is in
        flight. Raises RequestError if reset_connector is true: files of kv_offloading_path stay.
        """
        done = self.core.utility(prefix_reset(reset_running_requests, reset_connector))
        while self.core.engine.scheduler.paused and self.core.has_unfinished:
            self._outputs += self.core.step()
            self._errors += [error for _, error in self.core.pop_rejected()]
        self.core.rest()
        return done

    def shutdown(self) -> None:
        """Stop the engine; later calls of `add_request` and `step` raise EngineDeadError. Does nothing in a fork of its
        process. Device memory is freed once nothing refers to the engine.
        """
        self.core.shutdown()
