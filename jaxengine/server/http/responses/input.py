"""Conversion of the items of /v1/responses to chat messages.

Calls of tools that only OpenAI's server runs are left out, as those tools are. An item of another type is an error.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from jaxengine.media.parts import PlacedPart
from jaxengine.parsers.tools.forced import text_arguments
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.http.responses.tools import ADDITIONAL_TOOLS, flat_name

ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
_IMAGE_PART = "input_image"
# A call of the model -> where it has its arguments.
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_LEFT_OUT = (
    "code_interpreter_call",
    "file_search_call",
    "image_generation_call",
    "mcp_list_tools",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
)
_ALLOWED = ("message", *_CALLS, *_OUTPUTS, "reasoning", ADDITIONAL_TOOLS, *_LEFT_OUT)


def read_input(items: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert a request's `input` to chat messages; a text becomes a user message. Raises RequestError for an item or
    part that is not allowed; images are checked later.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        _add(messages, item, f"input[{number}]")
    # Reasoning without an answer is a message without content.
    return [{"content": "", **message} if "tool_calls" not in message else message for message in messages]


def left_out_items(items: str | Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the types of the items that are left out, each once, as "input.web_search_call"."""
    kinds = () if isinstance(items, str) else [item.get("type") for item in items]  # of any type, as nothing is checked
    yield from (f"input.{kind}" for kind in _LEFT_OUT if kind in kinds)


def named_items(items: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of a request's `input` as /v1/responses/{id}/input_items shows them, each with an id, its own or
    a new one. A text becomes the item of a user message.
    """
    if isinstance(items, str):
        items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": items}]}]
    return [{"id": f"item_{secrets.token_hex(16)}", "type": "message", **item} for item in items]


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Add an item to the messages, in place: to the last one if that is the same turn of the assistant; nothing for an
    item that is left out. where: path of the item, for errors. Raises RequestError for another type and for a field
    that is missing or not allowed.
    """
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ROLES:
            raise _refused(f"{where}.role is {show_value(role)}; allowed: {', '.join(ROLES)}")
        content = _content(item.get("content"), f"{where}.content", role != "assistant")
        open_turn = _open_turn(messages) if role == "assistant" else None
        if open_turn is not None and "content" not in open_turn:
            open_turn["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif isinstance(kind, str) and kind in _CALLS:
        if _open_turn(messages) is None:
            messages.append({"role": "assistant"})
        messages[-1].setdefault("tool_calls", []).append(_call(item, kind, where))
    elif kind in _OUTPUTS:
        if not isinstance(item.get("call_id"), str):
            raise _refused(f"{where}.call_id is missing or not a string")
        content = _content(item.get("output"), f"{where}.output", True)
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list):
            raise _refused(f"{where}.content is not a list")
        text = "\n".join(_part(part, where, ("reasoning_text", "summary_text")) for part in parts)
        if not parts and item.get("encrypted_content") is not None:
            text = _decrypted(item["encrypted_content"], f"{where}.encrypted_content")
        messages.append({"role": "assistant", "reasoning": text})
    elif kind != ADDITIONAL_TOOLS and kind not in _LEFT_OUT:
        raise _refused(f"{where}.type is {show_value(kind)}; allowed: {', '.join(_ALLOWED)}")


def _call(item: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Return the call of a function or a custom tool in the form of a chat message.

    kind: the item's type, one of _CALLS. where: path of the item, for errors. Raises RequestError for a field that is
    missing or no string; whether there is such a tool is not checked.
    """
    for key in ("call_id", "name", _CALLS[kind]):
        if not isinstance(item.get(key), str):
            raise _refused(f"{where}.{key} is missing or not a string")
    namespace = item.get("namespace")
    if not isinstance(namespace, str | None):
        raise _refused(f"{where}.namespace is not a string")
    given = item[_CALLS[kind]]
    arguments = text_arguments(given) if kind == "custom_tool_call" else given
    function = {"name": flat_name(item["name"], namespace), "arguments": arguments}
    return {"id": item["call_id"], "type": "function", "function": function}


def _decrypted(content: Any, where: str) -> str:
    """Decode the reasoning text, base64 of UTF-8, of a response made with include "reasoning.encrypted_content". Raises
    RequestError for anything else. where: of the content, for the error.
    """
    try:
        return base64.b64decode(content, validate=True).decode()
    except (TypeError, ValueError):
        raise _refused(f"{where} was not made by this server") from None


def _open_turn(messages: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the assistant message that further items extend, None without one: reasoning, text and calls are items
    each.
    """
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _content(content: Any, where: str, takes_images: bool) -> str | list[dict[str, Any]]:
    """Return `content`, a text or a list of parts, as one text, or as parts for a chat message if one of them is an
    image.

    where: its path, for errors. takes_images: whether images may be in it. Raises RequestError for anything else.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refused(f"{where} must be a text or a list of parts")
    kinds = (*_TEXT_PARTS, _IMAGE_PART) if takes_images else _TEXT_PARTS
    parts = [_any_part(part, f"{where}[{number}]", where, kinds) for number, part in enumerate(content)]
    has_images = any(isinstance(part, PlacedPart) for part in parts)
    return parts if has_images else "\n".join(part["text"] for part in parts)


def _any_part(part: Any, place: str, where: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Convert a part to one of a chat message: an image to a PlacedPart with its fields, which are checked later, for
    all APIs in one place; others to a text part.

    kinds: the allowed types of parts. place: path of the part; where: path of its item; both for errors. Raises
    RequestError for a part of another type or without a text.
    """
    if isinstance(part, dict) and part.get("type") == _IMAGE_PART and _IMAGE_PART in kinds:
        return PlacedPart(part, place)
    return {"type": "text", "text": _part(part, where, kinds)}


def _part(part: Any, where: str, kinds: Sequence[str]) -> str:
    """Return the text of a part that is one of `kinds`. where: path of its item, for errors. Raises RequestError for
    others.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        raise _refused(f"{where} holds a part of type {show_value(kind)}; allowed: {', '.join(kinds)}")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise _refused(f"{where} holds a part whose text is not a string")
    return text


def _refused(message: str) -> RequestError:
    """Return the error, whose field is "input"."""
    return RequestError(message, param="input")
