"""Types of responses for /openapi.json: those that several endpoints share, and how a route declares its own.

Endpoints write plain dicts; a test compares what they write with these types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field

F = TypeVar("F", bound=Callable[..., Any])


# Default of an optional field.
ABSENT: Any = Field(default_factory=dict)
FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


class Answer(BaseModel):
    """A JSON object of a response."""


class RequestTimes(Answer):
    """Times of a request, in milliseconds; null for one that is not known or has no interval.

    time_to_first_token_ms: from the first step with the request to its first token. generation_time_ms: from the first
    token to the last. mean_itl_ms: mean time between two tokens. queue_time_ms: from queueing to the first step.
    tokens_per_second: output tokens divided by the time from the first step to the last token.
    """

    time_to_first_token_ms: float | None = ABSENT
    generation_time_ms: float | None = ABSENT
    queue_time_ms: float | None = ABSENT
    mean_itl_ms: float | None = ABSENT
    tokens_per_second: float | None = ABSENT


class NullBody(Answer):
    """Keys that every complete answer has, as clients of vLLM read them as attributes; null unless said otherwise.
    Chunks of a stream leave out keys that would be null.
    """

    service_tier: None
    system_fingerprint: None
    kv_transfer_params: dict[str, Any] | None
    ec_transfer_params: None
    metrics: RequestTimes | None


NULL_BODY = dict.fromkeys(NullBody.model_fields)


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: int


class Error(Answer):
    error: ErrorDetail


class MessagesErrorDetail(Answer):
    type: str
    message: str


class MessagesError(Answer):
    type: Literal["error"]
    error: MessagesErrorDetail


class CohereError(Answer):
    message: str


class PromptTokensDetails(Answer):
    cached_tokens: int
    created_cache_tokens: int = ABSENT
    multimodal_tokens: dict[str, int] = ABSENT


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class Usage(Answer):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = ABSENT


class PromptLogprob(Answer):
    logprob: float
    rank: int | None
    decoded_token: str | None


# Candidates by token id for each prompt token; null for the first one.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


def answers(whole: Any, event: Any = None) -> Callable[[F], F]:
    """Return a decorator for an endpoint that records the types of its responses for /openapi.json: `whole` for the
    complete response, `event` for the JSON of each server-sent event, None if it does not stream. The endpoint itself
    is unchanged.
    """

    def mark(endpoint: F) -> F:
        """Record the types as an attribute of the endpoint, and return the endpoint."""
        endpoint.__dict__["answers"] = whole, event
        return endpoint

    return mark
