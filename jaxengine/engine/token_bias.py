"""Bias of a request: a row added to its logits that favours or forbids tokens.

logit_bias and allowed_token_ids are constant. min_tokens forbids the stop tokens until enough tokens have been
generated. bad_words of several tokens forbid the last token whenever the tokens before it have just been generated, and
no_repeat a token that would repeat a sequence of the output. All requests of a step wait for this: its cost does not
grow with the number of stop tokens, with bad words only with the number of their different lengths, and with no_repeat
with its window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxengine.scheduler.base.request import Request


class Forbidden(NamedTuple):
    """Tokens that a request may not generate next, in addition to those of the constant row.

    Attributes:
      stops: whether its stop tokens are forbidden.
      ends: last tokens of bad words whose other tokens were just generated, and those that would repeat a sequence.
    """

    stops: bool
    ends: frozenset[int]


_NO_ENDS: frozenset[int] = frozenset()


class TokenBias:
    """Maker of one request's bias rows."""

    def __init__(self, request: Request, vocab_size: int):
        """Compute the constant row from a request's allowed_token_ids, logit_bias and bad words of one token, and index
        its bad words of several tokens. vocab_size: V.
        """
        params = request.params
        row = np.zeros(vocab_size, np.float32)
        if params.allowed_token_ids is not None:
            row[:] = -np.inf
            row[list(params.allowed_token_ids)] = 0.0
        for token_id, bias in params.logit_bias.items():
            row[token_id] += bias
        row[[word[0] for word in params.bad_words if len(word) == 1]] = -np.inf
        self._row = row
        self._min_tokens = params.min_tokens
        self._stop_ids = np.array(request.stop_token_ids, np.int64)
        ends: dict[tuple[int, ...], set[int]] = {}
        for *head, last in (word for word in params.bad_words if len(word) > 1):
            ends.setdefault(tuple(head), set()).add(last)
        self._ends_of = {head: frozenset(lasts) for head, lasts in ends.items()}
        self._head_lengths = sorted({len(head) for head in ends})
        self._no_repeat = params.no_repeat

    def forbidden(self, num_output: int, output: np.ndarray) -> Forbidden:
        """Return which tokens are forbidden for the next token, beyond the constant row.

        num_output: number of output tokens so far. output: i32[n], their ids, which may lack the last ones unless
        TokenParams.forbids_by_output.
        """
        ends = _NO_ENDS
        if self._head_lengths:
            tail = tuple(output[-self._head_lengths[-1] :].tolist())
            for length in self._head_lengths:
                ends |= self._ends_of.get(tail[-length:], _NO_ENDS)
        if self._no_repeat is not None:
            ends |= repeating(output, *self._no_repeat)
        return Forbidden(num_output < self._min_tokens, ends)

    def row(self, forbidden: Forbidden) -> np.ndarray:
        """Return a new row f32[V] to add to the logits: the constant row, with -inf for the stop tokens if
        `forbidden.stops`, and for `forbidden.ends`.
        """
        row = self._row.copy()
        if forbidden.stops:
            row[self._stop_ids] = -np.inf
        row[list(forbidden.ends)] = -np.inf
        return row


def repeating(output: np.ndarray, size: int, window: int, exempt: Sequence[int]) -> frozenset[int]:
    """Return the tokens that would complete a sequence of `size` tokens which is among the last `window` of `output`,
    i32[n], already, without those in `exempt` (vLLM's NGramPerReqLogitsProcessor).
    """
    recent = output[max(0, len(output) - window) :]
    ends = np.arange(size - 1, len(recent))
    ends = ends[~np.isin(recent[ends], exempt)]
    # From the last token back: few sequences share it, and comparing all of each would hold up a step for milliseconds.
    for back in range(1, size):
        if not len(ends):
            break
        ends = ends[recent[ends - back] == recent[-back]]
    return frozenset(recent[ends].tolist())
