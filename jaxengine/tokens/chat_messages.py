"""Validation of chat messages, and the different forms in which templates expect the same message.

A template does not declare how it represents missing content or the arguments of an earlier call: some expect a missing
key, None or "", and an object or JSON text. Nor does it declare how it handles instructions: most know no role
"developer", and drop or refuse a second system message, or one in the middle.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.tokens.cut_json import read_cut_json

MAX_DEPTH = 32
# Types of content parts other than text, named as in templates. They have no other keys.
MEDIA_TYPES = ("image", "video", "audio")
# Type of a part with a model's reasoning, which only some templates take; also the name of reasoning in gpt-oss's.
THINKING = "thinking"
# Type of a part with the name of a language, which templates of requests for transcripts may take (Fun-ASR-Nano).
LANGUAGE = "language"
# Type of a text part -> key of the part that holds the text. Types of /v1/responses are allowed, as in vLLM.
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Names of a model's reasoning in answers, the one that counts first. Templates use one of them (gpt-oss's the last).
REASONING_NAMES = ("reasoning", "reasoning_content", "thinking")

# Nesting depth of arguments in a message: tool_calls, the call, function, arguments.
_ARGUMENTS_DEPTH = 4
_INSTRUCTING = ("system", "developer")
# Claude Code's line for Anthropic's accounting, which vLLM leaves out too: its hash differs from request to request, so
# no prefix after it could be cached.
ACCOUNTS = "x-anthropic-billing-header"
_KNOWS_DEVELOPER = re.compile(r"""['"]developer['"]""")
_ASKS_FOR_NONE = re.compile(r"""\bcontent\b['"]?\]?\s+is\s+(?:not\s+)?none\b""", re.IGNORECASE)

Message = dict[str, Any]


def checked_messages(messages: Any, joint: str | None = None) -> list[Message]:
    """Check messages, a list or tuple of at least one, and return copies in the form that templates read.

    Keys whose value is None are left out. A content that is a list of text parts becomes one text, joined by `joint`,
    without empty parts. If that is None, a list of several text parts stays a list, for the template may write parts
    one after the other, except in messages of tools, whose texts are joined by line breaks; a list of a single part, or
    none, becomes a text. A list with parts of MEDIA_TYPES, THINKING or LANGUAGE stays a list. Reasoning under any of
    REASONING_NAMES is stored under all of them, and a refusal becomes the content where that is missing. Instructions
    lose a first line with ACCOUNTS, and are left out if they have nothing else.

    Raises RequestError(param="messages") for invalid messages.
    """
    given = messages if isinstance(messages, (list, tuple)) else ()
    checked = [_checked_message(message, f"messages[{number}]", joint) for number, message in enumerate(given)]
    checked = [each for each in checked if each["role"] not in _INSTRUCTING or {"content", "tool_calls"} & {*each}]
    if not checked:
        raise _refused(
            f"messages must be a list of at least one message, got {kind([] if given else messages)}", messages
        )
    return checked


def ways_to_write(messages: Sequence[Message], template: str) -> Iterator[list[Message]]:
    """Yield the distinct variants of checked messages that `template` may accept, the likeliest first.

    A missing content is None for templates that test for it, otherwise a missing key, since they would print "None"; a
    further variant has "". Arguments of earlier calls are objects, or, in a further variant, the text that the model
    wrote. Instructions vary as in `_instructed`. If an answer has calls, reasoning and a content, and `template` has
    the word THINKING, all variants follow once more without the key THINKING in such answers.
    """
    for placed in _instructed(messages, template):
        yield from _ways_to_write(placed, template)
        # gpt-oss's template refuses such an answer.
        full = [THINKING in each and "tool_calls" in each and bool(each.get("content")) for each in placed]
        if THINKING in template and any(full):
            fewer = [
                {key: value for key, value in each.items() if key != THINKING or not found}
                for each, found in zip(placed, full, strict=True)
            ]
            yield from _ways_to_write(fewer, template)


def lost_instructions(messages: Sequence[Message], text: str) -> bool:
    """Return whether a rendered text lacks a text of a system or developer message, without white space around it.
    text: the rendered text.
    """
    contents = (_texts(message.get("content")) for message in messages if message["role"] in _INSTRUCTING)
    return any(each.strip() not in text for texts in contents for each in texts or ())


def joined_texts(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a content of several text parts as one text, joined by line breaks."""
    contents = [(message, _texts(message.get("content")) or ()) for message in messages]
    return [{**each, "content": "\n".join(texts)} if len(texts) > 1 else each for each, texts in contents]


def _texts(content: Any) -> list[str] | None:
    """Return the texts of a checked content, a text or a list of text parts; None for another content."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        return [part["text"] for part in content]
    return None


def has_unusual_instructions(messages: Sequence[Message]) -> bool:
    """Return whether the messages contain one that many templates refuse: a developer message, or a system message that
    is not the first message.
    """
    return messages[0]["role"] == "developer" or any(each["role"] in _INSTRUCTING for each in messages[1:])


def _instructed(messages: Sequence[Message], template: str) -> Iterator[Sequence[Message]]:
    """Yield the messages and, if any message but the first is an instruction, a variant in which all instructions are
    joined into one message at the beginning.

    Instructions are system and developer messages whose content is a text or a list of texts. For a template that does
    not contain the role "developer", developer messages become system messages. If there is a developer message, the
    instructions at the beginning are joined in the first variant too.
    """
    has_developer = any(each["role"] == "developer" for each in messages)
    if has_developer and _KNOWS_DEVELOPER.search(template) is None:
        messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
    is_text = [each["role"] in _INSTRUCTING and _texts(each.get("content")) is not None for each in messages]
    num_first = next((at for at, found in enumerate(is_text) if not found), len(messages))
    yield _merged(messages[:num_first], messages[num_first:]) if has_developer else messages
    if any(is_text[1:]):
        instructions = [each for each, found in zip(messages, is_text, strict=True) if found]
        yield _merged(instructions, [each for each, found in zip(messages, is_text, strict=True) if not found])


def _merged(instructions: Sequence[Message], others: Sequence[Message]) -> list[Message]:
    """Return a list of one message that joins the texts of all instructions by empty lines, as a list of one part if
    the first one's content is a list, and of `others`. Fewer than two instructions stay as they are.
    """
    if len(instructions) < 2:
        return [*instructions, *others]
    text = "\n\n".join("\n".join(_texts(each["content"]) or ()) for each in instructions)
    content = [{"type": "text", "text": text}] if isinstance(instructions[0]["content"], list) else text
    return [{**instructions[0], "content": content}, *others]


def _ways_to_write(messages: Sequence[Message], template: str) -> Iterator[list[Message]]:
    """Yield variants of checked messages: first with arguments of calls as objects, then with arguments as given; and
    within each first with a missing content as `template` seems to expect it (None or no key), then with "". Without
    calls, or without missing contents, the corresponding alternatives are left out.
    """
    none_first = _ASKS_FOR_NONE.search(template) is not None
    contents: tuple[Mapping[str, Any], ...] = ({"content": None} if none_first else {}, {"content": ""})
    calls = (_with_objects, lambda call: call)
    lacks_content = any("content" not in message for message in messages)
    has_calls = any("tool_calls" in message for message in messages)
    for write, content in itertools.product(calls[: 1 + has_calls], contents[: 1 + lacks_content]):
        written = [{**content, **message} for message in messages]
        for message in written:
            if "tool_calls" in message:
                message["tool_calls"] = [write(call) for call in message["tool_calls"]]
        yield written


def plain(value: Any, param: str, depth: int = 0) -> Any:
    """Return a copy of a value in plain JSON types, because a template could reach the methods of other types. Mappings
    become dicts, and tuples lists.

    param: name of the argument in errors. depth: number of levels that already enclose the value. Raises RequestError
    for other types, keys that are not texts, floats that are not finite, and more than MAX_DEPTH levels.
    """
    if depth > MAX_DEPTH:
        raise RequestError(f"{param} must not be nested deeper than {MAX_DEPTH}", param=param)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{param} must have texts as keys", param=param)
        return {str.__str__(key): plain(item, param, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, param, depth + 1) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    raise RequestError(f"{param} must hold JSON values only, got {type(value).__name__}", param=param)


def kind(value: Any) -> str:
    """Return the name of a value's type for an error message, with "an empty" before it for an empty text, list, tuple
    or dict.
    """
    empty = isinstance(value, (str, list, tuple, dict)) and not value
    return f"an empty {type(value).__name__}" if empty else type(value).__name__


def _checked_message(message: Any, where: str, joint: str | None) -> Message:
    """Check one message and return a copy without None values. Reasoning is stored under all REASONING_NAMES. A refusal
    takes the place of a missing content; an answer that has neither calls nor reasoning gets the content "". Content
    parts are joined as in `checked_messages`. An instruction has no content if it has nothing but a line with ACCOUNTS.
    where: path of the message in errors. Raises RequestError for an invalid message.
    """
    if not isinstance(message, Mapping):
        raise _refused(f"{where} must be a dict with role and content, got {kind(message)}", message)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise _refused(f"{where}.role must be a text that is not empty, got {kind(role)}", role)
    calls = _checked_calls(message.get("tool_calls"), where)
    reasoning = any(message.get(name) is not None for name in REASONING_NAMES)
    refusal = message.get("refusal")
    if content is None and isinstance(refusal, str):
        content = refusal
    if content is None and not calls and not (reasoning and role == "assistant"):
        if role != "assistant":
            raise _refused(f"{where}.content is missing; only an answer or a refusal may leave it out", message)
        content = ""
    if isinstance(content, (list, tuple)):
        parts = [_checked_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]
        if role in _INSTRUCTING:
            parts = [part for part in map(_without_accounts, parts) if part is not None]
        texts = [part["text"] for part in parts if "text" in part]
        if content and not parts:
            content = None
        elif len(texts) < len(parts) or (joint is None and len(parts) > 1 and role != "tool"):
            content = parts
        else:
            content = ("\n" if joint is None else joint).join(filter(None, texts))
    elif content is not None and not isinstance(content, str):
        raise _refused(f"{where}.content must be a text or a list of text parts, got {kind(content)}", content)
    elif content and role in _INSTRUCTING:
        content = (_without_accounts({"text": content}) or {}).get("text")
    checked = plain({**message, "content": content, "tool_calls": calls}, "messages")
    # Templates print None as "None", but handle a missing key.
    checked = {key: value for key, value in checked.items() if value is not None}
    if reasoning:
        counts = next(checked[name] for name in REASONING_NAMES if name in checked)
        checked |= dict.fromkeys(REASONING_NAMES, counts)
    return checked


def _without_accounts(part: dict[str, Any]) -> dict[str, Any] | None:
    """Return a part of an instruction without a first line with ACCOUNTS; None if nothing else is in it."""
    if not part.get("text", "").startswith(ACCOUNTS):
        return part
    rest = part["text"].partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _checked_calls(calls: Any, where: str) -> list[Any] | None:
    """Check the tool_calls of an earlier answer and return them as a list; None for None or an empty list.

    Each call must be a mapping with a text function.name. Its arguments must be a text, a mapping, [], None or missing.
    where: path of the message in errors. Raises RequestError otherwise.
    """
    if not calls and (calls is None or isinstance(calls, (list, tuple))):
        return None
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls):
        raise _refused(f"{where}.tool_calls must be a list of calls, got {kind(calls)}", calls)
    for number, call in enumerate(calls):
        function = call.get("function")
        place = f"{where}.tool_calls[{number}].function"
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _refused(f"{place}.name is missing or not a string", call)
        given = function.get("arguments")
        if given not in (None, []) and not isinstance(given, (str, Mapping)):  # PHP writes [] for {}
            raise _refused(f"{place}.arguments must be a text or an object, got {kind(given)}", given)
    return list(calls)


def _with_objects(call: Message) -> Message:
    """Return a copy of a tool call with its arguments as an object, as most templates expect them.

    Clients send them as text: missing, null or empty arguments become {}, and text that is not a JSON object becomes
    {"arguments": text}.
    """
    function = call["function"]
    return {**call, "function": {**function, "arguments": _object(function.get("arguments") or {})}}


def _object(arguments: Any) -> Any:
    """Return the arguments of a call as an object. Text is parsed as JSON; truncated JSON gives the complete part.
    JSON's null and [] become an empty object, and text that is not a JSON object becomes {"arguments": text}. Arguments
    that are not text are returned unchanged.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        value = read_cut_json(arguments)
        value = {} if value in (None, []) else plain(value, "messages", _ARGUMENTS_DEPTH)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _checked_part(part: Any, where: str) -> dict[str, Any]:
    """Check a content part, and return it as {"type": "text", "text": ...}, as {"type": ...} for one of MEDIA_TYPES, or
    as {"type": "thinking", "thinking": text, "closed": bool}, True by default, or as {"type": "language", "language":
    text}. A plain text and a refusal become text parts. where: path of the part in errors. Raises RequestError for an
    invalid part; a part of MEDIA_TYPES with a field in addition to "type" is one.
    """
    if isinstance(part, str):
        return {"type": "text", "text": str.__str__(part)}
    if not isinstance(part, Mapping):
        raise _refused(f'{where} must be {{"type": "text", "text": ...}}, got {kind(part)}', part)
    name = part.get("type")
    if isinstance(name, str) and name in MEDIA_TYPES and len(part) == 1:
        return {"type": str.__str__(name)}
    if name == THINKING:
        thought, closed = part.get(THINKING), part.get("closed", True)
        if not isinstance(thought, str) or type(closed) is not bool:
            raise _refused(f"{where} must have a text, thinking, and may have a bool, closed", part)
        return {"type": THINKING, THINKING: str.__str__(thought), "closed": closed}
    key = {**_TEXT_KEYS, LANGUAGE: LANGUAGE}.get(name) if isinstance(name, str) else None
    if key is None:
        raise _refused(f"{where}.type must be 'text' or 'refusal', got {show_value(name)}", name)
    if not isinstance(part.get(key), str):
        raise _refused(f"{where}.{key} must be a text, got {kind(part.get(key))}", part.get(key))
    kept = LANGUAGE if key == LANGUAGE else "text"
    return {"type": kept, kept: str.__str__(part[key])}


def _refused(message: str, value: Any) -> RequestError:
    """Return (not raise) a RequestError about the argument "messages" with this text and offending value."""
    return RequestError(message, param="messages", value=value)
