"""Typed reading of one value at a time out of a configuration that somebody else wrote.

Owns the wording of configuration errors. Knows neither what the values mean nor where they come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

_REQUIRED = object()
MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 4096  # a configuration holds one entry per layer, so their number is bounded before it is believed


class ModelConfigError(ValueError):
    """A model configuration that cannot be used; the message names the field, its value and what is allowed."""


class ConfigFields:
    """A mapping read field by field. `prefix` is prepended to every name ("llama." for GGUF metadata).

    A field that is absent, or null, takes the default; without a default it is an error.
    """

    def __init__(self, raw: Mapping[str, Any], prefix: str = ""):
        if not isinstance(raw, Mapping):
            raise ModelConfigError(f"a model configuration must be a mapping, got {type(raw).__name__}")
        self.raw = raw
        self.prefix = prefix

    def has(self, name: str) -> bool:
        return self.raw.get(self.prefix + name) is not None

    def fail(self, name: str, allowed: str) -> ModelConfigError:
        value = repr(self.raw.get(self.prefix + name))
        shown = value if len(value) <= 80 else value[:77] + "..."
        return ModelConfigError(f"{self.prefix + name} must be {allowed}, got {shown}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(self.prefix + name)
        if value is not None:
            # GGUF readers hand out numpy scalars; configuration objects hold Python values only.
            return value.item() if isinstance(value, np.generic) else value
        if default is _REQUIRED:
            raise ModelConfigError(f"{self.prefix + name} is missing from the model configuration")
        return default

    def value(self, name: str, default: Any = _REQUIRED) -> Any:
        return self._get(name, default)

    def integer(self, name: str, default: Any = _REQUIRED, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> Any:
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.fail(name, f"an integer >= {minimum} and <= {maximum}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A finite number above zero, as a float."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self.fail(name, "a finite number > 0")
        return float(value)

    def boolean(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self._get(name, default)
        if value is default:
            return value
        if not isinstance(value, str):
            raise self.fail(name, "a string")
        return value

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self._get(name, None)
        if value is not None and not isinstance(value, Mapping):
            raise self.fail(name, "a mapping")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty when the field is absent."""
        value = self._get(name, ())
        ids: tuple[Any, ...] = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.fail(name, "a token id >= 0 or a list of token ids")
        return ids
