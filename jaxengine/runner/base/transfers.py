"""Transfers between the host and the devices that the engine makes on purpose, in each step.

jax calls them implicit, because a numpy array goes to a compiled program and `np.asarray` takes a result, and its
transfer guard (JAX_TRANSFER_GUARD, `jax.transfer_guard`) would refuse them. `jax.device_put` is explicit, but takes ten
times as long as a compiled program needs for the same copy. So these are allowed where they are made, and a guard
still finds those that nobody meant.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax
import numpy as np


def sending() -> AbstractContextManager[None]:
    """Context manager for the call of a compiled program that takes numpy arrays."""
    return jax.transfer_guard_host_to_device("allow")


def fetched(array: jax.Array) -> np.ndarray:
    """Wait for an array of this process's devices and return it as a numpy array."""
    with jax.transfer_guard_device_to_host("allow"):
        return np.asarray(array)
