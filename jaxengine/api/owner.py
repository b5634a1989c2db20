"""Owner: the process to which an engine belongs. A fork has a copy of the engine's memory, but not its threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
from functools import cache
from weakref import WeakSet

from jaxengine.api.engine_client import EngineDeadError

_OWNERS: WeakSet[Owner] = WeakSet()


class Owner:
    """Mark of the process that has created this object, by which it is distinguished from its forks.

    Attributes:
      is_here: whether the code runs in that process, not in a fork of it.
      has_devices: whether that process uses jax's devices. If no owner does, the fork handler must not touch jax, which
        would initialise its devices.
    """

    def __init__(self, *, has_devices: bool):
        """Mark the current process as the owner, and register the fork handler."""
        self.is_here, self.has_devices = True, has_devices
        self._pid = os.getpid()
        _OWNERS.add(self)
        _watch_forks()

    def check(self) -> None:
        """Raise EngineDeadError in a fork, where every call would wait forever for a thread of the owner."""
        if not self.is_here:
            raise EngineDeadError(
                f"this engine belongs to process {self._pid}, and process {os.getpid()} is a fork without its threads "
                "and devices; create the engine in the process that uses it (multiprocessing: start method 'spawn'; "
                "datasets.map: without num_proc; gunicorn: without --preload), or send requests to `jaxengine serve`"
            )


def pickle_error(kind: str) -> TypeError:
    """Return the TypeError to raise when an engine is pickled or copied. kind: name of its class."""
    return TypeError(
        f"{kind} cannot be pickled or copied: its devices and threads belong to this process; create it in the process "
        "that uses it, or send requests to `jaxengine serve`"
    )


@cache
def _watch_forks() -> None:
    """Register `_after_fork` to run in forked processes. Later calls do nothing."""
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    """In a forked process, mark all owners as not here, and keep jax's clients alive until it ends.

    At exit a process deletes jax's clients, which would wait for threads that a fork does not have. An additional
    reference to each client, which is never released, prevents that. It is only needed if an owner has devices.
    """
    owners = list(_OWNERS)
    for owner in owners:
        owner.is_here = False
    if not any(owner.has_devices for owner in owners):
        return
    import jax  # an owner of devices has imported it; API processes do without

    for platform in (None, "cpu"):
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS leaves this one out
            for device in jax.local_devices(backend=platform):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(device.client))
