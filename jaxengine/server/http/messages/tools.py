"""Tools of /v1/messages: functions, tools that Anthropic defines, and blocks of system messages that add or remove them
in the course of a conversation (tool_addition, tool_removal).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError

from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.http.chat.protocol import MAX_NAME_CHARS
from jaxengine.server.http.request.errors import as_request_error
from jaxengine.server.http.request.fields import JsonObject
from jaxengine.server.http.request.protocol import RequestModel

ADDITION, REMOVAL = CHANGES = ("tool_addition", "tool_removal")
# Types of tools that Anthropic defines, which end with a date. Its server runs them, or its models know their schema.
_DEFINED = re.compile(r"[a-z0-9_]{1,64}_20\d{6}|mcp_toolset")


class MessagesTool(RequestModel):
    """A function that the model may call; strict as in chat.protocol.Function. defer_loading: passed to the chat
    template, which may leave the function out until a search or a message adds it.
    """

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: JsonObject | None = None


class DefinedTool(RequestModel):
    """A tool that Anthropic defines, such as web_search_20250305. It is left out of the prompt, and named in
    X-Ignored-Fields.
    """

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    cache_control: JsonObject | None = None


def _kind(tool: Any) -> str | None:
    """Return "custom" or "defined" for a tool, by its type; None for other types. A tool without a type is "custom"."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if kind is None or kind == "custom":
        return "custom"
    return "defined" if isinstance(kind, str) and _DEFINED.fullmatch(kind) else None


Tool = Annotated[
    Annotated[MessagesTool, Tag("custom")] | Annotated[DefinedTool, Tag("defined")],
    Discriminator(
        _kind,
        custom_error_type="tool_type",
        custom_error_message="type must be custom, or one with the date of a version, such as web_search_20250305",
    ),
]


def chat_tool(tool: MessagesTool) -> dict[str, Any]:
    """Return a function in the format of a chat request. It has description, strict and defer_loading only if they are
    given.
    """
    function = tool.model_dump(include={"name", "description", "strict", "defer_loading"}, exclude_none=True)
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


def tools_in_effect(tools: Sequence[Any], messages: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the tools that the model may call at the end of a conversation: those of the request, in their order, then
    those that messages define. A tool that is added is no longer deferred; one that is removed is left out, until it is
    added again. If several tools have one name, an addition changes the last function, and a removal removes all.

    tools: MessagesTool and DefinedTool. messages: as given. Raises RequestError for a change of another form than
    {"type": ..., "tool": {"type": "tool_reference", "name": ...}} or, to add a function, {"type": "tool_definition",
    "definition": ...} in `tool`, and for the name of a tool that is not known.
    """
    found, removed = list(tools), set[str]()
    # A function comes before a tool of Anthropic's, which the model cannot call. Whoever reads the tools refuses two
    # functions with one name.
    ordered = sorted(enumerate(tools), key=lambda pair: isinstance(pair[1], MessagesTool))
    indices = {tool.name: index for index, tool in ordered}
    for number, message in enumerate(messages):
        content = message.get("content")
        for at, block in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(block, dict) or block.get("type") not in CHANGES:
                continue
            where = f"messages[{number}].content[{at}]"
            name, tool = _read_change(block, where)
            if tool is not None:
                if indices.setdefault(name, len(found)) == len(found):
                    found.append(tool)
                found[indices[name]] = tool
            elif name not in indices:
                problem = f"{where}.tool.name is {show_value(name)}; allowed: names that tools or an addition declares"
                raise RequestError(problem, param="messages", value=name)
            elif block["type"] == ADDITION and isinstance(old := found[indices[name]], MessagesTool):
                found[indices[name]] = old.model_copy(update={"defer_loading": None})
            (removed.add if block["type"] == REMOVAL else removed.discard)(name)
    return [tool for tool in found if tool.name not in removed]


def ignored_keys(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield, once each, the names of keys in blocks that add or remove tools that have no effect: "messages.TYPE.KEY",
    with the path of the key within the block, for a key that `tools_in_effect` does not read, and for cache_control of
    a function. messages: as given; blocks of another form are left out.
    """
    found: dict[str, None] = {}
    for message in messages:
        content = message.get("content") if message.get("role") == "system" else None
        for block in content if isinstance(content, list) else ():
            if not isinstance(block, dict) or block.get("type") not in CHANGES:
                continue
            tool = block.get("tool")
            function = tool.get("definition") if isinstance(tool, dict) else None
            known = MessagesTool.model_fields.keys() - {"cache_control"}
            by_value = function is not None
            for place, one, own in (
                ("", block, ("type", "tool", "cache_control")),  # cache_control of blocks is named elsewhere
                ("tool.", tool, ("type", "definition" if by_value else "name")),
                ("tool.definition.", function, known),
            ):
                keys = one if isinstance(one, Mapping) else ()
                found |= dict.fromkeys(f"messages.{block['type']}.{place}{key}" for key in keys if key not in own)
    yield from found


def _read_change(block: dict[str, Any], where: str) -> tuple[str, MessagesTool | None]:
    """Return the name of the tool that a block adds or removes, and the tool if the block defines it, else None. Only
    additions may define one. where: path of the block, for errors. Raises RequestError for another form.
    """
    tool = block.get("tool")
    kind = tool.get("type") if isinstance(tool, dict) else None
    allowed = ("tool_reference", "tool_definition") if block["type"] == ADDITION else ("tool_reference",)
    if not isinstance(tool, dict) or kind not in allowed:
        problem = f"{where}.tool.type is {show_value(kind)}; allowed: {', '.join(allowed)}"
        raise RequestError(problem, param="messages")
    if kind == "tool_definition":
        try:
            defined = MessagesTool.model_validate(tool.get("definition"))
        except ValidationError as error:
            raise RequestError(f"{where}.tool.definition: {as_request_error(error)}", param="messages") from None
        return defined.name, defined
    if not isinstance(name := tool.get("name"), str):
        raise RequestError(f"{where}.tool.name is missing or not a text", param="messages")
    return name, None
