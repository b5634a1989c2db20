"""Whether a chat template takes contents as texts or as lists of parts, and messages written as it does.

Templates of models that take pictures go over the parts of a content and write a placeholder for each picture; others
want one text, in which the placeholder stands already. Which of the two a template is shows in its loops (in vLLM's
words: the content formats "openai" and "string"). Knows nothing of pictures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes

from jaxengine.tokens import chat_sandbox
from jaxengine.tokens.chat_messages import MEDIA_TYPES, Message
from scheduler.errors import RequestError

_CONTENT = "content"
_IMAGE, _VIDEO = MEDIA_TYPES
_ASKS_FOR_TEXT = re.compile(r"\bis\s+(?:not\s+)?string\b")
_MAX_TEMPLATE_CHARS = 1 << 20


def with_contents(
    messages: Sequence[Message], template: str, placeholder: Callable[[str], str] | None
) -> list[Message]:
    """Checked messages, each content as the template takes it.

    Args:
      messages: of chat_messages.checked_messages.
      placeholder: the text that stands for one of MEDIA_TYPES, for a template that takes texts; None for a model of
        text alone, whose texts stay as they are.

    Raises RequestError for a picture where it is None and the template takes texts.
    """
    has_media = any(isinstance(message.get("content"), list) for message in messages)
    if not has_media and placeholder is None:
        return list(messages)
    if takes_parts(template):
        # Some take nothing else, and would leave a text out.
        takes_texts = _ASKS_FOR_TEXT.search(template) is not None
        messages = [message if takes_texts else _as_parts(message) for message in messages]
        if placeholder is None or _IMAGE not in template or _VIDEO in template:
            return messages
        return [_with_texts(message, placeholder) for message in messages]
    return [_as_text(message, placeholder) for message in messages]


@lru_cache(maxsize=16)
def takes_parts(template: str) -> bool:
    """Whether a template goes over the parts of a content. One that is no template does not."""
    if len(template) > _MAX_TEMPLATE_CHARS:
        return False
    try:
        tree = chat_sandbox.parse(template)
        names = _content_names(tree)
        return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    except (jinja2.TemplateError, RecursionError, ValueError):
        return False


def _content_names(tree: nodes.Template) -> set[str]:
    """Variables that are a message's content: of its name, or set to it."""
    names = {_CONTENT}
    # As often as one may be set to another.
    for _ in range(3):
        for each in tree.find_all(nodes.Assign):
            if isinstance(each.target, nodes.Name) and _is_content(each.node, names):
                names.add(each.target.name)
    return names


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression is a content, or a selection of its parts."""
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
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_texts(message: Message, placeholder: Callable[[str], str]) -> Message:
    """With a text in the place of each video: the template, as SmolVLM's, has words for pictures alone."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{"type": "text", "text": placeholder(_VIDEO)} if part["type"] == _VIDEO else part for part in content]
    return {**message, "content": parts}


def _as_text(message: Message, placeholder: Callable[[str], str] | None) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(_text(part, placeholder) for part in content)}


def _text(part: dict[str, Any], placeholder: Callable[[str], str] | None) -> str:
    if part["type"] not in MEDIA_TYPES:
        return part["text"]
    if placeholder is None:
        raise RequestError(f"the chat template takes texts only, and messages has a part {part}", param="messages")
    return placeholder(part["type"])
