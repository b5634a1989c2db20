"""Detects whether a chat template takes contents as texts or as lists of parts, and converts messages accordingly.

The template's loops reveal which of the two it is (vLLM's content formats "openai" and "string").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes

from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.tokens import chat_sandbox
from jaxengine.tokens.chat_messages import LANGUAGE, MEDIA_TYPES, THINKING, Message

CONTENT_FORMATS = ("auto", "string", "openai")
_CONTENT = "content"
_IMAGE, _VIDEO, _AUDIO = MEDIA_TYPES
_ASKS_FOR_TEXT = re.compile(r"\bis\s+(?:not\s+)?string\b")
_MAX_TEMPLATE_CHARS = 1 << 20


def with_contents(
    messages: Sequence[Message],
    template: str,
    placeholder: Callable[[str], str] | None,
    content_format: str = "auto",
) -> list[Message]:
    """Return messages whose contents have the form that the template expects: lists of parts, or texts in which
    placeholders stand for images, videos and audio, and whose parts are joined by line breaks.

    A text stays a text if a template that takes parts also tests for texts. A template that takes parts but does not
    mention audio, or video next to images, gets placeholders in text parts for these.

    Args:
      messages: result of chat_messages.checked_messages; not changed.
      template: Jinja source.
      placeholder: function that returns the text for one of MEDIA_TYPES; None for a text-only model.
      content_format: "string" for texts, "openai" for parts alone, "auto" for what the template takes.

    Raises RequestError for another content_format, for media if `placeholder` is None and the template takes texts, and
    for parts of THINKING or LANGUAGE if it takes none.
    """
    if content_format not in CONTENT_FORMATS:
        param, text = "chat_template_content_format", f"must be one of {', '.join(CONTENT_FORMATS)}"
        raise RequestError(f"{param} {text}, got {show_value(content_format)}", param=param, value=content_format)
    for kind, instead in ((THINKING, "; reasoning_content has earlier reasoning"), (LANGUAGE, "")):
        if kind not in template and any(_has(kind, message) for message in messages):
            raise RequestError(f"the chat template takes no content part of type '{kind}'{instead}", param="messages")
    if content_format == "openai" or (content_format == "auto" and takes_parts(template)):
        # Some templates accept only parts, and would omit a text.
        takes_texts = content_format == "auto" and _ASKS_FOR_TEXT.search(template) is not None
        messages = [message if takes_texts else _as_parts(message) for message in messages]
        unknown = {_VIDEO} if _IMAGE in template and _VIDEO not in template else set[str]()
        unknown |= {_AUDIO} if _AUDIO not in template else set[str]()
        if placeholder is None or not unknown:
            return messages
        return [_with_texts(message, unknown, placeholder) for message in messages]
    return [_as_text(message, placeholder) for message in messages]


@lru_cache(maxsize=16)
def takes_parts(template: str) -> bool:
    """Return whether a template iterates over the parts of a content. False for a template that is invalid or very
    long. Results for the last 16 templates are cached.
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
    """Return the names of a template's variables that hold a message's content: "content", and variables that are
    assigned a content, up to three assignments in a chain.
    """
    names = {_CONTENT}
    # Assignments may chain; a few rounds are enough.
    for _ in range(3):
        for each in tree.find_all(nodes.Assign):
            if isinstance(each.target, nodes.Name) and _is_content(each.node, names):
                names.add(each.target.name)
    return names


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Return whether an expression of a template is a message's content: a variable in `names`, the attribute or key
    "content", a slice or filter of a content, or a conditional with one.
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
    """Return a copy of the message with a text content as a list of one text part. Other messages are returned
    unchanged.
    """
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_texts(message: Message, unknown: set[str], placeholder: Callable[[str], str]) -> Message:
    """Return a copy of the message with each part whose type is in `unknown`, types that the template does not support,
    replaced by a text part with its placeholder. Messages with a text content are returned unchanged.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "text", "text": placeholder(part["type"])} if part["type"] in unknown else part for part in content
    ]
    return {**message, "content": parts}


def _as_text(message: Message, placeholder: Callable[[str], str] | None) -> Message:
    """Return a copy of the message with the parts of its content joined to one text by line breaks. Messages without
    parts are returned unchanged. Raises RequestError for media if placeholder is None.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(_text(part, placeholder) for part in content)}


def _has(kind: str, message: Message) -> bool:
    """Return whether a message's content is a list with a part of this type."""
    content = message.get("content")
    return isinstance(content, list) and any(part["type"] == kind for part in content)


def _text(part: dict[str, Any], placeholder: Callable[[str], str] | None) -> str:
    """Return the text of a part of text, THINKING or LANGUAGE, or the placeholder of a part of MEDIA_TYPES. Raises
    RequestError for the latter if placeholder is None.
    """
    if part["type"] not in MEDIA_TYPES:
        return part[part["type"]]
    if placeholder is None:
        raise RequestError(f"the chat template takes texts only, and messages has a part {part}", param="messages")
    return placeholder(part["type"])
