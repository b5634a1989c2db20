"""The option by which an engine that nobody uses gives up its devices' memory."""

from __future__ import annotations

from jaxengine.config.errors import ConfigError

MIN_SECONDS, MAX_SECONDS = 0.01, 1e9


def check_idle_sleep(seconds: float | None, nnodes: int) -> None:
    """Raises ConfigError for a value of sleep_idle_seconds that is not allowed."""
    if seconds is None:
        return
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:  # NaN is not, either
        raise ConfigError("sleep_idle_seconds", seconds, f"{MIN_SECONDS} to {MAX_SECONDS:g}, or None")
    if nnodes > 1:
        raise ConfigError("sleep_idle_seconds", seconds, "None for an engine of several processes (nnodes)")


def refuse_idle_sleep(seconds: float | None, kind: str) -> None:
    """Raises ConfigError for an engine that its callers step: between their calls nothing can put it to sleep."""
    if seconds is not None:
        raise ConfigError(
            "sleep_idle_seconds", seconds, f"None with {kind}; AsyncLLM and `jaxengine serve` have a loop of their own"
        )
