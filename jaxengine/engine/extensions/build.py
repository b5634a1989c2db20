"""Choice of an engine's extensions: some are needed from the start because of options, others once a request needs
them.

An extension's module is imported where the extension is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from jaxengine.config.features.capture import check_captured
from jaxengine.engine.extension import Hooks, Inputs, Loop, LoopExtension
from jaxengine.engine.weight_types import WEIGHT_UTILITIES
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import CAPTURE, LOGPROBS, MASK, PROMPT_LOGPROBS

if TYPE_CHECKING:
    from jaxengine.engine.extensions.adapters import Adapters
    from jaxengine.engine.extensions.drafts import Drafts
    from jaxengine.engine.extensions.offload.offload import Offload
    from jaxengine.engine.extensions.pictures import MediaStats, Pictures
    from jaxengine.engine.extensions.weights.weights import Weights
    from jaxengine.runner.extensions.adapters.store import AdapterStore


class Extensions:
    """All extensions of one engine, called together.

    Attributes:
      active: extensions that take part in steps now.
      hooks: hooks of the active extensions.
      by_name: all extensions made so far, by capability name.
      idle_seconds: the option sleep_idle_seconds; inf if it is off.
    """

    def __init__(self, runner: ModelRunner, inputs: Inputs | None = None):
        """Make the extensions that the engine's options need from the start. inputs: prepares requests; None if
        requests are given as token ids.

        Raises ConfigError if an extension cannot be made with these options; those made before it are then shut down.
        """
        self.active: list[LoopExtension] = []
        self.hooks = Hooks()
        self.by_name: dict[str, LoopExtension] = {}
        self._runner, self._inputs = runner, inputs
        self.idle_seconds = runner.config.sleep_idle_seconds or float("inf")
        self._loop: Loop | None = None
        tokenizer = None if inputs is None or "pooling" in runner.extensions else inputs.tokenizer
        # Serialised at start-up because it takes a long time for a large vocabulary: the first grammar would delay
        # others.
        self._tokenizer: str | None = None if tokenizer is None else tokenizer.backend.to_str()
        has_drafts = runner.config.speculative_config is not None
        started = {
            "pooling": "pooling" in runner.extensions,
            "adapters": runner.config.enable_lora,
            "drafts": has_drafts,
            "structured": has_drafts and tokenizer is not None,  # tokens without an alternative are drafts
            "pictures": "pictures" in runner.extensions,
            "sounds": "sounds" in runner.extensions,
            "crossed_pictures": "crossed_pictures" in runner.extensions,
            "logits_processors": "logits_processors" in runner.extensions,
            "offload": "offload" in runner.extensions,
            "sessions": "offload" in runner.extensions,
            "kv_events": runner.config.publishes_kv_events,
            "page_ages": runner.config.kv_cache_metrics,
            "step_work": runner.config.enable_mfu_metrics,
            "kv_transfer": runner.config.hands_over_kv,
            "recording": "recording" in runner.extensions,
            "arrivals": runner.config.record_trace is not None,
            "routed_experts": "routed_experts" in runner.extensions,
            "trace": "trace" in runner.extensions,
            "weights": self.idle_seconds < float("inf"),
            "idle_sleep": self.idle_seconds < float("inf"),
        }
        try:
            for name in (name for name, is_started in started.items() if is_started):
                self.require(name)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to raise
                self.shutdown()
            raise

    @property
    def epilogue(self) -> Callable[..., None] | None:
        """Function of an active extension that dispatches a program after each forward pass in place of the sampler;
        None if the sampler runs.
        """
        return next((each.epilogue for each in self.active if each.epilogue is not None), None)

    def configure(self, config: SchedulerConfig) -> SchedulerConfig:
        """Return the scheduler's configuration with the changes of all extensions that the engine starts with."""
        for each in self.active:
            config = each.configure(config)
        return config

    def attach(self, loop: Loop) -> None:
        """Store the engine's parts and pass them to the active extensions. Later extensions get them when they are
        made. Raises ConfigError if one cannot begin its work with these options; all are then shut down.
        """
        self._loop = loop
        try:
            for each in self.active:
                each.attach(loop)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to raise
                self.shutdown()
            raise

    def prepare(self, request: Request) -> None:
        """Make and activate the extensions that a request's parameters need, and call the `prepare` of all active
        extensions. This must happen before the request is queued.

        Raises RequestError if the engine was started without an option that the request needs, or if an extension
        refuses it: UnknownAdapterError for an unknown adapter, OverloadedError if a sleeping engine cannot wake up.
        """
        features = request.params.features
        if request.lora is not None:
            self.require("adapters")
        if features & MASK:
            self.require("structured")
        if features & (LOGPROBS | PROMPT_LOGPROBS):
            self.require("scores")
        if request.params.steer:
            self.require("steering")
        if features & CAPTURE:
            check_captured(request.params.capture, self._runner.config)
            self.require("capture")
        if request.params.trace_decode_token_ids:
            self.require("trace")
        if request.params.alignment is not None:
            self.require("alignment")
        if request.params.return_sampling_mask:
            self.require("mass")
        if request.params.routed_experts_prompt_start:
            self.require("routed_experts")
        if request.params.token_results:
            self.require("token_pooling")
        if request.params.kv_transfer is not None:
            self.require("kv_transfer")
        for each in self.active:
            each.prepare(request)

    def require(self, name: str) -> LoopExtension:
        """Return the active extension of the capability `name`, a key of `_MAKERS`. If necessary it is made and
        activated first.

        Raises RequestError if the engine was started without the option that the capability needs, and an extension's
        own error if it cannot begin its work; it is then shut down, and the next call makes another.
        """
        found = self.by_name.get(name)
        if found is None:
            found = _MAKERS[name](self)
            if self._loop is not None:
                try:
                    found.attach(self._loop)
                except BaseException:
                    with contextlib.suppress(Exception):  # the first error is the one to raise
                        found.shutdown()
                    raise
            self.by_name[name] = found
        if found not in self.active:
            self.active.append(found)
            self.hooks.update(self.active)
        return found

    def queued(self, requests: Sequence[Request]) -> None:
        """Call the `queued` hook of the active extensions, then remove those that are idle from `active`."""
        for each in self.active:
            each.queued(requests)
        if any(each.is_idle for each in self.active):
            self.active[:] = [each for each in self.active if not each.is_idle]
            self.hooks.update(self.active)

    def rest(self) -> float:
        """Let active extensions do their periodic work while there are no requests. Return the seconds after which to
        call this again, inf for never.
        """
        return min((each.rest() for each in self.active), default=float("inf"))

    def shutdown(self) -> None:
        """End the threads and processes of all extensions; then raise the first error of those that raise one."""
        first: Exception | None = None
        for each in self.by_name.values():
            try:
                each.shutdown()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def adapter_store(self) -> AdapterStore:
        """Return the store of LoRA adapters that requests may name. Raises RequestError in an engine without
        enable_lora.
        """
        return cast("Adapters", self.require("adapters")).store

    def media_stats(self) -> MediaStats | None:
        """Return the counts of images and videos, or of sounds; None if the engine has no encoder."""
        names = ("pictures", "sounds", "crossed_pictures")
        found = next((self.by_name[name] for name in names if name in self.by_name), None)
        return None if found is None else cast("Pictures", found).stats

    def utilities(self) -> dict[str, Callable[..., Any]]:
        """Return the functions that an operator may call between two steps, by name.

        Functions of extensions that have not been made yet are included. Such a function makes its extension, returns
        what an engine without the extension returns, or raises RequestError.
        """
        found = dict(self._absent_utilities())
        for each in self.by_name.values():
            found |= each.utilities
        return found

    def _absent_utilities(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield (name, function) for the utilities of the adapters, weights and media extensions that have not been
        made. The functions of weights make the extension first; those that load or unload adapters raise RequestError
        in an engine without enable_lora; the others return what is true without the extension.
        """
        if "adapters" not in self.by_name:
            yield from (("adapter_forms", list), ("adapters", list))
            for name in ("load_adapter", "adapter_is_loaded", "unload_adapter"):
                yield name, lambda *arguments: self.require("adapters")
        if "weights" not in self.by_name:
            for name in WEIGHT_UTILITIES:
                yield name, lambda *arguments, name=name: self.require("weights").utilities[name](*arguments)
        if self.media_stats() is None:
            yield "reset_mm_cache", lambda: True
            yield "mm_cache", lambda: {**self._runner.config.mm_cache_placement(0), "engine_bytes": 0}

    def _adapters(self) -> LoopExtension:
        """Make the extension for LoRA adapters. Raises RequestError if the engine was started without enable_lora."""
        if not self._runner.config.enable_lora:
            raise RequestError("the engine was started without enable_lora", param="lora_name")
        from jaxengine.engine.extensions.adapters import Adapters

        media = None if self._inputs is None else self._inputs.media
        return Adapters(self._runner, None if media is None else media.adapter)

    def _drafts(self) -> LoopExtension:
        """Make the extension for speculative decoding. The engine must have a speculative_config."""
        from jaxengine.engine.extensions.drafts import Drafts

        config = self._runner.config
        speculation = config.speculative_config
        assert speculation is not None
        guided = speculation.guides(config.pipeline_parallel_size, config.max_in_flight)
        return Drafts(speculation, guided=guided)

    def _pictures(self) -> LoopExtension:
        """Make the extension for images and videos."""
        from jaxengine.engine.extensions.pictures import Pictures

        media = None if self._inputs is None else self._inputs.media
        return Pictures(None if media is None else media.cache)

    def _crossed_pictures(self) -> LoopExtension:
        """Make the extension for images that layers attend to."""
        from jaxengine.engine.extensions.crossed_pictures import CrossedPictures

        media = None if self._inputs is None else self._inputs.media
        return CrossedPictures(None if media is None else media.cache)

    def _offload(self) -> LoopExtension:
        """Make the extension for KV pages outside of the devices. Raises ConfigError for an option that cannot be
        used.
        """
        from jaxengine.engine.extensions.offload.offload import Offload

        return Offload(self._runner)

    def _sounds(self) -> LoopExtension:
        """Make the extension for sounds. The engine must have been given inputs."""
        from jaxengine.engine.extensions.sounds import Sounds

        assert self._inputs is not None
        return Sounds(self._inputs.media.processor.rules, self._inputs.media.cache)

    def _structured(self) -> LoopExtension:
        """Make the extension for structured outputs. Raises RequestError if the engine has no tokenizer or was not
        given inputs.
        """
        if self._tokenizer is None or self._inputs is None:
            raise RequestError("structured_outputs needs a tokenizer", param="structured_outputs")
        from jaxengine.engine.extensions.structured import Structured
        from jaxengine.grammars.request_masks import RequestMasks

        drafts = cast("Drafts | None", self.by_name.get("drafts"))
        inputs, runner = self._inputs, self._runner
        masks = RequestMasks(
            self._tokenizer,
            runner.vocab_size,
            runner.extension("structured").num_words,
            inputs.eos_token_ids(),
            inputs.tokenizer,
            looks_ahead=drafts is not None,  # grammar drafts are only useful if a step can verify several tokens
        )
        return Structured(masks, drafts)


def _pooling(_: Extensions) -> LoopExtension:
    """Make the extension for pooled results."""
    from jaxengine.engine.extensions.pooling.pooling import Pooling

    return Pooling()


def _token_pooling(_: Extensions) -> LoopExtension:
    """Make the extension for pooled results of each token."""
    from jaxengine.engine.extensions.pooling.token_pooling import TokenPooling

    return TokenPooling()


def _scores(_: Extensions) -> LoopExtension:
    """Make the extension for logprobs."""
    from jaxengine.engine.extensions.scores import Scores

    return Scores()


def _mass(extensions: Extensions) -> LoopExtension:
    """Make the extension for sampling masks. Raises RequestError if the engine was started without
    return_sampling_mask.
    """
    if not extensions._runner.config.return_sampling_mask:
        problem = "return_sampling_mask: the engine was started without return_sampling_mask"
        raise RequestError(problem, param="return_sampling_mask")
    from jaxengine.engine.extensions.mass import SamplingMasks

    return SamplingMasks()


def _trace(extensions: Extensions) -> LoopExtension:
    """Make the extension for trace replay. Raises RequestError if the engine was started without
    enable_trace_replay.
    """
    if "trace" not in extensions._runner.extensions:
        problem = "trace_decode_token_ids: the engine was started without enable_trace_replay"
        raise RequestError(problem, param="trace_decode_token_ids")
    from jaxengine.engine.extensions.trace import Traces

    return Traces()


def _alignment(extensions: Extensions) -> LoopExtension:
    """Make the extension for alignment. Raises RequestError if the engine's model has no alignment heads."""
    if "alignment" not in extensions._runner.extensions:
        problem = "alignment: the engine's model does not align tokens with a sound; serve Whisper with a"
        raise RequestError(f"{problem} generation_config.json that has alignment_heads", param="alignment")
    from jaxengine.engine.extensions.alignment import Alignment

    return Alignment()


def _routed_experts(extensions: Extensions) -> LoopExtension:
    """Make the extension for routed experts. Raises RequestError if the engine was started without
    enable_return_routed_experts.
    """
    if "routed_experts" not in extensions._runner.extensions:
        problem = "routed_experts_prompt_start: the engine was started without enable_return_routed_experts"
        raise RequestError(problem, param="routed_experts_prompt_start")
    from jaxengine.engine.extensions.routed_experts import RoutedExperts

    return RoutedExperts()


def _logits_processors(_: Extensions) -> LoopExtension:
    """Make the extension for the user's own logits processors."""
    from jaxengine.engine.extensions.logits_processors import LogitsProcessors

    return LogitsProcessors()


def _capture(_: Extensions) -> LoopExtension:
    """Make the extension for captured activations."""
    from jaxengine.engine.extensions.capture import Capture

    return Capture()


def _steering(_: Extensions) -> LoopExtension:
    """Make the extension for steering vectors."""
    from jaxengine.engine.extensions.steering import Steering

    return Steering()


def _recording(_: Extensions) -> LoopExtension:
    """Make the extension that records steps."""
    from jaxengine.engine.extensions.recording import Recording

    return Recording()


def _arrivals(_: Extensions) -> LoopExtension:
    """Make the extension that records a trace of requests."""
    from jaxengine.engine.extensions.arrivals import Arrivals

    return Arrivals()


def _idle_sleep(extensions: Extensions) -> LoopExtension:
    """Make the extension for automatic sleep, after requiring the weights extension that it uses."""
    from jaxengine.engine.extensions.weights.idle_sleep import IdleSleep

    return IdleSleep(cast("Weights", extensions.require("weights")), extensions.idle_seconds)


def _kv_events(extensions: Extensions) -> LoopExtension:
    """Make the extension that publishes KV events. Raises ConfigError for an address that cannot be used."""
    from jaxengine.engine.extensions.kv_events import KVEvents

    config = extensions._runner.config.kv_events_config
    assert config is not None
    return KVEvents(config, extensions._runner.num_ranks)


def _kv_transfer(extensions: Extensions) -> LoopExtension:
    """Make the extension that transfers pages between engines, after requiring the offload extension that it uses.
    Raises RequestError if the engine was started without a NixlConnector in kv_transfer_config.
    """
    if not extensions._runner.config.hands_over_kv:
        problem = "kv_transfer_params: the engine was started without a NixlConnector in kv_transfer_config"
        raise RequestError(problem, param="kv_transfer_params")
    from jaxengine.engine.extensions.kv_transfer import KVTransfer

    return KVTransfer(extensions._runner, cast("Offload", extensions.require("offload")))


def _page_ages(_: Extensions) -> LoopExtension:
    """Make the extension that measures the ages of pages."""
    from jaxengine.engine.extensions.page_ages import PageAges

    return PageAges()


def _step_work(extensions: Extensions) -> LoopExtension:
    """Make the extension that counts the operations and bytes of steps."""
    from jaxengine.engine.extensions.step_work import StepWork

    return StepWork(extensions._runner)


def _sessions(extensions: Extensions) -> LoopExtension:
    """Make the extension for sessions, after requiring the offload extension, which keeps their pages."""
    from jaxengine.engine.extensions.sessions import Sessions

    return Sessions(cast("Offload", extensions.require("offload")))


def _weights(extensions: Extensions) -> LoopExtension:
    """Make the extension for pauses, sleep and new weights. If the engine has a tier in host memory, sleep can keep
    pages there.
    """
    from jaxengine.engine.extensions.weights.weights import Weights

    if (offload := extensions.by_name.get("offload")) is None:
        return Weights()
    from jaxengine.engine.extensions.offload.due_copies import kept

    return Weights(partial(kept, cast("Offload", offload)))


# Function that makes the extension of each capability.
_MAKERS: dict[str, Callable[[Extensions], LoopExtension]] = {
    "adapters": Extensions._adapters,
    "alignment": _alignment,
    "arrivals": _arrivals,
    "capture": _capture,
    "crossed_pictures": Extensions._crossed_pictures,
    "drafts": Extensions._drafts,
    "idle_sleep": _idle_sleep,
    "kv_events": _kv_events,
    "kv_transfer": _kv_transfer,
    "logits_processors": _logits_processors,
    "mass": _mass,
    "offload": Extensions._offload,
    "page_ages": _page_ages,
    "pictures": Extensions._pictures,
    "pooling": _pooling,
    "recording": _recording,
    "routed_experts": _routed_experts,
    "scores": _scores,
    "sessions": _sessions,
    "sounds": Extensions._sounds,
    "steering": _steering,
    "step_work": _step_work,
    "structured": Extensions._structured,
    "token_pooling": _token_pooling,
    "trace": _trace,
    "weights": _weights,
}
