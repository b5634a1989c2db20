"""The share of a CUDA card that jax's client takes, so that gpu_memory_utilization is a share of the card.

jax takes a share of a card when it first looks for devices, by default three quarters, and never more afterwards. An
engine that comes first says how much. `gpu_memory_utilization` is what it plans for; the client takes a little more,
for gaps between allocations.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import jax

logger = logging.getLogger(__name__)

# XLA's own variables; the second is the name that older releases of jax know.
FRACTION, OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_FRACTIONS = FRACTION, OLD_FRACTION
JAX_SHARE = 0.75
_PLUGINS = "jax_cuda12_plugin", "jax_cuda13_plugin", "jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"
# 1 / _GAPS of the client's memory is left for gaps between allocations.
_GAPS = 32
_CPU_DEVICES = "jax_num_cpu_devices"


def client_share(utilization: float) -> float:
    """Return the share of a card, at most 1, that jax's client must take so that `usable` of it is the share
    `utilization` of the card.
    """
    return min(1.0, utilization * _GAPS / (_GAPS - 1))


def usable(limit: int) -> int:
    """Return the bytes that an engine may plan for, of the `limit` bytes that jax's client has: all but 1/32, rounded
    down, which is left for gaps.
    """
    return limit - limit // _GAPS


def claim_card(utilization: float) -> None:
    """Make jax's client take the share of each CUDA card that `utilization` needs, by setting an environment variable.
    Call it before jax looks for devices.

    Does nothing without a CUDA plugin, or if such a variable is set. If jax has initialised its devices already, it has
    no effect, and a warning is logged if the client has less of a GPU than is needed.
    """
    if not any(map(_is_installed, _PLUGINS)) or any(name in os.environ for name in _FRACTIONS):
        return
    if _has_devices():
        if client_share(utilization) > JAX_SHARE and jax.default_backend() == "gpu":
            logger.warning(
                "jax was in use before this engine and has %.0f %% of the card: an engine has less than %s of it "
                "(gpu_memory_utilization); make it first, or set %s",
                100 * JAX_SHARE,
                utilization,
                FRACTION,
            )
        return
    os.environ.update(client_environment(utilization))


def client_environment(utilization: float) -> dict[str, str]:
    """Return the environment variables that make jax's client take the share of a card that `utilization` needs."""
    return {FRACTION: f"{client_share(utilization):.4f}"}


def card_bytes(limit: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of a card from the `limit` bytes that jax's client has of it: limit divided by the fraction that
    the first non-empty variable of _FRACTIONS in `environment` sets, else by JAX_SHARE, rounded down. Raises ValueError
    for a fraction that is no number.
    """
    given = next((environment[name] for name in _FRACTIONS if environment.get(name)), None)
    return int(limit / (JAX_SHARE if given is None else float(given)))


def _is_installed(module: str, find: Callable[[str], object] = find_spec) -> bool:
    """Whether a module can be imported; imports its parent packages only. find: replacement of find_spec, for tests."""
    try:
        return find(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _has_devices() -> bool:
    """Whether jax has initialised its devices, tested by setting the number of CPU devices, which jax then refuses; the
    setting is restored.
    """
    before = getattr(jax.config, _CPU_DEVICES)
    try:
        jax.config.update(_CPU_DEVICES, 1 if before != 1 else 2)
    except RuntimeError:
        return True
    jax.config.update(_CPU_DEVICES, before)
    return False
