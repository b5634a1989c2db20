"""Conversion of the items of /v1/responses to chat messages.

Calls of tools that only OpenAI's server runs are left out, as are these tools. An item of another unknown type is an
error.
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
# Type of a call -> field with its arguments.
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
    """Convert a request's `input` to chat messages; a text becomes one user message. Raises RequestError for an item or
    part that is not allowed. Images are not checked here.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        _add(messages, item, f"input[{number}]")
    # Reasoning without an answer is a message without content.
    return [{"content": "", **message} if "tool_calls" not in message else message for message in messages]


def left_out_items(items: str | Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield, once each, the types of the items that are left out, as "input.TYPE", such as "input.web_search_call"."""
    kinds = () if isinstance(items, str) else [item.get("type") for item in items]
    yield from (f"input.{kind}" for kind in _LEFT_OUT if kind in kinds)


def named_items(items: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of a request's `input` as /v1/responses/{id}/input_items shows them: each has an id, which is
    random if the item has none, and a type. A text becomes the item of a user message.
    """
    if isinstance(items, str):
        items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": items}]}]
    named = ((item.get("id") or f"item_{secrets.token_hex(16)}", item) for item in items)
    return [{"id": name, "type": "message", **item} | {"id": name} for name, item in named]


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Add an item to the messages, in place. Text and calls of the assistant are added to its last message if that is
    open; items of types that are left out add nothing.

    where: path of the item, for errors. Raises RequestError for an unknown type and for a field that is missing or not
    allowed.
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
    """Return the call of a function or a custom tool as a tool call of a chat message. A namespace becomes part of the
    function's name (`flat_name`), and a custom tool's text becomes JSON arguments (`text_arguments`).

    kind: the item's type, one of _CALLS. where: path of the item, for errors. Raises RequestError for a field that is
    missing or not a string; the namespace may be missing. Whether the tool exists is not checked.
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
    """Return the reasoning text in the encrypted_content of a reasoning item, which this server writes as base64 of
    UTF-8. Raises RequestError for anything else. where: path of the content, for the error.
    """
    try:
        return base64.b64decode(content, validate=True).decode()
    except (TypeError, ValueError):
        raise _refused(f"{where} was not made by this server") from None


def _open_turn(messages: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the last message if it is the assistant's, so that further items may extend it (reasoning, text and calls
    are separate items); else None.
    """
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _content(content: Any, where: str, takes_images: bool) -> str | list[dict[str, Any]]:
    """Return `content`, a text or a list of parts, as one text with parts joined by line breaks, or as a list of chat
    message parts if one of them is an image.

    where: path of the content, for errors. takes_images: whether images are allowed. Raises RequestError for anything
    else.
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
    """Convert a part to a part of a chat message: an image to a PlacedPart with the same fields, which are checked
    later, others to a text part.

    kinds: the allowed types of parts. place: path of the part; where: path of the content; both for errors. Raises
    RequestError for a part of another type or without a text.
    """
    if isinstance(part, dict) and part.get("type") == _IMAGE_PART and _IMAGE_PART in kinds:
        return PlacedPart(part, place)
    return {"type": "text", "text": _part(part, where, kinds)}


def _part(part: Any, where: str, kinds: Sequence[str]) -> str:
    """Return the text of a part whose type is one of `kinds`. where: path of the content, for errors. Raises
    RequestError for another type and for a text that is not a string.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        raise _refused(f"{where} holds a part of type {show_value(kind)}; allowed: {', '.join(kinds)}")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise _refused(f"{where} holds a part whose text is not a string")
    return text


def _refused(message: str) -> RequestError:
    """Return a RequestError with this message and the field "input"."""
    return RequestError(message, param="input")
