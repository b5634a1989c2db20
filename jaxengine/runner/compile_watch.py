"""CompileWatch: counts the XLA compilations, from any cause, that happen while an engine serves."""

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
    """Counter of the compilations that run on a thread while it is inside `watch()`. `count` is their number.

    An engine's thread is inside `watch()` whenever it serves, so the count must stay 0 after start-up. Compilations by
    other engines or by the user's own code in the same process are not counted.
    """

    def __init__(self) -> None:
        """Begin at 0. The first watch of a process registers a listener of jax's compilation events."""
        self.count = 0
        _listen()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Count the compilations that run on this thread inside the context. In nested contexts only the innermost
        watch counts.
        """
        outer = getattr(_active, "watch", None)
        _active.watch = self
        try:
            yield
        finally:
            _active.watch = outer


def _listen() -> None:
    """Register the listener of jax's compilation events once, for all engines: jax cannot remove it."""
    global _registered
    with _listening:
        if not _registered:
            jax.monitoring.register_event_duration_secs_listener(_count)
            _registered = True


def _count(event: str, duration_secs: float, **_: str | int | float) -> None:
    """Listen to jax's events: increment the count of the watch that this thread is in, if any, for each compilation."""
    watch = getattr(_active, "watch", None)
    if watch is not None and event == _EVENT:
        watch.count += 1
