"""Which tokens a request favours or may not take next, as a row added to its logits.

logit_bias and allowed_token_ids never change. min_tokens forbids the stop tokens until enough tokens are out.
bad_words of several tokens forbid the last one wherever the ones before it have just been generated.
"""

from __future__ import annotations

import numpy as np

from scheduler.request import Request


class TokenBias:
    """The bias row of one request.

    Args:
      request: its parameters and stop ids.
      vocab_size: V.
    """

    def __init__(self, request: Request, vocab_size: int):
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
        self._stop_ids = list(request.stop_token_ids)
        self._sequences = [tuple(word) for word in params.bad_words if len(word) > 1]

    def forbidden(self, num_output: int, output: np.ndarray) -> frozenset[int]:
        """Tokens forbidden now beyond the constant row.

        num_output counts the tokens out so far; `output` i32[n] may lack the last ones unless bad words need them.
        """
        forbidden = set(self._stop_ids) if num_output < self._min_tokens else set()
        for *head, last in self._sequences:
            if len(output) >= len(head) and output[len(output) - len(head) :].tolist() == head:
                forbidden.add(last)
        return frozenset(forbidden)

    def row(self, forbidden: frozenset[int]) -> np.ndarray:
        """f32[V]: what to add to the logits."""
        row = self._row.copy()
        row[list(forbidden)] = -np.inf
        return row
