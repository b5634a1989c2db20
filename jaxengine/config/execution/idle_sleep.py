"""The option sleep_idle_seconds, by which an engine that nobody uses gives up its devices' memory."""

from __future__ import annotations

from jaxengine.config.base.errors import ConfigError

MIN_SECONDS, MAX_SECONDS = 0.01, 1e9


def check_idle_sleep(seconds: float | None, nnodes: int) -> None:
    """Raise ConfigError unless sleep_idle_seconds (`seconds`) is None, or from 0.01 to 1e9 in an engine of one process.

    nnodes: processes of the engine.
    """
    if seconds is None:
        return
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:  # refuses NaN as well
        raise ConfigError("sleep_idle_seconds", seconds, f"{MIN_SECONDS} to {MAX_SECONDS:g}, or None")
    if nnodes > 1:
        raise ConfigError("sleep_idle_seconds", seconds, "None for an engine of several processes (nnodes)")


def refuse_idle_sleep(seconds: float | None, kind: str) -> None:
    """Raise ConfigError if sleep_idle_seconds is given for an engine that only runs inside its callers' calls and so
    cannot sleep between them.

    seconds: the option's value; None if it is not given. kind: name of the engine's interface, for the message.
    """
    if seconds is not None:
        raise ConfigError(
            "sleep_idle_seconds", seconds, f"None with {kind}; AsyncLLM and `jaxengine serve` have a loop of their own"
        )
