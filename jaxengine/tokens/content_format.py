"""Detects whether a chat template takes contents as texts or as lists of parts, and converts messages accordingly.

Templates of multimodal models iterate over the parts of a content and write a placeholder per image; others expect a
text that contains the placeholders. Which one it is shows in the template's loops (vLLM's content formats "openai" and
"string").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes

from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens import chat_sandbox
from jaxengine.tokens.chat_messages import MEDIA_TYPES, Message

_CONTENT = "content"
_IMAGE, _VIDEO, _AUDIO = MEDIA_TYPES
_ASKS_FOR_TEXT = re.compile(r"\bis\s+(?:not\s+)?string\b")
_MAX_TEMPLATE_CHARS = 1 << 20


def with_contents(
    messages: Sequence[Message], template: str, placeholder: Callable[[str], str] | None
) -> list[Message]:
    """Convert the contents of checked messages to the template's form.

    Args:
      messages: from chat_messages.checked_messages.
      placeholder: returns the text for one of MEDIA_TYPES, for a template that takes texts; None for a text-only model,
        whose texts stay unchanged.

    Raises RequestError for media if `placeholder` is None and the template takes texts.
    """
    has_media = any(isinstance(message.get("content"), list) for message in messages)
    if not has_media and placeholder is None:
        return list(messages)
    if takes_parts(template):
        # Some templates only take parts, and would omit a text.
        takes_texts = _ASKS_FOR_TEXT.search(template) is not None
        messages = [message if takes_texts else _as_parts(message) for message in messages]
        unknown = {_VIDEO} if _IMAGE in template and _VIDEO not in template else set[str]()
        unknown |= {_AUDIO} if _AUDIO not in template else set[str]()
        if placeholder is None or not unknown:
            return messages
        return [_with_texts(message, unknown, placeholder) for message in messages]
    return [_as_text(message, placeholder) for message in messages]


@lru_cache(maxsize=16)
def takes_parts(template: str) -> bool:
    """Whether a template iterates over the parts of a content. False for one that is invalid or very long.

    The answers for the last 16 templates are kept.
    """
    if len(template) > _MAX_TEMPLATE_CHARS:
        return False
    try:
        tree = chat_sandbox.parse(template)
        names = _content_names(tree)
        return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    except (jinja2.TemplateError, RecursionError, ValueError):
        return False


def _content_names(tree: nodes.Template) -> set[str]:
    """Return the names of a template's variables that hold a message's content: "content", and those that are assigned
    it.
    """
    names = {_CONTENT}
    # Assignments may chain; a few rounds are enough.
    for _ in range(3):
        for each in tree.find_all(nodes.Assign):
            if isinstance(each.target, nodes.Name) and _is_content(each.node, names):
                names.add(each.target.name)
    return names


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression of a template (`node`) is a message's content: a name, attribute or key for it, a slice or
    filter of one, or a conditional with one.

    names: variables that hold a content.
    """
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == _CONTENT
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, names)
        return isinstance(node.arg, nodes.Const) and node.arg.value == _CONTENT
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return any(_is_content(each, names) for each in (node.expr1, node.expr2) if each is not None)
    return False


def _as_parts(message: Message) -> Message:
    """Return the message with a content that is a text as a list of one text part; others unchanged."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_texts(message: Message, unknown: set[str], placeholder: Callable[[str], str]) -> Message:
    """Replace the parts of a message whose type is in `unknown`, types that the template does not know, by text: videos
    for one that only takes images, such as SmolVLM's, and sounds.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "text", "text": placeholder(part["type"])} if part["type"] in unknown else part for part in content
    ]
    return {**message, "content": parts}


def _as_text(message: Message, placeholder: Callable[[str], str] | None) -> Message:
    """Return the message with the parts of its content joined to one text by line breaks; others unchanged. Raises
    RequestError for media if placeholder is None.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(_text(part, placeholder) for part in content)}


def _text(part: dict[str, Any], placeholder: Callable[[str], str] | None) -> str:
    """Return the text of a part, for one of MEDIA_TYPES its placeholder. Raises RequestError for it if placeholder is
    None.
    """
    if part["type"] not in MEDIA_TYPES:
        return part["text"]
    if placeholder is None:
        raise RequestError(f"the chat template takes texts only, and messages has a part {part}", param="messages")
    return placeholder(part["type"])
