"""vLLM's structured_outputs_config: how structured outputs are read unless a request overrides it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxengine.config.base.errors import ConfigError, not_built
from jaxengine.config.base.values import kind_missed, plain

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")
# vLLM's other fields, with the values that have no effect here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "disable_fallback": (False, True),  # there is one backend
    "reasoning_parser_plugin": ("",),
    "enable_in_reasoning": (False,),
}
# Fields that are no switches.
_NAMES = ("backend", "reasoning_parser")


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """Defaults for requests with a JSON schema. A request may switch each on, and disable_additional_properties off.

    Attributes:
      backend: one of vLLM's. The name changes nothing: grammars are llguidance's.
      disable_any_whitespace: no white space between the parts of JSON, unless a request gives a pattern for it.
      disable_additional_properties: objects have only the properties that their schema lists, unless it says otherwise
        and if that is safe (jaxengine.requests.structured.closed_objects).
      lenient: ignore keywords that no grammar can enforce, and read oneOf as anyOf, instead of refusing.
      reasoning_parser: format of the model's reasoning, by the server's names for --reasoning-parser: grammars apply
        only after it. "" for none. Servers have that option instead.
    """

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    lenient: bool = False
    reasoning_parser: str = ""

    def __post_init__(self):
        """Raise ConfigError for values that are not allowed; log that a backend other than "auto" and "guidance"
        changes nothing.
        """
        if self.backend not in BACKENDS:
            raise ConfigError("structured_outputs_config.backend", self.backend, ", ".join(BACKENDS))
        if self.backend not in ("auto", "guidance"):
            name = "structured_outputs_config.backend"
            logger.info("%s=%r changes nothing here: grammars are llguidance's", name, self.backend)
        for field in fields(self):
            if wanted := kind_missed(value := getattr(self, field.name), str(field.type)):
                raise ConfigError(f"structured_outputs_config.{field.name}", value, wanted)

    def check_for_server(self) -> None:
        """Raise ConfigError if a reasoning parser is given: a server has the option --reasoning-parser for it."""
        if self.reasoning_parser:
            name = "structured_outputs_config"
            problem = f"{name}.reasoning_parser is for engines without a server"
            raise ConfigError.because(name, problem, "give it to the server: jaxengine serve --reasoning-parser")

    @classmethod
    def switches(cls) -> tuple[str, ...]:
        """Return the names of the boolean fields."""
        return tuple(field.name for field in fields(cls) if field.name not in _NAMES)

    @classmethod
    def read(cls, value: Any) -> StructuredOutputsConfig:
        """Return the config for a dict of this class's fields or vLLM's, or None for the defaults. A config is returned
        unchanged.

        Fields of vLLM with a value that has no effect here are ignored. Raises ConfigError for unknown fields and
        values that are not supported.
        """
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
                raise not_built(name, f"{name}.{key}", each, _NEUTRAL[key])
        return cls(**chosen)

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the boolean fields that are True."""
        return tuple(name for name in self.switches() if getattr(self, name))
