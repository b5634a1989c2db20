"""Chat messages to prompt text: what a message may look like, which template is used, and what a template is told.

Every fault is a RequestError that names the argument. Knows nothing of token ids; templates run in chat_sandbox.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from jaxengine.tokens import chat_sandbox
from scheduler.errors import RequestError

MAX_DEPTH = 32
ROLE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# Names with a meaning of their own, in a template or in the calls that lead to it: letting a request set them has let
# requests change what a server does (CVE-2025-62426).
OWN_NAMES = chat_sandbox.FUNCTIONS.union(
    ROLE_TOKENS,
    ("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    ("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    ("return_assistant_tokens_mask", "chat_template_kwargs"),
)
# What answers call a model's reasoning; templates know the first.
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
# Marks where the last message ends; the space behind shows whether the template strips what it is given.
CONTINUE_MARK = "END_OF_THE_MESSAGE_TO_CONTINUE "


def render_chat(
    templates: str | Mapping[str, str] | None,
    role_tokens: Mapping[str, str],
    messages: Any,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Any,
    chat_template: Any,
    variables: Mapping[str, Any],
) -> str:
    """The prompt text of a conversation.

    Args:
      templates: the model's template, or templates by name, or None.
      role_tokens: texts of the tokens that exist, by names out of ROLE_TOKENS.
      messages: list of dicts with "role" and "content"; content is a text or a list of {"type": "text", "text": ...},
        whose texts are joined by line breaks. Other keys (name, tool_calls, ...) reach the template as they are.
      tools: None or a list of JSON-schema dicts.
      chat_template: Jinja source, or the name of one of `templates`, used instead of the model's default.
      variables: further names the template may use.

    Raises RequestError, its param being the argument at fault.
    """
    checked = checked_messages(messages)
    _check_options(add_generation_prompt, continue_final_message, tools)
    source = _choose(templates, chat_template, tools)
    if continue_final_message:
        checked[-1] = _marked(checked[-1])
    for name in variables:
        if name in OWN_NAMES:
            text = f"a chat template variable must not be named {name!r}, which has a meaning of its own"
            raise RequestError(text, param="chat_template_kwargs", value=name)
    context = {
        "documents": None,
        **{name: _plain(value, "chat_template_kwargs") for name, value in variables.items()},
        **role_tokens,
        "messages": checked,
        "tools": _plain(tools, "tools"),
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        text = chat_sandbox.render(source, context)
    except (jinja2.TemplateSyntaxError, SecurityError) as error:
        raise RequestError(f"the chat template cannot be used: {_brief(error)}", param="chat_template") from error
    except Exception as error:  # a template is a program: anything may come out of it
        raise RequestError(
            f"the chat template does not take the messages: {_brief(error)}", param="messages"
        ) from error
    return _cut_at_mark(text) if continue_final_message else text


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Copies of the messages, every content a text, keys without a value left out; RequestError(param="messages")."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise _refused(f"messages must be a list of at least one message, got {_kind(messages)}", messages)
    return [_checked_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refused(f"{where} must be a dict with role and content, got {_kind(message)}", message)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise _refused(f"{where}.role must be a text that is not empty, got {_kind(role)}", role)
    if content is None and not message.get("tool_calls"):
        raise _refused(f"{where}.content is missing; only a message with tool_calls may leave it out", message)
    if isinstance(content, (list, tuple)):
        content = "\n".join(_part_text(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    if content is not None and not isinstance(content, str):
        raise _refused(f"{where}.content must be a text or a list of text parts, got {_kind(content)}", content)
    checked = _plain({**message, "content": content}, "messages")
    # Templates print a None as "None", but know how to do without a key.
    checked = {key: value for key, value in checked.items() if value is not None}
    reasoning = [checked[name] for name in REASONING_NAMES if name in checked]
    return {**checked, REASONING_NAMES[0]: reasoning[0]} if reasoning else checked


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _refused(f'{where} must be {{"type": "text", "text": ...}}, got {_kind(part)}', part)
    if part.get("type") != "text":
        raise _refused(f"{where}.type must be 'text', got {str(part.get('type'))[:100]!r}", part.get("type"))
    if not isinstance(part.get("text"), str):
        raise _refused(f"{where}.text must be a text, got {_kind(part.get('text'))}", part.get("text"))
    return part["text"]


def _check_options(add_generation_prompt: Any, continue_final_message: Any, tools: Any) -> None:
    options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    for name, value in options.items():
        if type(value) is not bool:
            raise RequestError(f"{name} must be a bool, got {_kind(value)}", param=name, value=value)
    if add_generation_prompt and continue_final_message:
        text = "continue_final_message cannot be combined with add_generation_prompt: one continues the last message, "
        raise RequestError(text + "the other begins a new one", param="continue_final_message", value=True)
    is_list = isinstance(tools, (list, tuple)) and bool(tools) and all(isinstance(tool, Mapping) for tool in tools)
    if tools is not None and not is_list:
        text = f"tools must be a list of dicts that is not empty, got {_kind(tools)}"
        raise RequestError(text, param="tools", value=tools)


def _choose(templates: str | Mapping[str, str] | None, chat_template: Any, tools: Any) -> str:
    if chat_template is not None and (not isinstance(chat_template, str) or not chat_template):
        text = f"chat_template must be a text that is not empty, got {_kind(chat_template)}"
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
    if "content" not in message:
        raise RequestError(
            "there is no text in the last message to continue", param="continue_final_message", value=True
        )
    return {**message, "content": message["content"] + CONTINUE_MARK}


def _cut_at_mark(text: str) -> str:
    at = text.rfind(CONTINUE_MARK.strip())
    if at < 0:
        raise RequestError("the chat template leaves out the last message", param="continue_final_message", value=True)
    return text[:at] if text.startswith(CONTINUE_MARK, at) else text[:at].rstrip()


def _plain(value: Any, param: str, depth: int = 0) -> Any:
    """A copy made of JSON types only: methods of anything else would be within a template's reach."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{param} must not be nested deeper than {MAX_DEPTH}", param=param)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{param} must have texts as keys", param=param)
        return {str.__str__(key): _plain(item, param, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, param, depth + 1) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    raise RequestError(f"{param} must hold JSON values only, got {type(value).__name__}", param=param)


def _refused(message: str, value: Any) -> RequestError:
    return RequestError(message, param="messages", value=value)


def _kind(value: Any) -> str:
    empty = isinstance(value, (str, list, tuple, dict)) and not value
    return f"an empty {type(value).__name__}" if empty else type(value).__name__


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
