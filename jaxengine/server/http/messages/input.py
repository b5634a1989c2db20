"""Conversion of Anthropic's messages to chat messages.

Blocks that only Anthropic's server writes or reads are left out. Every other block takes effect, or is refused with its
type named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxengine.media.parts import PlacedPart
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.http.messages.tools import CHANGES
from jaxengine.tokens.chat_messages import ACCOUNTS

ROLES = ("user", "assistant", "system")
# Types of blocks that each role may have.
_BLOCKS = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
# Types of blocks in an assistant's message that are left out: thinking that only Anthropic can decrypt, and calls that
# its server has executed, with their results.
_LEFT_OUT = re.compile(r"redacted_thinking|server_tool_use|(?!tool_result)[a-z_]{1,64}_tool_result")


def read_messages(system: str | list[Any] | None, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert a request's `system`, which may be None, and `messages` to chat messages, the system message first.

    Raises RequestError for a role or block that is not allowed. Images are not checked here.
    """
    read = _read("system", system, "system") if system else []
    for number, message in enumerate(messages):
        where, role = f"messages[{number}]", message.get("role")
        if role not in ROLES:
            raise _refused(f"{where}.role is {show_value(role)}; allowed: {', '.join(ROLES)}")
        read += _read(role, message.get("content"), f"{where}.content")
    return read


def left_out_blocks(system: str | list[Any] | None, messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield, once each, names of what has no effect: first "messages." with ACCOUNTS for accounting lines of system
    messages, then, for parts of blocks, "messages.cache_control", "messages.is_error" and "messages.TYPE", where TYPE
    is that of a block that is left out. Names of what is in `system` begin with "system." instead. Arguments are those
    of `read_messages`.
    """
    blocks = [("system", block) for block in system or ()] if isinstance(system, list) else []
    instructions: list[tuple[str, Any]] = [("system", system), *blocks]
    for message in messages:
        content = message.get("content")
        own = [("messages", block) for block in content] if isinstance(content, list) else []
        blocks += own
        instructions += [("messages", content), *own] if message.get("role") == "system" else []
    yield from dict.fromkeys(f"{place}.{ACCOUNTS}" for place, one in instructions if _is_for_accounts(one))
    found = dict.fromkeys(
        (place, key)
        for place, block in blocks
        if isinstance(block, dict)
        for key in ("cache_control", "is_error", str(block.get("type")))
        if (key in ("cache_control", "is_error") and block.get(key)) or _LEFT_OUT.fullmatch(key)
    )
    yield from (f"{place}.{key}" for place, key in found)


def _is_for_accounts(block: Any) -> bool:
    """Whether an instruction, a text or a text block, begins with the line for Anthropic's accounting."""
    text = block.get("text") if isinstance(block, dict) else block
    return isinstance(text, str) and text.startswith(ACCOUNTS)


def _read(role: str, content: Any, where: str) -> list[dict[str, Any]]:
    """Return the chat messages for the content of one message.

    role: one of ROLES. where: path of the content, for errors. Raises RequestError for content that is not allowed.
    """
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise _refused(f"{where} must be a text or a list of blocks")
    return _blocks(role, content, where)


def _blocks(role: str, blocks: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Convert the blocks of a message to chat messages: one for each tool result, then one with all other blocks. The
    latter is omitted if there are only tool results, or if no block of a system message is left. Left out are the
    assistant's blocks of a type in _LEFT_OUT, and a system message's changes of tools (tools.CHANGES, unchecked here).

    role: one of ROLES. where: path of the blocks, for errors. Raises RequestError for a block that the role may not
    have or that lacks a field.
    """
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    said: dict[str, Any] = {"role": role}
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if role == "assistant" and isinstance(kind, str) and _LEFT_OUT.fullmatch(kind):
            continue
        allowed = (*_BLOCKS[role], *(CHANGES if role == "system" and where != "system" else ()))
        if kind not in allowed:
            raise _refused(f"{place}.type is {show_value(kind)}; allowed for {role}: {', '.join(allowed)}")
        if kind in CHANGES:
            continue
        if kind in ("text", "image"):
            parts.append(_part(block, place))
        elif kind == "thinking":
            said["reasoning"] = said.get("reasoning", "") + _text(block, "thinking", place)
        elif kind == "tool_result":
            content = {"role": "tool", "tool_call_id": _text(block, "tool_use_id", place)}
            results.append({**content, "content": _result(block.get("content"), f"{place}.content")})
        else:
            said.setdefault("tool_calls", []).append(_call(block, place))
    if parts or len(said) > 1 or not (results or role == "system"):
        results.append({**said, "content": _joined(parts)})
    return results


def _part(block: dict[str, Any], where: str) -> dict[str, Any]:
    """Convert a text or image block to a part of a chat message. The image is not checked here.

    where: path of the block, for errors. Raises RequestError for a text block without a text.
    """
    if block["type"] == "image":
        return PlacedPart({"type": "image", "source": block.get("source") or {}}, where)
    return {"type": "text", "text": _text(block, "text", where)}


def _joined(parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the texts of the parts, joined by line breaks; a list of the unchanged parts if they include an image."""
    if any(isinstance(part, PlacedPart) for part in parts):
        return [*parts]
    return "\n".join(part["text"] for part in parts)


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    """Convert a block tool_use to a tool call of a chat message.

    where: path of the block, for errors. Raises RequestError for an input that is not an object, and for a missing name
    or id.
    """
    if not isinstance(block.get("input"), dict):
        raise _refused(f"{where}.input is not an object")
    arguments = json.dumps(block["input"], ensure_ascii=False)
    function = {"name": _text(block, "name", where), "arguments": arguments}
    return {"id": _text(block, "id", where), "type": "function", "function": function}


def _result(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Return the content of a block tool_result for a chat message: a text, "" for None, or a list of parts if there is
    an image.

    where: path of the content, for errors. Raises RequestError for blocks other than text and image, and for content
    that is neither None nor a text nor a list.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _refused(f"{where} must be a text or a list of blocks of text and images")
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in ("text", "image"):
            raise _refused(f"{where}[{number}].type is {show_value(kind)}; allowed: text, image")
    return _joined([_part(block, f"{where}[{at}]") for at, block in enumerate(content)])


def _text(block: dict[str, Any], key: str, where: str) -> str:
    """Return the text in field `key` of a block. where: path of the block, for errors. Raises RequestError if the field
    is missing or not a text.
    """
    value = block.get(key)
    if not isinstance(value, str):
        raise _refused(f"{where}.{key} is missing or not a text")
    return value


def _refused(message: str) -> RequestError:
    """Return a RequestError with this message; its field is "system" if the message begins with that, otherwise
    "messages".
    """
    return RequestError(message, param="system" if message.startswith("system") else "messages")
