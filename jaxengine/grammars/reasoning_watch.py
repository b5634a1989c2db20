"""Detection of the token at which an output's reasoning ends and its grammar begins.

Words are searched in the bytes that tokens stand for, so that it does not matter how they are split, and a word that is
one added token is found like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.token_params import FREE, Grammar

# More tokens than any output has.
UNLIMITED = 1 << 62


class Vocabulary(Protocol):
    """Protocol of the parts of a tokenizer that are used here: encode returns the token ids of a text, text_bytes the
    UTF-8 bytes that a token stands for.
    """

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def text_bytes(self, token_id: int) -> bytes: ...


class _Words:
    """Search in a stream of bytes for words that come in this order, with anything between them.

    words: at least one; the bytes of one may come in several pieces.
    """

    def __init__(self, words: Sequence[str]):
        self._words = [word.encode() for word in reversed(words)]
        self._tail = b""

    def read(self, data: bytes) -> bytes | None:
        """Read more bytes of the text; return the bytes after the last word once all words have been found, None
        before. Must not be called after that.
        """
        text = self._tail + data
        while self._words:
            word = self._words[-1]
            before, found, behind = text.partition(word)
            if not found:
                self._tail = before[-(len(word) - 1) :] if len(word) > 1 else b""
                return None
            text = behind
            self._words.pop()
        return text


class ReasoningWatch:
    """Watch over one output whose grammar begins after `reasoning_end`; with `reasoning_begin` (the opening word), an
    output may also begin with its grammar's text.

    Only the tokens of `reasoning_begin` open reasoning, however else their text may be spelt. With a budget, the
    reasoning is closed by the budget's closing tokens when it is used up.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary):
        """Begin before the first token. vocabulary: the tokenizer."""
        self._vocabulary = vocabulary
        self._begin = grammar.reasoning_begin
        self._num_begun = 0
        self._ends = [_Words(words) for words in grammar.reasoning_end]
        self._is_free = grammar.kind == FREE
        self._budget = grammar.budget
        self._budget_ends = [] if grammar.budget is None else [_Words(words) for words in grammar.budget.ends]
        self._num_read = 0

    def gives_way(self, first: np.ndarray | None) -> bool:
        """Whether the grammar begins at once, because its own text may begin with the first token of the opening word,
        or cannot hold any text.

        first: the grammar's first mask, i32[num_words]; None if it can only end. An opening word of one token always
        opens reasoning. False without an opening word: the output begins inside reasoning.
        """
        if not self._begin or (first is not None and len(self._begin) == 1):
            return False
        return first is None or _allows(first, self._begin[0])

    @property
    def num_free(self) -> int:
        """How many of the next tokens may be any token, whatever they are, for a grammar of kind FREE (only a limit on
        reasoning); UNLIMITED without a budget. 0 for other grammars.
        """
        if not self._is_free:
            return 0
        if self._budget is None:
            return UNLIMITED
        return max(0, self._budget.num_tokens - self._num_read) + len(self._begin) - self._num_begun

    def forced(self) -> int | None:
        """Return the only token that may be taken now, the next closing token once the budget is used up; else None."""
        budget = self._budget
        if budget is None or self._num_begun < len(self._begin) or self._num_read < budget.num_tokens:
            return None
        return budget.closing[self._num_read - budget.num_tokens]

    def mask(self, first: np.ndarray | None) -> np.ndarray | None:
        """Return the mask of tokens that may be taken now if none is forced, i32[num_words]; None for all tokens,
        within the reasoning and for a grammar of kind FREE.

        first: the grammar's first mask. Before the opening word these are the tokens of `first` and the word's first
        token; within the word, only its next token.
        """
        if self._is_free or self._num_begun == len(self._begin):
            return None
        assert first is not None
        words = np.zeros_like(first) if self._num_begun else first.copy()
        token_id = self._begin[self._num_begun]
        words.view(np.uint8)[token_id // 8] |= np.uint8(1 << token_id % 8)
        return words

    def read(self, token_id: int) -> Sequence[int] | None:
        """Read the output's next token; return None while the reasoning continues or may begin, else the tokens with
        which the grammar's text begins.

        These are the token itself if it does not open reasoning, or the text after the end word in it, without leading
        white space and tokenized anew; () if there is none. The closing tokens of a used-up budget end the reasoning,
        too.
        """
        data = self._vocabulary.text_bytes(token_id)
        if self._num_begun < len(self._begin):
            if token_id == self._begin[self._num_begun]:
                self._num_begun += 1
            elif not (self._is_free and not self._num_begun and data.isspace()):
                return (token_id,)
            return None
        if (budget := self._budget) is not None:
            self._num_read += 1
            if self._num_read > budget.num_tokens:  # the closing tokens, which end the reasoning in any case
                return () if self._num_read == budget.num_tokens + len(budget.closing) else None
            if any(end.read(data) is not None for end in self._budget_ends):
                self._budget = None
        found = [behind for end in self._ends if (behind := end.read(data)) is not None]
        if not found:
            return None
        # The last token may continue after the words; white space there belongs to neither part.
        rest = max(found, key=len).decode(errors="replace").lstrip()
        return self._encode(rest) if rest else ()

    def _encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a text without special tokens; () if the tokenizer fails at it."""
        try:
            return self._vocabulary.encode(text, add_special_tokens=False)
        except RequestError:  # some tokenizers fail at the text of their own tokens
            return ()


def _allows(mask: np.ndarray, token_id: int) -> bool:
    """Whether a mask i32[num_words] allows token_id: bit t % 32 of word t / 32 stands for token t."""
    return bool(mask.view(np.uint8)[token_id // 8] >> token_id % 8 & 1)
