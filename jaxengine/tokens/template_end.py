"""Detection of the token that a chat template writes after an assistant's message, and which ends the model's turn."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

from jaxengine.models.params.gguf_ends import TURN_ENDS
from jaxengine.scheduler.base.errors import OverloadedError, RequestError

_USER, _ANSWER = "What is the number of the house?", "It has the number 4096."
# Tokens that many templates contain and that do not end a turn. A template need not be rendered because of them.
_NO_ENDS = frozenset(
    (
        *("<|im_start|>", "<start_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        *("<|user|>", "<|assistant|>", "<|system|>", "<|START_OF_TURN_TOKEN|>", "<|start|>", "<|turn>"),
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    )
)


def template_end(tokenizer: Any) -> int | None:
    """Return the id of the token with which the tokenizer's chat template ends an assistant's message.

    Returns None if the template writes no such token, if that token begins a turn, or if rendering fails. Also returns
    None, without rendering, if the tokenizer has several templates or none, or if its template contains a known end and
    no unknown token. tokenizer: a jaxengine.tokens.tokenizer.Tokenizer; not imported, because that module imports this
    one.
    """
    tokens = {token.content: at for at, token in tokenizer.backend.get_added_tokens_decoder().items()}
    if not _may_find_more(tokenizer, tokens):
        return None
    messages = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    except (RequestError, OverloadedError):
        return None
    bos = None if tokenizer.bos_token_id is None else tokenizer.backend.id_to_token(tokenizer.bos_token_id)
    end = _end_in(text, [token for token in tokens if token], bos)
    return None if end is None else tokens[end]


def _may_find_more(tokenizer: Any, tokens: dict[str, int]) -> bool:
    """Return whether the tokenizer's template may write an ending token that is not in its eos_token_ids. False unless
    there is exactly one template, and for a template with a known end and no unknown token. tokens: ids of the added
    tokens by their text.
    """
    source = tokenizer.chat_template
    if not isinstance(source, str):
        return False
    written = {token for token in tokens if token and token in source}
    known = {token for token, at in tokens.items() if at in tokenizer.eos_token_ids}
    has_end = bool(written & known) or "eos_token" in source
    bos = {token for token, at in tokens.items() if at == tokenizer.bos_token_id}
    return not has_end or bool(written - known - TURN_ENDS - _NO_ENDS - bos)


def _end_in(text: str, tokens: list[str], bos: str | None) -> str | None:
    """Return the token after the last _ANSWER, and white space, in a rendered conversation; None if no token stands
    there or it seems to begin a turn: it is `bos` or in _NO_ENDS, or also stands directly before the answer; or text
    follows it, and it is also the first token, the last one before the question, or the last one before the answer.

    text: the rendered conversation. tokens: texts of all added tokens. bos: the beginning-of-text token, or None.
    """
    at = text.rfind(_ANSWER)
    if at < 0:
        return None
    pattern = re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)))
    tail = text[at + len(_ANSWER) :].lstrip()
    match = pattern.match(tail)
    if match is None or (end := match.group()) in _NO_ENDS or end == bos:
        return None
    before = [(found.group(), found.end()) for found in pattern.finditer(text[:at])]
    # A token that also stands directly before the answer begins a turn: it is the assistant's role token.
    if before and before[-1][0] == end and not text[before[-1][1] : at].strip():
        return None
    if pattern.sub("", tail).strip():  # text, such as the name of a role, follows: the token may begin a turn
        to_user = takewhile(lambda each: each[1] <= text.find(_USER), before)
        starts = [token for token, _ in before if token != bos][:1] + [token for token, _ in [*to_user][-1:]]
        return None if end in (*starts, before[-1][0] if before else None) else end
    return end
