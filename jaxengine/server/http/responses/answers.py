"""Types of the responses of /v1/responses, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from jaxengine.server.http.answer.answers import ABSENT, Answer, Error, RequestTimes, TokenLogprob
from jaxengine.server.http.lists import Listed

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[TokenLogprob]


class ReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Answer):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Answer):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[dict[str, Any]]
    content: list[ReasoningText]
    encrypted_content: str = ABSENT


class FunctionCall(Answer):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str = ABSENT
    arguments: str


class CustomToolCall(Answer):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str = ABSENT
    input: str


Item = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall


class InputTokensDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Answer):
    code: str
    message: str


class IncompleteDetails(Answer):
    reason: str


class ResponseReasoning(Answer):
    effort: str | None
    summary: None


class RawMessage(Answer):
    """Text of the prompt or of the output before parsers split it, and all its token ids."""

    type: Literal["raw_message_tokens"]
    message: str
    tokens: list[int]


class ResponseAnswer(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    output: list[Item]
    usage: ResponseUsage | None
    background: bool
    error: ResponseError | None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    prompt: None
    input_messages: list[RawMessage] | None
    output_messages: list[RawMessage] | None
    metrics: RequestTimes = ABSENT
    metadata: dict[str, str]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None


class _Event(Answer):
    sequence_number: int


class ResponseEvent(_Event):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseAnswer


class OutputItemEvent(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: Item


class _ItemEvent(_Event):
    item_id: str
    output_index: int


class _PartEvent(_ItemEvent):
    content_index: int


class ContentPartEvent(_PartEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class OutputTextDelta(_PartEvent):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_PartEvent):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(_PartEvent):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningTextDone(_PartEvent):
    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsPiece(_ItemEvent):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_ItemEvent):
    type: Literal["response.function_call_arguments.done"]
    arguments: str
    name: str


class CustomInputPiece(_ItemEvent):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class CustomInputDone(_ItemEvent):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


ResponseStreamEvent = (
    ResponseEvent
    | OutputItemEvent
    | ContentPartEvent
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsPiece
    | ArgumentsDone
    | CustomInputPiece
    | CustomInputDone
    | Error
)


class ResponseTokens(Answer):
    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItems(Listed):
    data: list[dict[str, Any]]


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: bool
