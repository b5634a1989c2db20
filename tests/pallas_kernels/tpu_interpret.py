"""TPU kernels on the CPU: jax's interpreter with every race of every kernel, and with semaphores that must end at 0.

    install()                                             # once per process
    kernel(..., interpret=interpret_params("on_wait"))    # and again with "eager"
    assert not problems()

Both orders are needed: a copy that nobody waits for is read too early when it runs "on_wait" (NaN), and is a race when
it runs "eager". A wait for a copy that nobody started never returns: run under a time limit.
"""

from __future__ import annotations

from typing import Literal

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from tests.pallas_kernels import faster_interpreters, findings

_clear_shared_memory = interpreter._clear_shared_memory


def install() -> None:
    """Make jax's interpreter report here; RuntimeError on a jax release this was not fitted to."""
    findings.check_version()
    faster_interpreters.install()
    findings.record_races(interpreter)
    interpreter._clear_shared_memory = _end_of_kernel


def interpret_params(dma: Literal["on_wait", "eager"]) -> pltpu.InterpretParams:
    return pltpu.InterpretParams(detect_races=True, dma_execution_mode=dma, **findings.go_on_after_races())


def reset() -> None:
    """Forget findings, and what a kernel that raised has left behind."""
    interpreter.reset_tpu_interpret_mode_state()
    findings.clear()


def problems() -> list[str]:
    """What was found since `reset`; call it after the results are ready."""
    return findings.found()


def _end_of_kernel() -> None:
    semaphores = interpreter._get_shared_memory().sem.values()
    if any(semaphore.count_by_core.any() or any(semaphore.tasks) for semaphore in semaphores):
        findings.add("a kernel ends with copies that nobody has waited for")
    _clear_shared_memory()
