"""What answers look like, for /openapi.json: the shapes that several endpoints share, and how a route names its own.

The writers of answers make plain dicts; a test holds what they write to these types. Knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field

F = TypeVar("F", bound=Callable[..., Any])


# The default of a field that an answer may be without.
ABSENT: Any = Field(default_factory=dict)


class Answer(BaseModel):
    """A JSON object of an answer."""


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


class PromptTokensDetails(Answer):
    cached_tokens: int


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


# For each token of the prompt its candidates by token id; null where nothing precedes.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


def answers(whole: Any, event: Any = None) -> Callable[[F], F]:
    """Names the type of a route's answer, and of the JSON of each event where it streams."""

    def mark(endpoint: F) -> F:
        endpoint.__dict__["answers"] = whole, event
        return endpoint

    return mark
