"""What a request's tools and tool_choice mean: a schema for the output, and who reads the calls out of it.

Where the model chooses, it writes calls in its own way and the server's parser reads them, by a grammar where answers
have a form to keep to; a call that is forced keeps to a JSON schema of ours. Knows nothing of the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxengine.parsers.call_grammar import CallGrammar, Schema
from jaxengine.parsers.events import OutputParser
from jaxengine.parsers.registry import ToolFormat, call_ids
from jaxengine.parsers.tool_forced import NamedToolParser, RequiredToolParser
from jaxengine.requests.structured_outputs import StructuredOutputsParams
from jaxengine.server.http.chat.protocol import ChatRequest, Function, NamedTool, renamed
from jaxengine.tokens.tokenizer import Tokenizer
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
      structure: what the output is made to keep to, as structured_outputs has it, or None.
      asked_by: the field that asks for the structure.
      special_tokens: calls are marked with special tokens, which text must show.
    """

    open: Callable[[], OutputParser] | None = None
    structure: dict[str, Any] | None = None
    asked_by: str = "tools"
    special_tokens: bool = False


def tool_use(
    body: ChatRequest,
    auto: bool,
    tool_format: ToolFormat | None,
    tokenizer: Tokenizer,
    switches: Sequence[str] = (),
) -> ToolUse:
    """What a request's tools mean for its answer.

    auto: the server lets models choose. tool_format: how its model writes calls. switches: what is on for every schema.

    Raises RequestError.
    """
    choice, functions = body.choice, [tool.function for tool in body.tools or ()]
    if choice == "none":
        return ToolUse()
    if choice == "required":
        at_most = 1 if body.parallel_tool_calls is False else None
        return ToolUse(lambda: RequiredToolParser(call_ids()), _forced(body, _calls_schema(functions, at_most)))
    if isinstance(choice, NamedTool):
        name = choice.function.name
        chosen = next(each for each in functions if each.name == name)
        return ToolUse(lambda: NamedToolParser(call_ids(), name), _forced(body, _arguments_schema(chosen)))
    if not auto or tool_format is None:
        raise RequestError(
            "tool_choice 'auto' needs a server with --enable-auto-tool-choice and --tool-call-parser",
            param="tool_choice",
        )
    answer = None if body.response_format is None else body.response_format.structured_outputs()
    if answer is None:
        return ToolUse(tool_format.open, None, special_tokens=tool_format.special_tokens)
    try:
        answer_rule = StructuredOutputsParams(**answer).switched_on(switches).in_lark()
    except RequestError as error:
        raise renamed(error, "response_format") from None
    rules = ("start: answer | calls", f"answer: {answer_rule}", *_calls_rules(body, tool_format, tokenizer, switches))
    return ToolUse(tool_format.open, {"grammar": "\n".join(rules)}, "response_format", tool_format.special_tokens)


def _forced(body: ChatRequest, schema: Schema, white_space: str | None = " ?") -> dict[str, Any]:
    strict = any(tool.function.strict for tool in body.tools or ())
    return {"json": schema, "whitespace_pattern": white_space, "lenient": not strict}


def _calls_rules(
    body: ChatRequest, tool_format: ToolFormat, tokenizer: Tokenizer, switches: Sequence[str]
) -> list[str]:
    """Of `calls`: nothing but calls, in the model's own way. Raises RequestError."""

    def token_id(word: str) -> int | None:
        found = tokenizer.backend.token_to_id(word)
        return found if found in tokenizer.added_token_ids else None

    try:
        calls = CallGrammar(
            functions={tool.function.name: _arguments_schema(tool.function) for tool in body.tools or ()},
            many=body.parallel_tool_calls is not False,
            token_id=token_id,
            # With the white space of answers, or the lexer would decide between the two by the first blank.
            json=lambda schema: StructuredOutputsParams(**_forced(body, schema, None)).switched_on(switches).in_lark(),
        )
        return list(tool_format.grammar(calls))
    except RequestError as error:
        raise renamed(error, "tools") from None
    except ValueError as error:
        raise RequestError(f"tools cannot be called beside response_format: {error}", param="tools") from None


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
