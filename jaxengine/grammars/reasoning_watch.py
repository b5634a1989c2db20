"""Detection of the token at which an output's reasoning ends and its grammar begins.

The markers around reasoning are searched in the bytes for which tokens stand, so it does not matter how a marker is
split into tokens.
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
    """The part of a tokenizer that is used here."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        add_special_tokens: whether to add those that begin or end a text. Raises RequestError for a text that cannot be
        encoded.
        """
        ...

    def text_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text, perhaps only a part of a character; b"" for an unknown
        id.
        """
        ...


class _MarkerSearch:
    """Search in a stream of bytes for markers that occur in this order, with anything between them.

    markers: at least one. The bytes of a marker may arrive in several pieces.
    """

    def __init__(self, markers: Sequence[str]):
        self._markers = [marker.encode() for marker in reversed(markers)]
        self._tail = b""

    def read(self, data: bytes) -> bytes | None:
        """Read more bytes of the text; once all markers have been found, return the bytes after the last one, None
        before.

        Must not be called after that.
        """
        text = self._tail + data
        while self._markers:
            marker = self._markers[-1]
            before, found, after = text.partition(marker)
            if not found:
                self._tail = before[-(len(marker) - 1) :] if len(marker) > 1 else b""
                return None
            text = after
            self._markers.pop()
        return text


class ReasoningWatch:
    """Watch over one output whose grammar begins after `reasoning_end`.

    If the grammar has `reasoning_begin` (the opening marker), the output may omit its reasoning and begin with the
    grammar's text. Only the tokens of `reasoning_begin` open reasoning, not other tokens with the same text. When a
    budget is used up, its closing tokens are forced, which end the reasoning.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary):
        """Start before the first token, with the grammar's markers of reasoning and its budget. vocabulary: the
        tokenizer.
        """
        self._vocabulary = vocabulary
        self._begin = grammar.reasoning_begin
        self._num_begun = 0
        self._ends = [_MarkerSearch(markers) for markers in grammar.reasoning_end]
        self._is_free = grammar.kind == FREE
        self._budget = grammar.budget
        self._budget_ends = [] if grammar.budget is None else [_MarkerSearch(each) for each in grammar.budget.ends]
        self._num_read = 0

    def skips_reasoning(self, first: np.ndarray | None) -> bool:
        """Return whether the grammar must begin at once, without reasoning.

        That is so if the first token of the opening marker may also begin the grammar's text, or if the grammar allows
        no text at all. Otherwise an opening marker of one token opens reasoning, whatever the mask allows. Without an
        opening marker the output begins inside reasoning, and the result is False. first: the grammar's first mask,
        i32[num_words]; None if it can only end.
        """
        if not self._begin or (first is not None and len(self._begin) == 1):
            return False
        return first is None or _allows(first, self._begin[0])

    @property
    def num_free(self) -> int:
        """Number of next tokens that are not constrained, for a grammar of kind FREE, which only limits reasoning: the
        rest of the opening marker and of the budget; UNLIMITED without a budget. 0 for other grammars.
        """
        if not self._is_free:
            return 0
        if self._budget is None:
            return UNLIMITED
        return max(0, self._budget.num_tokens - self._num_read) + len(self._begin) - self._num_begun

    def forced(self) -> int | None:
        """Return the next closing token once the budget is used up, which is then the only allowed token; else None."""
        budget = self._budget
        if budget is None or self._num_begun < len(self._begin) or self._num_read < budget.num_tokens:
            return None
        return budget.closing[self._num_read - budget.num_tokens]

    def mask(self, first: np.ndarray | None) -> np.ndarray | None:
        """Return the mask of the tokens that are allowed now if none is forced, i32[num_words]. None allows all tokens:
        within reasoning, and for a grammar of kind FREE.

        first: the grammar's first mask. Before the opening marker, the tokens of `first` and the marker's first token
        are allowed; within the marker only its next token.
        """
        if self._is_free or self._num_begun == len(self._begin):
            return None
        assert first is not None
        mask = np.zeros_like(first) if self._num_begun else first.copy()
        token_id = self._begin[self._num_begun]
        mask.view(np.uint8)[token_id // 8] |= np.uint8(1 << token_id % 8)
        return mask

    def read(self, token_id: int) -> Sequence[int] | None:
        """Read the output's next token. Return None while reasoning continues or may begin, and otherwise the tokens
        with which the grammar's text begins.

        These are the token itself if it does not open reasoning; before the reasoning of a FREE grammar, white space is
        skipped. If it completes the end marker, they are the text after the marker, without leading white space and
        tokenised again; () if there is none. The last closing token of a budget ends the reasoning as well, with ().
        Once one of the budget's own ends has been read, the budget limits nothing more.
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
            if self._num_read > budget.num_tokens:  # a closing token; together they always end the reasoning
                return () if self._num_read == budget.num_tokens + len(budget.closing) else None
            if any(end.read(data) is not None for end in self._budget_ends):
                self._budget = None
        found = [after for end in self._ends if (after := end.read(data)) is not None]
        if not found:
            return None
        # The last token may continue after the marker. White space there belongs to neither part.
        rest = max(found, key=len).decode(errors="replace").lstrip()
        return self._encode(rest) if rest else ()

    def _encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a text without special tokens; () if the tokenizer cannot encode it."""
        try:
            return self._vocabulary.encode(text, add_special_tokens=False)
        except RequestError:  # some tokenizers cannot encode the text of their own tokens
            return ()


def _allows(mask: np.ndarray, token_id: int) -> bool:
    """Return whether a mask i32[num_words] allows a token. Bit t % 32 of element t / 32 stands for token t."""
    return bool(mask.view(np.uint8)[token_id // 8] >> token_id % 8 & 1)
