"""Online API: requests are async streams, and one engine runs them all on a thread of its own."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, cast

import jax
from jax.sharding import Mesh

from jaxengine.api.adapters import load_adapter
from jaxengine.api.core import EngineCore
from jaxengine.api.engine_client import EngineDeadError
from jaxengine.api.not_built import VllmMethods
from jaxengine.api.output_stream import OutputStream
from jaxengine.api.owner import pickle_error
from jaxengine.api.weights import AsyncWeightMethods
from jaxengine.config.engine_args import engine_options
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.requests.completion_logprobs import CompletionLogprobs, KnownCompletions
from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.output.outputs import AnyOutput, RequestOutput
from jaxengine.requests.params.lora import LoRARequest
from jaxengine.requests.params.options import RequestOptions, within_context
from jaxengine.requests.params.prepared import Prompt
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.requests.pooling.outputs import PoolingOutput, PoolingRequestOutput, checked
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.requests.run_in_thread import make_ready
from jaxengine.requests.tokenization import tokenized
from jaxengine.scheduler.base.errors import RequestError

if TYPE_CHECKING:
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class _Reader:
    """Bridge that passes outputs from the engine's thread to a stream read on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stream: OutputStream):
        self._loop = loop
        self._stream = stream

    def put(self, item: AnyOutput | BaseException) -> None:
        """Pass an output, or the error that ends the stream, to the stream on the reader's event loop, from any thread;
        drop it if that event loop is closed.
        """
        try:
            self._loop.call_soon_threadsafe(self._stream.put, item)
        except RuntimeError:  # the reader's event loop is gone, and the reader with it
            logger.debug("an output came after its event loop was closed")


class AsyncLLM(AsyncWeightMethods, VllmMethods):
    """Engine that streams the outputs of many requests at once, for use from async code.

    The constructor loads the model and starts the thread that runs steps. It raises ConfigError, ModelConfigError or
    ModelFileError, and ClusterError if there are several nodes. In a fork, methods raise EngineDeadError.

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
        """Load the model and start the engine's thread. Raises the errors that the class lists."""
        config = EngineConfig.from_options(model=model, **options)
        self._core = EngineCore(config, devices=devices, mesh=mesh, mesh_axes=mesh_axes)
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._command_lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._dead: EngineDeadError | None = None
        self._readers: dict[str, _Reader] = {}
        self._num_requests = 0
        self._thread = threading.Thread(target=self._loop, name="jaxengine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineConfig,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: None = None,
    ) -> Self:
        """Make an engine from `EngineArgs` or an EngineConfig.

        usage_context: ignored; in vLLM it labels usage statistics, which jaxengine does not collect. Raises ConfigError
        if start_engine_loop or stat_loggers is not the default, and the constructor's errors.
        """
        for name, value, only in (("start_engine_loop", start_engine_loop, True), ("stat_loggers", stat_loggers, None)):
            if value is not only:
                raise ConfigError(name, value, f"{only}; /metrics and get_metrics() have the engine's numbers")
        return cls(**engine_options(engine_args))

    @property
    def core(self) -> EngineCore:
        """The engine. Raises EngineDeadError in a fork of its process."""
        self._core.check_process()
        return self._core

    def __reduce__(self) -> NoReturn:
        raise pickle_error("AsyncLLM")

    @property
    def errored(self) -> bool:
        """Whether the engine has failed or was shut down, or this process is a fork of the engine's."""
        return self._dead is not None or not self._core.owner.is_here

    @property
    def inputs(self) -> InputProcessor:
        """The engine's InputProcessor: limits, tokenizer, sampling defaults. Raises EngineDeadError in a fork."""
        return self.core.inputs

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        client: str | None = None,
        session_id: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs as `sampling_params.output_kind` specifies, until the request is finished.

        The request starts when the iteration starts, and the iteration raises its errors. Leaving the iteration early,
        or cancelling the task that runs it, aborts the request and frees its pages.

        Args:
          sampling_params: None for the model's defaults. They are copied now, so that later changes have no effect.
          request_id: None for a generated one.
          priority, timeout, client, session_id: see `RequestOptions`.
          lora_request: the adapter to use. It is loaded first if necessary.
          tokenization_kwargs: see jaxengine.requests.tokenization.tokenized, whose errors the call itself raises.

        Raises:
          RequestError: the request cannot be served; other requests are not affected.
          EngineDeadError: the engine has failed or was shut down.
        """
        if tokenization_kwargs is not None:
            prompt = tokenized(self.inputs, prompt, tokenization_kwargs)
        # A copy: the caller may change the fields for another request before the iteration begins.
        params = within_context(sampling_params, self.inputs.config.max_model_len)
        name = None if lora_request is None else lora_request.lora_name
        options = RequestOptions(priority, timeout, client, lora=name, session=session_id)
        outputs = self.stream(prompt, params, request_id, options)
        return outputs if lora_request is None else self._with_adapter(lora_request, outputs)

    async def get_logprobs(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[int]],
        *,
        decode: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> CompletionLogprobs:
        """Return the raw log-probability of each token of given completions, one completion for each prompt.

        The same compiled programs compute them as in `generate`. They are those of temperature 1, without penalties,
        truncation or masks.

        prompts: as for `generate`, without images. completions: token ids, one sequence for each prompt; an empty
        sequence has no log-probabilities. decode: feed the tokens one by one, as decoding does, instead of all at once
        like a prompt; needs enable_trace_replay. lora_request: one adapter for all prompts. Raises RequestError at once
        for an argument that is not allowed and a logprobs_mode of logits, otherwise the first error of a request
        (RequestError or EngineDeadError); the other requests still run to their ends.
        """
        known = KnownCompletions(self.inputs, prompts, completions, decode=decode)
        requests = zip(known.prompts, known.params, strict=True)
        outputs = await asyncio.gather(*(self._last(prompt, params, lora_request) for prompt, params in requests))
        return known.result(outputs)

    async def _last(self, prompt: Prompt, params: SamplingParams, lora_request: LoRARequest | None) -> RequestOutput:
        """Run a request to its end and return its last output. Raises its RequestError, or EngineDeadError."""
        output = None
        async for each in self.generate(prompt, params, lora_request=lora_request):
            output = each
        assert output is not None
        return output

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter unless it is loaded already, and return True. Raises RequestError, with nothing changed, or
        EngineDeadError.
        """
        name, path, number = lora_request.lora_name, lora_request.path, lora_request.lora_int_id
        await load_adapter(self.utility, name, path, number, in_place=lora_request.load_inplace)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload the adapter with this lora_int_id. Returns whether there was one. Raises EngineDeadError."""
        for each in await self.utility("adapters"):
            if each["number"] == lora_id:
                await self.utility("unload_adapter", each["name"])
                return True
        return False

    async def list_loras(self) -> set[int]:
        """Return the lora_int_ids of the loaded adapters. Raises EngineDeadError."""
        return {each["number"] for each in await self.utility("adapters")}

    async def reset_mm_cache(self) -> None:
        """Drop cached images and videos, preprocessed and encoded, except running requests'. Raises EngineDeadError."""
        await self.utility("reset_mm_cache")

    async def start_profile(self) -> None:
        """Start profiling this process with jax.profiler. Raises RequestError if the engine has no profiler_config, or
        a profile is already running, and EngineDeadError.
        """
        await self.utility("start_profile")

    async def stop_profile(self) -> None:
        """End the profile and write it into the folder of profiler_config. Raises RequestError if no profile is
        running or it cannot be written, and EngineDeadError.
        """
        await self.utility("stop_profile")

    async def _with_adapter(self, request: LoRARequest, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Load the adapter, yield the outputs, with it as `lora_request`, and close `outputs`. Raises both's errors."""
        await self.add_lora(request)
        async with contextlib.aclosing(cast(AsyncGenerator[Any], outputs)):
            async for output in outputs:
                if isinstance(output, RequestOutput):
                    output.lora_request = request
                yield output

    def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        client: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """Yield the only output of a request to a pooling model: one vector, or one for each token if the task has it.

        pooling_params: None for the model's defaults; they are copied now. request_id: None for a generated one.
        priority, timeout, client: see `RequestOptions`. lora_request: see `generate`. The request starts when the
        iteration starts; leaving it early aborts the request. It raises RequestError, also for a result that is not
        finite, and EngineDeadError.
        """
        params, name = copy.copy(pooling_params), None if lora_request is None else lora_request.lora_name
        outputs = checked(self.pool(prompt, params, request_id, RequestOptions(priority, timeout, client, lora=name)))
        return outputs if lora_request is None else self._with_adapter(lora_request, outputs)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs as `sampling_params.output_kind` specifies, until the request is finished. Implements
        `EngineClient.stream`.

        sampling_params: None for the model's defaults. request_id: None for a generated one. options: None for the
        defaults. Leaving the iteration early aborts the request. The iteration raises RequestError and EngineDeadError.
        """
        params = self.core.inputs.default_sampling_params() if sampling_params is None else sampling_params
        return self._outputs(prompt, params, request_id, options)

    def pool(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """Yield the only output of a request to a pooling model, for callers that already have RequestOptions.
        Implements `EngineClient.pool`.

        pooling_params: None for the model's defaults. request_id: None for a generated one. options: None for the
        defaults. Leaving the iteration early aborts the request. The iteration raises RequestError and EngineDeadError.
        """
        params = PoolingParams() if pooling_params is None else pooling_params
        return self._outputs(prompt, params, request_id, options)

    async def _outputs(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        request_id: str | None,
        options: RequestOptions | None,
    ) -> AsyncIterator[Any]:
        """Submit a request to the engine's thread and yield its outputs; abort it if the caller stops reading.

        request_id: None for a generated one. options: None for the defaults. DELTA outputs that the reader has not
        fetched yet are merged into one. The iteration raises RequestError and EngineDeadError.
        """
        if request_id is None:
            self._num_requests += 1
            request_id = f"async-{self._num_requests}"
        options = options or RequestOptions()
        aggregate = isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
        stream = OutputStream(aggregate)
        reader = _Reader(asyncio.get_running_loop(), stream)
        if not isinstance(params, PoolingParams):  # a pooling model may prepend a prompt to the text, in `prepare`
            prompt = await make_ready(self.core.inputs, prompt)
        self._run_command(lambda: self._start(reader, prompt, params, request_id, options))
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                with contextlib.suppress(EngineDeadError):
                    self._run_command(lambda: self._stop(reader, request_id))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Tell the engine to end one or several requests; their streams then yield a last output with finish_reason
        "abort". Returns before the engine has ended them. Ignores unknown ids. Raises EngineDeadError.
        """
        for each in [request_id] if isinstance(request_id, str) else [*request_id]:
            self._run_command(partial(self._abort, each))

    async def check_health(self) -> None:
        """Raise EngineDeadError once the engine has failed or was shut down, and in a fork of its process."""
        self._core.check_process()
        if self._dead is not None:
            raise self._dead

    async def utility(self, name: str, *arguments: Any) -> Any:
        """Call a function of `EngineCore.utilities` between two steps and return its result, a plain JSON value. Raises
        RequestError for an unknown name, the function's own errors, and EngineDeadError.
        """
        return await self.between_steps(lambda: self.core.utility(name, *arguments))

    async def between_steps(self, function: Callable[[], _T]) -> _T:
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def settle(method: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                method(value)

        def call() -> None:
            try:
                if self._dead is not None:
                    raise self._dead
                outcome = future.set_result, function()
            except Exception as error:
                outcome = future.set_exception, error
            with contextlib.suppress(RuntimeError):  # the caller's event loop is gone
                loop.call_soon_threadsafe(settle, *outcome)

        self._run_command(call)
        return await future

    def text_spans(self) -> list[tuple[float, float, int]]:
        """Return the latest periods in which this process turned tokens into text, in order, as (start, end, number of
        outputs), in seconds of time.monotonic. Raises EngineDeadError in a fork.
        """
        return self.core.text_spans()

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer as a transformers object. Raises RequestError if the engine was started without one."""
        return self._core.inputs.require_tokenizer().hf

    def get_metrics(self):
        """Return the engine's metrics: counters, gauges and histograms. Raises EngineDeadError in a fork."""
        return self.core.metrics.collect()

    def shutdown(self, timeout: float | None = 10.0) -> None:
        """Stop the engine; open streams end with EngineDeadError. Does nothing in a fork of its process.

        timeout: seconds to wait for the engine's thread to end; None for no limit. The engine is shut down in either
        case.
        """
        if not self._core.owner.is_here:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(timeout)
        self.core.shutdown()

    def _run_command(self, command: Callable[[], None]) -> None:
        """Queue `command` for the engine's thread, which runs it before its next step; return without waiting for it.

        Raises EngineDeadError once the engine has failed or was shut down, and in a fork.
        """
        self._core.check_process()
        with self._command_lock:
            if self._dead is not None:
                raise self._dead
            self._commands.append(command)
        self._wake.set()

    def _start(
        self,
        reader: _Reader,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        request_id: str,
        options: RequestOptions,
    ) -> None:
        """Prepare and queue a request, on the engine's thread, and register its reader under the request's id. Any
        error of preparing it, RequestError and EngineDeadError of queueing it, and the error of an engine that has died
        go to the reader, which is then not registered; other errors of queueing are raised.
        """
        if self._dead is not None:
            reader.put(self._dead)
            return
        try:
            prepared = self.core.inputs.prepare(prompt, params, request_id=request_id, options=options)
        except Exception as error:  # nothing has changed, so any failure concerns this request only
            reader.put(error)
            return
        try:
            self.core.add(prepared)
        except (RequestError, EngineDeadError) as error:
            reader.put(error)
        else:
            self._readers[request_id] = reader

    def _stop(self, reader: _Reader, request_id: str) -> None:
        """Abort the request of a reader that has stopped reading, unless it was refused because its id was in use."""
        if self._readers.get(request_id) is reader:
            del self._readers[request_id]
            self.core.abort(request_id)

    def _abort(self, request_id: str) -> None:
        """End a request on the engine's thread, and pass its last outputs to its reader."""
        for output in self.core.abort(request_id):
            self._deliver(output)

    @jax.transfer_guard("allow")
    def _loop(self) -> None:
        """Run commands and steps until shutdown or an error, which is logged, on the engine's thread. Pass outputs and
        errors of refused requests to their readers. At the end, end all streams with EngineDeadError.
        """
        error = EngineDeadError("the engine was shut down")
        try:
            while not self._closing:
                while self._commands:
                    self._commands.popleft()()
                if self.core.has_unfinished:
                    for output in self.core.step():
                        self._deliver(output)
                    for request_id, refusal in self.core.pop_rejected():
                        if (reader := self._readers.pop(request_id, None)) is not None:
                            reader.put(refusal)
                else:
                    self._wake.wait(min(self.core.rest(), threading.TIMEOUT_MAX))
                    self._wake.clear()
        except EngineDeadError as failure:
            logger.exception("the engine's loop failed")
            error = failure
        except Exception as failure:
            logger.exception("the engine's loop failed")
            error = EngineDeadError(f"the engine has failed: {failure}")
            error.__cause__ = failure
        finally:
            self._end(error)

    def _deliver(self, output: AnyOutput) -> None:
        """Pass an output to its request's reader, if there is one; remove the reader of a finished request."""
        reader = self._readers.get(output.request_id)
        if reader is not None:
            reader.put(output)
            if output.finished:
                del self._readers[output.request_id]

    def _end(self, error: EngineDeadError) -> None:
        """Set `_dead` to `error`, run queued commands, which raise it to their callers, and end all streams with it."""
        with self._command_lock:
            self._dead = error
        while self._commands:
            self._commands.popleft()()
        for reader in self._readers.values():
            reader.put(error)
        self._readers.clear()
