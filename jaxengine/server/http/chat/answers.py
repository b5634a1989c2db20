"""Types of the responses of /v1/chat/completions, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from jaxengine.server.http.answer.answers import (
    ABSENT,
    Answer,
    NullBody,
    PromptLogprobs,
    RequestTimes,
    TokenLogprob,
    Usage,
)
from jaxengine.server.http.answer.sampling_mass import SampledChoice

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error", "repetition"]


class ChoiceLogprobs(Answer):
    content: list[TokenLogprob]


class CalledFunction(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    role: str
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCall] = ABSENT


class ChatChoice(SampledChoice):
    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None
    captured: str = ABSENT
    routed_experts: str | None


class ChatCompletion(NullBody):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None


class FunctionDelta(Answer):
    name: str = ABSENT
    arguments: str


class ToolCallDelta(Answer):
    index: int
    id: str = ABSENT
    type: Literal["function"] = ABSENT
    function: FunctionDelta


class ChatDelta(Answer):
    role: str = ABSENT
    content: str = ABSENT
    reasoning: str = ABSENT
    reasoning_content: str = ABSENT
    tool_calls: list[ToolCallDelta] = ABSENT


class ChatChunkChoice(SampledChoice):
    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = ABSENT
    token_ids: list[int] | None = ABSENT
    captured: str = ABSENT


class ChatCompletionChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage = ABSENT
    metrics: RequestTimes = ABSENT
    prompt_token_ids: list[int] | None = ABSENT
    prompt_text: str | None = ABSENT
