"""Limit of `bad_words` that can be checked only after tokenization."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxengine.requests.params.param_limits import MAX_BAD_WORDS_TOKENS
from jaxengine.scheduler.base.errors import RequestError


def verify_bad_word_tokens(sequences: Iterable[Sequence[int]]) -> None:
    """Raise RequestError if the tokenized bad_words, `sequences`, have more than MAX_BAD_WORDS_TOKENS tokens
    in total.
    """
    total = sum(len(sequence) for sequence in sequences)
    if total > MAX_BAD_WORDS_TOKENS:
        problem = f"bad_words must be at most {MAX_BAD_WORDS_TOKENS} tokens altogether, got {total}"
        raise RequestError(problem, param="bad_words", value=total)
