"""Weights that are replaced while requests run: pauses, versions, and what becomes of keys and values.

A switch lies between two steps with none in flight, so that each token belongs to one version, and nothing compiles:
executables take weights as arguments.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, get_args

from jaxengine.engine.extension import NO_EVENTS, Events, Loop, LoopExtension
from jaxengine.engine.weight_utilities import WEIGHT_UTILITIES
from jaxengine.runner import sleep
from jaxengine.runner.weight_update import NewWeights, checksums, read_weights
from jaxengine.scheduler.errors import RequestError
from jaxengine.scheduler.extensions.intake import Intake
from jaxengine.scheduler.request import FinishReason, Request

# What becomes of the requests that are there: they stay where they are, run to their end, or end at once.
PauseMode = Literal["keep", "wait", "abort"]
# What becomes of keys and values that earlier weights made: running requests go on with them, or are computed again;
# `drop` also gives up the cached prefixes, which nobody finds either way, at once.
KVMode = Literal["keep", "recompute", "drop"]
Version = int | str
# What sleeps: given up and put back apart from each other.
WEIGHTS, KV_CACHE = "weights", "kv_cache"
SLEEP_LEVELS = (0, 1, 2)
# Folders that are read at once, each of which takes the memory of all weights.
MAX_READS = 2


class WeightUpdate(NamedTuple):
    """A switch to new weights.

    Attributes:
      version: the new weights'.
      leaves: arrays that were replaced; num_bytes: of these, over all devices of this process.
      load_seconds: that reading and placing took, while steps went on; switch_seconds: between two steps.
    """

    version: Version
    leaves: int
    num_bytes: int
    load_seconds: float
    switch_seconds: float


class Weights(LoopExtension):
    """Pauses the engine and switches its weights.

    Attributes:
      version: of the weights that the next step will use.
    """

    def __init__(self) -> None:
        self.version: Version = 0
        self._num_switches = 0
        self._intake = Intake()
        self._aborts = False
        self._asleep: set[str] = set()
        self._reads: dict[int, Future[NewWeights]] = {}
        self._num_reads = 0

    def attach(self, loop: Loop) -> None:
        super().attach(loop)
        loop.scheduler.extensions.append(self._intake)
        for request in loop.scheduler.requests:
            self.prepare(request)

    def prepare(self, request: Request) -> None:
        request.weight_versions = [(self.version, 0)]

    def pause(self, mode: PauseMode) -> None:
        """Begins a pause. Steps must go on until `settle` says that it is there.

        Raises RequestError for another mode.
        """
        _among("mode", mode, get_args(PauseMode))
        scheduler = self.loop.scheduler
        if mode == "keep":
            scheduler.paused = True
            return
        self._intake.close(1 + max((each.arrival_index for each in scheduler.requests), default=-1))
        self._aborts = mode == "abort"

    def resume(self) -> None:
        """Ends a pause, or the beginning of one. Raises RequestError while the engine sleeps."""
        if self._asleep:
            parts = " and ".join(sorted(self._asleep))
            raise RequestError(f"the engine sleeps without its {parts}; wake_up brings them back", param="tags")
        self.loop.scheduler.paused = False
        self._intake.open()
        self._aborts = False

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for `resume`."""
        return self.loop.scheduler.paused or self._intake.first is not None

    def settle(self) -> bool:
        """Whether the pause is there: no step is in flight, and nobody is left for whom it waits."""
        if self.loop.in_flight or not (self.loop.scheduler.paused or not self._earlier()):
            return False
        self.loop.scheduler.paused = True
        return True

    def poll(self) -> Events:
        if not self._aborts:
            return NO_EVENTS
        self._aborts = False
        return Events(ended=[(request, FinishReason.ABORT, None) for request in self._earlier()])

    def check(self, version: Version | None, mode: PauseMode, kv: KVMode) -> None:
        """Raises RequestError for an argument of an update that is not allowed."""
        _among("mode", mode, get_args(PauseMode))
        _among("kv", kv, get_args(KVMode))
        if isinstance(version, bool) or not isinstance(version, int | str | None):
            raise RequestError(f"version is {version!r}; allowed: an integer or a text", param="version", value=version)

    def switch(self, new: NewWeights, version: Version | None = None, kv: KVMode = "recompute") -> WeightUpdate:
        """Replaces the weights while the engine is paused. version: None counts on from the last number.

        Raises RequestError for an invalid argument, and nothing has changed then.
        """
        self.check(version, "keep", kv)
        version = self._next_version(version)
        assert self.settle(), "weights are replaced between two steps"
        start, scheduler = time.monotonic(), self.loop.scheduler
        if kv != "keep":
            scheduler.preempt_all()
        self._num_switches += 1
        # Not the version: its caller may use a name again for other weights.
        scheduler.replace_weights(hashlib.sha256(self._num_switches.to_bytes(8, "big")).digest())
        new.put(self.loop.runner)
        if kv == "drop":
            scheduler.reset_prefix_cache()
        for extension in scheduler.extensions:
            extension.reset_cache()
        self._asleep.discard(WEIGHTS)
        self.version = version
        for request in scheduler.requests:
            num_output = len(scheduler.output_token_ids(request))
            if request.weight_versions[-1][1] == num_output:
                request.weight_versions.pop()
            request.weight_versions.append((version, num_output))
        return WeightUpdate(version, new.num_leaves, new.num_bytes, new.seconds, time.monotonic() - start)

    @property
    def asleep(self) -> set[str]:
        """What is not on the devices now."""
        return set(self._asleep)

    def check_sleep(self, level: int, mode: PauseMode) -> None:
        """Raises RequestError for an argument of a sleep that is not allowed."""
        _among("level", level, SLEEP_LEVELS)
        _among("mode", mode, get_args(PauseMode))

    def sleep(self, level: int) -> None:
        """Gives up device memory while the engine is paused. Running requests are computed again after `wake`.

        level: 0 gives up nothing; 1 the pools, and the weights, which host memory keeps; 2 the weights without a copy.
        Raises RequestError for another one.
        """
        _among("level", level, SLEEP_LEVELS)
        assert self.settle(), "an engine falls asleep between two steps"
        if level == 0:
            return
        scheduler, runner = self.loop.scheduler, self.loop.runner
        if KV_CACHE not in self._asleep:
            scheduler.preempt_all()
            scheduler.reset_prefix_cache()
            for extension in scheduler.extensions:
                extension.reset_cache()
            sleep.release_pools(runner)
        sleep.release_weights(runner, keep=level == 1)
        self._asleep = {WEIGHTS, KV_CACHE}

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Puts back what these tags name, by default all. Weights of level 2 must be given to `switch` first.

        Raises RequestError for another tag, and for weights that nobody has.
        """
        for tag in tags or ():
            _among("tags", tag, (WEIGHTS, KV_CACHE))
        wanted = self._asleep & set(tags if tags is not None else (WEIGHTS, KV_CACHE))
        if WEIGHTS in wanted and not sleep.restore_weights(self.loop.runner):
            raise RequestError("the weights were given up at level 2: give new ones by update_weights", param="tags")
        if KV_CACHE in wanted:
            sleep.allocate_pools(self.loop.runner)
        self._asleep -= wanted

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        return {name: getattr(self, f"_{name}") for name in WEIGHT_UTILITIES}

    def shutdown(self) -> None:
        for job in self._reads.values():
            job.cancel()

    def _pause_engine(self, mode: PauseMode) -> None:
        self.pause(mode)

    def _pause_is_there(self) -> bool:
        return self.settle()

    def _resume_engine(self) -> None:
        self.resume()

    def _engine_pause(self) -> dict[str, Any]:
        return {"is_paused": self.is_paused, "asleep": sorted(self._asleep), "weight_version": self.version}

    def _check_sleep(self, level: int, mode: PauseMode) -> None:
        self.check_sleep(level, mode)

    def _fall_asleep(self, level: int) -> None:
        self.sleep(level)

    def _wake_engine(self, tags: Sequence[str] | None) -> None:
        self.wake(tags)
        if not self._asleep:
            self.resume()

    def _weight_checksums(self) -> dict[str, str]:
        return checksums(self.loop.runner)

    def _read_weights(self, path: str, version: Version | None, mode: PauseMode, kv: KVMode, strict: bool) -> int:
        """Begins to read a folder on a thread; returns the number by which `weights_are_read` knows it."""
        self.check(version, mode, kv)
        if len(self._reads) >= MAX_READS:
            raise RequestError(f"{MAX_READS} folders are being read; try again when one of them is done", param="path")
        self._num_reads += 1
        job: Future[NewWeights] = Future()
        self._reads[self._num_reads] = job

        def read() -> None:
            if job.set_running_or_notify_cancel():
                try:
                    job.set_result(read_weights(self.loop.runner, path, strict=strict))
                except Exception as error:
                    job.set_exception(error)

        threading.Thread(target=read, name="jaxengine-weights", daemon=True).start()
        return self._num_reads

    def _weights_are_read(self, number: int) -> bool:
        """Whether a folder has been read. Raises RequestError, and forgets it, if that failed."""
        job = self._job(number)
        if job.done() and (error := job.exception()) is not None:
            del self._reads[number]
            raise error
        return job.done()

    def _forget_read_weights(self, number: int) -> None:
        self._reads.pop(number, None)

    def _switch_weights(self, number: int, version: Version | None, kv: KVMode) -> dict[str, Any]:
        """Replaces the weights by those that were read, while the engine is paused."""
        new = self._job(number).result(timeout=0)
        del self._reads[number]
        return self.switch(new, version, kv)._asdict()

    def _job(self, number: int) -> Future[NewWeights]:
        if number not in self._reads:
            raise RequestError(f"there are no weights {number} that were read", param="number", value=number)
        return self._reads[number]

    def status(self) -> dict[str, Any]:
        return {
            "weights": {
                "version": self.version,
                "switches": self._num_switches,
                "paused": self.is_paused,
                "asleep": sorted(self._asleep),
            }
        }

    def _next_version(self, version: Version | None) -> Version:
        if version is None:
            return self.version + 1 if isinstance(self.version, int) else self._num_switches + 1
        return version

    def _earlier(self) -> list[Request]:
        """Requests that do not wait for the pause to end."""
        first = self._intake.first
        return [each for each in self.loop.scheduler.requests if first is None or each.arrival_index < first]


def _among(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if isinstance(value, bool) or value not in allowed:
        raise RequestError(f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}", param=name, value=value)
