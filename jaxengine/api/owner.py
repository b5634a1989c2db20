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
    """

    def __init__(self, *, has_devices: bool):
        """Mark the current process as the owner, and register the fork handlers. has_devices: whether the process uses
        jax's devices. If no owner does, forks must not touch jax, which would initialise its devices.
        """
        self.is_here = True
        self._pid = os.getpid()
        _OWNERS.add(self)
        _watch_forks()
        if has_devices:
            _watch_forks_with_devices()

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
    """Register `_leave_owners` to run in forked processes. Later calls do nothing."""
    os.register_at_fork(after_in_child=_leave_owners)


@cache
def _watch_forks_with_devices() -> None:
    """Register `_keep_clients` to run in forked processes. Later calls do nothing."""
    os.register_at_fork(after_in_child=_keep_clients)


def _leave_owners() -> None:
    """In a forked process, mark all owners as not here."""
    for owner in list(_OWNERS):
        owner.is_here = False


def _keep_clients() -> None:
    """Keep jax's clients alive until the forked process ends, also if all owners have been deleted before the fork.

    At exit a process deletes jax's clients, which would wait for threads that a fork does not have. An additional
    reference to each client, which is never released, prevents that.
    """
    import jax  # an owner of devices has imported it; API processes do without

    for platform in (None, "cpu"):
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS leaves this one out
            for device in jax.local_devices(backend=platform):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(device.client))
