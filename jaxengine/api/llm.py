"""The offline API: `LLM(...)`, `generate`, `chat`. Same names and results as vLLM's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jaxengine.api.core import EngineCore
from jaxengine.api.turns import Turns
from jaxengine.config.engine_config import EngineConfig
from jaxengine.engine.metrics import Histogram, Metric
from jaxengine.requests.options import RequestOptions
from jaxengine.requests.outputs import RequestOutput
from jaxengine.requests.prepared import Prompt, is_token_ids
from jaxengine.requests.sampling_params import RequestOutputKind, SamplingParams
from scheduler.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ProgressFactory = Callable[..., Any]


@dataclass(eq=False)
class _Call:
    """What has come for one call of `generate`: outputs by request, and the first error of a request."""

    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    error: RequestError | None = None


def count_tokens(outputs: Iterable[RequestOutput], before: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Tokens of the prompts and of the answers, on top of those counted before."""
    prompt, generated = before
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        generated += sum(len(completion.token_ids) for completion in output.outputs)
    return prompt, generated


def speed_text(num_prompt_tokens: int, num_generated_tokens: int, seconds: float) -> str:
    """Tokens a second as vLLM's progress bar words them."""
    rates = num_prompt_tokens / max(seconds, 1e-6), num_generated_tokens / max(seconds, 1e-6)
    return f"est. speed input: {rates[0]:.2f} toks/s, output: {rates[1]:.2f} toks/s"


class LLM:
    """A model in this process, answering batches of prompts.

    Several threads may call it: their requests run together, each step made by one of the threads that wait for one.
    A step that fails ends all calls, and every later one, with EngineDeadError.

    Args:
      model: a GGUF file, a Hugging Face folder or a hub id; None for the embedded SmolLM2-135M-Instruct.
      devices: jax devices to take from, the first ones that the parallel sizes ask for; default all.
      mesh: a jax.sharding.Mesh with axes data, attn and model to run on, instead of parallel sizes.
      options: see `jaxengine.EngineConfig`. One that is unknown or not supported yet raises ConfigError.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        devices: Sequence[Any] | None = None,
        mesh: Mesh | None = None,
        **options: Any,
    ):
        self.core = EngineCore(EngineConfig.from_options(model=model, **options), devices=devices, mesh=mesh)
        # Whoever touches the core has the turn.
        self._turns = Turns()
        self._calls: dict[str, _Call] = {}

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Stops the engine; calls of other threads, and all later ones, end with EngineDeadError."""
        with self._turns:
            self.core.shutdown()

    def get_expert_load(self) -> np.ndarray | None:
        """u32[layers, E]: tokens that each expert was picked for so far, modulo 2**32; None without experts.

        Layers are those that have experts. Shows how evenly `enable_expert_parallel` loads the devices.
        """
        with self._turns:
            self.core.check()
            return self.core.runner.expert_load()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | ProgressFactory = True,
        priority: int | Sequence[int] | None = None,
        client: str | Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt; results come in the order of the prompts.

        Args:
          prompts: a string, a list of token ids, {"prompt": ...}, {"prompt_token_ids": [...]}, or a list of them.
          sampling_params: one for all or one each; None for the model's defaults.
          use_tqdm: a progress bar, or what makes one.
          priority: one for all or one each; smaller runs first. Needs scheduling_policy="priority".
          client: whose they are, a name for all or one each. Needs scheduling_policy="fair", which serves
            clients that wait in equal shares.

        Raises:
          RequestError: for the first bad prompt or parameter; no request has been started then. For a grammar that
            cannot be compiled; all requests of this call are aborted then.
          EngineDeadError: the engine has failed or was shut down.
        """
        batch: Any = [prompts] if isinstance(prompts, (str, Mapping)) or is_token_ids(prompts) else prompts
        if not isinstance(batch, (Sequence, np.ndarray)):
            raise RequestError(
                "prompts must be a string, a list of token ids, a dict, or a list of them, got "
                f"{type(prompts).__name__}",
                param="prompts",
                value=prompts,
            )
        params = self._params_for(len(batch), sampling_params)
        priorities: list[Any] = [priority or 0] * len(batch)
        if isinstance(priority, Sequence):
            priorities = list(priority)
        if len(priorities) != len(batch):
            raise RequestError(
                f"priority has {len(priorities)} values for {len(batch)} prompts", param="priority", value=priority
            )
        clients: list[Any] = [client] * len(batch)
        if isinstance(client, Sequence) and not isinstance(client, str):
            clients = list(client)
        if len(clients) != len(batch):
            raise RequestError(
                f"client has {len(clients)} values for {len(batch)} prompts", param="client", value=client
            )
        started: dict[str, _Call] = {}
        call = _Call()
        try:
            with self._turns:
                self.core.check()
                prepared = [
                    self.core.inputs.prepare(prompt, each, options=RequestOptions(priority=rank, client=who))
                    for prompt, each, rank, who in zip(batch, params, priorities, clients, strict=True)
                ]
                for request in prepared:
                    self.core.add(request)
                    started[request.request_id] = self._calls[request.request_id] = call
            self._run(call, len(started), use_tqdm)
        except BaseException:
            self._abort(started)
            raise
        return [call.outputs[request_id] for request_id in started]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | ProgressFactory = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, through the model's chat template."""
        if not messages:
            raise RequestError("messages is empty; at least one is needed", param="messages", value=messages)
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        with self._turns:
            prompts = [
                self.core.inputs.chat_prompt(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    chat_template=chat_template,
                    chat_template_kwargs=chat_template_kwargs,
                )
                for conversation in conversations
            ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer as transformers has it; RequestError when the engine was started without."""
        return self.core.inputs.require_tokenizer().hf

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` stands for: the model's generation_config.json over vLLM's defaults."""
        return self.core.inputs.default_sampling_params()

    def get_metrics(self) -> list[Metric | Histogram]:
        """Counters, gauges and histograms, each with `name` and `value`."""
        with self._turns:
            return self.core.metrics.collect()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes."""
        with self._turns:
            return self.core.utility("reset_prefix_cache")

    def _params_for(self, count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            params = [params] * count
        if not isinstance(params, Sequence) or len(params) != count:
            raise RequestError(
                f"sampling_params must be one SamplingParams or one for each of the {count} prompts",
                param="sampling_params",
                value=params,
            )
        final = RequestOutputKind.FINAL_ONLY
        return [each.clone_with(output_kind=final) if isinstance(each, SamplingParams) else each for each in params]

    def _run(self, call: _Call, num_requests: int, use_tqdm: bool | ProgressFactory) -> None:
        """Steps, in turns with other threads, until all outputs of a call have come."""
        make = use_tqdm if callable(use_tqdm) else tqdm
        with make(total=num_requests, desc="Processed prompts", disable=not use_tqdm) as bar:
            shown, start, tokens = 0, time.monotonic(), (0, 0)
            while shown < num_requests:
                with self._turns:
                    if call.error is None and len(call.outputs) == shown:
                        self._step()
                    if call.error is not None:
                        raise call.error
                    num_ended = len(call.outputs)
                    tokens = count_tokens(islice(call.outputs.values(), shown, None), tokens)
                if num_ended > shown:
                    bar.postfix = speed_text(*tokens, time.monotonic() - start)
                    bar.update(num_ended - shown)
                    shown = num_ended

    def _step(self) -> None:
        """One step; what it brought goes to the calls that wait for it."""
        for output in self.core.step():
            if output.finished and (call := self._calls.pop(output.request_id, None)) is not None:
                call.outputs[output.request_id] = output
        for request_id, error in self.core.take_refused():
            if (call := self._calls.pop(request_id, None)) is not None:
                call.error = call.error or error

    def _abort(self, request_ids: Iterable[str]) -> None:
        with self._turns:
            for request_id in request_ids:
                if self._calls.pop(request_id, None) is not None and self.core.dead is None:
                    self.core.abort(request_id)
