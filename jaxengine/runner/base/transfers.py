"""Transfers between the host and the devices that the engine makes on purpose, in each step.

jax calls them implicit, because a numpy array goes to a compiled program and `np.asarray` takes a result, and its
transfer guard (JAX_TRANSFER_GUARD, `jax.transfer_guard`) would refuse them. `jax.device_put` is explicit, but takes
four times as long as the call of a small program that copies the same array. So these transfers are allowed where they
are made, and a guard still finds those that nobody meant.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import jax
import numpy as np

_UNGUARDED = nullcontext()
# What jax.config has where transfers are allowed. To ask it takes a quarter of the time of a scope.
_ALLOWED = (None, "allow")


def sending() -> AbstractContextManager[None]:
    """Context manager for the call of a compiled program that takes numpy arrays."""
    config = jax.config
    if config.jax_transfer_guard in _ALLOWED and config.jax_transfer_guard_host_to_device in _ALLOWED:
        return _UNGUARDED
    return jax.transfer_guard_host_to_device("allow")


def fetched(array: jax.Array) -> np.ndarray:
    """Wait for an array of this process's devices and return it as a numpy array."""
    config = jax.config
    if config.jax_transfer_guard in _ALLOWED and config.jax_transfer_guard_device_to_host in _ALLOWED:
        return np.asarray(array)
    with jax.transfer_guard_device_to_host("allow"):
        return np.asarray(array)
