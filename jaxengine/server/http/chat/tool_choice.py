"""What a request's tools and tool_choice mean: a schema for the output, and who reads the calls out of it.

Where the model chooses, it writes calls in its own way and the server's parser reads them; a call that is forced keeps
to a JSON schema of ours. Knows nothing of the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxengine.parsers.events import OutputParser
from jaxengine.parsers.registry import ToolFormat, call_ids
from jaxengine.parsers.tool_forced import NamedToolParser, RequiredToolParser
from jaxengine.server.http.chat.protocol import ChatRequest, Function, NamedTool
from scheduler.errors import RequestError

# Of a function that declares no parameters.
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# Beside these, a schema's own properties are not all that it has.
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "additionalProperties"}


@dataclass(frozen=True)
class ToolUse:
    """How the calls of one request come about.

    Attributes:
      open: a parser for one output; None: nothing is read as a call.
      schema: what the output is made to keep to, or None.
      special_tokens: calls are marked with special tokens, which text must show.
    """

    open: Callable[[], OutputParser] | None = None
    schema: dict[str, Any] | None = None
    special_tokens: bool = False


def tool_use(body: ChatRequest, auto: bool, tool_format: ToolFormat | None) -> ToolUse:
    """auto: the server lets models choose. tool_format: how its model writes calls. Raises RequestError."""
    choice, functions = body.choice, [tool.function for tool in body.tools or ()]
    if choice == "none":
        return ToolUse()
    if choice == "required":
        at_most = 1 if body.parallel_tool_calls is False else None
        return ToolUse(lambda: RequiredToolParser(call_ids()), _calls_schema(functions, at_most))
    if isinstance(choice, NamedTool):
        name = choice.function.name
        chosen = next(each for each in functions if each.name == name)
        return ToolUse(lambda: NamedToolParser(call_ids(), name), _arguments_schema(chosen))
    if not auto or tool_format is None:
        raise RequestError(
            "tool_choice 'auto' needs a server with --enable-auto-tool-choice and --tool-call-parser",
            param="tool_choice",
        )
    return ToolUse(tool_format.open, None, tool_format.special_tokens)


def _arguments_schema(function: Function) -> dict[str, Any]:
    """A function is called with the parameters that it lists, unless its schema says otherwise."""
    schema = dict(function.parameters or _NO_ARGUMENTS)
    if "properties" in schema and not _COMBINING & schema.keys():
        schema["additionalProperties"] = False
    return schema


def _calls_schema(functions: Sequence[Function], at_most: int | None) -> dict[str, Any]:
    """Of a list of calls, as RequiredToolParser reads it."""
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        parameters = _arguments_schema(function)
        # References in a schema count from its root, and here that is ours.
        for word in ("$defs", "definitions"):
            own = parameters.pop(word, {})
            if not isinstance(own, dict):
                raise RequestError(f"tools have a function whose {word} is no object", param="tools")
            for name, schema in own.items():
                if definitions.setdefault(word, {}).setdefault(name, schema) != schema:
                    raise RequestError(f"tools have different definitions of {name!r} in {word}", param="tools")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **definitions}
    return schema if at_most is None else {**schema, "maxItems": at_most}
