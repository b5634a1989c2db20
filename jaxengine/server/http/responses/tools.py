"""Tools of a request to /v1/responses: functions and custom tools, alone or in namespaces, converted to functions of a
chat request.

For the model, a function of a namespace has a longer name, and a custom tool is a function that takes one text. Tools
that only OpenAI's server can run, or whose schema only its models know, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError

from jaxengine.parsers.tools.forced import TEXT
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.http.chat.protocol import MAX_NAME_CHARS, MAX_TOOLS
from jaxengine.server.http.request.fields import JsonObject, at_most
from jaxengine.server.http.request.protocol import RequestModel

# Types of OpenAI's tools that this server cannot run, without the date of a version.
_OPENAI_TOOLS = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_preview",
)
_OTHERS = re.compile(rf"(?:{'|'.join(_OPENAI_TOOLS)})(?:_\d{{4}}_\d\d_\d\d)?")
_SEPARATOR = "__"
ADDITIONAL_TOOLS = "additional_tools"

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class ResponseFunction(RequestModel):
    """A function that the model may call; strict and defer_loading: as in chat.protocol.Function."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class GrammarFormat(RequestModel):
    """Texts of a grammar: Lark's notation, or a regular expression."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1)


class CustomTool(RequestModel):
    """A tool that takes one text. A text of a forced call has the format; otherwise the format is in the tool's
    description for the model, which writes freely.
    """

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None
    defer_loading: bool | None = None

    @property
    def form(self) -> dict[str, str] | None:
        """The tool's format in the form of ChatRequest.text_forms; None if any text is allowed."""
        if not isinstance(self.format, GrammarFormat):
            return None
        return {"grammar" if self.format.syntax == "lark" else "regex": self.format.definition}


class Namespace(RequestModel):
    """Functions and custom tools whose names are unique within the namespace."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[
        list[Annotated[ResponseFunction | CustomTool, Field(discriminator="type")]],
        Field(fail_fast=True),
        at_most(MAX_TOOLS),
    ]


class OtherTool(RequestModel):
    """A tool that this server cannot run. It is left out of the prompt, and named in X-Ignored-Fields."""

    model_config = ConfigDict(extra="allow")

    type: str


def _kind(tool: Any) -> str | None:
    """Return a tool's type, "other" for one that only OpenAI's server can run, None without a type."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "other" if isinstance(kind, str) and _OTHERS.fullmatch(kind) else kind


ResponseTool = Annotated[
    Annotated[ResponseFunction, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(
        _kind,
        custom_error_type="tool_type",
        custom_error_message=f"type must be function, custom, namespace or one of {', '.join(_OPENAI_TOOLS)}",
    ),
]


_TOOL: TypeAdapter[Any] = TypeAdapter(ResponseTool)


class ChosenTool(RequestModel):
    """The function or custom tool that must be called. namespace: if it is in one."""

    type: Literal["function", "custom"] = "function"
    name: str
    namespace: str | None = None


class ChosenOther(RequestModel):
    """A forced call of a tool that this server cannot run, which is refused."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(pattern=rf"^{_OTHERS.pattern}$")]


class AllowedTools(RequestModel):
    """The tools that may be called, as in chat.protocol.AllowedTools. Those that this server cannot run have no effect.

    mode: "auto" by default.
    """

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ChosenTool | ChosenOther], Field(min_length=1, fail_fast=True), at_most(MAX_TOOLS)]


@dataclass(frozen=True)
class Origin:
    """Tool of the request from which a function of the chat request was made.

    Attributes:
      is_custom: whether it is a custom tool and not a function.
      name: the tool's name in the request.
      namespace: namespace of the tool, or None.
    """

    is_custom: bool
    name: str
    namespace: str | None = None

    @property
    def item(self) -> dict[str, str]:
        """Fields with which output items identify the tool: its name, and its namespace if it has one."""
        return {"name": self.name, **({} if self.namespace is None else {"namespace": self.namespace})}


@dataclass
class Callables:
    """Tools of a request that the model may call.

    Attributes:
      functions: the tools in the form of a chat request.
      text_forms: value of ChatRequest.text_forms.
      origins: original tool by name of the function.
      left_out: types of the tools that are left out.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    text_forms: dict[str, Mapping[str, str]] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, tools: Sequence[Any]) -> Callables:
        """Return the converted tools of a request. tools: ResponseTools, of which those that the server cannot run are
        only named in `left_out`, by type. Raises RequestError for names that occur twice or are too long, and for more
        than MAX_TOOLS functions and custom tools, those of namespaces included.
        """
        found = cls()
        for tool in tools:
            if isinstance(tool, OtherTool):
                found.left_out.append(tool.type)
            elif isinstance(tool, Namespace):
                about = f"Namespace {tool.name}: {tool.description}" if tool.description else None
                for number, each in enumerate(tool.tools):
                    found._add(each, tool.name, about if number == 0 else None)
            else:
                found._add(tool)
        if len(found.functions) > MAX_TOOLS:
            problem = f"tools has {len(found.functions)} functions and custom tools; allowed: {MAX_TOOLS}"
            raise RequestError(problem, param="tools")
        return found

    def _add(self, tool: ResponseFunction | CustomTool, namespace: str | None = None, about: str | None = None) -> None:
        """Add a function, or a custom tool as a function of one text, to `functions`, `origins` and, if it has a form,
        `text_forms`, under the `flat_name` of its name and `namespace`. about: text to put before its description.
        Raises RequestError if that name is taken or longer than MAX_NAME_CHARS.
        """
        name = flat_name(tool.name, namespace)
        if len(name) > MAX_NAME_CHARS or name in self.origins:
            wrong = "of two tools" if name in self.origins else f"longer than {MAX_NAME_CHARS} characters"
            raise RequestError(f"tools has the name {show_value(name)}, which is {wrong}", param="tools")
        self.origins[name] = Origin(isinstance(tool, CustomTool), tool.name, namespace)
        if isinstance(tool, CustomTool):
            function = _text_function(tool)
            if tool.defer_loading is not None:
                function["defer_loading"] = tool.defer_loading
            if tool.form is not None:
                self.text_forms[name] = tool.form
        else:
            function = tool.model_dump(exclude={"type"}, exclude_none=True)
        if about:
            function["description"] = "\n\n".join(filter(None, (about, function.get("description"))))
        self.functions.append({"type": "function", "function": {**function, "name": name}})


def read_additional_tools(items: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Yield the tools, as ResponseTools, of the input items of type additional_tools. Raises RequestError at the first
    list or tool that is not valid.
    """
    for number, item in enumerate(items):
        if item.get("type") != ADDITIONAL_TOOLS:
            continue
        tools, where = item.get("tools"), f"input[{number}].tools"
        if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
            raise RequestError(f"{where} must be a list of at most {MAX_TOOLS} tools", param="input")
        for at, tool in enumerate(tools):
            try:
                yield _TOOL.validate_python(tool)
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(map(str, first["loc"][1:]))
                said = f"{where}[{at}] is not valid: {place + ': ' if place else ''}{first['msg']}"
                raise RequestError(said, param="input") from None


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model knows a tool: NAMESPACE__NAME, without a second "__" if the namespace ends
    with one; the tool's own name without a namespace.
    """
    if namespace is None:
        return name
    return f"{namespace}{'' if namespace.endswith(_SEPARATOR) else _SEPARATOR}{name}"


def _text_function(tool: CustomTool) -> dict[str, Any]:
    """Return the function of a chat request, named without the namespace, for a custom tool: its text is the only
    parameter.
    """
    return {
        "name": tool.name,
        "description": "\n\n".join(_description(tool)),
        "parameters": {
            "type": "object",
            "properties": {TEXT: {"type": "string", "description": "The whole input of the tool, as plain text."}},
            "required": [TEXT],
            "additionalProperties": False,
        },
    }


def _description(tool: CustomTool) -> Iterator[str]:
    """Yield the paragraphs of a custom tool's description for the model: its description and its format, as far as it
    has them.
    """
    if tool.description:
        yield tool.description
    if isinstance(tool.format, GrammarFormat):
        kind = "this Lark grammar" if tool.format.syntax == "lark" else "this regular expression"
        yield f"The input must match {kind}:\n{tool.format.definition}"
