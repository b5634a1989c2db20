"""Utilities by which an operator's server reads weights and inspects pauses. Arguments and results are plain JSON."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jaxengine.engine.weight_types import KVMode, PauseMode, Version
from jaxengine.runner.weights.weight_names import Target, check_chunk_bytes, check_target
from jaxengine.runner.weights.weight_update import NewWeights, checksums, read_weights
from jaxengine.scheduler.base.errors import RequestError

# Largest number of reads at once, each of which takes host memory for all weights.
MAX_READS = 2
# Time without a call about a read after which it is dropped. A waiting caller makes a hundred calls a second, but a
# switch or a sleep may delay them for a while.
_LEASE_SECONDS = 120.0


@dataclass(eq=False)
class _Read:
    """Weights of a folder that a thread is reading or has read.

    Attributes:
      thread: reads the weights.
      job: result, the weights or the exception that ended the read.
      stopped: event that is set when the read is not needed any more.
      used: time.monotonic seconds of the last call about the read.
    """

    thread: threading.Thread
    job: Future[NewWeights]
    stopped: threading.Event
    used: float = field(default_factory=time.monotonic)


def _begin(read: Callable[[Callable[[], bool]], NewWeights]) -> _Read:
    """Call `read` on a new daemon thread and return its _Read. The argument of `read` is a function that returns
    whether to stop.
    """
    job, stopped = Future[NewWeights](), threading.Event()

    def run() -> None:
        try:
            job.set_result(read(stopped.is_set))
        except Exception as error:
            job.set_exception(error)

    thread = threading.Thread(target=run, name="jaxengine-weights", daemon=True)
    thread.start()
    return _Read(thread, job, stopped)


class WeightOrders:
    """Utilities named in jaxengine.engine.weight_types that are not methods of Weights. None of them waits."""

    def __init__(self, weights: Any):
        """Start without reads. weights: the engine's jaxengine.engine.extensions.weights.weights.Weights."""
        self._weights = weights
        self._reads: dict[int, _Read] = {}
        # Threads of dropped reads, which hold their memory until they end.
        self._ending: list[threading.Thread] = []
        self._num_reads = 0

    def engine_pause(self) -> dict[str, Any]:
        """Return whether the operator has paused the engine ("is_paused"), which of its parts sleep ("asleep", sorted),
        and the version of its weights ("weight_version").
        """
        own = self._weights
        return {"is_paused": own.is_paused, "asleep": sorted(own.asleep), "weight_version": own.version}

    def weight_checksums(self) -> dict[str, str]:
        """Return a digest of each weight by name, after waking an engine that sleeps automatically.

        Raises RequestError while weights sleep on request, ClusterError if a process is lost.
        """
        self._weights.rouse()
        return checksums(self._weights.loop.runner)

    def read_weights(
        self,
        path: str,
        version: Version | None,
        mode: PauseMode,
        kv: KVMode,
        strict: bool,
        chunk_bytes: int | None = None,
        target: Target = "model",
    ) -> int:
        """Begin to read a folder of weights on a thread; return the read's number, the argument of `weights_are_read`.

        version, mode, kv: arguments of the planned update, which are only checked here. Others: see
        `LLM.update_weights`. Raises RequestError for an invalid argument, and if MAX_READS reads are running, or
        complete but neither used nor dropped; a dropped read counts until its thread has ended. Errors of the folder,
        and of an engine without drafts, are raised by `weights_are_read`.
        """
        self._weights.check(version, mode, kv)
        check_chunk_bytes(chunk_bytes)
        check_target(target)
        self.expire()
        self._ending = [each for each in self._ending if each.is_alive()]
        if len(self._reads) + len(self._ending) >= MAX_READS:
            text = f"{MAX_READS} folders are being read or wait for their switch; try again when one of them is in use"
            raise RequestError(text, param="path")
        self._num_reads += 1
        runner = self._weights.loop.runner
        self._reads[self._num_reads] = _begin(
            lambda stop: read_weights(runner, path, strict=strict, chunk_bytes=chunk_bytes, target=target, stop=stop)
        )
        return self._num_reads

    def weights_are_read(self, number: int) -> bool:
        """Return whether the read of this number is complete. If it failed, drop it and raise its error (such as
        WeightUpdateError).

        Raises RequestError for an unknown number.
        """
        job = self._find(number)
        if job.done() and (error := job.exception()) is not None:
            del self._reads[number]
            raise error
        return job.done()

    def hold_engine(self, number: int, mode: PauseMode) -> None:
        """Begin the pause of a weight update, in addition to the operator's pause and those of other updates.

        number: number of a read. Switching to its weights or dropping them ends the pause. mode: see `Weights.pause`,
        whose errors this raises. Raises RequestError for an unknown number.
        """
        self._find(number)
        self._weights.hold(number, mode)

    def forget_read_weights(self, number: int) -> None:
        """Drop a read and its weights, stop the read if it runs, and end the pause that `hold_engine` began for it.
        Ignores an unknown number.
        """
        if (read := self._reads.pop(number, None)) is not None:
            read.stopped.set()
            self._ending.append(read.thread)
        self._weights.release(number)

    def expire(self) -> float:
        """Drop reads without a call for _LEASE_SECONDS, and end their pauses; return the number of seconds after which
        to call this again, inf if there are no reads.
        """
        if not self._reads:
            return float("inf")
        long_ago = time.monotonic() - _LEASE_SECONDS
        for number in [number for number, read in self._reads.items() if read.used < long_ago]:
            self.forget_read_weights(number)
        return _LEASE_SECONDS if self._reads else float("inf")

    def switch_weights(self, number: int, version: Version | None, kv: KVMode) -> dict[str, Any] | None:
        """Replace the engine's weights by those of a read, end the pause of `hold_engine`, drop the read, and return a
        WeightUpdate's fields. If `Weights.switch` raises, the pause is ended and the read dropped as well.

        Returns None, with nothing changed, while that pause is not complete: call again. version, kv: see
        `Weights.switch`. Raises RequestError for an unknown number, if the read is not complete, and without that
        pause; raises the read's error if it failed, and the errors of `Weights.switch`.
        """
        if not (job := self._find(number)).done():
            raise RequestError(f"the weights {number} are still being read", param="number", value=number)
        new = job.result()
        if not self._weights.settle(number):
            return None
        del self._reads[number]
        try:
            return self._weights.switch(new, version, kv)._asdict()
        finally:
            self._weights.release(number)

    def check_paused(self) -> None:
        """Raise RequestError unless the operator's pause has begun."""
        if not self._weights.is_paused:
            text = "the engine is not paused; allowed: after pause_generation (/pause) or sleep with level 0"
            raise RequestError(f"release_kv_cache_memory: {text}")

    def fall_asleep(self, level: int, tags: list[str] | None = None, keep_kv: bool = False) -> bool:
        """Put the engine to sleep if the operator's pause is complete; return whether it was complete. On False, call
        again.

        level, tags, keep_kv: see `Weights.sleep`, whose errors this raises. Raises RequestError if the pause has been
        ended.
        """
        if not self._weights.settle():
            return False
        self._weights.sleep(level, tags, keep_kv)
        return True

    def _find(self, number: int) -> Future[NewWeights]:
        """Return the future of a read's weights, and restart the time after which the read is dropped. Raises
        RequestError for an unknown number.
        """
        if number not in self._reads:
            raise RequestError(f"there are no weights {number} that were read", param="number", value=number)
        self._reads[number].used = time.monotonic()
        return self._reads[number].job
