"""Values of max_model_len that are not numbers: the longest context that fits."""

from __future__ import annotations

from jaxengine.config.base.errors import ConfigError

AUTO_LENGTH = -1
WORDS = {"auto": AUTO_LENGTH}


def given_length(max_model_len: int | None) -> int | None:
    """Return max_model_len, or None if it is None or "auto" (-1), where the length follows from the model or from free
    memory.
    """
    return None if max_model_len == AUTO_LENGTH else max_model_len


def check_length(max_model_len: int | None, nnodes: int) -> None:
    """Raise ConfigError if max_model_len is "auto" (-1) and the engine has several processes (nnodes > 1)."""
    if max_model_len == AUTO_LENGTH and nnodes > 1:
        raise ConfigError("max_model_len", "auto", f"a number with nnodes {nnodes}, of which each must know it")
