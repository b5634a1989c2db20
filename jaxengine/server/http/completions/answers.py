"""Types of the responses of /v1/completions, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from jaxengine.server.http.answer.answers import (
    ABSENT,
    Answer,
    FinishReason,
    NullBody,
    PromptLogprobs,
    RequestTimes,
    Usage,
)
from jaxengine.server.http.answer.sampling_mass import SampledChoice


class CompletionLogprobs(Answer):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChunkChoice(SampledChoice):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    captured: str = ABSENT


class CompletionChoice(SampledChoice):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: str | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    captured: str = ABSENT


class Completion(NullBody):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage = ABSENT
    metrics: RequestTimes = ABSENT
