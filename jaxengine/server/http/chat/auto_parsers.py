"""Resolution of the parser names "auto" by the model's chat template."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxengine.parsers.registry import AUTO, REASONING_PARSERS, TOOL_PARSERS, by_template
from jaxengine.requests.inputs import InputProcessor
from jaxengine.server.base.options import ServerConfig

logger = logging.getLogger(__name__)


def without_auto(config: ServerConfig, inputs: InputProcessor) -> ServerConfig:
    """Return the config in which parsers named "auto" are replaced by those that fit the chat template, and log the
    choice. inputs: processor with the chat template.

    A parser becomes None if the template is not recognised; if that is the parser of tool calls,
    enable_auto_tool_choice becomes False.
    """
    changes: dict[str, Any] = {}
    for option, rows in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        if getattr(config, option) == AUTO:
            changes[option] = name = by_template(rows, _template(inputs))
            flag = "--" + option.replace("_", "-")
            if name is None:
                logger.warning("%s auto: the chat template is not recognised, so the parser is off; name one", flag)
            else:
                logger.info("%s auto: %s, by the chat template", flag, name)
    if "tool_call_parser" in changes and changes["tool_call_parser"] is None:
        changes["enable_auto_tool_choice"] = False
    return replace(config, **changes)


def _template(inputs: InputProcessor) -> str:
    """Return the text of the chat template in use: the engine's option, else the tokenizer's. Several templates are
    joined by line breaks. "" without a template.
    """
    template = inputs.config.chat_template
    if template is None and inputs.tokenizer is not None:
        template = inputs.tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, Mapping) else template or ""
