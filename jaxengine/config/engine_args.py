"""vLLM's EngineArgs: engine options that a program collects and may change before it makes an engine of them."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Self

from jaxengine.config import vllm_options
from jaxengine.config.command_line import destination
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.engine_flags import MODEL_HELP, add_engine_options
from jaxengine.config.option_names import chosen_options

_FIELDS = {field.name: field for field in dataclasses.fields(EngineConfig)}


class EngineArgs(EngineConfig):
    """EngineConfig whose fields may be assigned. Like `LLM` it also accepts vLLM's other options and earlier names.

    Values are checked at construction. Values that are assigned later are checked when an engine is made.
    `dataclasses.asdict`, `fields` and `replace` work as on EngineConfig.

    Args:
      model, options: arguments of `LLM`. Raises ConfigError for an unknown option or a value that is not allowed.
    """

    def __init__(self, model: str | None = None, **options: Any):
        super().__init__(**chosen_options(_FIELDS, {"model": model, **options}))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an option without checking its value; one of vLLM's earlier names sets the field that replaced it.

        Raises ConfigError for an unknown or unsupported name.
        """
        for field, chosen in chosen_options(_FIELDS, {name: value}).items():
            object.__setattr__(self, field, chosen)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # the fields may change

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each engine option, with the option's default, to `parser` and return the parser.

        Parsed options have the names of `LLM`'s arguments: `LLM(**vars(parser.parse_args()))`.
        """
        known = len(parser._actions)
        parser.add_argument("--model", default=None, metavar="MODEL", help=MODEL_HELP)
        add_engine_options(parser)
        prefix = destination(EngineConfig, "")
        for action in parser._actions[known:]:
            action.dest = action.dest.removeprefix(prefix)
            action.default = _default(action.dest)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return EngineArgs made of the engine options among parsed arguments. Other attributes, such as a program's
        own, are ignored. Raises ConfigError for values that are not allowed.
        """
        names = _FIELDS.keys() | vllm_options.NAMES
        return cls(**{name: value for name, value in vars(args).items() if name in names})


def engine_options(args: EngineConfig) -> dict[str, Any]:
    """Return the options of an EngineArgs or EngineConfig by name, as keyword arguments of `LLM`."""
    return {name: getattr(args, name) for name in _FIELDS}


def _default(name: str) -> Any:
    """Return the default on the command line of an option of EngineConfig, or of one that only vLLM has. An empty tuple
    becomes None.
    """
    if name in _FIELDS:
        return _FIELDS[name].default or None if isinstance(_FIELDS[name].default, tuple) else _FIELDS[name].default
    return vllm_options.NOT_BUILT.get(name, (False if vllm_options.is_switch(name) else None,))[0]
