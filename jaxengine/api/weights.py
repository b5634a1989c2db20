"""Methods of LLM and AsyncLLM that pause, sleep and update weights. Names are vLLM's if vLLM has the method.

The code that replaces weights is imported on first use.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jaxengine.api.core import CoreMethods, EngineCore
from jaxengine.api.engine_client import prefix_reset
from jaxengine.engine.weight_types import KVMode, PauseMode, WeightUpdate
from jaxengine.runner.weights.weight_names import Renamed, Target, check_target
from jaxengine.runner.weights.weight_names import ScannedLayers as ScannedLayers
from jaxengine.scheduler.base.errors import RequestError, invalid

if TYPE_CHECKING:
    from jaxengine.runner.weights.weight_update import NewWeights

_T = TypeVar("_T")

# Seconds between two checks of whether a pause is complete.
_SETTLE_SECONDS = 0.002


class WeightMethods(CoreMethods):
    """Methods that update weights, pause and sleep, for an engine whose steps are run by the calling threads."""

    _step: Callable[[], None]

    def update_weights(
        self,
        params: Any,
        *,
        version: int | str | None = None,
        mode: PauseMode = "keep",
        kv: KVMode = "recompute",
        mapping: Mapping[str, Renamed] | None = None,
        strict: bool = True,
        donate: bool = False,
        target: Target = "model",
        chunk_bytes: int | None = None,
    ) -> WeightUpdate:
        """Replace the model's weights between two steps, either all of them or none, and return what was replaced and
        how long it took. Nothing is compiled.

        New weights are read and put on the devices in addition to the old ones, while other threads' requests continue.
        Matrices that were quantised when the engine loaded them are quantised again. Weights of drafts and adapters are
        not replaced.

        Args:
          params: tensors by Hugging Face name, as a mapping or as pairs; a folder with safetensors or in device layout;
            a GGUF file; or the engine's own tree (nnx.State, nnx.Module), whose arrays are not copied if they are on
            the engine's devices in its layout.
          version: version of the new weights, as `weight_version` and outputs report it. None for the current one plus
            one; if the current one is a text, for the number of updates of the model, including this one.
          mode: whether running requests continue ("keep"), may finish first ("wait") or are ended ("abort"). New
            requests wait in any case. "wait" is refused while `pause_generation` or `sleep` keeps requests.
          kv: whether running requests compute their keys and values again ("recompute") or continue with those that the
            old weights have computed ("keep"; in a pooling model they compute them again). "drop" is "recompute", and
            also clears cached prefixes at once. No request uses cached pages that other weights have computed.
          mapping: maps names in params to Hugging Face names; or to (name, order of the array's axes or None, function
            of the array or None); or to ScannedLayers, for an array that stacks a tensor of each layer. Other names are
            not changed.
          strict: False keeps the weights for which params has no tensor.
          donate: delete jax arrays in params as soon as they have been copied, even if a later one is faulty. Arrays of
            the engine's own tree that are used without a copy are not deleted.
          target: "draft" replaces the weights of the drafter instead: a draft model, an MTP layer (by its names in the
            model's checkpoint; other tensors are ignored) or a head. No output token depends on them, and
            version must be None.
          chunk_bytes: limit of the bytes of copies of tensors in host memory, in addition to old and new weights; one
            row is always allowed. None keeps tensors until the weight that they form is complete. An iterator's tensor
            is released before the next one is requested. Not counted are a device's part of a weight while it is sent
            to a device with its own memory, parts on such a device of a jax array that is read, and matrices that are
            quantised or have their own format, which are kept until they are complete. Must be None for a folder in
            device layout.

        Raises WeightUpdateError, whose `faults` list all tensors that are missing, unknown or of a wrong shape, or
        those given twice, or the first one whose elements are not finite; RequestError for another argument;
        EngineDeadError; ClusterError if another process of the engine is lost. On an error the old weights are kept.
        """
        with self._lock:
            weights = _weights_of(self.core)
            weights.check(version, mode, kv)
        new = _read_new(self.core, params, mapping, strict, donate, target, chunk_bytes)
        return self._in_pause(mode, lambda: weights.switch(new, version, kv))

    def update_lora(
        self,
        name: str,
        params: Any,
        *,
        config: Mapping[str, Any] | None = None,
        lora_int_id: int | None = None,
        mode: PauseMode = "keep",
        kv: KVMode = "recompute",
    ) -> None:
        """Replace an adapter's matrices between two steps, or add an adapter, from arrays in memory. Nothing is
        compiled.

        Args:
          name: the adapter's name in requests (`LoRARequest.lora_name`).
          params: tensors by PEFT's names ("base_model.model.NAME.lora_A.weight"), as a mapping or as pairs.
          config: fields of PEFT's adapter_config.json; None to keep those of the adapter with this name.
          lora_int_id: number of a new adapter; None for an unused one. A `LoRARequest` for it may have any path.
          mode: whether running requests continue ("keep"), may finish first ("wait") or are ended ("abort").
          kv: whether running requests with this adapter compute their keys and values again ("recompute") or keep them
            ("keep"; in a pooling model they compute them again). "drop" is "recompute", and also clears all cached
            prefixes. Other requests keep theirs.

        Raises WeightUpdateError, whose `faults` list all tensors that are missing, unknown, given twice or of a wrong
        shape, or whose elements are not finite; RequestError; EngineDeadError. On an error the old adapter is kept.
        """
        with self._lock:
            weights = _weights_of(self.core)
            weights.check(None, mode, kv)
            adapters = _adapters_of(self.core)
        new = _read_adapter(adapters, name, params, config, lora_int_id)
        self._in_pause(mode, lambda: adapters.replace(new, kv))

    def _in_pause(self, mode: PauseMode, function: Callable[[], _T]) -> _T:
        """Run steps in a pause until no request runs, call a function with the lock held, and return its result.

        mode: what happens to running requests: "keep", "wait" or "abort". Raises RequestError for an invalid pause,
        EngineDeadError, and the function's errors; the pause is ended first.
        """
        key = object()
        with self._lock:
            weights = _weights_of(self.core)
        try:
            with self._lock:  # a deferred Ctrl-C is raised when the lock is released, after the pause has begun
                weights.hold(key, mode)
            return self._once_paused(key, function)
        finally:
            with self._lock:
                weights.release(key)

    def _once_paused(self, key: object, function: Callable[[], _T]) -> _T:
        """Run steps until a pause is complete, then call a function with the lock held and return its result. The pause
        continues.

        key: key of the pause; None for that of `pause_generation`. Raises RequestError if the pause is ended in the
        meantime, EngineDeadError, and the function's errors.
        """
        while True:
            with self._lock:
                if _weights_of(self.core).settle(key):
                    return function()
                self._step()

    def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Pause the engine until `resume_generation`, and return once no request runs. New requests wait.

        mode: "keep" interrupts running requests, "wait" lets them finish first, "abort" ends them. clear_cache: drop
        cached prefixes. Raises RequestError for another mode, for "wait" while the engine sleeps and has requests, and
        if another thread ends the pause before it is complete; EngineDeadError.
        """
        with self._lock:
            _weights_of(self.core).pause(mode)
        self._once_paused(None, lambda: clear_cache and self.core.utility("reset_prefix_cache"))

    def resume_generation(self) -> None:
        """End the pause of `pause_generation`; pauses of weight updates continue. Raises RequestError while the engine
        sleeps because of `sleep` or `release_kv_cache_memory`, and EngineDeadError.
        """
        with self._lock:
            _weights_of(self.core).resume()

    def is_paused(self) -> bool:
        """Return whether the engine is paused, and requests wait for `resume_generation`. Raises EngineDeadError."""
        with self._lock:
            return _weights_of(self.core).is_paused

    def sleep(
        self,
        level: int = 1,
        mode: PauseMode = "abort",
        tags: Sequence[str] | None = None,
        *,
        keep_kv: bool = False,
    ) -> None:
        """Free device memory until `wake_up`, and return once it is freed. Compiled programs are kept. Requests wait.

        Args:
          level: 1 frees pages, and weights after copying them to host memory. 2 frees pages, and weights without a
            copy, so that `update_weights` must provide new ones. 0 only pauses.
          mode: what happens to running requests, "keep", "wait" or "abort". Requests that are kept will be computed
            again if pages are freed.
          tags: "weights" and "kv_cache", which are freed; None for both. A later call may free more. None at level 0.
          keep_kv: first copy cached pages to the tier in host memory, where requests find them after `wake_up`;
            otherwise that tier is emptied. Needs level 1, the tag "kv_cache" if any is given, and kv_offloading_size.

        Raises RequestError for arguments that are not allowed or if another thread ends the pause; EngineDeadError;
        jax's RuntimeError or MemoryError if copies cannot be made, after which `wake_up` restores what was freed.
        """
        with self._lock:
            weights = _weights_of(self.core)
            weights.begin_sleep(level, mode, tags, keep_kv)
        self._once_paused(None, lambda: weights.sleep(level, tags, keep_kv))

    def release_kv_cache_memory(self) -> None:
        """Free the pages of a paused engine, but not its weights, until `wake_up`. Cached prefixes are dropped, and
        requests that were kept will be computed again. Raises RequestError if the engine is not paused or ceases to be,
        and EngineDeadError.
        """
        with self._lock:
            weights = _weights_of(self.core)
            self.core.utility("check_paused")
        self._once_paused(None, lambda: weights.sleep(1, ("kv_cache",)))

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Restore what `sleep` has freed, and end the pause once everything is restored. If the engine does not sleep,
        end the pause at once. Return whether everything is restored.

        tags: "weights", "kv_cache" or both; None for both; "scheduling" for none. Raises RequestError for another tag,
        and for weights that were freed at level 2 and have not been replaced; EngineDeadError; jax's RuntimeError or
        MemoryError if the memory cannot be allocated, in which case the engine still sleeps.
        """
        with self._lock:
            return _weights_of(self.core).wake(tags)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached prefixes, and return True. Running requests keep their pages.

        reset_running_requests: also compute running requests again from their first token, once no step is in flight.
        The steps that are in flight are completed here. Raises RequestError if reset_connector is true.
        """
        with self._lock:
            done = self.core.utility(prefix_reset(reset_running_requests, reset_connector))
            if reset_running_requests:  # steps in flight are collected first
                while self.core.engine.scheduler.paused and self.core.has_unfinished:
                    self._step()
                self.core.rest()
            return done

    def is_sleeping(self) -> bool:
        """Return whether weights or pages are not on the devices because the engine sleeps. Raises EngineDeadError."""
        with self._lock:
            return bool(_weights_of(self.core).asleep)

    @property
    def weight_version(self) -> int | str:
        """Version of the weights: 0, then the number or text of the last `update_weights`. Raises EngineDeadError."""
        with self._lock:
            return _weights_of(self.core).version

    def weight_info(self, checksum: bool = False) -> dict[str, Any]:
        """Return {"weight_version"}, and with `checksum` also {"checksums"}: the SHA-256 of each weight on the devices,
        by name. For checksums, an engine that sleeps automatically is woken.

        Raises EngineDeadError; for checksums also RequestError while the engine sleeps because of `sleep`, or if other
        processes hold weights.
        """
        with self._lock:
            return _weight_info(self.core, checksum)


class AsyncWeightMethods(ABC):
    """Methods that update weights, pause and sleep, for an engine whose steps run on a separate thread."""

    @property
    @abstractmethod
    def core(self) -> EngineCore:
        """The engine."""

    @abstractmethod
    async def between_steps(self, function: Callable[[], _T]) -> _T:
        """Call a function on the engine's thread before its next step, wait for it, and return its result. Raises the
        function's error, or EngineDeadError.
        """

    async def update_weights(
        self,
        params: Any,
        *,
        version: int | str | None = None,
        mode: PauseMode = "keep",
        kv: KVMode = "recompute",
        mapping: Mapping[str, Renamed] | None = None,
        strict: bool = True,
        donate: bool = False,
        target: Target = "model",
        chunk_bytes: int | None = None,
    ) -> WeightUpdate:
        """Replace the model's weights as `LLM.update_weights` does, with its arguments, errors and result.

        New weights are loaded while requests continue; only the switch needs a pause.
        """
        weights = await self._weights()
        weights.check(version, mode, kv)
        new = await asyncio.to_thread(_read_new, self.core, params, mapping, strict, donate, target, chunk_bytes)
        return await self._in_pause(mode, lambda: weights.switch(new, version, kv))

    async def update_lora(
        self,
        name: str,
        params: Any,
        *,
        config: Mapping[str, Any] | None = None,
        lora_int_id: int | None = None,
        mode: PauseMode = "keep",
        kv: KVMode = "recompute",
    ) -> None:
        """Replace an adapter's matrices, or add an adapter, as `LLM.update_lora`, with its arguments and errors."""
        weights = await self._weights()
        weights.check(None, mode, kv)
        adapters = await self.between_steps(lambda: _adapters_of(self.core))
        new = await asyncio.to_thread(_read_adapter, adapters, name, params, config, lora_int_id)
        await self._in_pause(mode, lambda: adapters.replace(new, kv))

    async def _in_pause(self, mode: PauseMode, function: Callable[[], _T]) -> _T:
        """Begin a pause, call a function on the engine's thread once no request runs, end the pause, and return the
        function's result.

        mode: what happens to running requests: "keep", "wait" or "abort". Raises RequestError for an invalid pause,
        EngineDeadError, and the function's errors; the pause is ended first.
        """
        weights, key = await self._weights(), object()
        try:
            # If this task is cancelled in the meantime, the release still follows the hold, as commands run in order.
            await self.between_steps(lambda: weights.hold(key, mode))
            return await self._once_paused(weights, key, function)
        finally:
            await self.between_steps(lambda: weights.release(key))

    async def _once_paused(self, weights: Any, key: object, function: Callable[[], _T]) -> _T:
        """Wait until a pause is complete, then call a function on the engine's thread and return its result. The pause
        continues.

        weights: the engine's Weights. key: key of the pause; None for that of `pause_generation`. Raises RequestError
        if the pause is ended in the meantime, EngineDeadError, and the function's errors.
        """
        while True:
            done = await self.between_steps(lambda: (function(),) if weights.settle(key) else None)
            if done is not None:
                return done[0]
            await asyncio.sleep(_SETTLE_SECONDS)

    async def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Pause the engine until `resume_generation`, and return once no request runs. New requests wait.

        mode: "keep" interrupts running requests, "wait" lets them finish first, "abort" ends them. clear_cache: drop
        cached prefixes. Raises RequestError for another mode, for "wait" while the engine sleeps and has requests, and
        if the pause is ended before it is complete; EngineDeadError.
        """
        weights = await self._weights()
        await self.between_steps(lambda: weights.pause(mode))
        await self._once_paused(weights, None, lambda: clear_cache and self.core.utility("reset_prefix_cache"))

    async def resume_generation(self) -> None:
        """End the pause of `pause_generation`; pauses of weight updates continue. Raises RequestError while the engine
        sleeps because of `sleep` or `release_kv_cache_memory`, and EngineDeadError.
        """
        weights = await self._weights()
        await self.between_steps(weights.resume)

    async def is_paused(self) -> bool:
        """Return whether the engine is paused, and requests wait for `resume_generation`. Raises EngineDeadError."""
        weights = await self._weights()
        return await self.between_steps(lambda: weights.is_paused)

    async def sleep(
        self,
        level: int = 1,
        mode: PauseMode = "abort",
        tags: Sequence[str] | None = None,
        *,
        keep_kv: bool = False,
    ) -> None:
        """Free device memory until `wake_up`, and return once it is freed. Requests wait. See `LLM.sleep` for the
        arguments and errors.
        """
        weights = await self._weights()
        await self.between_steps(lambda: weights.begin_sleep(level, mode, tags, keep_kv))
        await self._once_paused(weights, None, lambda: weights.sleep(level, tags, keep_kv))

    async def release_kv_cache_memory(self) -> None:
        """Free the pages of a paused engine, but not its weights, until `wake_up`; see `LLM.release_kv_cache_memory`.
        Raises RequestError if the engine is not paused or ceases to be, and EngineDeadError.
        """
        weights = await self._weights()
        await self.between_steps(lambda: self.core.utility("check_paused"))
        await self._once_paused(weights, None, lambda: weights.sleep(1, ("kv_cache",)))

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Restore what `sleep` has freed, and end the pause once everything is restored. If the engine does not sleep,
        end the pause at once. See `LLM.wake_up` for the argument, the result and errors.
        """
        weights = await self._weights()
        return await self.between_steps(lambda: weights.wake(tags))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Drop all cached prefixes, and return True. Running requests keep their pages.

        reset_running_requests: also compute running requests again from their first token, once no step is in flight;
        this method does not wait for that. Raises EngineDeadError, and RequestError for reset_connector: files of
        kv_offloading_path are not deleted.
        """
        name = prefix_reset(reset_running_requests, reset_connector)
        return await self.between_steps(lambda: self.core.utility(name))

    async def is_sleeping(self) -> bool:
        """Return whether weights or pages are not on the devices because the engine sleeps. Raises EngineDeadError."""
        weights = await self._weights()
        return await self.between_steps(lambda: bool(weights.asleep))

    async def weight_info(self, checksum: bool = False) -> dict[str, Any]:
        """Return the result of `LLM.weight_info`, with its errors."""
        return await self.between_steps(lambda: _weight_info(self.core, checksum))

    async def _weights(self) -> Any:
        """Return the engine's Weights object, fetched on the engine's thread. Raises EngineDeadError."""
        return await self.between_steps(lambda: _weights_of(self.core))


def _weights_of(core: EngineCore) -> Any:
    """Return the engine's jaxengine.engine.extensions.weights.weights.Weights, for a caller that holds the lock or runs
    on the engine's thread. Raises EngineDeadError.
    """
    core.check()
    return core.engine.extensions.require("weights")


def _read_new(
    core: EngineCore,
    params: Any,
    mapping: Mapping[str, Renamed] | None,
    strict: bool,
    donate: bool,
    target: Target,
    chunk_bytes: int | None,
) -> NewWeights:
    """Load new weights onto the devices, without using them yet. Steps may run in the meantime.

    Arguments: see `LLM.update_weights`. Raises WeightUpdateError, RequestError for an argument that is not allowed, and
    ClusterError if a process is lost.
    """
    from jaxengine.runner.weights.weight_update import read_weights

    check_target(target)
    for name, value in {"strict": strict, "donate": donate}.items():
        if not isinstance(value, bool):
            raise invalid(name, value, "True, False")
    return read_weights(
        core.runner, params, mapping=mapping, strict=strict, donate=donate, target=target, chunk_bytes=chunk_bytes
    )


def _adapters_of(core: EngineCore) -> Any:
    """Return the engine's jaxengine.engine.extensions.adapters.Adapters, for a caller that holds the lock or runs on
    the engine's thread. Raises EngineDeadError, and RequestError without enable_lora.
    """
    core.check()
    return core.engine.extensions.require("adapters")


def _read_adapter(adapters: Any, name: str, params: Any, config: Mapping[str, Any] | None, number: int | None) -> Any:
    """Check an adapter's tensors, and return the adapter in host memory as a GivenAdapter that is not used yet. Steps
    may run in the meantime.

    number: lora_int_id. Other arguments, and errors: see `LLM.update_lora`.
    """
    from jaxengine.runner.weights.weight_update import read_adapter

    if config is not None and not isinstance(config, Mapping):
        text = f"config must be the fields of PEFT's adapter_config.json, got {type(config).__name__}"
        raise RequestError(text, param="config", value=config)
    return read_adapter(params, lambda source: adapters.store.read_given(name, source, config, number))


def _weight_info(core: EngineCore, checksum: bool) -> dict[str, Any]:
    """Return the result of `LLM.weight_info`, with its errors, for a caller that holds the lock or runs on the engine's
    thread.
    """
    from jaxengine.runner.weights.weight_update import checksums

    weights = _weights_of(core)
    if checksum:
        weights.rouse()
    return {"weight_version": weights.version, **({"checksums": checksums(core.runner)} if checksum else {})}
