"""What interpreters find wrong with kernels besides their numbers, collected over all kernels of a run."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import jax
from jax._src.pallas.mosaic.interpret import vector_clock
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

# The jax releases, major and minor, whose private interpreter modules the *_interpret files work with.
FITTED_TO = ("0.10", "0.11", "0.12")
IS_FITTED = ".".join(jax.__version__.split(".")[:2]) in FITTED_TO
# Why Blackwell kernels do not run in this jax's interpreter, "" if they do.
NO_TCGEN05 = "" if hasattr(gpu_callbacks, "tcgen05_commit_arrive") else "jax's interpreter has no tcgen05 before 0.11.1"
_LOCK = threading.Lock()
_FOUND: dict[str, None] = {}


def check_version() -> None:
    """Raises RuntimeError on a jax release that the interpreters' additions were not fitted to."""
    if not IS_FITTED:
        raise RuntimeError(f"kernel interpreters are fitted to jax {', '.join(FITTED_TO)}, this is {jax.__version__}")


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


def go_on_after_races() -> dict[str, Any]:
    """Options of an interpreter that records a race and goes on, where a release would end the kernel: 0.12 does."""
    return {"on_race": "warn"} if hasattr(RaceDetectionState, "on_race") else {}


def record_races(interpreter: ModuleType) -> None:
    """Make `interpreter` keep the races of all kernels here. Its own state starts anew with every kernel."""
    for name in ("RaceDetectionState", "GPURaceDetectionState"):
        if hasattr(interpreter, name):
            setattr(interpreter, name, _recorded(getattr(interpreter, name)))


def _recorded(base: type) -> type:
    class RecordedRaces(base):
        @property
        def races_found(self) -> bool:
            return self._races_found

        @races_found.setter
        def races_found(self, value: bool) -> None:
            self._races_found = value
            if value:
                add("race (the lines are printed after RACE DETECTED)")

        def check_write(self, *arguments: Any, **options: Any) -> None:
            """Check, then forget the accesses to this range that came before: whoever races with them races with this.

            Each access is compared with all that are remembered, and a kernel writes the same buffers over and over.
            """
            super().check_write(*arguments, **options)
            # 0.10 has two arguments for a thread, later releases one; each access ends with (clock, range, line).
            *_, clock, buffer, place = arguments[: 5 if _HAS_CORES else 4]
            place = getattr(place, "range", place)

            def superseded(access) -> bool:
                *_, when, where, _ = access
                return where == place and when is not clock and _before(when, clock)

            with self.lock:
                for accesses in (self.reads, self.writes):
                    accesses[buffer] = [access for access in accesses[buffer] if not superseded(access)]

    return RecordedRaces


_HAS_CORES = hasattr(vector_clock, "lt")


def _before(clock: Any, other: Any) -> bool:
    return vector_clock.lt(clock, other) if _HAS_CORES else clock.lt(other)
