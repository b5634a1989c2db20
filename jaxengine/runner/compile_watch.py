"""Counts what XLA compiles while an engine is at work, whoever asked for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_active = threading.local()
_listening = threading.Lock()
_registered = False


class CompileWatch:
    """`count` is the number of compilations that ran on a thread while it was inside `watch()`.

    An engine that is serving is always inside, so after its start-up the count must stay 0. Work of other engines or
    of the user's own on the same process is not counted.
    """

    def __init__(self) -> None:
        self.count = 0
        _listen()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        outer = getattr(_active, "watch", None)
        _active.watch = self
        try:
            yield
        finally:
            _active.watch = outer


def _listen() -> None:
    """Registers the listener unless that is done: jax offers no way to take one back, so one serves all engines."""
    global _registered
    with _listening:
        if not _registered:
            jax.monitoring.register_event_duration_secs_listener(_count)
            _registered = True


def _count(event: str, duration_secs: float, **_: str | int | float) -> None:
    watch = getattr(_active, "watch", None)
    if watch is not None and event == _EVENT:
        watch.count += 1
