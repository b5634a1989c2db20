"""How structured output is read where a request does not say: vLLM's structured_outputs_config. Knows no grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxengine.config.errors import ConfigError
from jaxengine.config.values import plain

BACKENDS = ("auto", "guidance")
# vLLM's other fields, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "disable_fallback": (False, True),  # there is one backend
    "reasoning_parser": ("",),
    "reasoning_parser_plugin": ("",),
    "enable_in_reasoning": (False,),
}
_ADVICE = {"reasoning_parser": "give it to the server: jaxengine serve --reasoning-parser"}


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """Defaults for requests with a JSON schema; a request may switch each on for itself, and closing objects off.

    Attributes:
      backend: "auto" or "guidance", which are the same: grammars are llguidance's.
      disable_any_whitespace: no white space between the parts of JSON, unless a request has a pattern for it.
      disable_additional_properties: objects have only the properties their schema lists, where it does not say and that
        is safe (jaxengine.requests.closed_objects).
      lenient: keywords that no grammar can enforce are left out, and oneOf is read as anyOf, instead of refusing.
    """

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    lenient: bool = False

    def __post_init__(self):
        if self.backend not in BACKENDS:
            problem = f"structured_outputs_config.backend is {self.backend!r}, and the only one here is llguidance"
            raise ConfigError.because("structured_outputs_config", problem, f"give {' or '.join(BACKENDS)}")
        for name in self.switches():
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"structured_outputs_config.{name}", getattr(self, name), "True or False")

    @classmethod
    def switches(cls) -> tuple[str, ...]:
        """The fields that are on or off."""
        return tuple(field.name for field in fields(cls) if field.name != "backend")

    @classmethod
    def read(cls, value: Any) -> StructuredOutputsConfig:
        """From a dict of vLLM's fields and ours, or None for the defaults. Raises ConfigError."""
        if value is None or isinstance(value, cls):
            return value or cls()
        name = "structured_outputs_config"
        if not isinstance(value, Mapping):
            raise ConfigError(name, value, "a dict of its fields")
        known = [field.name for field in fields(cls)]
        chosen = {str(key): plain(each) for key, each in value.items()}
        for key in [key for key in chosen if key not in known]:
            if key not in _NEUTRAL:
                raise ConfigError.because(name, f"{name} has no {key!r}", f"it has {', '.join(known)}")
            if (each := chosen.pop(key)) is not None and each not in _NEUTRAL[key]:
                neutral = " or ".join(map(repr, _NEUTRAL[key]))
                advice = _ADVICE.get(key, f"leave it at {neutral}")
                raise ConfigError.because(name, f"{name}.{key} is {each!r}, which is not supported here", advice)
        return cls(**chosen)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The names of what is switched on."""
        return tuple(name for name in self.switches() if getattr(self, name))
