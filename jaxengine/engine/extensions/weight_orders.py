"""Functions by which an operator's server reads weights and looks at pauses. Arguments and results are plain JSON."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from jaxengine.engine.weight_types import KVMode, PauseMode, Version
from jaxengine.runner.weight_update import NewWeights, checksums, read_weights
from jaxengine.scheduler.errors import RequestError

# Folders that are read at once, each of which takes the memory of all weights.
MAX_READS = 2


class WeightOrders:
    """The utilities of jaxengine.engine.weight_types that are no methods of Weights. None of them waits."""

    def __init__(self, weights: Any):
        """weights: the engine's jaxengine.engine.extensions.weights.Weights."""
        self._weights = weights
        self._reads: dict[int, Future[NewWeights]] = {}
        self._num_reads = 0

    def engine_pause(self) -> dict[str, Any]:
        """Return whether the engine is paused, which parts of it sleep, and the version of its weights."""
        own = self._weights
        return {"is_paused": own.is_paused, "asleep": sorted(own.asleep), "weight_version": own.version}

    def weight_checksums(self) -> dict[str, str]:
        self._weights.rouse()
        return checksums(self._weights.loop.runner)

    def read_weights(self, path: str, version: Version | None, mode: PauseMode, kv: KVMode, strict: bool) -> int:
        """Begins to read a folder on a thread; returns the number by which `weights_are_read` knows it.

        version, mode, kv: of the update to come, only checked here; strict: as of `LLM.update_weights`. Raises
        RequestError for one of the three that is not allowed, and for more than MAX_READS that are being read, or are
        read and neither used nor forgotten. What is wrong with the folder `weights_are_read` raises.
        """
        self._weights.check(version, mode, kv)
        if len(self._reads) >= MAX_READS:
            text = f"{MAX_READS} folders are being read or wait for their switch; try again when one of them is in use"
            raise RequestError(text, param="path")
        self._num_reads += 1
        job: Future[NewWeights] = Future()
        self._reads[self._num_reads] = job

        def read() -> None:
            if job.set_running_or_notify_cancel():
                try:
                    job.set_result(read_weights(self._weights.loop.runner, path, strict=strict))
                except Exception as error:
                    job.set_exception(error)

        threading.Thread(target=read, name="jaxengine-weights", daemon=True).start()
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
        self._reads.pop(number, None)
        self._weights.release(number)

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
        return self._reads[number]
