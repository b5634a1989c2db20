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
from jaxengine.requests.params.options import RequestOptions, within_context
from jaxengine.requests.params.prepared import Prompt
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.scheduler.base.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class LLMEngine(VllmMethods):
    """Engine without a loop: `step` runs one step for all requests that were added. Only one thread may use it at a
    time.

    Args:
      model: a GGUF file, a Hugging Face folder or a hub id; None for the embedded model.
      devices, mesh, mesh_axes, options: see `LLM`.
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
        """Load the model and compile its steps. Raises ConfigError, ModelConfigError or ModelFileError."""
        config = EngineConfig.from_options(model=model, **options)
        refuse_idle_sleep(config.sleep_idle_seconds, "LLMEngine")
        self.core = EngineCore(config, devices=devices, mesh=mesh, mesh_axes=mesh_axes)
        # Outputs that `step` has not returned yet, because it raises the errors of the same steps first.
        self._outputs: list[AnyOutput] = []
        self._errors: list[RequestError] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, usage_context: Any = None) -> Self:
        """Make an engine from `EngineArgs` or an EngineConfig. Raises ConfigError, ModelConfigError or ModelFileError.

        usage_context: ignored; it is for vLLM's usage statistics, which are not collected here.
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
        params = within_context(params, self.core.inputs.config.max_model_len)
        prompt = self.core.inputs.make_ready(prompt)
        self.core.add(self.core.inputs.prepare(prompt, params, request_id=request_id, options=options))
        return request_id

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End one or several requests, which will have no further output. Unknown ids are ignored."""
        for each in [request_id] if isinstance(request_id, str) else request_id:
            self.core.abort(each)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work left, outputs to return, or errors to raise."""
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
        """Return the engine's counters, gauges and histograms, each with a name and its values."""
        return self.core.metrics.collect()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached prefixes, and return True. Running requests keep their pages.

        reset_running_requests: also recompute running requests from their first token, once no step is in flight. The
        steps that this needs are run here; the next `step` returns their outputs. Raises RequestError if
        reset_connector is true, because files of kv_offloading_path are not deleted.
        """
        done = self.core.utility(prefix_reset(reset_running_requests, reset_connector))
        if reset_running_requests:  # what is in flight lands first
            while self.core.engine.scheduler.paused and self.core.has_unfinished:
                self._outputs += self.core.step()
                self._errors += [error for _, error in self.core.pop_rejected()]
            self.core.rest()
        return done

    def shutdown(self) -> None:
        """Stop the engine; later calls of `add_request` and `step` raise EngineDeadError. Does nothing in a fork of its
        process.

        Device memory is freed once nothing refers to the engine.
        """
        self.core.shutdown()
