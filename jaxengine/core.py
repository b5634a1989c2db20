"""A model ready to serve: prompts in, outputs out, one `step` at a time. What LLM and AsyncLLM both stand on.

Checks a request whole before anything changes, so that a bad one disturbs nobody.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jaxengine.cluster import ALONE, Cluster, Peers
from jaxengine.config import ConfigError, EngineConfig, ResolvedConfig
from jaxengine.devices import choose_devices, open_stages
from jaxengine.engine import Engine, EngineOutput
from jaxengine.metrics import Metrics
from jaxengine.model_runner import ModelRunner
from jaxengine.model_source import ModelSource, open_model
from jaxengine.output_processor import OutputProcessor, follows_every_step
from jaxengine.outputs import RequestOutput
from jaxengine.platforms import PLATFORMS, Platform
from models.kv_cache import platform_of
from scheduler.errors import RequestError
from scheduler.request import FinishReason, Request
from scheduler.sampling_params import SamplingParams, verify_bad_word_tokens

logger = logging.getLogger(__name__)

Prompt = str | Mapping[str, Any]


@dataclass(frozen=True)
class PreparedRequest:
    """A checked request that changed nothing yet."""

    request_id: str
    prompt: str | None
    params: SamplingParams
    requests: list[Request]
    bad_words: list[list[int]]


class EngineCore:
    """Loads the model, compiles every step, and then serves. Not thread-safe."""

    def __init__(self, config: EngineConfig, *, devices: Sequence[Any] | None = None, mesh: Mesh | None = None):
        """devices: to take from, default all; or a mesh with axes data, attn and model that says how to use which.

        Raises ConfigError, ModelConfigError or ModelFileError, each saying what to change.
        """
        if config.nnodes > 1 and (devices is not None or mesh is not None):
            raise ConfigError("nnodes", config.nnodes, "1 beside devices or a mesh; it takes those of all processes")
        self._cluster = Cluster(config) if config.nnodes > 1 else None
        try:
            opened = open_resolved(config, devices, mesh)
            self.config, self.model_config = opened.config, opened.source.config
            self.generation_defaults = opened.source.generation_defaults
            self.tokenizer = opened.source.load_tokenizer(self.config)
            self.runner = load_runner(*opened, peers=self._cluster or ALONE)
        except BaseException as error:
            self.shutdown(f"start-up failed: {error}")
            raise
        if not config.disable_log_stats:
            print(self.runner.plan.table(), file=sys.stderr)
        self.engine = Engine(self.runner)
        self.metrics = Metrics(self.engine, log_stats=not config.disable_log_stats)
        self._processor = OutputProcessor(self.tokenizer)
        self._num_requests = 0

    def shutdown(self, reason: str | None = None) -> None:
        """Ends the engine's other processes, if it has any; with a reason, as a failure."""
        if self._cluster is not None:
            self._cluster.shutdown(reason)

    @property
    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> PreparedRequest:
        """Checks a request and turns its text into tokens.

        Args:
          timeout: seconds from now after which the request is aborted.

        Raises:
          RequestError: naming the field, its value and what is allowed.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params must be a SamplingParams, got {type(params).__name__}", param="sampling_params"
            )
        if type(priority) is not int:
            raise RequestError(f"priority must be an int, got {priority!r}", param="priority", value=priority)
        if timeout is not None and not (type(timeout) in (int, float) and timeout > 0):
            raise RequestError(f"timeout must be a number above 0, got {timeout!r}", param="timeout", value=timeout)
        if priority and self.config.scheduling_policy != "priority":
            raise RequestError(
                f"priority is {priority}; it needs scheduling_policy='priority'", param="priority", value=priority
            )
        text, token_ids, salt = self._read_prompt(prompt)
        longest = self.config.max_model_len
        if not 1 <= len(token_ids) < longest:
            raise RequestError(
                f"prompt has {len(token_ids)} tokens; allowed are 1 to {longest - 1} (max_model_len - 1)",
                param="prompt",
                value=len(token_ids),
            )
        params.verify_against(
            self.model_config.vocab_size,
            self.config.max_logprobs,
            longest,
            self.tokenizer is not None,
            len(token_ids),
        )
        self._num_requests += 1
        index = self._num_requests
        request_id = request_id if request_id is not None else str(index)
        if request_id in self._processor:
            raise RequestError(f"request_id {request_id!r} is in use", param="request_id", value=request_id)
        arrival = time.monotonic()
        requests = [
            self._make_request(
                request_id if params.n == 1 else f"{number}_{request_id}",
                token_ids,
                params if params.n == 1 else params.child(number),
                fallback_seed=self._draw_seed(index, number),
                priority=priority,
                arrival_time=arrival,
                deadline=float("inf") if timeout is None else arrival + timeout,
                cache_salt=salt,
            )
            for number in range(params.n)
        ]
        return PreparedRequest(request_id, text, params, requests, self._tokenize_bad_words(params))

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

    def default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults with what the model's generation_config.json suggests."""
        return SamplingParams(**self.generation_defaults)

    def _process(self, result: EngineOutput) -> list[RequestOutput]:
        outputs = self._processor.process(
            result,
            time.monotonic(),
            lambda request, text: self.engine.finish(request, FinishReason.STOP, text),
        )
        for output in outputs:
            self.metrics.observe(output)
        return outputs

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """(text, token ids, cache salt)"""
        salt = None
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown:
                name = sorted(map(str, unknown))[0]
                raise RequestError(
                    f"prompt has the key {name!r}; allowed are prompt, prompt_token_ids and cache_salt",
                    param="prompt",
                    value=name,
                )
            salt = prompt.get("cache_salt")
            if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= 1024):
                raise RequestError(
                    f"cache_salt is {salt!r}; allowed is a string of 1 to 1024 characters",
                    param="cache_salt",
                    value=salt,
                )
            if "prompt_token_ids" in prompt:
                text = prompt.get("prompt")
                return text, self._check_token_ids(prompt["prompt_token_ids"]), salt
            prompt = prompt.get("prompt", None)
        if not isinstance(prompt, str):
            raise RequestError(
                f"prompt must be a string or a dict with 'prompt' or 'prompt_token_ids', got {type(prompt).__name__}",
                param="prompt",
                value=prompt,
            )
        if not prompt:
            raise RequestError("prompt is empty; at least one character is needed", param="prompt", value=prompt)
        if self.tokenizer is None:
            raise RequestError(
                "prompt is text, but skip_tokenizer_init is set; give prompt_token_ids", param="prompt", value=prompt
            )
        return prompt, self.tokenizer.encode(prompt), salt

    def _check_token_ids(self, token_ids: Any) -> list[int]:
        vocab_size = self.model_config.vocab_size
        if isinstance(token_ids, np.ndarray):
            token_ids = token_ids.tolist()
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)) or not token_ids:
            raise RequestError(
                "prompt_token_ids must be a list of at least one token id",
                param="prompt_token_ids",
                value=token_ids,
            )
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"prompt_token_ids holds {token_id!r}; allowed are integers from 0 to {vocab_size - 1}",
                    param="prompt_token_ids",
                    value=token_id,
                )
        return list(token_ids)

    def _make_request(
        self, request_id: str, token_ids: list[int], params: SamplingParams, *, fallback_seed: int, **fields: Any
    ) -> Request:
        room = self.config.max_model_len - len(token_ids)
        eos = () if params.ignore_eos else self._eos_token_ids()
        return Request(
            request_id=request_id,
            prompt_token_ids=np.array(token_ids, np.int32),
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            eos_token_ids=eos,
            stop_token_ids=tuple(dict.fromkeys((*eos, *params.stop_token_ids))),
            seed=fallback_seed if params.seed is None else params.seed,
            per_step=follows_every_step(params),
            **fields,
        )

    def _eos_token_ids(self) -> tuple[int, ...]:
        ids = () if self.tokenizer is None else self.tokenizer.eos_token_ids
        return tuple(dict.fromkeys((*ids, *self.model_config.eos_token_ids)))

    def _draw_seed(self, index: int, number: int) -> int:
        """The seed of a request without one: new for each request, the same in every run of one engine seed."""
        digest = hashlib.sha256(f"{self.config.seed}/{index}/{number}".encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def _tokenize_bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each bad word as it is spelt at a start and after a space, as vLLM does."""
        if not params.bad_words:
            return []
        assert self.tokenizer is not None
        sequences: list[list[int]] = []
        for word in params.bad_words:
            plain = self.tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            sequences.append(plain)
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                sequences.append(spaced)
        verify_bad_word_tokens(sequences)
        return sequences


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
