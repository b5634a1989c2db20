"""The option sleep_idle_seconds, by which an engine that nobody uses gives up its devices' memory."""

from __future__ import annotations

from jaxengine.config.base.errors import ConfigError

MIN_SECONDS, MAX_SECONDS = 0.01, 1e9


def check_idle_sleep(seconds: float | None, nnodes: int) -> None:
    """Raise ConfigError for a value of sleep_idle_seconds that is not allowed.

    seconds: the value. nnodes: processes of the engine.
    """
    if seconds is None:
        return
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:  # NaN is not, either
        raise ConfigError("sleep_idle_seconds", seconds, f"{MIN_SECONDS} to {MAX_SECONDS:g}, or None")
    if nnodes > 1:
        raise ConfigError("sleep_idle_seconds", seconds, "None for an engine of several processes (nnodes)")


def refuse_idle_sleep(seconds: float | None, kind: str) -> None:
    """Raise ConfigError if sleep_idle_seconds is given for an engine that its callers step, as nothing runs between
    calls.

    seconds: the option's value. kind: name of the engine's interface, for the message.
    """
    if seconds is not None:
        raise ConfigError(
            "sleep_idle_seconds", seconds, f"None with {kind}; AsyncLLM and `jaxengine serve` have a loop of their own"
        )
