"""Conversion of the prompts of a request to token ids, off the event loop if that takes long.

Owns the accepted forms of a prompt and its truncation. Independent of sampling and answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxengine.requests.inputs import InputProcessor
from jaxengine.scheduler.base.errors import RequestError, prompt_length_error, show_value
from jaxengine.server.base.workers import Workers

_T = TypeVar("_T")

MAX_DETOKENIZE = 1 << 18  # token ids; a tenth of a second of work that blocks everything else
_LONG_TEXT = 10_000  # characters; a few milliseconds of work
# Characters for each that a token has, of tokenizers that need not keep all of a text.
_SPACED = 8
FORMS = "a string, a list of strings, a list of token ids or a list of lists of token ids"


def read_prompts(
    prompt: Any, max_prompts: int, inputs: InputProcessor, longest: int | None, *, param: str = "prompt"
) -> list[str | list[int]]:
    """Return the prompts that a request has in its field `param`: all texts, or all lists of token ids, in order.

    prompt: the field's value, of any type. longest: limit of a prompt's token ids; None if prompts are truncated. Texts
    may have any length here. inputs: of the model, whose vocabulary has the ids. Raises RequestError for another form
    than FORMS, for no prompts or more than `max_prompts`, for lists that are too long, for an empty prompt, and for ids
    out of range.
    """
    prompts = prompt if isinstance(prompt, list) and not _begins_with_id(prompt) else [prompt]
    if not 1 <= len(prompts) <= max_prompts:
        raise RequestError(f"{param} holds {len(prompts)} prompts; allowed: 1 to {max_prompts}", param=param)
    for each in prompts:
        # Before its entries are checked.
        if longest is not None and isinstance(each, list) and len(each) > longest:
            raise prompt_length_error(param, len(each), longest, inputs.config.max_model_len)
    texts = all(isinstance(each, str) for each in prompts)
    if not texts and not all(isinstance(each, list) and _is_ids(each) for each in prompts):
        raise RequestError(f"{param} must be {FORMS}, got {show_value(prompt)}", param=param)
    for each in prompts:
        if not each:
            raise RequestError(f"{param} is empty; at least one token is needed", param=param)
        if not isinstance(each, str):
            check_token_ids(param, each, inputs.model_config.vocab_size)
    return prompts


def check_token_ids(param: str, token_ids: list[int], vocab_size: int) -> None:
    """Raise RequestError for an id below 0 or from `vocab_size` on. param: the ids' field, for the error."""
    least, most = min(token_ids, default=0), max(token_ids, default=0)
    if not 0 <= least <= most < vocab_size:
        wrong = least if least < 0 else most
        raise RequestError(
            f"{param} holds the token id {show_value(wrong)}; allowed: 0 to {vocab_size - 1}",
            param=param,
            value=wrong,
        )


def _begins_with_id(value: list[Any]) -> bool:
    """Whether the first entry of a list is an integer."""
    return bool(value) and type(value[0]) is int


def _is_ids(value: list[Any]) -> bool:
    """Whether a list has integers alone, and at least one."""
    return set(map(type, value)) == {int}


class PromptEncoder:
    """Encoder of prompts for an engine."""

    def __init__(self, inputs: InputProcessor):
        self._inputs = inputs
        self._longest_token: int | None = None
        self._workers = Workers()

    async def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        cut_side: str | None = None,
    ) -> list[list[int]]:
        """Return the token ids of each text; a thread computes them if the texts are long. param: their field, for
        errors.

        texts: at least one. cut_side: "left" or "right" where the caller cuts token ids on that side, down to at most
        max_model_len: of a text that is too long only the other end is encoded.

        Raises RequestError for one with more characters than max_model_len tokens can have, before any work on it, and
        where there is no tokenizer; OverloadedError if too many requests are waiting. Texts of too many tokens are not
        refused here.
        """
        tokenizer = self._inputs.require_tokenizer()
        if cut_side is None:
            self.verify_length(max(map(len, texts)), param)
        else:
            most = self._most_chars()
            texts = [text[:most] if cut_side == "right" else text[-most:] for text in texts]
        if sum(map(len, texts)) <= _LONG_TEXT:
            return tokenizer.encode_batch(texts, add_special_tokens)
        return await self._workers.run(tokenizer.encode_batch, texts, add_special_tokens)

    def verify_length(self, num_chars: int, param: str) -> None:
        """Raise RequestError, with `param` as its field, if a prompt of `num_chars` characters cannot fit into
        max_model_len, whatever they are, or if there is no tokenizer.
        """
        most = self._most_chars()
        if num_chars > most:
            raise prompt_length_error(param, num_chars, most, self._inputs.config.max_model_len, "characters")

    def cut(self, token_ids: list[int], keep: int | None, side: str | None, max_tokens: int | None) -> list[int]:
        """Return a prompt's token ids truncated as its request says.

        keep: truncate_prompt_tokens, 1 or more; None: all; -1: as many as leave room for max_tokens, or for one token
        if that is None or 0, but at least one. side: truncation_side; "right" keeps the first tokens, any other value
        or None the last ones.
        """
        if keep is None:
            return token_ids
        if keep == -1:
            keep = max(1, self._inputs.config.max_model_len - max(1, max_tokens or 1))
        return token_ids[:keep] if side == "right" else token_ids[-keep:]

    async def run(self, function: Callable[[], _T]) -> _T:
        """Run `function` on one of the threads that encode; return its result. Raises its errors, and OverloadedError
        if too many requests wait.
        """
        return await self._workers.run(function)

    def _most_chars(self) -> int:
        """Return the most characters of a prompt that may fit into max_model_len: as many for each token as the longest
        one has, times _SPACED unless the tokenizer is byte-level. Raises RequestError without a tokenizer.
        """
        tokenizer = self._inputs.require_tokenizer()
        if self._longest_token is None:
            vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
            self._longest_token = max(map(len, vocabulary), default=1)
        # Others may drop white space, and make one token of a word that they do not know.
        spaced = 1 if tokenizer.is_byte_level else _SPACED
        return spaced * self._inputs.config.max_model_len * self._longest_token
