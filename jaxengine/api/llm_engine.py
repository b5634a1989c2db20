"""vLLM's LLMEngine: the caller adds requests and runs the steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

from jax.sharding import Mesh

from jaxengine.api.adapters import load_first
from jaxengine.api.core import EngineCore, engine_lock
from jaxengine.api.not_built import VllmMethods
from jaxengine.api.weights import WeightMethods
from jaxengine.config.engine_args import engine_options
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.execution.idle_sleep import refuse_idle_sleep
from jaxengine.requests.output.outputs import AnyOutput, RequestOutput
from jaxengine.requests.params.lora import LoRARequest
from jaxengine.requests.params.options import RequestOptions, within_context
from jaxengine.requests.params.prepared import Prompt
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.requests.tokenization import tokenized
from jaxengine.scheduler.base.errors import RequestError

if TYPE_CHECKING:
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast


class LLMEngine(WeightMethods, VllmMethods):
    """Engine without a loop: `step` runs one step for all requests that were added. Only one thread may run steps.

    Ctrl-C is raised once a running call has done its work, and the engine goes on; a second one interrupts the call at
    once, and ends every later one with EngineDeadError.

    Args:
      model: a GGUF file, a Hugging Face folder or a hub id; None for the embedded model.
      devices, mesh, mesh_axes, options: see `LLM`.

    The constructor raises ConfigError, ModelConfigError or ModelFileError, and ClusterError if there are several nodes.
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
        """Load the model and compile its steps. Raises the errors that the class lists."""
        config = EngineConfig.from_options(model=model, **options)
        refuse_idle_sleep(config.sleep_idle_seconds, "LLMEngine")
        self._core = EngineCore(config, devices=devices, mesh=mesh, mesh_axes=mesh_axes)
        # Outputs that `step` has not returned yet, because it raises the errors of the same steps first.
        self._outputs: list[AnyOutput] = []
        self._errors: list[RequestError] = []
        self._adapters: dict[str, LoRARequest] = {}  # of the requests that have one, by request id
        # Held by every access to the core that changes it.
        self._lock = engine_lock(self._core)

    @property
    def core(self) -> EngineCore:
        return self._core

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, usage_context: Any = None) -> Self:
        """Make an engine from `EngineArgs` or an EngineConfig. Raises the constructor's errors.

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
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id. Its outputs come from `step`, as `params.output_kind` specifies.

        Args:
          request_id: one that no unfinished request has.
          prompt, params: as for `LLM.generate`, or, for a pooling model, for `LLM.encode`.
          arrival_time: seconds of time.time; None for now.
          lora_request: the adapter to use; it is loaded unless it already is.
          tokenization_kwargs: see jaxengine.requests.tokenization.tokenized.
          priority: smaller runs first; see `RequestOptions`.

        Raises:
          RequestError: the request cannot be served and is not queued; its adapter may have been loaded.
          ModelFileError: the adapter cannot be read.
          EngineDeadError: the engine has failed or was shut down.
        """
        self.core.check()
        if tokenization_kwargs is not None:
            prompt = tokenized(self.core.inputs, prompt, tokenization_kwargs)
        name = load_first(self.core, self._lock, lora_request)
        options = RequestOptions(priority, lora=name)
        if arrival_time is not None:
            options = replace(options, arrival=options.arrival - (time.time() - arrival_time))
        params = within_context(params, self.core.inputs.config.max_model_len)
        prompt = self.core.inputs.make_ready(prompt)
        with self._lock:
            self.core.add(self.core.inputs.prepare(prompt, params, request_id=request_id, options=options))
            if lora_request is not None:
                self._adapters[request_id] = lora_request
        return request_id

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End one or several requests, which will have no further output. Unknown ids are ignored."""
        with self._lock:
            for each in [request_ids] if isinstance(request_ids, str) else request_ids:
                self.core.abort(each)
                self._adapters.pop(each, None)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has work to do, outputs to return, or errors to raise."""
        return self.core.has_unfinished or bool(self._outputs or self._errors)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that wait or run, `n` sequences of a prompt counted as `n`."""
        return self.core.engine.scheduler.num_unfinished

    def step(self) -> list[AnyOutput]:
        """Run one step and return its outputs.

        Raises:
          RequestError: a request turned out to be invalid, such as one whose grammar cannot be compiled. It has ended
            and others go on. The next call raises the next such error or returns the outputs of this step; it runs a
            step only if there are neither.
          EngineDeadError: the engine has failed or was shut down.
        """
        with self._lock:
            if not self._outputs and not self._errors:
                self._step()
        if self._errors:
            raise self._errors.pop(0)
        outputs, self._outputs = self._outputs, []
        return outputs

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer as a transformers object. Raises RequestError if the engine was started without one."""
        return self.core.inputs.require_tokenizer().hf

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter unless it is loaded already, and return True. Raises RequestError or ModelFileError, with
        nothing changed.
        """
        load_first(self.core, self._lock, lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Unload the adapter with this lora_int_id. Returns whether there was one."""
        with self._lock:
            for each in self.core.utility("adapters"):
                if each["number"] == lora_id:
                    self.core.utility("unload_adapter", each["name"])
                    return True
        return False

    def list_loras(self) -> set[int]:
        """Return the lora_int_ids of the loaded adapters."""
        return {each["number"] for each in self.core.utility("adapters")}

    def _step(self) -> None:
        """Run one step for a method that needs it; the next calls of `step` return its outputs and raise its errors."""
        for output in self.core.step():
            find = self._adapters.pop if output.finished else self._adapters.get
            adapter = find(output.request_id, None)
            if isinstance(output, RequestOutput):
                output.lora_request = adapter
            self._outputs.append(output)
        for request_id, error in self.core.pop_rejected():
            self._adapters.pop(request_id, None)
            self._errors.append(error)

    def shutdown(self) -> None:
        """Stop the engine; later calls of `add_request` and `step` raise EngineDeadError. Does nothing in a fork of its
        process.

        Device memory is freed once nothing refers to the engine.
        """
        if self._core.owner.is_here:
            with self._lock:
                self._core.shutdown()
