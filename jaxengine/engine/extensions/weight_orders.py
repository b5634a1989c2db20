"""Functions by which an operator's server reads weights and looks at pauses. Arguments and results are plain JSON."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jaxengine.engine.weight_types import KVMode, PauseMode, Version
from jaxengine.runner.weight_names import check_chunk_bytes
from jaxengine.runner.weight_update import NewWeights, checksums, read_weights
from jaxengine.scheduler.errors import RequestError

# Folders that are read at once, each of which takes the memory of all weights.
MAX_READS = 2
# After which nobody is left who would use what was read: who waits asks a hundred times a second, but a switch or a
# sleep may keep the engine from hearing it for a while.
_LEASE_SECONDS = 120.0


@dataclass(eq=False)
class _Read:
    """A folder that a thread reads, or has read.

    Attributes:
      stopped: nobody wants it any more. asked: when somebody did last, in seconds of time.monotonic.
    """

    thread: threading.Thread
    job: Future[NewWeights]
    stopped: threading.Event
    asked: float = field(default_factory=time.monotonic)


def _begin(read: Callable[[Callable[[], bool]], NewWeights]) -> _Read:
    """Calls `read` on a thread of its own with a function that tells whether it is to stop."""
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
    """The utilities of jaxengine.engine.weight_types that are no methods of Weights. None of them waits."""

    def __init__(self, weights: Any):
        """weights: the engine's jaxengine.engine.extensions.weights.Weights."""
        self._weights = weights
        self._reads: dict[int, _Read] = {}
        # Of forgotten reads, which have their memory until they end.
        self._ending: list[threading.Thread] = []
        self._num_reads = 0

    def engine_pause(self) -> dict[str, Any]:
        """Return whether the engine is paused, which parts of it sleep, and the version of its weights."""
        own = self._weights
        return {"is_paused": own.is_paused, "asleep": sorted(own.asleep), "weight_version": own.version}

    def weight_checksums(self) -> dict[str, str]:
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
    ) -> int:
        """Begins to read a folder on a thread; returns the number by which `weights_are_read` knows it.

        version, mode, kv: of the update to come, only checked here; strict, chunk_bytes: as of `LLM.update_weights`.
        Raises RequestError for one that is not allowed, and for more than MAX_READS that are being read, or are read
        and neither used nor forgotten; one that is forgotten counts until its thread has ended. What is wrong with the
        folder `weights_are_read` raises.
        """
        self._weights.check(version, mode, kv)
        check_chunk_bytes(chunk_bytes)
        self.expire()
        self._ending = [each for each in self._ending if each.is_alive()]
        if len(self._reads) + len(self._ending) >= MAX_READS:
            text = f"{MAX_READS} folders are being read or wait for their switch; try again when one of them is in use"
            raise RequestError(text, param="path")
        self._num_reads += 1
        runner = self._weights.loop.runner
        self._reads[self._num_reads] = _begin(
            lambda stop: read_weights(runner, path, strict=strict, chunk_bytes=chunk_bytes, stop=stop)
        )
        return self._num_reads

    def weights_are_read(self, number: int) -> bool:
        """Whether a folder has been read. Raises the reading's error, such as WeightUpdateError, if that failed, and
        forgets it; RequestError for an unknown number.
        """
        job = self._find(number)
        if job.done() and (error := job.exception()) is not None:
            del self._reads[number]
            raise error
        return job.done()

    def hold_engine(self, number: int, mode: PauseMode) -> None:
        """Begins the pause of an update, beside the operator's and those of others.

        number: of weights that are read, whose switch or forgetting ends it. mode: as of `Weights.pause`, whose errors
        it raises; RequestError for an unknown number.
        """
        self._find(number)
        self._weights.hold(number, mode)

    def forget_read_weights(self, number: int) -> None:
        """Gives up weights that were read, if they have not been used, and ends the pause that waited for them."""
        if (read := self._reads.pop(number, None)) is not None:
            read.stopped.set()
            self._ending.append(read.thread)
        self._weights.release(number)

    def expire(self) -> float:
        """Forgets reads whose askers are gone, with their pauses; returns after how many seconds to call again."""
        if not self._reads:
            return float("inf")
        long_ago = time.monotonic() - _LEASE_SECONDS
        for number in [number for number, read in self._reads.items() if read.asked < long_ago]:
            self.forget_read_weights(number)
        return _LEASE_SECONDS if self._reads else float("inf")

    def switch_weights(self, number: int, version: Version | None, kv: KVMode) -> dict[str, Any] | None:
        """Replaces the weights by those that were read, and ends the pause of `hold_engine`; returns a WeightUpdate's
        fields. Returns None, with nothing changed, while that pause is not there yet: ask again.

        version, kv: as of `Weights.switch`. Raises RequestError for an unknown number, if they are not read yet, and
        without that pause; and the reading's error.
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

    def fall_asleep(self, level: int) -> bool:
        """Has the engine sleep once the operator's pause is there; returns whether it is, else ask again.

        level: as of `Weights.sleep`, whose errors it raises; RequestError if the pause has been ended.
        """
        if not self._weights.settle():
            return False
        self._weights.sleep(level)
        return True

    def _find(self, number: int) -> Future[NewWeights]:
        if number not in self._reads:
            raise RequestError(f"there are no weights {number} that were read", param="number", value=number)
        self._reads[number].asked = time.monotonic()
        return self._reads[number].job
