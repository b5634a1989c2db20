"""Backends that run a recorded step again: kernels of a platform, on its devices or on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxengine.models.cache import platform_of
from jaxengine.models.kernel_rows import INTERPRETED, PLATFORM_OF_OPTION, interpreted, rows_of
from jaxengine.records.step_file import RecordError

NATIVE, CPU, INTERPRET, XLA = "native", "cpu", "interpret", "xla"
BACKENDS = (NATIVE, CPU, INTERPRET, XLA)


class Backend(NamedTuple):
    """Kernels and devices that run a step.

    Attributes:
      name: one of BACKENDS.
      platform: platform whose kernels run, a name of jaxengine.pallas_kernels.registry.
      context: context manager within which programs are traced and run.
      device: kind of device, as jax names it; None for the default one.
    """

    name: str
    platform: str
    context: Callable[[], AbstractContextManager[Any]]
    device: str | None

    def devices(self, count: int) -> Sequence[Any]:
        """Return the first `count` devices of the backend's kind.

        Raises RecordError if there are fewer, and for the backend "native" if their platform is not the recorded one.
        """
        found = jax.devices(self.device)
        if self.device is None and platform_of(found[0]) != self.platform:
            raise RecordError(
                f"the step was recorded on {self.platform!r}, and this machine has {platform_of(found[0])!r}; "
                "--backend cpu, interpret and xla run it on any"
            )
        if len(found) < count:
            raise RecordError(f"the step was recorded on {count} devices, and there are {len(found)}")
        return found[:count]


def choose_backend(name: str, recorded: str, kernels: str | None = None) -> Backend:
    """Return the backend called `name`, one of BACKENDS, for steps that were recorded on platform `recorded`.

    kernels: value of PLATFORM_OF_OPTION whose kernels "interpret" runs; None for those of `recorded`. Raises
    RecordError for an unknown name, for a platform without kernels to interpret, and if `kernels` is given with another
    backend than "interpret".
    """
    if name not in BACKENDS:
        raise RecordError(f"backend is {name!r}; allowed: {', '.join(BACKENDS)}")
    if kernels is not None and name != INTERPRET:
        raise RecordError(f"--kernels is for --backend interpret, not {name}")
    if name == NATIVE:
        return Backend(name, recorded, nullcontext, None)
    if name != INTERPRET:
        platform = PLATFORM_OF_OPTION[name]
        return Backend(name, platform, nullcontext if name == CPU else partial(rows_of, platform), "cpu")
    platform = recorded if kernels is None else PLATFORM_OF_OPTION.get(kernels, kernels)
    if platform not in INTERPRETED:
        raise RecordError(f"platform {platform!r} has no Pallas kernels to interpret; --backend cpu or xla runs it")
    return Backend(name, platform, partial(interpreted, platform), "cpu")


def prepare_devices(backend: str, count: int) -> None:
    """Set jax to the CPU platform with `count` devices, unless the backend is "native". Has no effect once jax has
    initialised its devices.
    """
    if backend == NATIVE:
        return
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # too late, as in a program that has run something; `devices` says if there are too few
        return
