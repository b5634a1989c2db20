"""Offsets of tokens in the text of a completion, in characters."""

from __future__ import annotations

from collections.abc import Sequence

from jaxengine.requests.output.detokenizer import IncrementalDetokenizer
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.tokens.tokenizer import Tokenizer


class OutputOffsets:
    """Offsets, in characters, at which the tokens of a growing output begin in its text.

    If a character consists of several tokens, each has the character's offset. A token that the text leaves out has the
    offset of the text after it. Tokens of a stop string have the offsets that they would have without it, since a
    stream has sent them before the string is complete.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: Sequence[int], first: int
    ):
        """Start before the first token.

        tokenizer: None for an output without text; all its tokens then have the offset `first`. params: sampling
        parameters with which the text is detokenized. prompt_token_ids: the prompt before the output. first: offset of
        the output, in characters.
        """
        self._offset = first
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                prompt_tail_ids=prompt_token_ids[-8:],
            )

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offset, in characters, of each of the output's next tokens, and advance past them."""
        return [self._append(token_id) for token_id in token_ids]

    def _append(self, token_id: int) -> int:
        """Return the offset of the next token, and advance by the length of the text that it completes."""
        begin = self._offset
        if self._detokenizer is not None:
            self._detokenizer.append([token_id])
            self._offset += len(self._detokenizer.delta())
        return begin


def prompt_offsets(tokenizer: Tokenizer | None, text: str, token_ids: Sequence[int]) -> list[int]:
    """Return the offsets at which the tokens of a prompt begin in its text, in characters, at most the text's length;
    all 0 without a tokenizer.

    A special token advances the offset only if the text contains it at that position; one that the tokenizer has added
    does not.
    """
    if tokenizer is None:
        return [0] * len(token_ids)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    offsets, offset = [], 0
    for token_id in token_ids:
        offsets.append(min(offset, len(text)))
        if token_id in tokenizer.all_special_ids:
            if not text.startswith(tokenizer.backend.id_to_token(token_id) or "", offset):
                continue
        detokenizer.append([token_id])
        offset += len(detokenizer.delta())
    return offsets
