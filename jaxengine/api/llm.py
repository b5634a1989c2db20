"""Offline API: the class `LLM`, whose methods have vLLM's names and return what vLLM's return."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jaxengine.api.adapters import load_each
from jaxengine.api.core import EngineCore, engine_lock
from jaxengine.api.not_built import VllmMethods
from jaxengine.api.owner import pickle_error
from jaxengine.api.pooling_methods import PoolingMethods
from jaxengine.api.weights import WeightMethods
from jaxengine.config.engine_args import engine_options
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.execution.idle_sleep import refuse_idle_sleep
from jaxengine.requests.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, candidates
from jaxengine.requests.completion_logprobs import CompletionLogprobs, KnownCompletions
from jaxengine.requests.output.outputs import RequestOutput
from jaxengine.requests.output.speed import count_tokens, speed_text
from jaxengine.requests.params.lora import LoRARequest, one_for_each
from jaxengine.requests.params.options import RequestOptions, as_batch, options_for, params_for
from jaxengine.requests.params.prepared import Prompt
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.requests.tokenization import tokenized
from jaxengine.scheduler.base.errors import RequestError

if TYPE_CHECKING:
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

ProgressFactory = Callable[..., Any]

# Seconds between two checks of whether the engine, paused while requests wait, has been resumed.
_PAUSED_SECONDS = 0.005
_WAITS_BEFORE_WARNING = 2000  # ten seconds

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Call:
    """State of one running call: its finished outputs by request id, and the first error of one of its requests."""

    outputs: dict[str, Any] = field(default_factory=dict)
    error: RequestError | None = None


class LLM(PoolingMethods, WeightMethods, VllmMethods):
    """A model in this process that answers batches of prompts.

    Several threads may call it: their requests are batched together, and each step is run by one of the waiting
    threads. A step that fails, or is interrupted by a second Ctrl-C, ends all running calls, and every later one, with
    EngineDeadError, which is also raised in a fork of the engine's process.

    Args:
      model: a GGUF file, a Hugging Face folder or a hub id; None for the embedded SmolLM2-135M-Instruct.
      devices: jax devices to use, as many of the first ones as the parallel sizes need; None for all.
      mesh: a jax.sharding.Mesh in place of parallel sizes, such as that of a training script.
      mesh_axes: what each axis of the mesh is used for, for instance {"fsdp": "data", "tp": "tensor"}: "data" for
        replicas, "tensor" for tensor parallelism, or "attn" and "model" for its two parts. Several axes may have the
        same use. An axis that is not listed is used for what its own name says; an axis of size 1 needs no use.
      options: see `jaxengine.EngineConfig`.

    Raises:
      ConfigError: an unknown or unsupported option.
      ModelConfigError, ModelFileError: the model is not supported, or a file of it is missing or invalid.
      ClusterError: there are several nodes, and the others cannot be reached or one is lost.
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
        refuse_idle_sleep(config.sleep_idle_seconds, "LLM")
        self._core = EngineCore(config, devices=devices, mesh=mesh, mesh_axes=mesh_axes)
        # Held by every access to the core.
        self._lock = engine_lock(self._core)
        self._calls: dict[str, _Call] = {}

    @property
    def core(self) -> EngineCore:
        """The engine. Raises EngineDeadError in a fork of its process."""
        self._core.check_process()
        return self._core

    def __reduce__(self) -> NoReturn:
        raise pickle_error("LLM")

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Make an LLM from `EngineArgs` or an EngineConfig. Raises the constructor's errors."""
        return cls(**engine_options(engine_args))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Stop the engine, unless this is a fork of its process: running and later calls end with EngineDeadError."""
        if self._core.owner.is_here:
            with self._lock:
                self._core.shutdown()

    def get_expert_load(self) -> np.ndarray | None:
        """Return the number of tokens that each expert was given so far, u32[expert layers, E], modulo 2**32; None for
        a model without experts.

        Raises EngineDeadError.
        """
        with self._lock:
            self.core.check()
            experts = self.core.runner.extensions.get("experts")
            return None if experts is None else experts.load()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressFactory = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        client: str | Sequence[str] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; results come in the order of the prompts.

        Args:
          prompts: a string, a list of token ids, {"prompt": ...}, {"prompt_token_ids": [...]}, or a list of them.
          sampling_params: one for all or one per prompt; None for the model's defaults. Only final outputs are
            returned, regardless of output_kind.
          use_tqdm: whether to show a progress bar, or a function that makes one.
          priority: one for all or one per prompt; smaller runs first. Needs scheduling_policy="priority".
          client: name of the client, one for all or one per prompt. Needs scheduling_policy="fair", which serves
            waiting clients in equal shares.
          lora_request: the adapter to use, one for all or one per prompt; None for the model alone. Needs enable_lora.
          tokenization_kwargs: how prompts become tokens, see jaxengine.requests.tokenization.tokenized.

        Raises:
          RequestError: a prompt or parameter is invalid, or a grammar cannot be compiled. The first such error is
            raised, and all requests of this call are aborted.
          ModelFileError: an adapter cannot be read.
          EngineDeadError: the engine has failed or was shut down.
        """
        batch = as_batch(prompts)
        if tokenization_kwargs is not None:
            batch = [tokenized(self.core.inputs, prompt, tokenization_kwargs) for prompt in batch]
        params = self._params_for(len(batch), sampling_params)
        if lora_request is None:  # a plain request enters no file of adapters
            return self._answer(batch, params, options_for(len(batch), priority, client, [None] * len(batch)), use_tqdm)
        adapters = one_for_each(len(batch), lora_request)
        options = options_for(len(batch), priority, client, load_each(self.core, self._lock, adapters))
        outputs = self._answer(batch, params, options, use_tqdm)
        for output, adapter in zip(outputs, adapters, strict=True):
            output.lora_request = adapter
        return outputs

    def get_logprobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Sequence[Sequence[int]],
        *,
        decode: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool | ProgressFactory = False,
    ) -> CompletionLogprobs:
        """Return the raw log-probability of each token of given completions, one completion for each prompt.

        The same compiled programs compute them as in `generate`. They are those of temperature 1, without penalties,
        truncation or masks.

        prompts, lora_request, use_tqdm: as for `generate`; no images. completions: token ids, one sequence for each
        prompt; an empty sequence has no log-probabilities. decode: feed the tokens one by one, as decoding does,
        instead of all at once like a prompt; needs enable_trace_replay. Raises RequestError, also if logprobs_mode asks
        for logits, ModelFileError for an adapter, and EngineDeadError.
        """
        batch = as_batch(prompts)
        known = KnownCompletions(self.core.inputs, batch, completions, decode=decode)
        if lora_request is not None:
            loras = one_for_each(len(batch), lora_request)
            lora_request = [loras[index] for index in known.rows]
        outputs = self.generate(known.prompts, known.params, use_tqdm, lora_request) if known.rows else []
        return known.result(outputs)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | ProgressFactory = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Continue each prompt with the sequences that a beam search finds, best first; results come in the order of
        the prompts.

        Each token takes one call of `generate` with all beams of all prompts. lora_request, use_tqdm: as for
        `generate`, with a progress bar for each token. Raises RequestError for invalid prompts or params, images, and a
        beam that is wider than the engine's max_logprobs allows; raises ModelFileError and EngineDeadError.
        """
        inputs = self.core.inputs
        params.verify(inputs.config.max_logprobs, inputs.config.logprobs_mode)
        one = params.token_params()
        with self._lock:
            first = [inputs.prepare(prompt, one).requests[0] for prompt in as_batch(prompts)]
        if any(request.media is not None for request in first):
            raise RequestError("beam search takes prompts of text or tokens, not images", param="multi_modal_data")
        prompt_ids = [request.prompt_token_ids.tolist() for request in first]
        longest, eos = inputs.config.max_model_len, inputs.eos_token_ids()
        searches = [BeamSearch(token_ids, params, eos, longest) for token_ids in prompt_ids]
        adapters = one_for_each(len(searches), lora_request)
        while grown := [(ids, own) for search, own in zip(searches, adapters, strict=True) for ids in search.prompts]:
            token_ids, loras = zip(*grown, strict=True)
            answers = iter(self.generate(token_ids, one, use_tqdm, loras))
            for search in searches:
                if search.prompts:
                    search.advance([candidates(next(answers)) for _ in search.prompts])
        return [search.result(inputs.tokenizer) for search in searches]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | ProgressFactory = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, formatted by a chat template; results come in their order.

        Messages may contain images and videos, see jaxengine.media.parts.collect_media. Other arguments are those of
        `generate` and of transformers' apply_chat_template.

        Args:
          chat_template: Jinja source or the name of one of the model's templates; None for the engine's option, or
            else the model's.
          chat_template_content_format: "string", "openai" or "auto"; None for the engine's option.
          chat_template_kwargs: variables of the template.
          mm_processor_kwargs: options of the model's media processor.

        Raises RequestError, also if there are no messages or the template refuses them; ModelFileError for an adapter;
        EngineDeadError.
        """
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        if messages is None or is_list and not messages:
            raise RequestError("messages is empty; at least one is needed", param="messages", value=messages)
        # What is no list at all is refused as a conversation.
        conversations: Any = messages if is_list and not isinstance(messages[0], Mapping) else [messages]
        # Without the lock, so that other threads do not wait for this call's images.
        read = [self.core.inputs.media_reader.read(conversation) for conversation in conversations]
        with self._lock:
            prompts = [
                self.core.inputs.chat_prompt(
                    conversation,
                    media,
                    mm_processor_kwargs=mm_processor_kwargs,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    chat_template=chat_template,
                    chat_template_kwargs=chat_template_kwargs,
                    content_format=chat_template_content_format,
                )
                for conversation, media in read
            ]
        options: Any = {"priority": priority, "tokenization_kwargs": tokenization_kwargs}
        return self.generate(prompts, sampling_params, use_tqdm, lora_request, **options)

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer as a transformers object. Raises RequestError if the engine was started without one."""
        return self._core.inputs.require_tokenizer().hf

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters: vLLM's, overridden by the model's as generation_config specifies."""
        return self._core.inputs.default_sampling_params()

    def _params_for(self, count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        """Return the result of `params_for` for the default parameters, if `params` is None, or else `params`. Raises
        its errors.
        """
        given = self.get_default_sampling_params() if params is None else params
        return params_for(count, given, self.core.inputs.config.max_model_len)

    def _answer(
        self,
        batch: Sequence[Prompt],
        params: Sequence[SamplingParams] | Sequence[PoolingParams],
        options: Sequence[RequestOptions],
        use_tqdm: bool | ProgressFactory,
    ) -> list[Any]:
        """Run the requests of a batch of prompts and return their outputs in order.

        params, options: one for each prompt. Raises RequestError for the first request that cannot be served, or
        EngineDeadError; on any error, all requests of the batch are aborted first.
        """
        started: dict[str, _Call] = {}
        call = _Call()
        try:
            batch = [self.core.inputs.make_ready(prompt) for prompt in batch]
            with self._lock:
                self.core.check()
                prepared = [
                    self.core.inputs.prepare(prompt, each, options=own)
                    for prompt, each, own in zip(batch, params, options, strict=True)
                ]
                for request in prepared:
                    self.core.add(request)
                    started[request.request_id] = self._calls[request.request_id] = call
            self._run(call, len(started), use_tqdm)
        except BaseException:
            self._abort(started)
            raise
        return [call.outputs[request_id] for request_id in started]

    def _run(self, call: _Call, num_requests: int, use_tqdm: bool | ProgressFactory) -> None:
        """Run steps, taking turns with other threads, until all `num_requests` outputs of a call have arrived, and show
        its progress. Wait while the engine is paused, with one warning in the log. Raises the RequestError of one of
        its requests, or EngineDeadError; the other requests are not aborted.
        """
        make = use_tqdm if callable(use_tqdm) else tqdm
        with make(total=num_requests, desc="Processed prompts", disable=not use_tqdm) as bar:
            shown, start, tokens, waits = 0, time.monotonic(), (0, 0), 0
            while shown < num_requests:
                with self._lock:
                    if call.error is None and len(call.outputs) == shown:
                        self._step()
                    if call.error is not None:
                        raise call.error
                    num_ended, is_idle = len(call.outputs), not self.core.has_unfinished
                    if use_tqdm:
                        tokens = count_tokens(islice(call.outputs.values(), shown, None), tokens)
                if num_ended > shown and use_tqdm:
                    bar.postfix = speed_text(*tokens, time.monotonic() - start)
                    bar.update(num_ended - shown)
                elif is_idle and num_ended == shown:  # the engine is paused
                    if (waits := waits + 1) == _WAITS_BEFORE_WARNING:
                        way = "sleeps: wake_up()" if self.is_sleeping() else "is paused: resume_generation()"
                        _log.warning("requests wait, because the engine %s lets them run", way)
                    time.sleep(_PAUSED_SECONDS)
                shown = num_ended

    def _step(self) -> None:
        """Run one step and pass its final outputs and rejected requests to the calls that they belong to. The caller
        holds the lock.
        """
        for output in self.core.step():
            if output.finished and (call := self._calls.pop(output.request_id, None)) is not None:
                call.outputs[output.request_id] = output
        for request_id, error in self.core.pop_rejected():
            if (call := self._calls.pop(request_id, None)) is not None:
                call.error = call.error or error

    def _abort(self, request_ids: Iterable[str]) -> None:
        """Abort the requests that have not ended, and forget them. If the engine is dead, only forget them."""
        with self._lock:
            for request_id in request_ids:
                if self._calls.pop(request_id, None) is not None and self.core.dead is None:
                    self.core.abort(request_id)
