"""What interpreters find wrong with kernels besides their numbers, collected over all kernels of a run."""

from __future__ import annotations

import threading

import jax
from jax._src.pallas.mosaic.interpret import vector_clock
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState

FITTED_TO = "0.10.2"  # the jax release whose private interpreter modules the *_interpret files work with
_LOCK = threading.Lock()
_FOUND: dict[str, None] = {}


def check_version() -> None:
    """Raises RuntimeError on a jax release that the interpreters' additions were not fitted to."""
    if jax.__version__ != FITTED_TO:
        raise RuntimeError(f"the kernel interpreters are fitted to jax {FITTED_TO}, this is {jax.__version__}")


def add(message: str) -> None:
    """Remember a finding; called from the threads of an interpreter."""
    with _LOCK:
        _FOUND[message] = None


def clear() -> None:
    with _LOCK:
        _FOUND.clear()


def found() -> list[str]:
    with _LOCK:
        return list(_FOUND)


class RecordedRaces(RaceDetectionState):
    """Takes the place of jax's own state, which every kernel starts anew: only the last one's races would be seen."""

    @property
    def races_found(self) -> bool:
        return self._races_found

    @races_found.setter
    def races_found(self, value: bool) -> None:
        self._races_found = value
        if value:
            add("race (the lines are printed after RACE DETECTED)")

    def check_write(self, device_id, local_core_id, clock, buffer_key, rnge, source_info=None):
        """Check, then forget the accesses to this range that came before: whoever races with them races with this.

        Each access is compared with all that are remembered, and a kernel writes the same buffers over and over.
        """
        super().check_write(device_id, local_core_id, clock, buffer_key, rnge, source_info)

        def superseded(access) -> bool:
            _, _, when, where, _ = access
            return where == rnge and when is not clock and vector_clock.lt(when, clock)

        with self.lock:
            for accesses in (self.reads, self.writes):
                accesses[buffer_key] = [access for access in accesses[buffer_key] if not superseded(access)]
