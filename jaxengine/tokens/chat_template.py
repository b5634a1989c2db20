"""Renders chat messages to prompt text: choice of the template, its variables, and its errors.

Every error is a RequestError that names the argument. Messages are checked by chat_messages; templates run in
chat_sandbox, in a process of template_renderer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens import chat_sandbox
from jaxengine.tokens.chat_messages import (
    Message,
    checked_messages,
    has_unusual_instructions,
    joined_texts,
    kind,
    lost_instructions,
    plain,
    ways_to_write,
)
from jaxengine.tokens.content_format import with_contents
from jaxengine.tokens.template_renderer import BadTemplate, ConversationRefused, TemplateFailure, TemplateRenderer

ROLE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# Names that have a meaning in templates or in the calls that lead to them. In another server, requests that set them
# could change its behaviour (CVE-2025-62426).
OWN_NAMES = chat_sandbox.FUNCTIONS.union(
    ROLE_TOKENS,
    ("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    ("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    ("return_assistant_tokens_mask", "chat_template_kwargs"),
)
# Text that marks the end of the last message. Its trailing space reveals whether the template strips contents.
CONTINUE_MARK = "END_OF_THE_MESSAGE_TO_CONTINUE "


class Dialect(Protocol):
    """Protocol of what is done to messages before a template writes them."""

    @property
    def joint(self) -> str | None:
        """Text between the text parts of a message; None if the template decides."""
        ...

    def written(self, messages: Sequence[Message]) -> list[Message]:
        """Return checked messages as the template expects them."""
        ...

    def guarded(self, value: Any) -> Any:
        """Return a value of plain JSON types in whose texts no special token is read as such; may be applied twice."""
        ...


class _UsualDialect:
    """Dialect that changes nothing: special tokens written in messages become their ids."""

    joint = None

    def written(self, messages: Sequence[Message]) -> list[Message]:
        return list(messages)

    def guarded(self, value: Any) -> Any:
        return value


USUAL = _UsualDialect()


def render_chat(
    renderer: TemplateRenderer,
    templates: str | Mapping[str, str] | None,
    role_tokens: Mapping[str, str],
    messages: Any,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Any,
    chat_template: Any,
    variables: Mapping[str, Any],
    placeholder: Callable[[str], str] | None = None,
    content_format: str = "auto",
    dialect: Dialect = USUAL,
) -> str:
    """Return the prompt text of a conversation.

    Args:
      renderer: runs the template.
      templates: the model's template, or templates by name; None for a model without one, which needs chat_template.
      role_tokens: texts of the existing tokens, by names of ROLE_TOKENS.
      messages: list of dicts with "role" and "content"; content is a text or a list of {"type": "text", "text": ...}
        (also input_text, output_text) and {"type": "refusal", "refusal": ...}, whose texts are joined by line breaks
        unless the template writes all of them one after the other. The list may have {"type": "image"}, {"type":
        "video"} or {"type": "audio"}, for which the template may look, and {"type": "thinking", "thinking": ...} or
        {"type": "language", "language": ...}, for which it must. An answer with tool_calls, reasoning or a refusal may
        have no content. Arguments in tool_calls are objects or texts; of truncated JSON the template gets as much as is
        there. A message of the role developer is a system message for templates that do not know the role. Several
        instructions that the template refuses or leaves out become one at the beginning. Other keys (name, ...) are
        passed to the template unchanged.
      add_generation_prompt: whether the text ends with the beginning of an answer.
      continue_final_message: whether the text ends with the last message's text, which the model continues. Must not be
        combined with add_generation_prompt.
      tools: None or a list of JSON-schema dicts, not empty.
      chat_template: Jinja source, or the name of one of `templates`. None: the model's default, which is "tool_use" if
        there are tools and such a template, else "default".
      variables: additional variables of the template; names of OWN_NAMES are refused.
      placeholder: for a model that takes media, returns the text that stands for "image", "video" or "audio" in
        templates that take only text; None for a text-only model.
      content_format: as of content_format.with_contents; "openai" is "auto" for a dialect that joins parts.
      dialect: what is done to messages beforehand. Token texts and placeholders are not guarded.

    Raises RequestError, whose param is the argument at fault; OverloadedError if too many templates are being rendered.
    """
    checked = dialect.guarded(dialect.written(checked_messages(messages, dialect.joint)))
    _check_options(add_generation_prompt, continue_final_message, tools)
    source = _choose(templates, chat_template, tools)
    if content_format == "openai" and dialect.joint is not None:
        content_format = "auto"
    parts, joined = (
        with_contents(each, source, placeholder, content_format) for each in (checked, joined_texts(checked))
    )
    for name in variables:
        if name in OWN_NAMES:
            text = f"a chat template variable must not be named {name!r}, which is reserved"
            raise RequestError(text, param="chat_template_kwargs", value=name)
    context = {
        "documents": None,
        **{name: dialect.guarded(plain(value, "chat_template_kwargs")) for name, value in variables.items()},
        **role_tokens,
        "tools": dialect.guarded(plain(tools, "tools")),
        "add_generation_prompt": add_generation_prompt,
    }

    def write(contents: list[Message]) -> str:
        ended = [*contents[:-1], _marked(contents[-1])] if continue_final_message else contents
        return _render(renderer, source, context, ended, dialect)

    if content_format == "openai" or parts == joined:
        text = write(parts)
    else:
        text = write(joined)
        # Templates may look at the first part alone, print the list, or refuse it.
        with contextlib.suppress(_Refused):
            one_by_one = write(parts)
            text = one_by_one if "".join(one_by_one.split()) == "".join(text.split()) else text
    return _cut_at_mark(text) if continue_final_message else text


class _Refused(RequestError):
    """Error for messages that the template refuses in every variant."""


def _render(
    renderer: TemplateRenderer,
    source: str,
    context: Mapping[str, Any],
    checked: Sequence[Message],
    dialect: Dialect,
) -> str:
    """Return the text of the first variant of the messages that the template accepts and whose instructions it writes.
    If no accepted variant keeps the instructions, return the text of the first accepted one. Whether instructions are
    kept matters only for messages that `has_unusual_instructions` finds.

    source: the template. context: its variables other than messages. checked: result of checked_messages. dialect:
    guards arguments of calls, in whose JSON a character may have been escaped. Raises RequestError for a template that
    is invalid, takes too long or accepts no variant; OverloadedError if too many templates are being rendered.
    """
    first: TemplateFailure | None = None
    incomplete: str | None = None
    may_lose = has_unusual_instructions(checked)
    for messages in ways_to_write(checked, source):
        for message in messages:
            if "tool_calls" in message:
                message["tool_calls"] = dialect.guarded(message["tool_calls"])
        try:
            text = renderer.render(source, {**context, "messages": messages})
        except BadTemplate as error:
            raise RequestError(f"the chat template cannot be used: {error}", param="chat_template") from None
        except ConversationRefused as error:
            first = first or error
            continue
        except TemplateFailure as error:
            raise RequestError(f"the chat template cannot be rendered: {error}", param="messages") from None
        if not may_lose or not lost_instructions(messages, text):
            return text
        incomplete = text if incomplete is None else incomplete
    if incomplete is not None:
        return incomplete
    raise _Refused(f"the chat template does not take the messages: {first}", param="messages") from None


def _check_options(add_generation_prompt: Any, continue_final_message: Any, tools: Any) -> None:
    """Check arguments of render_chat. Raises RequestError if one of the first two is not a bool or both are true, or if
    tools is neither None nor a list of at least one dict.
    """
    options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    for name, value in options.items():
        if type(value) is not bool:
            raise RequestError(f"{name} must be a bool, got {kind(value)}", param=name, value=value)
    if add_generation_prompt and continue_final_message:
        text = "continue_final_message cannot be combined with add_generation_prompt: one continues the last message, "
        raise RequestError(text + "the other begins a new one", param="continue_final_message", value=True)
    is_list = isinstance(tools, (list, tuple)) and bool(tools) and all(isinstance(tool, Mapping) for tool in tools)
    if tools is not None and not is_list:
        text = f"tools must be a list of dicts that is not empty, got {kind(tools)}"
        raise RequestError(text, param="tools", value=tools)


def _choose(templates: str | Mapping[str, str] | None, chat_template: Any, tools: Any) -> str:
    """Return the source of the template to use: the model's template that chat_template names, else chat_template
    itself. If that is None, it is the model's only one; of several "tool_use" if there are tools and such a template,
    else "default".

    Arguments: see render_chat. Raises RequestError for a chat_template that is empty or not a text, and if there is no
    such template of the model.
    """
    if chat_template is not None and (not isinstance(chat_template, str) or not chat_template):
        text = f"chat_template must be a text that is not empty, got {kind(chat_template)}"
        raise RequestError(text, param="chat_template", value=chat_template)
    if isinstance(templates, str):
        return chat_template or templates
    named = templates or {}
    if chat_template is not None:
        return named.get(chat_template, chat_template)
    name = "tool_use" if tools is not None and "tool_use" in named else "default"
    if name not in named:
        known = f"; it has {', '.join(map(repr, named))}" if named else ""
        raise RequestError(f"the model has no default chat template{known}; pass chat_template", param="chat_template")
    return named[name]


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the message with CONTINUE_MARK after its text, or after its last part. Raises RequestError for a
    message that does not end with text.
    """
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + CONTINUE_MARK}
    if not content or content[-1]["type"] != "text":
        problem = "the last message has no text to continue"
        raise RequestError(problem, param="continue_final_message", value=True)
    last = {**content[-1], "text": content[-1]["text"] + CONTINUE_MARK}
    return {**message, "content": [*content[:-1], last]}


def _cut_at_mark(text: str) -> str:
    """Return the part of a rendered text before the last CONTINUE_MARK. Trailing white space is removed if the template
    has stripped the mark's. Raises RequestError for a text without the mark.
    """
    at = text.rfind(CONTINUE_MARK.strip())
    if at < 0:
        raise RequestError("the chat template leaves out the last message", param="continue_final_message", value=True)
    return text[:at] if text.startswith(CONTINUE_MARK, at) else text[:at].rstrip()
