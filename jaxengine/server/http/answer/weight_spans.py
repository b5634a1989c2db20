"""Weight versions of an answer's tokens, for the field `return_weight_versions`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jaxengine.requests.output.outputs import CompletionOutput
from jaxengine.server.http.answer.answers import Answer


class WeightVersions(Answer):
    """A version of the weights and the tokens that it made: the output's tokens from `start` to before `end`."""

    version: int | str
    start: int
    end: int


class SpanWriter:
    """Writer of the weight versions of one request's outputs, which may arrive in pieces."""

    def __init__(self) -> None:
        self._num_tokens: Counter[int] = Counter()

    def of(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """Return the field weight_versions of the choice that ends output `index`; {} before its end. Call it for each
        piece, as it counts the tokens.

        An output without versions was made by the weights that the engine started with, version 0.
        """
        self._num_tokens[index] += len(output.token_ids)
        if output.finish_reason is None:
            return {}
        spans = output.weight_versions or [(0, 0, self._num_tokens[index])]
        return {"weight_versions": [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans]}
