"""Changes to messages that Mistral AI's own library makes before it writes them: results of tools get one form or one
order, and special tokens that users write stay texts.

The library encodes the texts of a conversation apart from its marks. Here a chat template writes both into one text, so
a character that the tokenizer leaves out is put into special tokens that are written in messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer, normalizers

from jaxengine.tokens.mistral.template import MistralFormat
from jaxengine.tokens.vocabularies.pieces import longest_of

Message = dict[str, Any]
# A code point that Unicode reserves for uses within programs: it is not a character of any text.
GUARD = "\ufdd0"


def leave_out_guards(backend: Tokenizer) -> None:
    """Make a tokenizer, in place, leave GUARD out of texts once special tokens are found in them."""
    drop = normalizers.Replace(GUARD, "")
    own = backend.normalizer
    backend.normalizer = drop if own is None else normalizers.Sequence([drop, own])


class MistralDialect:
    """chat_template.Dialect of a tokenizer in Mistral AI's format, `backend`, to which `leave_out_guards` was applied.
    form: the chat format.
    """

    def __init__(self, backend: Tokenizer, form: MistralFormat):
        self.joint, self._version = form.joint, form.version
        added = backend.get_added_tokens_decoder().values()
        texts = sorted({token.content for token in added if token.special and token.content})
        # Looks ahead, since two tokens may overlap.
        self._starts = re.compile(f"(?={longest_of(texts)})(.)", re.DOTALL)

    def written(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with results of tools as the version of the format has them: up to 3 with is_json, and JSON
        in one form; from 11 on in the order of their calls, as from 13 on they have no ids.
        """
        if self._version < 7:
            return [_result(each) if each["role"] == "tool" else each for each in messages]
        return list(messages) if self._version < 11 else results_in_order(messages)

    def guarded(self, value: Any) -> Any:
        """Return a copy of a value of plain JSON types with GUARD after the first character of each special token in
        its texts, also in keys.
        """
        if isinstance(value, str):
            return self._starts.sub(rf"\1{GUARD}", value)
        if isinstance(value, dict):
            return {self.guarded(key): self.guarded(item) for key, item in value.items()}
        return [self.guarded(item) for item in value] if isinstance(value, list) else value


def _result(message: Message) -> Message:
    """Return a copy of a tool's message with is_json, whether its content is JSON; JSON is written anew by json.dumps,
    and "" becomes {}. A message whose content is not a text is returned unchanged.
    """
    content = message.get("content")
    if not isinstance(content, str):
        return message
    try:
        return {**message, "content": json.dumps(json.loads(content or "{}"), ensure_ascii=False), "is_json": True}
    except (ValueError, RecursionError):
        return {**message, "is_json": False}


def results_in_order(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which consecutive results of tools have the order of the calls before them; results of unknown
    calls come last.
    """
    found: list[Message] = []
    calls: list[Any] = []
    for is_result, side_by_side in groupby(messages, key=lambda message: message["role"] == "tool"):
        group = list(side_by_side)
        if is_result:
            places = {name: at for at, name in enumerate(calls)}
            group.sort(key=lambda message: places.get(str(message.get("tool_call_id")), len(places)))
            calls = []
        else:
            calls += [str(call.get("id")) for message in group for call in message.get("tool_calls", ())]
        found += group
    return found
