"""Replacement of weights while requests run: pauses, versions, and the fate of cached keys and values.

Weights are switched between two steps with none in flight, so each token belongs to one version. Nothing compiles:
executables take weights as arguments.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

from jaxengine.engine.extension import Events, Loop, preempt_stale, reset_caches
from jaxengine.engine.extensions.weights.pauses import Pauses
from jaxengine.engine.extensions.weights.weight_orders import WeightOrders
from jaxengine.engine.stats.metric_types import Gauge, Histogram, Metric
from jaxengine.engine.stats.stats import Histogram as Durations
from jaxengine.engine.weight_types import (
    WEIGHT_UTILITIES,
    KVMode,
    PauseMode,
    Version,
    WeightUpdate,
)
from jaxengine.runner.weights import sleep
from jaxengine.runner.weights.process_weights import everywhere
from jaxengine.runner.weights.weight_update import NewWeights
from jaxengine.scheduler.base.errors import RequestError, invalid, refuse, show_value
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.weight_version import MAX_VERSION, check_version
from jaxengine.scheduler.rank import Rank

# Parts of device memory that `sleep` releases and `wake` puts back, each on its own.
WEIGHTS, KV_CACHE = "weights", "kv_cache"
PARTS = {WEIGHTS, KV_CACHE}
SLEEP_LEVELS = (0, 1, 2)
_SLEEP_BOUNDS = (0.01, 0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)  # seconds, as vLLM has them


class Weights(Pauses):
    """Loop extension that pauses the engine, switches its weights, and puts it to sleep.

    Attributes:
      version: version of the weights that the next step will use.
      dozes: whether the engine sleeps automatically; it then is not paused, and wakes for any call that needs it.
    """

    def __init__(self, keep_pages: Callable[[Sequence[Rank]], AbstractContextManager[None]] | None = None):
        """Set the state to awake and not paused, with version 0.

        keep_pages: makes a context in which host memory keeps the replicas' pages; None if the engine has no tiers.
        """
        super().__init__()
        self._keep_pages = keep_pages
        self.version: Version = 0
        self._num_switches = 0
        self._asleep: set[str] = set()
        self._level = 0
        self.dozes = False
        self._orders = WeightOrders(self)
        self._durations = {name: Durations(_SLEEP_BOUNDS) for name in ("sleep", "wake")}
        self._updates = Durations(_SLEEP_BOUNDS)

    def attach(self, loop: Loop) -> None:
        """Store the engine's parts, add the pauses' admission control to the scheduler's extensions, and set the weight
        version of requests that already exist.
        """
        super().attach(loop)
        loop.scheduler.extensions.append(self._intake)
        for request in loop.scheduler.requests:
            self.prepare(request)

    def prepare(self, request: Request) -> None:
        """Set the version with which the request's first token will be sampled."""
        request.weight_versions = [(self.version, 0)]

    def pause(self, mode: PauseMode) -> None:
        """Begin the operator's pause, after waking an engine that sleeps automatically. The pause is complete once
        `settle` returns True; steps must go on until then.

        mode: effect on unfinished requests (PauseMode). "wait" after "keep" lets the kept requests run to their end.
        Raises RequestError for an unknown mode, and for "wait" while the engine sleeps and has requests.
        """
        self.hold(None, mode)

    def hold(self, key: Any, mode: PauseMode) -> None:
        """Begin a pause in addition to others, after waking an engine that sleeps automatically; `release` with the
        same key ends it.

        key: any hashable value of the caller; None is the operator's pause, which `resume` ends. mode: effect on
        unfinished requests (PauseMode). Raises RequestError for an unknown mode, for "wait" while the engine sleeps and
        has requests, and for "wait" with another key than None while the operator's pause keeps requests.
        """
        _among("mode", mode, get_args(PauseMode))
        self.rouse()
        self.check_wait(mode, of_update=key is not None, asleep=bool(self._asleep))
        super().hold(key, mode)

    def resume(self) -> None:
        """End the operator's pause, complete or not; pauses of weight updates continue. Does nothing during an
        automatic sleep.

        Raises RequestError while the engine sleeps on request.
        """
        if self.dozes:
            return
        if self._asleep:
            parts = " and ".join(sorted(self._asleep))
            raise RequestError(f"the engine sleeps without its {parts}; wake_up brings them back", param="tags")
        self.release(None)

    @property
    def is_paused(self) -> bool:
        """Whether the operator's pause is in force, so that requests wait for `resume`."""
        return not self.dozes and None in self._pauses

    def rest(self) -> float:
        """Carry out a pending `recompute`, or drop expired reads of weights. Returns the number of seconds after which
        to call this again: 0 after the recompute, else that of the reads, inf without reads.
        """
        return 0.0 if self.recompute_if_still() else self._orders.expire()

    def poll(self) -> Events:
        """Drop expired reads of weights, and carry out a pending `recompute`; return the requests that a pause of mode
        "abort" ends.
        """
        self._orders.expire()
        return super().poll()

    def check(self, version: Version | None, mode: PauseMode, kv: KVMode) -> None:
        """Raise RequestError for an argument of a weight update that is invalid or not allowed at this time. mode, kv,
        version: see `switch` and PauseMode.
        """
        _among("mode", mode, get_args(PauseMode))
        _among("kv", kv, get_args(KVMode))
        self.check_wait(mode, of_update=True, asleep=bool(self._asleep))
        check_version(version)
        if version is None and self.version == MAX_VERSION:
            text = f"version is None, which counts on from {MAX_VERSION}, the last number; allowed now: another one"
            raise RequestError(text, param="version", value=version)

    def switch(self, new: NewWeights, version: Version | None = None, kv: KVMode = "recompute") -> WeightUpdate:
        """Replace the weights while the engine is paused, and return what was replaced.

        Weights that slept are awake afterwards, unless other arrays, such as adapters, are still in host memory.
        Unfinished requests record the version with the number of their output tokens. Without kv="keep", and in a
        pooling model, they are computed again. version: version of the new weights; None for the last version plus one
        or, if that is a text, for the number of switches including this one. kv: treatment of keys and values of the
        old weights (KVMode).

        Weights of a draft model are replaced as `_switch_draft` describes: neither the version nor the requests'
        records change. Raises RequestError, with nothing changed, for an invalid argument, and for a version with a
        draft model's weights. Asserts that the pause is complete.
        """
        self.check(version, "keep", kv)
        if new.are_of_draft:
            return _switch_draft(self, new, version, kv)
        if version is None:
            version = self.version + 1 if isinstance(self.version, int) else self._num_switches + 1
        assert self.is_still, "weights are replaced between two steps"
        start, scheduler = time.monotonic(), self.loop.scheduler
        preempt_stale(self.loop, kv)
        self._num_switches += 1
        # The digest counts switches: a caller may use a version again for other weights.
        scheduler.replace_weights(hashlib.sha256(self._num_switches.to_bytes(8, "big")).digest())
        new.put()
        for extension in scheduler.extensions:
            extension.weights_replaced()
        reset_caches(scheduler, prefixes=kv == "drop")
        if sleep.are_present(self.loop.runner):  # otherwise other arrays, such as adapters, are still in host memory
            self._asleep.discard(WEIGHTS)
        self.version = version
        for request in scheduler.requests:
            num_output = len(scheduler.output_token_ids(request))
            if request.weight_versions[-1][1] == num_output:
                request.weight_versions.pop()
            request.weight_versions.append((version, num_output))
        paused = time.monotonic() - start
        self._updates.observe(new.seconds + paused)
        return WeightUpdate(version, new.num_leaves, new.num_bytes, new.seconds, paused)

    @property
    def asleep(self) -> set[str]:
        """Parts, of "weights" and "kv_cache", that are not on the devices now; a copy."""
        return set(self._asleep)

    def begin_sleep(
        self, level: int, mode: PauseMode, tags: Sequence[str] | None = None, keep_kv: bool = False
    ) -> None:
        """Begin the operator's pause (mode: PauseMode), for a later call of `sleep` with the other arguments once it is
        complete.

        An engine that sleeps automatically is not woken if all parts are to sleep: its sleep becomes the operator's.
        Raises the RequestErrors of `pause`, and RequestError for arguments of `sleep` that are not allowed.
        """
        parts = _parts(level, tags, keep_kv, self._keep_pages is not None)
        _among("mode", mode, get_args(PauseMode))
        if self.dozes and parts == PARTS:
            self.dozes = False
        else:
            self.pause(mode)

    def sleep(self, level: int, tags: Sequence[str] | None = None, keep_kv: bool = False) -> None:
        """Release device memory while the engine is paused, in addition to what an earlier call has released.

        level: 1 keeps the weights in host memory; 2 keeps no copy; 0 releases nothing. tags: parts to release,
        "weights", "kv_cache" or both; None for both. Without "kv_cache", pages, cached prefixes and running requests
        stay; with it, running requests are computed again after `wake`. keep_kv: copy cached pages to host memory
        first, and keep its content, so that requests find them after `wake`.

        Raises RequestError for arguments that are not allowed; MemoryError or jax's RuntimeError if copies cannot be
        made: `wake` then restores what was released. Asserts that the pause is complete.
        """
        parts = _parts(level, tags, keep_kv, self._keep_pages is not None)
        assert self.is_still, "an engine falls asleep between two steps"
        start, scheduler, runner = time.monotonic(), self.loop.scheduler, self.loop.runner
        asleep, self._asleep = self._asleep, self._asleep | parts
        if KV_CACHE in parts - asleep:
            scheduler.preempt_all()
            with self._keep_pages(scheduler.ranks) if keep_kv and self._keep_pages else nullcontext():
                reset_caches(scheduler)
            everywhere(runner, sleep.release_pools)
        if WEIGHTS in parts:
            self._level = max(level, self._level) if WEIGHTS in asleep else level
            everywhere(runner, sleep.release_weights, keep=level == 1)
        if parts:
            self._durations["sleep"].observe(time.monotonic() - start)

    def doze(self) -> None:
        """Put an engine without requests to sleep at level 1, until a request or call needs it: begin the operator's
        pause with mode "keep", release all parts, and set `dozes`.

        Raises MemoryError or jax's RuntimeError if copies cannot be made; the engine is then awake again, or sleeps on
        if waking fails, too.
        """
        self.hold(None, "keep")
        self.dozes = True
        try:
            self.sleep(1)
        except (RuntimeError, MemoryError):
            self.wake()
            raise

    def rouse(self) -> None:
        """Wake an engine that sleeps automatically, with the errors of `wake`; do nothing otherwise."""
        if self.dozes:
            self.wake()

    def wake(self, tags: Sequence[str] | None = None) -> bool:
        """Put the named parts back on the devices; end the operator's pause once no part sleeps. Return whether none
        does.

        tags: "weights", "kv_cache" or both; None for both; "scheduling" for none. Weights released at level 2 must be
        given to `switch` first. Raises RequestError for an unknown tag and for such weights that have not been given;
        jax's RuntimeError or MemoryError if memory cannot be allocated, with what was allocated released again.
        """
        start, wanted = time.monotonic(), self._asleep & _named(tags, (WEIGHTS, KV_CACHE, "scheduling"))
        try:
            if WEIGHTS in wanted and not everywhere(self.loop.runner, sleep.restore_weights):
                text = "the weights were given up at level 2: give new ones by update_weights"
                raise RequestError(text, param="tags")
            if KV_CACHE in wanted:
                everywhere(self.loop.runner, sleep.allocate_pools)
        except (RuntimeError, MemoryError):
            if KV_CACHE in wanted:
                everywhere(self.loop.runner, sleep.release_pools)
            if WEIGHTS in wanted:
                everywhere(self.loop.runner, sleep.release_weights, keep=True)
            raise
        self._asleep -= wanted
        if wanted:
            self._durations["wake"].observe(time.monotonic() - start)
        if not self._asleep:
            self.dozes = False
            self.resume()
        return not self._asleep

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        own = {
            "pause_engine": self.pause,
            "pause_is_there": self.settle,
            "resume_engine": self.resume,
            "begin_sleep": self.begin_sleep,
            "wake_engine": self.wake,
            "recompute_running": self.recompute,
        }
        return {name: own.get(name) or getattr(self._orders, name) for name in WEIGHT_UTILITIES}

    def metrics(self) -> Iterator[Metric | Histogram]:
        level = self._level if WEIGHTS in self._asleep else 0
        states = {"awake": not self._asleep, "weights_offloaded": level == 1, "discard_all": level == 2}
        for name, holds in states.items():
            yield Gauge("vllm:engine_sleep_state", float(holds), {"sleep_state": name})
        for operation, durations in self._durations.items():
            yield durations.metric("vllm:sleep_mode_operation_duration_seconds", {"operation": operation})
        yield self._updates.metric("vllm:rl_weight_update_operation_duration_seconds", {"operation": "update"})

    def status(self) -> dict[str, Any]:
        """Return, under "weights", the "version" of the weights, the number of "switches", whether the operator's pause
        is in force ("paused"), and the sorted parts that sleep ("asleep").
        """
        return {
            "weights": {
                "version": self.version,
                "switches": self._num_switches,
                "paused": self.is_paused,
                "asleep": sorted(self._asleep),
            }
        }


def _switch_draft(weights: Weights, new: NewWeights, version: Version | None, kv: KVMode) -> WeightUpdate:
    """Replace a draft model's weights while the engine is paused, and return what was replaced. The engine's version
    stays, since no sampled token depends on a draft model.

    kv: "recompute" and "drop" preempt running requests and reset the prefix cache, whose pages also have the draft
    model's keys and values. Raises RequestError for a version other than None. Asserts that the pause is complete.
    """
    if version is not None:
        text = f"version is {version!r}; allowed with target='draft': None, for the weights of the model stay"
        raise RequestError(text, param="version", value=version)
    assert weights.is_still, "weights are replaced between two steps"
    start, scheduler = time.monotonic(), weights.loop.scheduler
    if kv != "keep":
        scheduler.preempt_all()
        scheduler.reset_prefix_cache()
    new.put()
    for extension in scheduler.extensions:
        extension.weights_replaced()
    return WeightUpdate(weights.version, new.num_leaves, new.num_bytes, new.seconds, time.monotonic() - start)


def _named(tags: Sequence[str] | None, known: tuple[str, ...] = (WEIGHTS, KV_CACHE)) -> set[str]:
    """Return the parts that `tags` names as a set; None names all, an empty collection none. Raises RequestError for
    anything but a collection of known tags or None.
    """
    if not isinstance(tags, Collection | None):
        raise refuse("tags", tags, "None or a list of tags")
    for tag in tags or ():
        _among("tags", tag, known)
    return set(PARTS if tags is None else tags)


def _parts(level: int, tags: Sequence[str] | None, keep_kv: bool, can_keep: bool) -> set[str]:
    """Return the parts that `sleep` with these arguments releases; an empty set for level 0. Raises RequestError for
    arguments that are not allowed.

    can_keep: whether the engine has tiers, which keep_kv needs.
    """
    _among("level", level, SLEEP_LEVELS)
    parts = _named(tags)
    if tags is not None and not (level and parts):
        allowed = f"{WEIGHTS}, {KV_CACHE} or both" if level else "None with level 0, which releases nothing"
        raise invalid("tags", tags, allowed)
    if not isinstance(keep_kv, bool) or (keep_kv and not (can_keep and level == 1 and KV_CACHE in parts)):
        text = "allowed: False, or True at level 1 if kv_cache is released and kv_offloading_size is set"
        raise RequestError(f"keep_kv is {show_value(keep_kv)}; {text}", param="keep_kv", value=keep_kv)
    return parts if level else set()


def _among(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise RequestError, which names the argument, for a value that is not one of `allowed`, and for a bool."""
    if isinstance(value, bool) or value not in allowed:
        raise RequestError(f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}", param=name, value=value)
