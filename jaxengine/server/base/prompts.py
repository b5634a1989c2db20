"""Conversion of the prompts of a request to token ids, on a thread if that takes a long time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jaxengine.requests.inputs import InputProcessor
from jaxengine.scheduler.base.errors import RequestError, prompt_length_error, show_value
from jaxengine.server.base.workers import Workers

_T = TypeVar("_T")

MAX_DETOKENIZE = 1 << 18  # token ids; a tenth of a second of work that blocks everything else
_LONG_TEXT = 10_000  # characters; more than a few milliseconds of work is done on a thread
# Factor for the characters of a token, of tokenizers that may drop parts of a text.
_SPACED = 8
FORMS = "a string, a list of strings, a list of token ids or a list of lists of token ids"


def read_prompts(
    prompt: Any, max_prompts: int, inputs: InputProcessor, longest: int | None, *, param: str = "prompt"
) -> list[str | list[int]]:
    """Return the prompts in a request's field `param`, in order: all of them texts, or all lists of token ids.

    prompt: the field's value, of any type. inputs: processor of the model whose vocabulary limits the ids. longest:
    largest number of token ids in a prompt; None if prompts are truncated. Texts may have any length here. Raises
    RequestError for a value of another form than FORMS, for no prompts or more than `max_prompts`, for lists that are
    too long, for an empty prompt, and for ids out of range. The lists of the result are those of `prompt`, not copies.
    """
    prompts = prompt if isinstance(prompt, list) and not (prompt and type(prompt[0]) is int) else [prompt]
    if not 1 <= len(prompts) <= max_prompts:
        raise RequestError(f"{param} holds {len(prompts)} prompts; allowed: 1 to {max_prompts}", param=param)
    for each in prompts:
        # Before its entries are checked.
        if longest is not None and isinstance(each, list) and len(each) > longest:
            raise prompt_length_error(param, len(each), longest, inputs.config.max_model_len)
    texts = all(isinstance(each, str) for each in prompts)
    if not texts and not all(isinstance(each, list) and {*map(type, each)} == {int} for each in prompts):
        raise RequestError(f"{param} must be {FORMS}, got {show_value(prompt)}", param=param)
    for each in prompts:
        if not each:
            raise RequestError(f"{param} is empty; at least one token is needed", param=param)
        if not isinstance(each, str):
            check_token_ids(param, each, inputs.model_config.vocab_size)
    return prompts


def check_token_ids(param: str, token_ids: list[int], vocab_size: int) -> None:
    """Raise RequestError if an id is below 0 or at least `vocab_size`; an empty list passes. param: name of the field,
    for the error.
    """
    least, most = min(token_ids, default=0), max(token_ids, default=0)
    if not 0 <= least <= most < vocab_size:
        wrong = least if least < 0 else most
        raise RequestError(
            f"{param} holds the token id {show_value(wrong)}; allowed: 0 to {vocab_size - 1}",
            param=param,
            value=wrong,
        )


def check_detokenize(param: str, token_ids: list[int], inputs: InputProcessor) -> None:
    """Raise RequestError if there are more than MAX_DETOKENIZE ids to decode, or one is neither an id of the model's
    vocabulary, which may be padded, nor of the tokenizer's, which may have more tokens; or without a tokenizer. param:
    name of the field, for errors.
    """
    tokenizer = inputs.require_tokenizer()
    if len(token_ids) > MAX_DETOKENIZE:
        raise RequestError(f"{param} holds {len(token_ids)} ids; allowed: {MAX_DETOKENIZE}", param=param)
    check_token_ids(param, token_ids, max(inputs.model_config.vocab_size, tokenizer.vocab_size))


class PromptEncoder:
    """Encoder of prompts for an engine's tokenizer, with its own threads for long texts."""

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
        """Return the token ids of each text. A thread computes them if the texts have more than _LONG_TEXT characters
        together.

        texts: one text or more. param: name of their field, for errors. cut_side: "left" or "right" if the caller then
        cuts token ids on that side down to at most max_model_len: of a text that is certainly too long, only the other
        end is encoded. None encodes whole texts. Raises RequestError, before any work on it, for a whole text with more
        characters than max_model_len tokens can have, for invalid Unicode, and without a tokenizer; OverloadedError if
        too many calls wait for a thread. Texts of too many tokens are not refused here.
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

    async def places(
        self, text: str, ids: Sequence[int], side: str | None, *, add_special_tokens: bool
    ) -> list[tuple[int, int]] | None:
        """Return, for each of `ids`, the tokens of `text`, the positions of its first character in `text` and of the
        one after its last; (0, 0) for an added special token. `ids` are all of the tokens, or what `cut` with this
        `side` leaves of them; None for other ids, for a text of more characters than max_model_len tokens can have, and
        where Tokenizer.places has none. Computed on a thread. Raises RequestError without a tokenizer, OverloadedError
        if too many calls wait for a thread.
        """
        if len(text) > self._most_chars():
            return None
        tokenizer = self._inputs.require_tokenizer()
        whole, places = await self._workers.run(tokenizer.places, text, add_special_tokens)
        kept = slice(len(ids)) if side == "right" else slice(len(whole) - len(ids), None)
        return places[kept] if places is not None and whole[kept] == list(ids) else None

    async def beginnings(self, texts: Sequence[str], count: int) -> list[str]:
        """Return the beginning of each text that has at most `count` tokens, see Tokenizer.beginning. Computed on a
        thread; more characters than max_model_len tokens can have are cut off first. Raises RequestError for invalid
        Unicode and without a tokenizer; OverloadedError if too many calls wait for a thread.
        """
        tokenizer, most = self._inputs.require_tokenizer(), self._most_chars()
        return await self._workers.run(lambda: [tokenizer.beginning(text[:most], count) for text in texts])

    async def strings(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return Tokenizer.convert_ids_to_tokens of the ids (None for those outside the vocabulary), computed on a
        thread, as a body may have millions of them.
        Raises RequestError without a tokenizer, OverloadedError if too many calls wait for a thread.
        """
        return await self._workers.run(self._inputs.require_tokenizer().convert_ids_to_tokens, token_ids)

    def cut_side(self, keep: int | None, side: str | None) -> str | None:
        """Return the argument `cut_side` of `encode` for a request with these arguments of `cut`. None if whole texts
        are needed: without truncation, and if more than max_model_len token ids would be kept.
        """
        return None if keep is None or keep > self._inputs.config.max_model_len else side or "left"

    def verify_length(self, num_chars: int, param: str) -> None:
        """Raise RequestError, with `param` as its field, if no prompt of `num_chars` characters can fit into
        max_model_len, or if there is no tokenizer.
        """
        most = self._most_chars()
        if num_chars > most:
            raise prompt_length_error(param, num_chars, most, self._inputs.config.max_model_len, "characters")

    def cut(self, token_ids: list[int], keep: int | None, side: str | None, max_tokens: int | None) -> list[int]:
        """Return a prompt's token ids, truncated as the request says.

        keep: truncate_prompt_tokens: the number of ids to keep, 1 or more. None keeps all; -1 keeps as many as leave
        room in max_model_len for max_tokens (for one token if that is None or 0), and at least one. side:
        truncation_side; "right" keeps the first ids, any other value or None the last ones.
        """
        if keep is None:
            return token_ids
        if keep == -1:
            keep = max(1, self._inputs.config.max_model_len - max(1, max_tokens or 1))
        return token_ids[:keep] if side == "right" else token_ids[-keep:]

    async def run(self, function: Callable[[], _T]) -> _T:
        """Run `function` on one of the encoder's threads and return its result. Raises its errors, and OverloadedError
        if too many calls wait for a thread.
        """
        return await self._workers.run(function)

    def _most_chars(self) -> int:
        """Return an upper bound of the characters of a prompt that fits into max_model_len: max_model_len times the
        length of the vocabulary's longest token, times _SPACED unless the tokenizer is byte-level. Raises RequestError
        without a tokenizer.
        """
        tokenizer = self._inputs.require_tokenizer()
        if self._longest_token is None:
            vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
            self._longest_token = max(map(len, vocabulary), default=1)
        # Other tokenizers may drop white space, and replace an unknown word by one token.
        spaced = 1 if tokenizer.is_byte_level else _SPACED
        return spaced * self._inputs.config.max_model_len * self._longest_token
