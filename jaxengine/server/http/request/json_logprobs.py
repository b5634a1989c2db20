"""Log-probabilities in answers as JSON."""

from __future__ import annotations

from typing import Any

from jaxengine.requests.output.outputs import PositionLogprobs

MIN_LOGPROB = -9999.0


def json_logprob(logprob: float) -> float:
    """Return a log-probability for JSON, which has no infinity: -9999.0 for anything less than that or NaN."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def json_position(position: PositionLogprobs | None) -> dict[str, Any] | None:
    """Return an entry of vLLM's prompt_logprobs: candidates by token id, which is a text in JSON. None for None, as for
    the first token.
    """
    if position is None:
        return None
    return {
        str(token_id): {"logprob": json_logprob(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
        for token_id, one in position.items()
    }
