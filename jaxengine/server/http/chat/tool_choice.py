"""Meaning of a request's tools and tool_choice: a constraint on the output, and the parser of its calls.

If the model chooses, it writes calls in its own format, which the server's parser reads; a grammar constrains them if
the answer has a response_format or structured_outputs. A forced call follows a JSON schema or, for models that need it,
the model's own format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxengine.parsers.allowed import AllowedCalls
from jaxengine.parsers.registry import ReasoningFormat, ToolFormat, call_ids
from jaxengine.parsers.scan.call_grammar import CallGrammar, Schema, call_schema, literal
from jaxengine.parsers.scan.call_start import CallStarts
from jaxengine.parsers.scan.events import OutputParser
from jaxengine.parsers.tools.forced import NamedTextParser, NamedToolParser, RequiredTextParser, RequiredToolParser
from jaxengine.requests.structured.closed_objects import lists_all
from jaxengine.requests.structured.params import StructuredOutputsParams, structured_outputs
from jaxengine.requests.structured.structural_tags import lark_regex
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.schema_references import Place, SchemaDocument, UnresolvedError, moved, with_definitions
from jaxengine.server.http.chat.protocol import ChatRequest, Function, NamedTool
from jaxengine.server.http.request.errors import renamed
from jaxengine.tokens.tokenizer import Tokenizer

# Schema for a function that declares no parameters.
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords by which a schema may allow properties that it does not list.
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "additionalProperties"}


@dataclass(frozen=True)
class ToolUse:
    """Constraint and parser for the tool calls of a request.

    Attributes:
      open: creates a parser for one output; None: calls are not parsed.
      structure: constraint on the output, as structured_outputs, or None.
      asked_by: field of the request that requires the structure.
      special_tokens: whether calls are marked with special tokens, which detokenised text must include.
      stop_words: tokens that end an output.
      is_whole: whether the structure covers the entire output, including reasoning.
      calls: how calls begin in the model's own format; None if calls are not in that format.
    """

    open: Callable[[], OutputParser] | None = None
    structure: dict[str, Any] | None = None
    asked_by: str = "tools"
    special_tokens: bool = False
    stop_words: tuple[str, ...] = ()
    is_whole: bool = False
    calls: CallStarts | None = None


def tool_use(
    body: ChatRequest,
    auto: bool,
    tool_format: ToolFormat | None,
    reasoning_format: ReasoningFormat | None,
    tokenizer: Tokenizer,
    switches: Sequence[str] = (),
) -> ToolUse:
    """Return how a request's tools affect its answer: ToolUse() if no tool may be called.

    A forced call is constrained by a grammar of body.text_forms, else by the forced_grammar of the model's own format,
    else by a JSON schema of the functions. With "auto", calls are in the model's format; a response_format, or
    structured_outputs, adds a grammar for an answer or calls or, if the format has no grammar, constrains the answer
    only. auto: whether the server lets models choose. tool_format, reasoning_format: formats of the model, None if the
    server has no parser. switches: options of structured outputs that are on by default. Raises RequestError for tools,
    or a tool_choice, that these formats cannot serve.
    """
    choice, functions = body.choice, body.callable_functions
    if choice == "none":
        return ToolUse()
    if choice != "auto" and (forced := _forced_text(body, switches)) is not None:
        return forced
    if choice != "auto" and tool_format is not None and tool_format.forced_grammar is not None:
        return _forced_in_own_way(body, tool_format, tokenizer, switches)
    if choice == "required":
        at_most = 1 if body.parallel_tool_calls is False else None
        return ToolUse(lambda: RequiredToolParser(call_ids()), _forced(body, _calls_schema(functions, at_most)))
    if isinstance(choice, NamedTool):
        (chosen,) = functions
        return ToolUse(lambda: NamedToolParser(call_ids(), chosen.name), _forced(body, _arguments_schema(chosen)))
    if not auto or tool_format is None:
        raise RequestError(
            "tool_choice 'auto' needs a server with --enable-auto-tool-choice and --tool-call-parser",
            param="tool_choice",
        )
    known = {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}
    names = [each.name for each in functions]

    def open_parser() -> OutputParser:
        """Return a parser of one output: of calls of all functions, if all may be called."""
        parser = tool_format.open(known)
        return parser if len(names) == len(known) else AllowedCalls(parser, names)

    read = ToolUse(
        open_parser,
        special_tokens=tool_format.special_tokens,
        stop_words=tool_format.stop_words,
        calls=tool_format.call_starts([each.name for each in functions]),
    )
    field = "response_format" if body.structured_outputs is None else "structured_outputs"
    answer = body.structured_outputs
    if answer is None and body.response_format is not None:
        answer = body.response_format.structured_outputs()
    if answer is None:
        return read
    if tool_format.grammar is None:
        if reasoning_format is None or not reasoning_format.holds_calls:
            text = f"{field} with tools needs a server with the --reasoning-parser of this model's format"
            raise RequestError(text, param=field)
        return replace(read, structure=answer, asked_by=field)
    try:
        answer_rule = structured_outputs("structured_outputs", answer).switched_on(switches).in_lark()
    except RequestError as error:
        raise renamed(error, field) from None
    calls_rules = _rules(tool_format.grammar, body, functions, tokenizer, switches)
    rules = ("start: answer | calls", f"answer: {answer_rule}", *calls_rules)
    around = {name: answer[name] for name in ("reasoning_begin", "reasoning_end") if name in answer}
    return replace(read, structure={"grammar": "\n".join(rules), **around}, asked_by=field)


def _forced_text(body: ChatRequest, switches: Sequence[str]) -> ToolUse | None:
    """Return the ToolUse of a forced call if the call may be of a tool in body.text_forms, else None.

    body: request whose tool_choice is "required" or names a tool. Such a tool's text is written outside of JSON, as no
    grammar can constrain a text within JSON. Raises RequestError for functions that no grammar can call.
    """
    if isinstance(body.choice, NamedTool):
        name = body.choice.function.name
        form = body.text_forms.get(name)
        return None if form is None else ToolUse(lambda: NamedTextParser(call_ids(), name), dict(form))
    callable_functions = body.callable_functions
    forms = {each.name: body.text_forms[each.name] for each in callable_functions if each.name in body.text_forms}
    if not forms:
        return None
    rules: list[str] = []
    for number, (name, form) in enumerate(forms.items()):
        head = literal(f'{{"name": {literal(name)}}}\n')
        text = f"%lark {{\n{form['grammar']}\n}}" if "grammar" in form else lark_regex(form["regex"])
        rules += [f"text_{number}: {head} body_{number}", f"body_{number}: {text}"]
    starts = [f"text_{number}" for number in range(len(forms))]
    functions = [each for each in callable_functions if each.name not in forms]
    if functions:
        schema = _forced(body, _calls_schema(functions, 1 if body.parallel_tool_calls is False else None))
        rules.append(f"calls: {StructuredOutputsParams(**schema).switched_on(switches).in_lark()}")
        starts.append("calls")
    grammar = "\n".join((f"start: {' | '.join(starts)}", *rules))
    return ToolUse(lambda: RequiredTextParser(call_ids()), {"grammar": grammar})


def _forced_in_own_way(
    body: ChatRequest, tool_format: ToolFormat, tokenizer: Tokenizer, switches: Sequence[str]
) -> ToolUse:
    """Return the ToolUse of a forced call in the model's own format, constrained by a grammar of the whole output.

    body: request whose tool_choice is "required" or names a tool. tool_format: a format with a forced_grammar. Raises
    RequestError for functions that no grammar can call.
    """
    functions = body.callable_functions
    assert tool_format.forced_grammar is not None
    rules = _rules(tool_format.forced_grammar, body, functions, tokenizer, switches)
    return ToolUse(
        lambda: tool_format.open({each.name: _arguments_schema(each) for each in functions}),
        {"grammar": "\n".join(rules)},
        special_tokens=tool_format.special_tokens,
        stop_words=tool_format.stop_words,
        is_whole=True,
        calls=tool_format.call_starts([each.name for each in functions]),
    )


def _forced(body: ChatRequest, schema: Schema, white_space: str | None = " ?") -> dict[str, Any]:
    """Return structured_outputs that force an output of this JSON schema. They are lenient unless a tool is strict.
    white_space: pattern of the white space allowed; None for the default.
    """
    strict = any(function.strict for function in body.callable_functions)
    return {"json": schema, "whitespace_pattern": white_space, "lenient": not strict}


def _rules(
    grammar: Callable[[CallGrammar], Iterator[str]],
    body: ChatRequest,
    functions: Sequence[Function],
    tokenizer: Tokenizer,
    switches: Sequence[str],
) -> list[str]:
    """Return the rules, in Lark's notation, that `grammar` yields for calls of `functions`.

    switches: options of structured outputs that are on by default. Raises RequestError for functions that no grammar
    can call.
    """

    def token_id(word: str) -> int | None:
        """Return the token id of a word that is an added token, else None."""
        found = tokenizer.backend.token_to_id(word)
        return found if found in tokenizer.added_token_ids else None

    try:
        calls = CallGrammar(
            functions={each.name: _arguments_schema(each) for each in functions},
            many=body.parallel_tool_calls is not False,
            token_id=token_id,
            # With the same white space as answers; otherwise the first blank would decide between the two.
            json=lambda schema: StructuredOutputsParams(**_forced(body, schema, None)).switched_on(switches).in_lark(),
        )
        return list(grammar(calls))
    except RequestError as error:
        raise renamed(error, "tools") from None
    except ValueError as error:
        raise RequestError(f"tools cannot be called by a grammar: {error}", param="tools") from None


def _arguments(function: Function, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, for use in a document with these `$defs`; the targets of its
    references are added to `definitions`.

    It gets "additionalProperties": false if it lists every required parameter (`lists_all`) and has no keyword of
    _COMBINING. A function without parameters takes an empty object. Raises RequestError for a reference without a
    target.
    """
    given = function.parameters or _NO_ARGUMENTS
    document = SchemaDocument(given)
    schema = dict(given)
    if lists_all(schema) and not _COMBINING & schema.keys():
        # Only in this copy, not in the document: a reference to the root may be combined with other properties.
        schema["additionalProperties"] = False
    try:
        return moved(Place(schema, document.root.base), document, definitions)
    except UnresolvedError as error:
        raise RequestError(f"tools have a function whose parameters cannot be used: {error}", param="tools") from None


def _arguments_schema(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments as a self-contained document. Raises RequestError for a reference
    without a target.
    """
    definitions: dict[str, Any] = {}
    return with_definitions(_arguments(function, definitions), definitions)


def _calls_schema(functions: Sequence[Function], at_most: int | None) -> dict[str, Any]:
    """Return the schema of a list of at least one call, for RequiredToolParser. at_most: largest number of calls; None
    for no limit.

    Raises RequestError for a reference without a target.
    """
    definitions: dict[str, Any] = {}
    calls = [call_schema(each.name, "parameters", _arguments(each, definitions)) for each in functions]
    schema = with_definitions({"type": "array", "minItems": 1, "items": {"anyOf": calls}}, definitions)
    return schema if at_most is None else {**schema, "maxItems": at_most}
